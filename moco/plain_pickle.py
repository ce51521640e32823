"""Pickles of containers, numbers, text and numpy arrays, read without trusting a byte of them.

A list of allowed globals is not enough for numpy: its own constructors believe what the pickle
says, so an array of dtype object can be laid over bytes of the file, which then serve as pointers,
and a dtype's state can be forged. So every global that a pickled array names resolves to a
stand-in of this module, which checks its arguments and knows plain number types only.
"""

from __future__ import annotations

import collections
import math
import pickle
from typing import Any, NoReturn, cast

import numpy as np

_NUMBERS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
# What GLOBAL numpy.ndarray resolves to: only ever an argument, never called.
_NDARRAY = object()


class Refused(Exception):
    """The pickle asks for something that is not plain data; the message names it."""


class _Dtype:
    """Stands in for an unpickled numpy.dtype; `dtype` is a real one of _NUMBERS."""

    __slots__ = ("dtype",)

    def __init__(self, name: str) -> None:
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        # (version, byte order, subdtype, names, fields, itemsize, alignment, flags)
        match state:
            case (3, "<" | ">" | "|" | "=" as order, None, None, None, -1, -1, 0):
                self.dtype = self.dtype.newbyteorder(order)
            case _:
                raise Refused("it holds a numpy.dtype with a forged or structured state")


class _Array(np.ndarray):
    """An array whose unpickled state is checked before numpy sees it."""

    def __setstate__(self, state: Any) -> None:
        match state:
            case (1, tuple(shape), _Dtype() as dtype, bool(fortran), bytes() | str() as data):
                # Python 2 wrote bytes as str; the unpickler read it as latin-1.
                data = data.encode("latin-1") if isinstance(data, str) else data
                _check_size(shape, dtype, data)
                checked: Any = (1, shape, dtype.dtype, fortran, data)
                super().__setstate__(checked)
            case _:
                raise Refused("it holds a numpy.ndarray that is not an array of plain numbers")


def _check_size(shape: Any, dtype: Any, data: bytes | bytearray) -> None:
    if not (
        isinstance(dtype, _Dtype)
        and isinstance(shape, tuple)
        and all(type(n) is int and n >= 0 for n in shape)
        and math.prod(shape) * dtype.dtype.itemsize == len(data)
    ):
        raise Refused("it holds a numpy.ndarray whose shape and bytes disagree")


def _dtype(name: Any, *flags: Any) -> _Dtype:
    if not isinstance(name, str) or name not in _NUMBERS or flags != (False, True):
        raise Refused(f"it holds a numpy.dtype {str(name)[:40]!r} that is not a plain number")
    return _Dtype(name)


def _reconstruct(subtype: Any, shape: Any, typecode: Any) -> _Array:
    if subtype is not _NDARRAY:
        raise Refused("it holds a subclass of numpy.ndarray")
    return _Array((0,), dtype=np.uint8)


def _scalar(dtype: Any, data: Any) -> Any:
    data = data.encode("latin-1") if isinstance(data, str) else data
    if not isinstance(data, bytes):
        raise Refused("it holds a numpy scalar that is not a plain number")
    _check_size((), dtype, data)
    return np.frombuffer(data, dtype=cast(_Dtype, dtype).dtype)[0]


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> np.ndarray:
    if not isinstance(data, bytes | bytearray):
        raise Refused("it holds a numpy.ndarray that is not an array of plain numbers")
    _check_size(shape, dtype, data)
    array = np.frombuffer(data, dtype=dtype.dtype)
    if order == "K":
        return array.reshape(shape).transpose(axes)
    return array.reshape(shape, order=order)


def _encode(text: Any, encoding: Any) -> bytes:
    # Protocols 0 to 2 spell bytes as _codecs.encode(text, "latin1").
    if not isinstance(text, str) or encoding != "latin1":
        raise Refused("it calls _codecs.encode on something else than bytes")
    return text.encode("latin-1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
    # numpy 2 renamed numpy.core to numpy._core.
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
}


class PlainUnpickler(pickle.Unpickler):
    """`PlainUnpickler(file, encoding="latin-1").load()`; raises Refused and pickle's own errors.

    The arrays in the result may be read-only; copy what is to be changed.
    """

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise Refused(f"it names {module[:60]}.{name[:60]}") from None

    def persistent_load(self, pid: Any) -> NoReturn:
        # Only in pickles that are part of another format, and in files that are no pickle.
        raise pickle.UnpicklingError("it names objects outside the file")
