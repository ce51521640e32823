"""Unpickler that reads pickles as data: it imports and calls nothing from them.

The standard library's pure-Python unpickler parses; each opcode that touches an object is replaced
here. A name is looked up in a table of this project's functions, which check their arguments; any
other name becomes an `Inert`, and so do the objects that it creates. Memory is limited in
proportion to the file's size, and so is a walk through the result. A file can still waste time.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pickle import _Unpickler  # noqa: TID251  # each opcode that touches an object is replaced
from types import FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import numpy as np

from moco.common.limits import Implausible, check_parts

# Bytes of memory that a pickle may take: the larger of this and its size times the ratio. Lists of
# floats, names of tensors and rows of a training log take 3 to 10 times their bytes in the file.
MIN_MEMORY, MEMORY_RATIO = 256 << 20, 10
_ITEM, _OBJECT = 100, 500  # bytes of a dictionary's item, of an object created by a call
MIN_PARTS = 1_000_000
MAX_DIMENSIONS = 64  # as numpy and torch
MAX_KEYS = 100_000  # other than text and objects; all but small integers count 20 times
_NUMBERS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])


class Refused(Exception):
    """Refusal of a file that is a program, or names classes where none are allowed."""


class Inert(dict[Any, Any]):
    """Placeholder for a class or function, or for an object created by it, which is not loaded.

    Its items are the object's attributes and, if the class is a dictionary, its items. Items of a
    list are in "__items__", a state other than a dictionary in "__state__".

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
        return f"<inert {self.name[:80]!r}>"

    def extend(self, items: list[Any]) -> None:
        """Append items of a list, as the unpickler does."""
        self.setdefault("__items__", []).extend(items)

    def append(self, item: Any) -> None:
        """Append an item of a list."""
        self.extend([item])


def read_pickle(file: BinaryIO, size: int, objects: set[str]) -> Any:
    """Read the value in a file that is one pickle of containers, numbers, text and numpy arrays.

    Args:
        file: File to read, at its start.
        size: Size of the file in bytes.
        objects: Set that receives the name of each class or function that is an `Inert` in the
            value.

    Raises:
        Implausible: If the file claims more than it can hold.
        Exception: Various kinds if the file is damaged or not a pickle.
    """
    value = Unpickler(file, size, objects).load()
    require_end(file)
    return value


def require_end(file: BinaryIO) -> None:
    """Raise Implausible unless the whole file was read."""
    if file.read(1):
        raise Implausible("bytes follow its end")


def integers(values: Any) -> tuple[int, ...]:
    """Return sizes or strides; raise Implausible unless an array can have them."""
    if not isinstance(values, tuple) or len(values) > MAX_DIMENSIONS:
        raise Implausible("a shape that is not a tuple of sizes")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in values):
        raise Implausible("a shape of something else than sizes")
    return values


class _Dtype:
    """Wrapper of a numeric `numpy.dtype`, whose state may change its byte order."""

    def __init__(self, name: str) -> None:
        self.dtype = np.dtype(name)


def _dtype(name: Any, *flags: Any) -> Any:
    if not isinstance(name, str):  # hashing or printing it might never end
        return Inert("numpy.dtype")
    return _Dtype(name) if name in _NUMBERS else Inert(f"numpy.dtype {name[:20]}")


def _ndarray(*args: Any) -> Inert:
    return Inert("numpy.ndarray", args[:1])


def _reconstruct(subtype: Any, *_: Any) -> Any:
    return np.empty(0, np.uint8) if subtype is _ndarray else Inert("numpy.ndarray, a subclass")


class Unpickler(_Unpickler):
    """Reader of one pickle: `Unpickler(file, size, objects).load()`.

    The file is left at the end of the pickle. Arrays in the result may be read-only.

    Args:
        file: File at the start of the pickle.
        size: See `read_pickle`.
        objects: See `read_pickle`.
        names: Further values, and functions that a pickle may call and that check their arguments.
        persistent: Return the object of a persistent id, in formats whose pickles refer to data
            outside them.
    """

    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_Unpickler.dispatch)

    def __init__(
        self,
        file: BinaryIO,
        size: int,
        objects: set[str],
        names: Mapping[str, Any] = MappingProxyType({}),
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        def read(count: int) -> bytes:
            data = file.read(min(count, size))  # read() allocates the requested size
            if len(data) < count:
                raise EOFError(f"{count} bytes are claimed where {len(data)} are left")
            return data

        bounded = SimpleNamespace(read=read, readline=file.readline)
        super().__init__(bounded, encoding="latin-1")
        self._objects, self._persistent, self._size = objects, persistent, size
        self._memory, self._keys = max(MIN_MEMORY, MEMORY_RATIO * size), MAX_KEYS
        self._names = {
            **names,
            "collections.OrderedDict": self._ordered,
            "_codecs.encode": self._encode,
            "numpy.ndarray": _ndarray,
            "numpy.dtype": _dtype,
        }
        for module in ("builtins", "__builtin__"):  # Python 3, and protocols below 3
            self._names[f"{module}.set"] = self._set
            self._names[f"{module}.frozenset"] = self._frozen_set
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
        """Return the entry of the table of names, or an `Inert`."""
        full = f"{module}.{name}"
        self._take(len(full))
        if full not in self._names:
            self._take(_OBJECT)
            self._names[full] = Inert(full)
            self._objects.add(full)
        return self._names[full]

    def persistent_load(self, pid: Any) -> Any:
        """Return the object of a persistent id, if the format has any."""
        if self._persistent is None:
            raise pickle.UnpicklingError("it names objects outside the file")
        self._take(_OBJECT)
        return self._persistent(pid)

    def get_extension(self, code: int) -> None:
        """Refuse registered extensions, whose classes would be imported."""
        raise pickle.UnpicklingError("it names a registered extension")

    def _take(self, memory: int) -> None:
        """Raise Implausible unless that many bytes of memory are left."""
        self._memory -= memory
        if self._memory < 0:
            raise Implausible(f"too many objects for a pickle of {self._size} bytes")

    def _key(self, key: Any) -> Any:
        """Check a key or member; text and objects have secret hashes, others can collide."""
        self._take(_ITEM)
        if isinstance(key, tuple) and any(isinstance(part, tuple) for part in key):
            raise Implausible("a nested tuple is used as a key")
        if not isinstance(key, str | bytes | Inert):
            self._keys -= 1 if isinstance(key, int) and key.bit_length() <= 60 else 20
            self._keys -= len(key) if isinstance(key, tuple) else 0
            if self._keys < 0:
                raise Implausible("too many keys that are no text")
        return key

    # Functions that a pickle may call and that allocate memory.

    def _ordered(self, pairs: Any = ()) -> OrderedDict[Any, Any]:
        return OrderedDict((self._key(key), value) for key, value in pairs)

    def _set(self, items: Any = ()) -> set[Any]:
        return {self._key(item) for item in items}

    def _frozen_set(self, items: Any = ()) -> frozenset[Any]:
        return frozenset(self._set(items))

    def _encode(self, text: str, encoding: Any = "latin1") -> bytes:
        """Decode bytes as written by Python 2 and protocols below 3."""
        if not isinstance(text, str) or encoding != "latin1":
            raise Implausible("bytes that are not made of text")
        self._take(len(text))
        return text.encode("latin-1")

    def _array(self, data: Any, dtype: Any, shape: Any, order: Any = "C", axes: Any = None) -> Any:
        """Create an array of numbers; numpy itself would trust the size claimed by a pickle."""
        # The data must not be another array, whose memory would go with a second state.
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | bytearray | str):
            return Inert("numpy.ndarray", (data, dtype, shape))
        self._take(_OBJECT + len(data))
        data = self._encode(data) if isinstance(data, str) else data
        array = np.frombuffer(data, dtype.dtype)
        if math.prod(integers(shape)) != array.size:
            raise Implausible("an array whose shape and bytes disagree")
        if order == "K":
            return array.reshape(shape).transpose(axes)
        return array.reshape(shape, order=order)

    def _scalar(self, dtype: Any, data: Any) -> Any:
        value = self._array(data, dtype, ())
        return value if isinstance(value, Inert) else value[()]

    def _call(self, function: Any, args: Any) -> Any:
        self._take(_OBJECT)
        if not isinstance(args, tuple):
            raise Implausible("a call with something else than arguments")
        if isinstance(function, Inert):
            made: Any = Inert(function.name, args)
        elif isinstance(function, FunctionType | MethodType):  # from the table of names
            made = function(*args)
        else:
            raise Implausible(f"a call of a {type(function).__name__}")
        if isinstance(made, Inert):
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
            case np.ndarray(), _:  # arrays of objects or text are emptied
                value.__setstate__((1, (0,), np.dtype("V1"), False, b""))  # type: ignore[arg-type]
                self._objects.add("numpy.ndarray of objects or text")
            case Inert(), _:
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
                raise Implausible(f"the state of a {type(value).__name__}")

    # Opcodes, registered as the standard library registers its own.

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _reduce

    def _new_with_keywords(self) -> None:
        keywords = self.stack.pop()
        self._reduce()
        self._set_state(self.stack[-1], keywords)

    dispatch[pickle.NEWOBJ_EX[0]] = _new_with_keywords

    def _instantiate(self, function: Any, args: list[Any]) -> None:
        self.stack.append(self._call(function, tuple(args)))  # INST and OBJ

    def _build(self) -> None:
        state = self.stack.pop()
        self._set_state(self.stack[-1], state)

    dispatch[pickle.BUILD[0]] = _build

    def _set_items(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise Implausible(f"items of a {type(self.stack[-1]).__name__} are set")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][self._key(key)] = value

    dispatch[pickle.SETITEMS[0]] = lambda self: self._set_items(self.pop_mark())
    dispatch[pickle.SETITEM[0]] = lambda self: self._set_items(
        [self.stack.pop(-2), self.stack.pop()]
    )

    def _dictionary(self) -> None:
        self.metastack[-1].append({})
        self._set_items(self.pop_mark())

    dispatch[pickle.DICT[0]] = _dictionary

    def _add_items(self) -> None:
        items = self._set(self.pop_mark())
        set.update(self.stack[-1], items)

    dispatch[pickle.ADDITEMS[0]] = _add_items

    def _freeze(self) -> None:
        items = self.pop_mark()
        self.stack.append(self._frozen_set(items))

    dispatch[pickle.FROZENSET[0]] = _freeze

    def _put(self) -> None:
        place = int(self.readline())
        if place >> 32:
            raise Implausible("a place of the memo beyond 32 bits")
        self.memo[place] = self.stack[-1]

    dispatch[pickle.PUT[0]] = _put

    def _byte_array(self) -> None:
        self.stack.append(bytearray(self.read(*struct.unpack("<Q", self.read(8)))))

    dispatch[pickle.BYTEARRAY8[0]] = _byte_array
    # A buffer outside the file: no writer of these formats uses one.
    dispatch[pickle.READONLY_BUFFER[0]] = dispatch[pickle.NEXT_BUFFER[0]]


def _charged(step: Callable[[Any], None]) -> Callable[[Any], None]:
    def charged(unpickler: Unpickler) -> None:
        unpickler._take(_ITEM)
        step(unpickler)

    return charged


for _code in (  # opcodes of few bytes that allocate many
    pickle.EMPTY_LIST,
    pickle.EMPTY_DICT,
    pickle.EMPTY_SET,
    pickle.MARK,
    pickle.TUPLE,
    pickle.TUPLE1,
    pickle.TUPLE2,
    pickle.TUPLE3,
    pickle.MEMOIZE,
    pickle.PUT,
    pickle.BINPUT,
    pickle.LONG_BINPUT,
):
    Unpickler.dispatch[_code[0]] = _charged(Unpickler.dispatch[_code[0]])
