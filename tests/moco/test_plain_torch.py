"""torch.save's formats read without torch.load: what both read is the same, bit by bit."""

import io
import pickle
import struct
import tarfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from moco.errors import DataError
from moco.fileio import load_pickle, load_torch
from tests.oracles.payloads import zip_of

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def values():
    torch.manual_seed(0)
    base = torch.arange(24.0).reshape(2, 3, 4)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    tagged = torch.ones(2), nn.Parameter(torch.ones(2))
    for tensor in tagged:
        tensor.tag = "a tensor with attributes is written in another way"
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
        "layouts": [torch.strided, torch.sparse_coo],
        "plain": [1, -(2**70), 1.5, True, None, "ä", b"\xff", (1, (2, 3)), {"a": [{}]}, 1j],
        "containers": [{1, "a"}, bytearray(b"x"), OrderedDict(b=1, a=2), {(1, "x"): 2, 3: 4}],
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
    torch.save(
        values(),
        tmp_path / "x",
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=zipped,
    )
    ours = load_torch(tmp_path / "x")
    assert_same(torch.load(tmp_path / "x", weights_only=False), ours)
    shared = {view.untyped_storage().data_ptr() for view in ours["views"]}
    assert len(shared) == 1, "views share their storage"
    ours["views"][0][0, 0, 0] = 9  # and can be written


@pytest.mark.parametrize("zipped", [True, False])
def test_negated_and_conjugated_tensors(tmp_path, zipped):
    """Lazy ones are saved as they were before it, with a bit that says so."""
    z = torch.randn(2, 3, dtype=torch.complex64)
    written = {"conj": z.conj(), "neg": z.clone().conj().imag, "both": torch._neg_view(z.conj())}
    assert written["conj"].is_conj() and written["neg"].is_neg()
    for name, value in written.items():
        torch.save({name: value}, tmp_path / "x", _use_new_zipfile_serialization=zipped)
        ours = load_torch(tmp_path / "x")[name]
        assert torch.equal(ours, torch.load(tmp_path / "x")[name]) and torch.equal(ours, value)
        assert not ours.is_conj() and not ours.is_neg()


class _Rebuilt:
    """A tensor as torch._utils._rebuild_tensor_v2 makes it, with what torch calls metadata."""

    def __init__(self, storage, shape, stride, metadata):
        args = storage, 0, shape, stride, False, OrderedDict(), metadata
        self.value = torch._utils._rebuild_tensor_v2, args

    def __reduce__(self):
        return self.value


@pytest.mark.parametrize(
    ("shape", "metadata", "reason"),
    [
        ((4,), {"neg": False}, "unknown metadata"),
        ((4,), {"other": True}, "unknown metadata"),
        ((4,), [], "unknown metadata"),
        ((4,), {"conj": True}, "a conjugated tensor of real numbers"),
        ((2**25,), {"neg": True}, "negated or conjugated tensors claim more"),
    ],
)
def test_other_metadata_is_refused(tmp_path, shape, metadata, reason):
    storage = torch.zeros(4)._typed_storage()
    some = [_Rebuilt(storage, shape, (0,), metadata) for _ in range(3)]
    torch.save({"w": some}, tmp_path / "x")
    with pytest.raises(DataError, match=reason):
        load_torch(tmp_path / "x")


def test_memory_formats(tmp_path):
    """Names without a meaning here; this torch itself cannot write them."""
    name = b"\x80\x02(ctorch\ncontiguous_format\nctorch._utils\n_get_memory_format\n"
    call = b"X\x13\x00\x00\x00torch.channels_last\x85Rl."
    (tmp_path / "x").write_bytes(zip_of({"data.pkl": name + call}))
    assert load_torch(tmp_path / "x") == [torch.contiguous_format, torch.channels_last]
    (tmp_path / "x").write_bytes(zip_of({"data.pkl": (name + call).replace(b"_last", b"_none")}))
    with pytest.raises(DataError, match="an unknown memory_format"):
        load_torch(tmp_path / "x")


def write_tar(path: Path, tensors: dict) -> None:
    """torch 0.1.9, torch/serialization.py, save: a dict of tensors, each with its own storage."""
    parts = {name: io.BytesIO() for name in ("sys_info", "storages", "tensors", "pickle")}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return str(id(value)) if isinstance(value, torch.Tensor) else None

    def dump(name, value):
        pickle.dump(value, parts[name], protocol=2)

    def dump_type(name, before, after):
        """(*before, torch.<after>) as a pickle: Python's own pickler would look the class up."""
        for value in (b"\x80\x02(", *(pickle.dumps(v, 2)[2:-1] for v in before)):
            parts[name].write(value)
        parts[name].write(b"ctorch\n" + after.encode() + b"\nt.")

    dump("sys_info", {"protocol_version": 1000, "little_endian": True})
    dump("storages", len(tensors))
    dump("tensors", len(tensors))
    for i, tensor in enumerate(tensors.values()):
        dump_type("storages", (i, "cpu"), "FloatStorage")
        flat = tensor.untyped_storage()
        parts["storages"].write(struct.pack("<q", flat.nbytes() // 4) + bytes(flat))
        dump_type("tensors", (id(tensor), i), "FloatTensor")
        shape, stride = tensor.shape, tensor.stride()
        parts["tensors"].write(struct.pack("<i4x", len(shape)))
        parts["tensors"].write(struct.pack(f"<{2 * len(shape) + 1}q", *shape, *stride, 0))
    dump("storages", [])
    Pickler(parts["pickle"], protocol=2).dump(tensors)
    with tarfile.open(path, "w") as tar:
        for name, part in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(part.getvalue())
            tar.addfile(info, io.BytesIO(part.getvalue()))


def test_the_tar_before_0_1_10(tmp_path):
    tensors = {"w": torch.randn(2, 3), "t": torch.randn(3, 2).t()}
    write_tar(tmp_path / "x", tensors)
    assert_same(torch.load(tmp_path / "x", weights_only=False), load_torch(tmp_path / "x"))
    assert_same(tensors, load_torch(tmp_path / "x"))


def test_tensors_that_nothing_here_could_use_are_not_dense(tmp_path):
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    sparse = torch.eye(3).to_sparse()
    torch.save({"q": quantised, "s": sparse, "m": torch.ones(2, device="meta")}, tmp_path / "x")
    loaded = load_torch(tmp_path / "x")
    assert loaded["q"].is_quantized and loaded["s"].is_sparse and loaded["m"].is_meta


def test_protocols_0_and_1(tmp_path):
    """Numbers, text and containers only: torch itself cannot read a tensor so written."""
    value = {"a": [1, 2.5, "ä", None, True, {}, (), (1, 2)], "b": -(2**70)}
    for protocol in (0, 1):
        torch.save(value, tmp_path / "x", pickle_protocol=protocol)
        assert load_torch(tmp_path / "x") == value


def test_torchscript_has_a_sentence_of_its_own(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "x.pt")
    with pytest.raises(DataError, match=r"TorchScript.*a program.*\.state_dict\(\)"):
        load_torch(tmp_path / "x.pt")


def test_a_whole_module_is_named(tmp_path):
    for zipped in (True, False):
        torch.save(nn.Linear(2, 2), tmp_path / "x", _use_new_zipfile_serialization=zipped)
        with pytest.raises(DataError, match=r"torch\.nn\.modules\.linear\.Linear|whole module"):
            load_torch(tmp_path / "x")


def test_a_pickle_of_tensors_is_named(tmp_path):
    """pickle.dump of a state dict holds a whole torch.save file for each tensor."""
    (tmp_path / "x").write_bytes(pickle.dumps({"w": torch.ones(1)}))
    with pytest.raises(DataError, match=r"torch\._utils\._rebuild|torch\.storage"):
        load_pickle(tmp_path / "x")


def test_a_flipped_bit_is_found(tmp_path):
    torch.save({"w": torch.ones(1000)}, tmp_path / "x")
    content = bytearray(tmp_path.joinpath("x").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=r"damaged \(Bad CRC-32"):
        load_torch(tmp_path / "x")
