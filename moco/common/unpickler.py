"""Unpickler that reads pickles as data, without importing or calling anything that they name.

The standard library's pure-Python unpickler parses; each opcode that touches an object is replaced
here. A name is looked up in a table of this project's functions, which check their arguments; any
other name becomes an `OpaqueObject`, and so do the objects that it creates. A set becomes a
list. The memory of a pickle is limited in proportion to the file's size; every read, which creates
at most one small object, and every copy is charged. The number of parts of the result is limited
as well. A file can still waste time.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pickle import _Unpickler  # noqa: TID251  # each opcode that touches an object is replaced
from types import MappingProxyType, SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import numpy as np

from moco.common.limits import CorruptFileError, check_parts

# Bytes of memory that a pickle may take: the larger of this and its size times the ratio. Lists of
# floats, names of tensors and rows of a training log take 3 to 10 times their bytes in the file.
MIN_MEMORY, MEMORY_RATIO = 256 << 20, 16
_STEP, _ITEM, _OBJECT = 32, 100, 500  # bytes charged for a read, a dictionary item, a call
MIN_PARTS = 1_000_000
MAX_DIMENSIONS = 64  # as numpy and torch
# Limit for keys other than text, objects and small integers: each counts 20 and its parts.
MAX_KEYS = 100_000
_NUMBERS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])


class RefusedFileError(Exception):
    """File that is refused because it is a program, or names classes where none are allowed."""


class OpaqueObject(dict[Any, Any]):
    """Placeholder for a class or function, or for an object that it would create.

    The items are the object's attributes and, if the class is a dictionary, the dictionary's items.
    The items of a list are in "__items__", a state other than a dictionary is in "__state__".

    Attributes:
        name: Name of the class or function, "module.name".
        args: Arguments of the call.
    """

    __slots__ = ("args", "name")
    __hash__ = object.__hash__  # type: ignore[assignment]  # enum members are keys

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.name, self.args = name, args

    def __repr__(self) -> str:
        return f"<opaque {self.name[:80]!r}>"

    def append(self, item: Any) -> None:
        """Append an item of a list, as the unpickler does."""
        self.setdefault("__items__", []).append(item)


def read_pickle(file: BinaryIO, size: int, objects: set[str]) -> Any:
    """Read the value in a file that is one pickle of containers, numbers, text and numpy arrays.

    Args:
        file: File to read, at its start.
        size: Size of the file in bytes.
        objects: Set that receives the name of each class or function that is an `OpaqueObject` in
            the value.

    Raises:
        CorruptFileError: If the file declares more than it contains.
        Exception: Various kinds if the file is damaged or not a pickle.
    """
    value = Unpickler(file, size, objects).load()
    require_end(file)
    return value


def require_end(file: BinaryIO) -> None:
    """Raise CorruptFileError unless the whole file was read."""
    if file.read(1):
        raise CorruptFileError("bytes follow its end")


def check_sizes(values: Any) -> tuple[int, ...]:
    """Return sizes or strides unchanged; raise CorruptFileError unless an array can have them."""
    fits = isinstance(values, tuple) and len(values) <= MAX_DIMENSIONS
    if not (fits and all(type(n) is int and 0 <= n < 1 << 62 for n in values)):
        raise CorruptFileError("a shape that is not a tuple of sizes")
    return values


_NDARRAY = OpaqueObject("numpy.ndarray")


class _Dtype:
    """Wrapper of a numeric `numpy.dtype`, whose state may change its byte order."""

    def __init__(self, name: str) -> None:
        self.dtype = np.dtype(name)


def _dtype(name: Any, *flags: Any) -> Any:
    # Hashing another object might never end.
    if not isinstance(name, str):
        return OpaqueObject("numpy.dtype")
    return _Dtype(name) if name in _NUMBERS else OpaqueObject(f"numpy.dtype {name[:20]}")


def _reconstruct(subtype: Any, *_: Any) -> Any:
    return np.empty(0, "V1") if subtype is _NDARRAY else OpaqueObject("numpy.ndarray, a subclass")


class Unpickler(_Unpickler):
    """Reader of one pickle: `Unpickler(file, size, objects).load()`.

    The file is left at the end of the pickle. Arrays in the result may be read-only.

    Args:
        file: File at the start of the pickle.
        size: See `read_pickle`.
        objects: See `read_pickle`.
        names: Further values and functions that a pickle may name; functions check their arguments.
        persistent: Function that returns the object of a persistent id, for formats whose pickles
            refer to data outside the pickle.
    """

    memo: dict[int, Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_Unpickler.dispatch)

    def __init__(
        self,
        file: BinaryIO,
        size: int,
        objects: set[str],
        names: Mapping[str, Any] = MappingProxyType({}),
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        def read(count: int) -> bytes:  # called for every opcode, so inlined
            self._memory -= _STEP
            if self._memory < 0:
                self._take(0)
            data = file.read(count if count < size else size)  # read() allocates what is requested
            if len(data) < count:
                raise EOFError(f"{count} bytes are claimed where {len(data)} are left")
            return data

        bounded = SimpleNamespace(read=read, readline=file.readline)
        super().__init__(bounded, encoding="latin-1")
        self._objects, self._size = objects, size
        self._memory, self._keys = max(MIN_MEMORY, MEMORY_RATIO * size), MAX_KEYS
        self._names = {
            **names,
            "collections.OrderedDict": self._ordered,
            "_codecs.encode": self._encode,
            "numpy.ndarray": _NDARRAY,
            "numpy.dtype": _dtype,
        }
        if persistent:
            self.persistent_load = persistent  # type: ignore[method-assign, assignment]
        for module in ("builtins", "__builtin__"):  # Python 3, and protocols below 3
            for name in ("set", "frozenset"):
                self._names[f"{module}.{name}"] = lambda items=(): items
            self._names[f"{module}.bytes"] = lambda: b""
        for core in ("numpy.core", "numpy._core"):  # renamed by numpy 2
            self._names[f"{core}.multiarray._reconstruct"] = _reconstruct
            self._names[f"{core}.multiarray.scalar"] = self._scalar
            self._names[f"{core}.numeric._frombuffer"] = self._array

    def load(self) -> Any:
        """Read the pickle and check the size of the result."""
        value = super().load()
        self.memo.clear()  # it holds the text and bytes of each value until garbage collection
        check_parts(value, max(self._size, MIN_PARTS))
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Return the entry of the table of names, or an `OpaqueObject`."""
        full = f"{module}.{name}"
        self._take(len(full))
        if full not in self._names:
            self._names[full] = OpaqueObject(full)
            self._objects.add(full)
        return self._names[full]

    def get_extension(self, code: int) -> None:
        """Refuse registered extensions, whose classes would be imported."""
        raise pickle.UnpicklingError("it names a registered extension")

    def _take(self, memory: int) -> None:
        """Charge bytes of memory; raise CorruptFileError if they exceed the limit."""
        self._memory -= memory
        if self._memory < 0:
            raise CorruptFileError(f"too many objects for a pickle of {self._size} bytes")

    def _key(self, key: Any) -> Any:
        """Check a key; hashes of text and objects are secret, hashes of other keys can collide."""
        self._take(_ITEM)
        if isinstance(key, tuple) and any(isinstance(part, tuple) for part in key):
            raise CorruptFileError("a nested tuple is used as a key")
        is_small = isinstance(key, int) and key.bit_length() <= 60
        if not is_small and not isinstance(key, str | bytes | OpaqueObject):
            self._keys -= 20 + (len(key) if isinstance(key, tuple) else 0)
            if self._keys < 0:
                raise CorruptFileError("too many keys that are no text")
        return key

    # Functions that a pickle may call and that allocate memory.

    def _ordered(self, pairs: Any = ()) -> OrderedDict[Any, Any]:
        return OrderedDict((self._key(key), value) for key, value in pairs)

    def _encode(self, text: str, encoding: Any = "latin1") -> bytes:
        """Decode bytes as written by Python 2 and protocols below 3."""
        if not isinstance(text, str) or encoding != "latin1":
            raise CorruptFileError("bytes that are not made of text")
        self._take(len(text))
        return text.encode("latin-1")

    def _array(self, data: Any, dtype: Any, shape: Any, order: Any = "C", axes: Any = None) -> Any:
        """Create an array of numbers; numpy itself would trust the size claimed by a pickle."""
        # The data must not be another array, whose memory would go with a second state.
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | bytearray | str):
            return OpaqueObject("numpy.ndarray", (data, dtype, shape))
        data = self._encode(data) if isinstance(data, str) else data
        array = np.frombuffer(data, dtype.dtype)
        if math.prod(check_sizes(shape)) != array.size:
            raise CorruptFileError("an array whose shape and bytes disagree")
        if order == "K":
            return array.reshape(shape).transpose(axes)
        return array.reshape(shape, order=order)

    def _scalar(self, dtype: Any, data: Any) -> Any:
        value = self._array(data, dtype, ())
        return value if isinstance(value, OpaqueObject) else value[()]

    def _call(self, function: Any, args: Any) -> Any:
        self._take(_OBJECT)
        if not isinstance(args, tuple):
            raise CorruptFileError("a call whose arguments are not a tuple")
        # Besides the functions in the table of names, nothing in a pickle can be called.
        made = (
            OpaqueObject(function.name, args)
            if isinstance(function, OpaqueObject)
            else function(*args)
        )
        if isinstance(made, OpaqueObject):
            self._objects.add(made.name)
        return made

    def _set_state(self, value: Any, state: Any) -> None:
        match value, state:
            # (version, byte order, subdtype, names, fields, itemsize, alignment, flags)
            case _Dtype(), (3, "<" | ">" | "|" | "=" as order, None, None, None, -1, -1, 0):
                value.dtype = value.dtype.newbyteorder(order)
            case np.ndarray(), (1, shape, _Dtype() as dtype, fortran, bytes() | str() as data):
                data = self._encode(data) if isinstance(data, str) else data
                self._array(data, dtype, shape)  # checks them; numpy does not copy them
                value.__setstate__((1, shape, dtype.dtype, bool(fortran), data))  # type: ignore[arg-type]
            case np.ndarray(), _:  # arrays of objects or text stay empty
                self._objects.add("numpy.ndarray of objects or text")
            case OpaqueObject(), _:
                # The state is the attributes, or a pair of attributes and slots.
                for part in state if type(state) is tuple and len(state) == 2 else (state,):
                    is_named = isinstance(part, dict) and all(type(key) is str for key in part)
                    self._take(_ITEM * len(part) if is_named else _ITEM)
                    value.update(part if is_named else {} if part is None else {"__state__": state})
            case OrderedDict(), dict():
                # A state dict has only this one; others could hide a method.
                if isinstance(state.get("_metadata"), dict):
                    value._metadata = state["_metadata"]  # type: ignore[attr-defined]
            case _ if not hasattr(value, "requires_grad"):  # hooks of torch 0.3's parameters
                raise CorruptFileError(f"the state of a {type(value).__name__}")

    # Opcodes, registered as in the standard library.

    def _reduce(self: Any) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _reduce

    def _new_with_keywords(self: Any) -> None:
        keywords = self.stack.pop()
        self._reduce()
        self._set_state(self.stack[-1], keywords)

    dispatch[pickle.NEWOBJ_EX[0]] = _new_with_keywords

    def _instantiate(self: Any, function: Any, args: list[Any]) -> None:
        self.stack.append(self._call(function, tuple(args)))  # INST and OBJ

    def _build(self: Any) -> None:
        state = self.stack.pop()
        self._set_state(self.stack[-1], state)

    dispatch[pickle.BUILD[0]] = _build

    def _set_items(self: Any, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][self._key(key)] = value

    dispatch[pickle.SETITEMS[0]] = lambda self: self._set_items(self.pop_mark())
    dispatch[pickle.SETITEM[0]] = lambda self: self._set_items(
        [self.stack.pop(-2), self.stack.pop()]
    )

    def _dictionary(self: Any) -> None:
        self.metastack[-1].append({})
        self._set_items(self.pop_mark())

    dispatch[pickle.DICT[0]] = _dictionary

    dispatch[pickle.EMPTY_SET[0]] = dispatch[pickle.EMPTY_LIST[0]]
    dispatch[pickle.ADDITEMS[0]] = dispatch[pickle.APPENDS[0]]
    dispatch[pickle.FROZENSET[0]] = dispatch[pickle.TUPLE[0]]

    def _put(self: Any) -> None:
        self.memo[self._key(int(self.readline()))] = self.stack[-1]

    dispatch[pickle.PUT[0]] = _put
    dispatch[pickle.FRAME[0]] = lambda self: self.read(
        8
    )  # opcodes in the frame are read one by one

    def _byte_array(self: Any) -> None:
        self.stack.append(bytearray(self.read(*struct.unpack("<Q", self.read(8)))))

    dispatch[pickle.BYTEARRAY8[0]] = _byte_array
