"""Pickles of untrusted files, read as data: nothing in them is imported or called.

Python's own unpickler (the one written in Python) keeps the stack and reads numbers and text; every
step that touches an object is replaced here. A name is looked up in a table of this project's
functions, which check their arguments; any other becomes an `Inert`, and so does what is made by
it. Lengths are compared with what is left of the file, memory with its size, and whoever walks
through the result comes to an end. A file can still waste time (docs/converting.md).
"""

from __future__ import annotations

import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, ClassVar

import numpy as np

# What a pickle may make, in bytes: this, or its size times the ratio. Lists of floats, names of
# tensors and rows of a training log take 3 to 10 times their bytes in the file.
MIN_MEMORY = 256 << 20
MEMORY_RATIO = 10
_ITEM, _OBJECT = 100, 500  # bytes of an item of a dictionary, of what a call makes
MAX_DEPTH = 100
MIN_PARTS = 1_000_000
MAX_BITS = 1000  # float() of it does not overflow, and Python prints it
MAX_DIMENSIONS = 64  # as numpy and torch
# Whoever writes a file can choose keys that share one place in a dictionary, except text, into
# whose hash Python mixes a secret. A number of 60 bits is its own hash; others count 20 times.
MAX_KEYS = 100_000
_NUMBERS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])


class Refused(Exception):
    """The file is a program, or names classes where there must be none; the message says which."""


class Implausible(Exception):
    """The file claims more than it can hold; the message says what."""


class Inert(dict[Any, Any]):
    """Stands for a class or function, or for what was made by it; nothing of it was loaded.

    Its items are the object's attributes and, where the class is a dictionary, its items. A list's
    are under "__items__", a state that is no dictionary under "__state__".

    Attributes:
        name: of the class or function, "module.name".
        args: what it was called with.
    """

    __slots__ = ("args", "name")
    __hash__ = object.__hash__  # type: ignore[assignment]  # members of enums are keys

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.name, self.args = name, args

    def __repr__(self) -> str:
        return f"<inert {self.name[:80]!r}>"


class Known:
    """A name that a pickle may call; `make` is this project's function for it."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


class Source:
    """A file of `size` bytes, of which never more is requested than the `left` ones."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self.size, self.left = file, size, size

    def claim(self, count: int) -> BinaryIO:
        """The file, of which the next `count` bytes are taken."""
        if not 0 <= count <= self.left:
            raise pickle.UnpicklingError(f"{count} bytes are claimed where {self.left} are left")
        self.left -= count
        return self._file

    def read(self, count: int) -> bytes:
        return self.claim(count).read(count)

    def readline(self) -> bytes:
        line = self._file.readline(self.left)
        self.left -= len(line)
        return line

    def finish(self) -> None:
        """Raise Implausible unless everything was read."""
        if self.left:
            raise Implausible(f"{self.left} bytes follow its end")


def read_pickle(file: BinaryIO, size: int, objects: set[str]) -> Any:
    """The value in a file that is one pickle of containers, numbers, text and numpy arrays.

    Args:
        size: of the file, in bytes.
        objects: takes the name of each class or function that is an `Inert` in the value.

    Raises:
        Implausible: what the file claims cannot be.
        Exception: of many kinds where the file is damaged or no pickle.
    """
    source = Source(file, size)
    value = Unpickler(source, objects).load()
    source.finish()
    return value


def integers(values: Any) -> tuple[int, ...]:
    """Sizes or strides; raises Implausible unless they are few, and each one that an array has."""
    if not isinstance(values, tuple) or len(values) > MAX_DIMENSIONS:
        raise Implausible("a shape that is not a tuple of sizes")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in values):
        raise Implausible("a shape of something else than sizes")
    return values


class _Dtype:
    """Stands for a numpy.dtype; `dtype` is a real one of numbers, or None."""

    def __init__(self, name: str) -> None:
        self.dtype: np.dtype | None = np.dtype(name)

    def set_state(self, state: Any) -> None:
        # (version, byte order, subdtype, names, fields, itemsize, alignment, flags)
        match state:
            case (3, "<" | ">" | "|" | "=" as order, None, None, None, -1, -1, 0) if self.dtype:
                self.dtype = self.dtype.newbyteorder(order)
            case _:
                self.dtype = None

    def check(self, shape: Any, data: bytes | bytearray) -> np.dtype:
        """The dtype; numpy itself would believe what a pickle says of the array."""
        if self.dtype is None or math.prod(integers(shape)) * self.dtype.itemsize != len(data):
            raise Implausible("an array whose shape and bytes disagree")
        return self.dtype


class _Array(np.ndarray):
    """An array whose state is checked before numpy sees it."""

    def set_state(self, state: Any) -> None:
        checked: Any = (1, (0,), np.dtype("V1"), False, b"")  # of objects or text: not kept
        match state:
            case (1, shape, _Dtype() as dtype, bool(fortran), bytes() | str() as data):
                real = _to_bytes(data)
                checked = (1, shape, dtype.check(shape, real), fortran, real)
        super().__setstate__(checked)


def _to_bytes(data: bytes | bytearray | str) -> bytes | bytearray:
    return data.encode("latin-1") if isinstance(data, str) else data  # as Python 2 wrote them


def _dtype(name: Any, *flags: Any) -> Any:
    known = isinstance(name, str)
    return _Dtype(name) if name in _NUMBERS else Inert(f"numpy.dtype {name[:20] if known else ''}")


def _reconstruct(subtype: Any, *_: Any) -> Any:
    return _Array((0,), np.uint8) if subtype is _NDARRAY else Inert("numpy.ndarray, a subclass")


def _scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | str):
        return Inert("numpy.generic", (dtype, data))
    return np.frombuffer(_to_bytes(data), dtype.check((), _to_bytes(data)))[0]


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | bytearray):
        return Inert("numpy.ndarray", (data, dtype, shape))
    array = np.frombuffer(data, dtype.check(shape, data))
    if order == "K":
        return array.reshape(shape).transpose(axes)
    return array.reshape(shape, order=order)


def _items(value: Any) -> Any:
    if not isinstance(value, list | tuple | set):
        raise Implausible("a container that is not made of a list")
    return value


def _encode(text: Any, encoding: Any) -> bytes:
    """Protocols 0 to 2 spell bytes as _codecs.encode(text, "latin1")."""
    if not isinstance(text, str) or encoding != "latin1":
        raise Implausible("bytes that are not made of text")
    return text.encode("latin-1")


_NDARRAY = Known(lambda *args: Inert("numpy.ndarray", args))
NAMES: Mapping[str, Any] = {
    "numpy.ndarray": _NDARRAY,
    "numpy.dtype": Known(_dtype),
    "_codecs.encode": Known(_encode),
    **{f"{module}.bytes": Known(lambda: b"") for module in ("builtins", "__builtin__")},
    **{
        f"numpy.{core}.{name}": Known(make)
        for core in ("core", "_core")  # renamed by numpy 2
        for name, make in (
            ("multiarray._reconstruct", _reconstruct),
            ("multiarray.scalar", _scalar),
            ("numeric._frombuffer", _frombuffer),
        )
    },
}


class Unpickler(pickle._Unpickler):
    """`Unpickler(source, objects).load()` reads one pickle and leaves the source behind it.

    Args:
        source: at the pickle's start.
        objects: as of `read_pickle`.
        names: what a pickle may name beside the containers: Known, or a value by itself.
        persistent: object of an identity, in formats whose pickles refer to what is beside them.

    The arrays in the result may be read-only; copy what is to be changed.
    """

    stack: list[Any]
    memo: dict[int, Any]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(
        self,
        source: Source,
        objects: set[str],
        names: Mapping[str, Any] = NAMES,
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(source, encoding="latin-1")
        self._objects, self._persistent, self._size = objects, persistent, source.size
        self._memory, self._keys = max(MIN_MEMORY, MEMORY_RATIO * source.size), MAX_KEYS
        self._names = {**names, "collections.OrderedDict": Known(self._ordered)}
        for module in ("builtins", "__builtin__"):  # Python 3, and protocols below 3
            self._names[f"{module}.set"] = Known(self._set)
            self._names[f"{module}.frozenset"] = Known(lambda *args: frozenset(self._set(*args)))

    def load(self) -> Any:
        value = super().load()
        check_parts(value, max(self._size, MIN_PARTS))
        return value

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        self._take(len(full))
        if full not in self._names:
            self._take(_OBJECT)
            self._names[full] = Inert(full)
            self._objects.add(full)
        return self._names[full]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it names objects outside the file")
        self._take(_OBJECT)
        return self._persistent(pid)

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("it names a registered extension or data outside the file")

    def _take(self, memory: int) -> None:
        """Raise Implausible unless so many bytes of memory are left for what is made."""
        self._memory -= memory
        if self._memory < 0:
            raise Implausible(f"too many objects for a pickle of {self._size} bytes")

    def _key(self, key: Any) -> Any:
        """A key of a dictionary or part of a set, whose hash takes no time."""
        self._take(_ITEM)
        if not isinstance(key, str | bytes):
            inner = [part for part in key if isinstance(part, tuple)] if type(key) is tuple else ()
            if any(len(t) > MAX_DIMENSIONS or any(isinstance(p, tuple) for p in t) for t in inner):
                raise Implausible("a nested tuple is used as a key")
            self._keys -= 1 if isinstance(key, int) and key.bit_length() <= 60 else 20
            self._keys -= len(key) if isinstance(key, tuple) else 0
            if self._keys < 0:
                raise Implausible("too many keys that are no text")
        return key

    def _ordered(self, pairs: Any = ()) -> OrderedDict[Any, Any]:
        return OrderedDict((self._key(key), value) for key, value in map(_items, _items(pairs)))

    def _set(self, items: Any = ()) -> set[Any]:
        return {self._key(item) for item in _items(items)}

    def _call(self, function: Any, args: Any) -> Any:
        self._take(_OBJECT)
        if type(args) is not tuple:
            raise Implausible("a call with something else than arguments")
        if isinstance(function, Known):
            self._take(_weight(args) + sum(map(_weight, args)))
            made = function.make(*args)
        else:
            known = isinstance(function, Inert)
            made = Inert(function.name if known else f"a {type(function).__name__}", args)
        if isinstance(made, Inert):
            self._objects.add(made.name)
        return made

    def _set_state(self, value: Any, state: Any) -> None:
        self._take(_weight(state) + sum(map(_weight, state if type(state) is tuple else ())))
        if isinstance(value, _Dtype | _Array):
            value.set_state(state)
            if value.dtype is None or value.dtype.kind == "V":
                self._objects.add("numpy.ndarray of objects or text")
        elif isinstance(value, Inert):
            # The attributes, or those and the slots'.
            for part in state if type(state) is tuple and len(state) == 2 else (state,):
                is_named = isinstance(part, dict) and all(type(key) is str for key in part)
                value.update(part if is_named else {} if part is None else {"__state__": state})
        elif isinstance(value, OrderedDict):
            # Of a state dict; any other attribute would hide a method.
            if isinstance(state, dict) and isinstance(state.get("_metadata"), dict):
                value._metadata = state["_metadata"]  # type: ignore[attr-defined]
        elif not hasattr(value, "requires_grad"):  # a parameter of torch 0.3, with its hooks
            raise Implausible(f"the state of a {type(value).__name__}")

    # The steps, as the standard library registers its own.

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _reduce

    def _new_with_keywords(self) -> None:
        keywords = self.stack.pop()
        self._reduce()
        if keywords:
            self._set_state(self.stack[-1], keywords)

    dispatch[pickle.NEWOBJ_EX[0]] = _new_with_keywords

    def _object(self) -> None:
        function, *args = self.pop_mark()
        self.stack.append(self._call(function, tuple(args)))

    dispatch[pickle.OBJ[0]] = _object

    def _instance(self) -> None:
        module, name = (self.readline()[:-1].decode("ascii") for _ in range(2))
        args = self.pop_mark()
        self.stack.append(self._call(self.find_class(module, name), tuple(args)))

    dispatch[pickle.INST[0]] = _instance

    def _build(self) -> None:
        state = self.stack.pop()
        self._set_state(self.stack[-1], state)

    dispatch[pickle.BUILD[0]] = _build

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        target = target.setdefault("__items__", []) if isinstance(target, Inert) else target
        if type(target) is not list:
            raise Implausible(f"items are appended to a {type(target).__name__}")
        target.extend(items)

    dispatch[pickle.APPEND[0]] = lambda self: self._extend([self.stack.pop()])
    dispatch[pickle.APPENDS[0]] = lambda self: self._extend(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise Implausible(f"items of a {type(target).__name__} are set")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self._key(key)] = value

    dispatch[pickle.SETITEM[0]] = lambda self: self._set_items(
        [self.stack.pop(-2), self.stack.pop()]
    )
    dispatch[pickle.SETITEMS[0]] = lambda self: self._set_items(self.pop_mark())

    def _dictionary(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self._set_items(items)

    dispatch[pickle.DICT[0]] = _dictionary

    def _add_items(self) -> None:
        items = self._set(self.pop_mark())
        if type(self.stack[-1]) is not set:
            raise Implausible(f"items are added to a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(items)

    dispatch[pickle.ADDITEMS[0]] = _add_items

    def _frozen_set(self) -> None:
        items = self.pop_mark()
        self.stack.append(frozenset(self._set(items)))

    dispatch[pickle.FROZENSET[0]] = _frozen_set

    def _put(self) -> None:
        place = int(self.readline()[:-1])
        if not 0 <= place < 1 << 32:
            raise Implausible("a place of the memo beyond 32 bits")
        self.memo[place] = self.stack[-1]

    dispatch[pickle.PUT[0]] = _put

    def _byte_array(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.stack.append(bytearray(self.read(size)))

    dispatch[pickle.BYTEARRAY8[0]] = _byte_array
    dispatch[pickle.NEXT_BUFFER[0]] = lambda self: self.get_extension(0)
    dispatch[pickle.READONLY_BUFFER[0]] = lambda self: self.get_extension(0)


def _charged(step: Callable[[Any], None], cost: int) -> Callable[[Any], None]:
    def charged(unpickler: Unpickler) -> None:
        unpickler._take(cost)
        step(unpickler)

    return charged


# The steps of few bytes that take many.
for _codes, _cost in (
    (pickle.EMPTY_LIST + pickle.EMPTY_DICT + pickle.MARK, 90),
    (pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3, 70),
    (pickle.MEMOIZE + pickle.PUT + pickle.BINPUT + pickle.LONG_BINPUT, _ITEM),
    (pickle.EMPTY_SET, 230),
):
    for _code in _codes:
        Unpickler.dispatch[_code] = _charged(Unpickler.dispatch[_code], _cost)


def _weight(value: Any) -> int:
    """Bytes that a copy of an argument or of a state takes."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return _ITEM * len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 0


def check_parts(root: Any, limit: int) -> None:
    """Raise Implausible unless a walk through all parts of a value ends soon.

    Args:
        root: dictionaries, lists and tuples; anything else, `Inert` among it, has no parts.
        limit: number of parts, each counted as often as it can be reached.
    """
    done: dict[int, tuple[int, int]] = {}

    def measure(value: Any, depth: int) -> tuple[int, int]:
        """Parts and levels of a container that is so deep in the root."""
        count, levels = done.get(id(value), (1, 0))
        if count == 1 and depth <= MAX_DEPTH:
            for part in value.values() if isinstance(value, dict) else value:
                parts, below = 1, 0
                if isinstance(part, dict | list | tuple) and not isinstance(part, Inert):
                    parts, below = measure(part, depth + 1)
                elif isinstance(part, int) and part.bit_length() > MAX_BITS:
                    raise Implausible(f"a whole number of {part.bit_length()} bits")
                count, levels = count + parts, max(levels, below + 1)
            done[id(value)] = count, levels
        if depth + levels > MAX_DEPTH:
            raise Implausible(f"objects nested more than {MAX_DEPTH} deep")
        if count > limit:
            raise Implausible(f"more than {limit} parts, or one named again and again")
        return count, levels

    measure([root], 0)
