"""The unpickler of .pkl files: plain arrays of every protocol, no forged ones.

A forged array would crash the interpreter when it is used or freed, so each is opened in a process
of its own.
"""

import _codecs
import pickle
import pickletools
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moco.common.errors import DataError
from moco.common.files import load_pickle
from moco.common.unpickler import Unpickler
from tests.oracles.payloads import POINTER, Call

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
    for key, value in expected.items():
        if key == "containers":
            assert actual[key] == value
            continue
        assert actual[key].dtype == value.dtype, key
        assert actual[key].shape == value.shape, key
        assert actual[key].tobytes() == value.tobytes(), key


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
    """An array as protocols below 5 write it: empty, then given shape, dtype, order and data."""
    return Call(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, *values))


def forged() -> list[Any]:
    """Arrays that would make numpy read or write where it must not."""
    structure = (3, "|", None, ("a",), {"a": (number("f8"), 0)}, 8, 1, 0)
    void = Call(np.dtype, "V8", False, True, state=structure)
    objects = np.dtype("O")
    # What numpy would take for a structured dtype, made to look like the stand-in.
    described = Call(OrderedDict, [("names", ["a"]), ("formats", ["f8"])], state={"itemsize": 8})
    lookalike = Call(OrderedDict, state={"dtype": described})
    return [
        Call(np.ndarray, (1,), objects, POINTER),
        Call(np.ndarray, (2**40,)),
        *(
            state(shape, dtype, False, data)
            for shape, dtype, data in (
                ((1,), objects, POINTER),
                ((1,), void, POINTER),
                ((1,), number("f8", structure), POINTER),
                ((1,), number("f8"), [POINTER]),
                ((1,), "f8", POINTER),
                ((2**40,), number(), POINTER),
                ((1,), number(), POINTER),
                ((-1, -2), number(), POINTER),
            )
        ),
        Call(RECONSTRUCT, OrderedDict, (0,), b"b"),
        Call(SCALAR, objects, POINTER),
        Call(SCALAR, lookalike, POINTER),
        Call(SCALAR, number(), POINTER),
        Call(SCALAR, number(), 1.5),
        Call(FROMBUFFER, POINTER, objects, (1,), "C"),
        Call(FROMBUFFER, POINTER, lookalike, (1,), "C"),
        Call(FROMBUFFER, POINTER, number(), (2**40,), "C"),
        Call(FROMBUFFER, 7, number("f8"), (1,), "C"),
        # Its memory goes when the inner array is given another state.
        Call(FROMBUFFER, state((1,), number("f8"), False, POINTER), number("f8"), (1,), "C"),
        Call(_codecs.encode, "x", "rot13"),
    ]


def test_numpy_itself_believes_a_forged_array() -> None:
    """The reason for all this: if numpy ever checks, this module can go."""
    array = np.ndarray((1,), dtype=object, buffer=bytes(8))
    assert array.dtype == object


# What a reader could do with a value, in a process of its own.
READ_FORGED = """
import gc, sys
import numpy as np
from moco.common.errors import DataError
from moco.common.files import load_pickle
from moco.common.unpickler import Inert
for path in sys.argv[1:]:
    objects = set()
    try: (value,) = load_pickle(path, objects)
    except DataError as error: print(error)
    else:
        assert objects and isinstance(value, Inert | np.ndarray), (objects, value)
        if isinstance(value, np.ndarray): assert (value.dtype.kind, value.size) == ("V", 0)
        repr(value), list(value), value == value
        del value
        gc.collect()
        print("inert", sorted(objects))
"""


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_forged_arrays_are_refused_or_inert(protocol: int, tmp_path: Path) -> None:
    cases = forged()
    for i, value in enumerate(cases):
        (tmp_path / f"{i:02}").write_bytes(pickle.dumps([value], protocol))
    done = subprocess.run(
        [sys.executable, "-c", READ_FORGED, *sorted(map(str, tmp_path.iterdir()))],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(cases)


def test_the_message_names_what_was_asked_for(tmp_path: Path) -> None:
    """Where no class is expected; else it is inert, and listed."""
    (tmp_path / "x").write_bytes(pickle.dumps(Call(print, "x"), 2))
    with pytest.raises(DataError, match=r"refused.*builtin.*\.print"):
        load_pickle(tmp_path / "x")
    objects: set[str] = set()
    value = load_pickle(tmp_path / "x", objects)
    assert (value.name, value.args) == ("__builtin__.print", ("x",))
    assert objects == {value.name}


def test_the_steps_are_known() -> None:
    """What a later Python adds to its machine has to be looked at before it may touch an object."""
    known = {opcode.code.encode("latin-1")[0] for opcode in pickletools.opcodes}
    assert set(Unpickler.dispatch) == known
    assert pickle.HIGHEST_PROTOCOL == 5
