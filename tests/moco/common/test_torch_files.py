"""torch.save's formats read without torch.load: what both read is bitwise identical."""

import contextlib
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from moco.common.errors import DataError
from moco.common.files import load_pickle, load_torch
from moco.common.unpickler import OpaqueObject
from tests.oracles.payloads import zip_of

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def values():
    torch.manual_seed(0)
    base = torch.arange(24.0).reshape(2, 3, 4)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    tagged = torch.ones(2), nn.Parameter(torch.ones(2))
    for tensor in tagged:
        tensor.tag = "tensors with attributes are written in another way"
    return {
        "dtypes": {str(dtype): torch.randn(5).to(dtype) for dtype in DTYPES},
        "views": [base, base.transpose(0, 2), base[:, 1:], base[1, 1, 1]],
        "expanded": torch.ones(1).expand(7),
        "empty": torch.zeros(0, 3),
        "leaf": torch.ones(2, requires_grad=True),
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "tagged": list(tagged),
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "types": [torch.float16, torch.Size([1, 2]), torch.device("cuda", 1)],
        "plain": [1, -(2**70), 1.5, True, None, "ä", b"\xff", (1, (2, 3)), {"a": [{}]}],
        "containers": [{1, "a"}, OrderedDict(b=1, a=2), {(1, "x"): 2, 3: 4}],
        "numpy": [np.float64(2.5), np.arange(3, dtype="i2"), np.random.default_rng(0).random(3)],
    }


def assert_same(a, b, where="file"):
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), where
        assert (type(a), a.requires_grad) == (type(b), b.requires_grad), where
        assert a.storage_offset() == b.storage_offset(), where
        assert bytes(a.untyped_storage()) == bytes(b.untyped_storage()), where
    elif isinstance(a, dict):
        assert type(a) is type(b) and list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
        assert getattr(a, "_metadata", 0) == getattr(b, "_metadata", 0)
    elif isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        assert type(a) is type(b) and len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}/{i}")
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype, where
        np.testing.assert_array_equal(a, b)
    else:
        assert type(a) is type(b) and a == b, where


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_reads(tmp_path, zipped, protocol):
    """Also with protocols that weights_only=True does not know."""
    how = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": zipped}
    torch.save(values(), tmp_path / "x", **how)
    ours = load_torch(tmp_path / "x")
    theirs = torch.load(tmp_path / "x", weights_only=False)
    theirs["containers"][0] = [*theirs["containers"][0]]  # sets become lists
    ours["containers"][0].sort(key=theirs["containers"][0].index)
    assert_same(theirs, ours)
    shared = {view.untyped_storage().data_ptr() for view in ours["views"]}
    assert len(shared) == 1, "views share their storage"
    ours["views"][0][0, 0, 0] = 9  # and can be written


class _Rebuilt:
    """Tensor as rebuilt by torch._utils._rebuild_tensor_v2, with torch's metadata."""

    def __init__(self, storage, shape, stride, metadata):
        args = storage, 0, shape, stride, False, OrderedDict(), metadata
        self.value = torch._utils._rebuild_tensor_v2, args

    def __reduce__(self):
        return self.value


def test_tensors_that_are_not_dense_or_lazily_changed_are_inert(tmp_path):
    """The bytes of a negated or conjugated one are not its values; no network has one."""
    storage = torch.zeros(4)._typed_storage()
    metadata = ({"neg": True}, {"conj": True}, {"other": True}, [1])
    values = [
        *(_Rebuilt(storage, (4,), (1,), each) for each in metadata),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
    ]
    for value in values:
        torch.save({"w": value}, tmp_path / "x")
        assert type(load_torch(tmp_path / "x", set())["w"]) is OpaqueObject
        with pytest.raises(DataError, match="refused"):
            load_torch(tmp_path / "x")


def test_protocols_0_and_1(tmp_path):
    """Numbers, text and containers only: torch itself cannot read a tensor so written."""
    value = {"a": [1, 2.5, "ä", None, True, {}, (), (1, 2)], "b": -(2**70)}
    for protocol in (0, 1):
        torch.save(value, tmp_path / "x", pickle_protocol=protocol)
        assert load_torch(tmp_path / "x") == value


def test_the_message_for_torchscript_tells_how_to_convert_it(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "x.pt")
    with pytest.raises(DataError, match=r"TorchScript.*a program.*\.state_dict\(\)"):
        load_torch(tmp_path / "x.pt")


def test_whole_modules_and_pickled_tensors_are_inert_and_named(tmp_path):
    for zipped in (True, False):
        torch.save(nn.Linear(2, 2), tmp_path / "x", _use_new_zipfile_serialization=zipped)
        objects = set()
        module = load_torch(tmp_path / "x", objects)
        assert module.name in objects and module.name.endswith("linear.Linear")
        assert module["_parameters"]["weight"].shape == (2, 2)
    # pickle.dump of a state dict contains a whole torch.save file for each tensor.
    (tmp_path / "x").write_bytes(pickle.dumps({"w": torch.ones(1)}))
    objects = set()
    assert type(load_pickle(tmp_path / "x", objects)["w"]) is OpaqueObject
    assert "torch._utils._rebuild_tensor_v2" in objects


def test_one_file_does_not_change_what_another_reads(tmp_path):
    """No file can give a state to the class itself, which every pickle may name."""
    named = b"\x80\x02ctorch\nTensor\n"
    for i, rest in enumerate((b"}X\x01\x00\x00\x00aK\x01sb.", b".", b")R.")):
        (tmp_path / f"{i}").write_bytes(zip_of({"data.pkl": named + rest}))
        with contextlib.suppress(DataError):
            value = load_torch(tmp_path / f"{i}", set())
            assert not isinstance(value, OpaqueObject) or (dict(value), value.args) == ({}, ())
