"""The unpickler of .pkl files: plain arrays of every protocol, no forged ones.

A forged array could crash the interpreter when it is used or freed, so all are read in a process
of their own.
"""

import _codecs
import pickle
import pickletools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moco.common.errors import DataError
from moco.common.files import load_pickle, load_torch
from moco.common.unpickler import Unpickler
from tests.oracles.payloads import POINTER, Call, saved
from tests.oracles.python import run_python

ROOT = Path(__file__).resolve().parents[3]


def values() -> dict[str, Any]:
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    return OrderedDict(
        plain=base,
        fortran=np.asfortranarray(base),
        axes=base.transpose(1, 0, 2),
        view=base[:, ::2],
        empty=np.zeros((0, 3)),
        zero_dim=np.array(7, dtype=np.int64),
        big_endian=base.astype(">f8"),
        half=base.astype(np.float16),
        bools=base > 3,
        bytes_=np.arange(256, dtype=np.uint8),
        scalar=np.float32(1.5),
        containers=[(1, 2.5), {"a": {3}}, frozenset([4]), None, True, b"\xff\x00", "ä"],
    )


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_are_bitwise_identical(protocol: int, tmp_path: Path) -> None:
    written = values()
    if protocol < 4:
        written.pop("containers")  # sets need the global builtins.set before protocol 4
    if protocol < 3:
        written.pop("empty")  # and b"" builtins.bytes before protocol 3
    (tmp_path / "x").write_bytes(pickle.dumps(written, protocol))
    expected = pickle.loads((tmp_path / "x").read_bytes())
    actual = load_pickle(tmp_path / "x")
    assert list(actual) == list(expected)
    if containers := expected.pop("containers", None):
        containers[1:3] = {"a": [3]}, actual["containers"][2]  # sets become lists or tuples
        assert list(actual["containers"][2]) == [4] and actual.pop("containers") == containers
    for key, value in expected.items():
        read = actual[key]
        assert (read.dtype, read.shape) == (value.dtype, value.shape), key
        assert read.tobytes() == value.tobytes(), key


def test_python_2_pickles(tmp_path: Path) -> None:
    # {'w': numpy.array([1., 2.], 'f4')} as Python 2 wrote it: bytes are str.
    code = (
        b"\x80\x02}q\x00U\x01wq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\n"
        b"q\x03K\x00\x85U\x01b\x87Rq\x04(K\x01K\x02\x85cnumpy\ndtype\nq\x05U\x02f4K\x00K\x01\x87R"
        b"(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"U\x08\x00\x00\x80\x3f\x00\x00\x00\x40tbs."
    )
    (tmp_path / "x").write_bytes(code)
    assert load_pickle(tmp_path / "x")["w"].tolist() == [1.0, 2.0]


RECONSTRUCT = np.zeros(1).__reduce__()[0]
SCALAR = np.float32(1).__reduce__()[0]
FROMBUFFER = np.zeros(1).__reduce_ex__(5)[0]


def number(name: str = "f4", state: Any = (3, "<", None, None, None, -1, -1, 0)) -> Call:
    return Call(np.dtype, name, False, True, state=state)


def state(*values: Any) -> Call:
    """Return an array as in protocols below 5: empty, then set to shape, dtype, order and data."""
    return Call(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, *values))


def forged() -> list[Any]:
    """Return arrays that would make numpy access memory outside them."""
    structure = (3, "|", None, ("a",), {"a": (number("f8"), 0)}, 8, 1, 0)
    void = Call(np.dtype, "V8", False, True, state=structure)
    objects = np.dtype("O")
    # numpy would take it for a structured dtype, and it looks like the wrapper of a dtype.
    described = Call(OrderedDict, [("names", ["a"]), ("formats", ["f8"])], state={"itemsize": 8})
    lookalike = Call(OrderedDict, state={"dtype": described})
    return [
        Call(np.ndarray, (1,), objects, POINTER),
        Call(np.ndarray, (2**40,)),
        state((1,), objects, False, POINTER),
        state((1,), void, False, POINTER),
        state((1,), number("f8", structure), False, POINTER),
        state((1,), number("f8"), False, [POINTER]),
        state((1,), "f8", False, POINTER),
        state((2**40,), number(), False, POINTER),
        state((1,), number(), False, POINTER),
        state((-1, -2), number(), False, POINTER),
        Call(RECONSTRUCT, OrderedDict, (0,), b"b"),
        Call(SCALAR, objects, POINTER),
        Call(SCALAR, lookalike, POINTER),
        Call(SCALAR, number(), POINTER),
        Call(SCALAR, number(), 1.5),
        Call(FROMBUFFER, POINTER, objects, (1,), "C"),
        Call(FROMBUFFER, POINTER, lookalike, (1,), "C"),
        Call(FROMBUFFER, POINTER, number(), (2**40,), "C"),
        Call(FROMBUFFER, 7, number("f8"), (1,), "C"),
        # Its memory is freed when the inner array is given another state.
        Call(FROMBUFFER, state((1,), number("f8"), False, POINTER), number("f8"), (1,), "C"),
        Call(_codecs.encode, "x", "rot13"),
    ]


# Use each value as a reader could.
READ_FORGED = """
import gc, sys
import numpy as np
from moco.common.errors import DataError
from moco.common.files import load_pickle, load_torch
from moco.common.unpickler import OpaqueObject
for path in sys.argv[1:]:
    objects = set()
    try: (value,) = load_pickle(path, objects)
    except DataError as error: print(error)
    else:
        assert objects and isinstance(value, OpaqueObject | np.ndarray), (objects, value)
        if isinstance(value, np.ndarray): assert (value.dtype.kind, value.size) == ("V", 0)
        repr(value), list(value), value == value
        del value
        gc.collect()
        print("inert", sorted(objects))
"""


def test_forged_arrays_are_refused_or_inert(tmp_path: Path) -> None:
    cases = [pickle.dumps([value], protocol) for value in forged() for protocol in (0, 2, 5)]
    for i, content in enumerate(cases):
        (tmp_path / f"{i:02}").write_bytes(content)
    shown = run_python("-c", READ_FORGED, *sorted(tmp_path.iterdir()))
    assert len(shown.splitlines()) == len(cases)


@pytest.mark.parametrize("load", [load_pickle, load_torch])
def test_a_name_is_in_the_message_or_inert_and_listed(load, tmp_path: Path) -> None:
    call = Call(print, "x")
    content = saved(call) if load is load_torch else pickle.dumps(call, 2)
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=r"^[^\n]*refused[^\n]*builtin[^\n]*\.print[^\n]*$"):
        load(tmp_path / "x")
    objects: set[str] = set()
    value = load(tmp_path / "x", objects)
    assert (value.name, value.args) == ("__builtin__.print", ("x",))
    assert objects == {value.name}


def test_all_opcodes_are_known() -> None:
    """Opcodes of a later Python have to be reviewed before they may touch an object."""
    known = {opcode.code.encode("latin-1")[0] for opcode in pickletools.opcodes}
    assert set(Unpickler.dispatch) == known
    assert pickle.HIGHEST_PROTOCOL == 5
