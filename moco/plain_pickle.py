"""Pickles of containers, numbers, text and numpy arrays, read without trusting a byte of them.

A pickle is a program for a machine with a stack. This is that machine, with the opcodes as
pickletools lists them, and nothing that a pickle could do harm with:

- A name is looked up in a table and never imported. A call is one of this project's functions,
  which check their arguments; numpy's own believe what the pickle says, so that an array of dtype
  object laid over bytes of the file would make them pointers.
- Lengths are compared with what is left of the file before anything is allocated, numbered places
  of the memo do not reserve the places below, and the memory of what the opcodes make is limited by
  the size of the pickle.
- Keys are short, and few of them have a hash that whoever wrote the file could choose.
- The result has no cycle, no deep nesting, and no more parts than the file has bytes, so that
  whoever walks through it comes to an end.
"""

from __future__ import annotations

import codecs
import math
import pickle
import pickletools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Literal, NoReturn

import numpy as np

from moco.inert import KNOWN, Inert, Known

# What the opcodes of a pickle may make, in bytes of memory: this, or so many times its size. An
# opcode of one byte can make an object of 200; lists of floats, names of tensors and rows of a
# training log take 3 to 10 times their bytes in the file.
MIN_MEMORY = 256 << 20
MEMORY_RATIO = 10
_SLOT = 16  # of the stack, or of a list: 8 bytes, with what a list reserves
_MEMO = 128  # a place of the memo: a number, and an entry of a dictionary that doubles
_PART = 136  # what check_parts keeps of a container
_PERSISTENT = 500  # a storage of torch
_MARK = 88
MAX_DEPTH = 100
MAX_BITS = 1000  # float() of it does not overflow, and Python prints it
# Parts of a value that a small file may describe by naming one object often.
MIN_PARTS = 1_000_000
MIN_COPIES = 1_000_000
MAX_KEY = 1000  # letters or bytes
# Python mixes a secret into the hash of text only. Of other keys whoever writes a file can choose
# many with one place in a dictionary, and to add each takes a look at all of them.
_KEY_BITS = 60  # the hash of a longer number is its remainder
_MAX_INTEGER_KEYS = 100_000  # in a file; also numbers of 60 bits can follow each other's traces
_MAX_OTHER_KEYS = 4096  # in a file: other numbers and tuples
_MAX_TUPLE = 64  # parts of a tuple that is a key; the hash of a tuple visits each
_FEW = 16  # arguments or parts of a state; more are not looked into
_UNIT = 64  # bytes of text or data that are as much to copy as an item of a container
MAX_DIMENSIONS = 64  # as numpy and torch
_MAX_SIZE_BITS = 62  # torch's own integers have 63
_NUMBERS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])


class Refused(Exception):
    """The pickle asks for something that is not plain data; the message names it."""


class Implausible(Exception):
    """The file claims more than it can hold; the message says what."""


class Window:
    """Part of a file, read from its start to its end and not beyond.

    Args:
        file: opened for reading in binary mode; shared windows must not be read alternately.
        start: in bytes from the file's start.
        size: bytes.

    Attributes:
        left: bytes not yet read.
        memory: bytes that what its pickles make may still take, all together.
        copies: of items and units of bytes that they may still ask for. Whoever copies each thing
            once needs no more than this; naming one thing a million times does.
    """

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self.file, self.size, self.left = file, size, size
        self.memory = max(MIN_MEMORY, MEMORY_RATIO * size)
        self.copies = MIN_COPIES + size
        self._integer_keys, self._other_keys = _MAX_INTEGER_KEYS, _MAX_OTHER_KEYS
        file.seek(start)

    def take(self, memory: int) -> None:
        """Raise Implausible unless so many bytes of memory are left for what is made."""
        self.memory -= memory
        if self.memory < 0:
            raise Implausible(f"too many objects for a pickle of {self.size} bytes")

    def key(self, key: Any) -> Any:
        """A key of a dictionary or part of a set, whose hash takes no time and runs nothing."""
        if isinstance(key, str | bytes):
            if len(key) > MAX_KEY:
                raise Implausible(f"a key of {len(key)} letters")
        elif isinstance(key, int) and key.bit_length() <= _KEY_BITS:
            self._integer_keys -= 1
        elif _hashable(key):
            self._other_keys -= key is not None and not isinstance(key, Known)
        else:
            raise Implausible(f"a {type(key).__name__} is used as a key")
        if min(self._integer_keys, self._other_keys) < 0:
            raise Implausible("too many keys that are no text")
        return key

    def claim(self, count: int) -> None:
        """Raise UnpicklingError unless this many bytes are left; they count as read."""
        if not 0 <= count <= self.left:
            raise pickle.UnpicklingError(f"{count} bytes are claimed where {self.left} are left")
        self.left -= count

    def read(self, count: int) -> bytes:
        self.claim(count)
        return self.file.read(count)

    def readline(self) -> bytes:
        line = self.file.readline(self.left)
        self.left -= len(line)
        return line

    def readinto(self, buffer: memoryview) -> None:
        """Fill a buffer of bytes."""
        self.claim(len(buffer))
        done = 0
        while done < len(buffer):
            count = self.file.readinto(buffer[done:])  # type: ignore[attr-defined]
            if not count:
                raise pickle.UnpicklingError("the file ends too early")
            done += count


def integers(values: Any) -> tuple[int, ...] | None:
    """Sizes or strides, or None: few, not negative, none beyond what an array can have."""
    if (
        isinstance(values, tuple)
        and len(values) <= MAX_DIMENSIONS
        and all(type(n) is int and n >= 0 and n.bit_length() <= _MAX_SIZE_BITS for n in values)
    ):
        return values
    return None


class _Dtype:
    """Stands in for an unpickled numpy.dtype; `dtype` is a real one of _NUMBERS."""

    __slots__ = ("dtype",)

    def __init__(self, name: str) -> None:
        self.dtype = np.dtype(name)

    def set_state(self, state: Any) -> None:
        # (version, byte order, subdtype, names, fields, itemsize, alignment, flags)
        match state:
            case (3, "<" | ">" | "|" | "=" as order, None, None, None, -1, -1, 0):
                self.dtype = self.dtype.newbyteorder(order)
            case _:
                raise Refused("it holds a numpy.dtype with a forged or structured state")


class _Array(np.ndarray):
    """An array whose unpickled state is checked before numpy sees it."""

    def set_state(self, state: Any) -> None:
        match state:
            case (1, tuple(shape), _Dtype() as dtype, bool(fortran), bytes() | str() as data):
                # Python 2 wrote bytes as str, read as latin-1.
                data = data.encode("latin-1") if isinstance(data, str) else data
                _check_size(shape, dtype, data)
                checked: Any = (1, shape, dtype.dtype, fortran, data)
                super().__setstate__(checked)
            case _:
                raise Refused("it holds a numpy.ndarray that is not an array of plain numbers")


def _check_size(shape: Any, dtype: Any, data: bytes | bytearray) -> None:
    if not (
        isinstance(dtype, _Dtype)
        and integers(shape) is not None
        and math.prod(shape) * dtype.dtype.itemsize == len(data)
    ):
        raise Refused("it holds a numpy.ndarray whose shape and bytes disagree")


def _dtype(name: Any, *flags: Any) -> _Dtype:
    if not isinstance(name, str) or name not in _NUMBERS or flags != (False, True):
        shown = name[:40] if isinstance(name, str) else type(name).__name__
        raise Refused(f"it holds a numpy.dtype {shown!r} that is not a plain number")
    return _Dtype(name)


_NDARRAY = Known("numpy.ndarray", None)


def _reconstruct(subtype: Any, shape: Any, typecode: Any) -> _Array:
    if subtype is not _NDARRAY:
        raise Refused("it holds a subclass of numpy.ndarray")
    return _Array((0,), dtype=np.uint8)


def _scalar(dtype: Any, data: Any) -> Any:
    data = data.encode("latin-1") if isinstance(data, str) else data
    if not isinstance(data, bytes):
        raise Refused("it holds a numpy scalar that is not a plain number")
    _check_size((), dtype, data)
    return np.frombuffer(data, dtype=dtype.dtype)[0]


def _frombuffer(
    data: Any, dtype: Any, shape: Any, order: Literal["C", "F", "A", "K"], axes: Any = None
) -> np.ndarray:
    if not isinstance(data, bytes | bytearray):
        raise Refused("it holds a numpy.ndarray that is not an array of plain numbers")
    _check_size(shape, dtype, data)
    array = np.frombuffer(data, dtype=dtype.dtype)
    if order == "K":
        if axes is not None and integers(axes) is None:
            raise Refused("it holds a numpy.ndarray with forged axes")
        return array.reshape(shape).transpose(axes)
    return array.reshape(shape, order=order)


def _encode(text: Any, encoding: Any) -> bytes:
    # Protocols 0 to 2 spell bytes as _codecs.encode(text, "latin1").
    if not isinstance(text, str) or encoding != "latin1":
        raise Refused("it calls _codecs.encode on something else than bytes")
    return text.encode("latin-1")


_CheckKey = Callable[[Any], Any]


class _Keyed(Known):
    """A Known whose `make` takes first of all what checks a key."""

    __slots__ = ()


def _ordered(check: _CheckKey, pairs: Any = ()) -> OrderedDict[Any, Any]:
    """From (key, value) pairs, as Python 2 wrote them."""
    result: OrderedDict[Any, Any] = OrderedDict()
    for key, value in _sequence(pairs):
        result[check(key)] = value
    return result


def _counter(counts: Any = ()) -> dict[Any, Any]:
    if not isinstance(counts, dict | tuple):
        raise Refused("it makes a collections.Counter of something else than a dictionary")
    return dict(counts)


def _set(check: _CheckKey, items: Any = ()) -> set[Any]:
    return {check(item) for item in _sequence(items)}


def _frozenset(check: _CheckKey, items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(check, items))


def _sequence(items: Any = (), *_: Any) -> list[Any]:
    if not isinstance(items, list | tuple | set):
        raise Refused("it makes a container of something else than a list")
    return list(items)


def _bytearray(data: Any = b"", encoding: Any = "latin-1") -> bytearray:
    """Never of a number, which would be its size."""
    return bytearray(data if isinstance(data, bytes) else _encode(data, encoding.replace("-", "")))


def _bytes(*size: Any) -> bytes:
    """Protocols 0 to 2 spell b"" as bytes()."""
    if size:
        raise Refused("it makes bytes of a number")
    return b""


def _complex(real: float, imag: float) -> complex:
    return complex(real, imag)


def _getattr(owner: Any, name: Any) -> Inert:
    """A method or an enum's member by name: only of what is known, and only its name."""
    if not isinstance(owner, Known) or type(name) is not str:
        raise Refused("it calls getattr on something else than a known class")
    return Inert(f"{owner.name}.{name[:60]}")


def _getitem(owner: Any, args: Any) -> Inert:
    """typing.Union[int, str] and the like."""
    if not isinstance(owner, Known) or not owner.name.startswith("typing."):
        raise Refused("it calls getitem on something else than typing's names")
    return Inert(owner.name, (args,))


def _reconstructor(cls: Any, base: Any, state: Any) -> Any:
    """Protocols 0 and 1 spell the making of an object so."""
    if isinstance(cls, _Keyed):
        raise Refused(f"it makes {cls} in an unknown way")
    made = _call(cls, (), _no_key)
    if isinstance(made, Inert) and isinstance(state, dict):
        made.set_attributes(state)
    return made


def _no_key(key: Any) -> NoReturn:
    raise Implausible("a key where there is none")


def _plain() -> Iterator[Known]:
    yield _NDARRAY
    yield Known("numpy.dtype", _dtype)
    yield Known("_codecs.encode", _encode)
    for core in ("core", "_core"):  # renamed by numpy 2
        yield Known(f"numpy.{core}.multiarray._reconstruct", _reconstruct)
        yield Known(f"numpy.{core}.multiarray.scalar", _scalar)
        yield Known(f"numpy.{core}.numeric._frombuffer", _frombuffer)
    yield _Keyed("collections.OrderedDict", _ordered)
    yield Known("collections.defaultdict", lambda factory=None: {})
    yield Known("collections.Counter", _counter)
    yield Known("collections.deque", _sequence)
    for builtins, copyreg in (("builtins", "copyreg"), ("__builtin__", "copy_reg")):
        yield _Keyed(f"{builtins}.set", _set)
        yield _Keyed(f"{builtins}.frozenset", _frozenset)
        yield Known(f"{builtins}.bytearray", _bytearray)
        yield Known(f"{builtins}.bytes", _bytes)
        yield Known(f"{builtins}.complex", _complex)
        yield Known(f"{builtins}.getattr", _getattr)
        yield Known(f"{copyreg}._reconstructor", _reconstructor)
    for operator in ("operator", "_operator"):
        yield Known(f"{operator}.getitem", _getitem)


PLAIN: dict[str, Any] = KNOWN | {known.name: known for known in _plain()}


def _call(function: Any, args: Any, check: _CheckKey) -> Any:
    if not isinstance(function, Known) or function.make is None:
        shown = function if isinstance(function, Known) else f"a {type(function).__name__}"
        raise Refused(f"it calls {shown}, which is not callable")
    if type(args) is not tuple:
        raise Refused(f"it calls {function} with something else than arguments")
    return function.make(check, *args) if isinstance(function, _Keyed) else function.make(*args)


def _weight(value: Any) -> int:
    """What copying an argument or a state costs, with the parts of a tuple of a few."""
    parts = value if isinstance(value, tuple) and len(value) <= _FEW else ()
    return _length(value) + sum(map(_length, parts))


def _length(value: Any) -> int:
    if isinstance(value, str | bytes | bytearray):
        return len(value) // _UNIT
    return len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 0


def _hashable(key: Any, depth: int = 2) -> bool:
    """Whether a key that is not short text is one whose hash and comparison take no time."""
    if isinstance(key, tuple):
        few = depth > 0 and len(key) <= _MAX_TUPLE
        return few and all(_hashable(part, depth - 1) for part in key)
    if isinstance(key, str | bytes):
        return len(key) <= MAX_KEY
    return isinstance(key, int | float | complex | None | Known | np.generic)


def _size(value: Any) -> int:
    """Memory of an object without its parts, and of what check_parts keeps of it."""
    return sys.getsizeof(value) + (_PART if isinstance(value, list | tuple | dict) else 0)


def _build(value: Any, state: Any) -> None:
    if isinstance(value, Inert | _Dtype | _Array):
        value.set_state(state)
    elif isinstance(value, OrderedDict):
        # Of a state dict. Any other attribute would hide a method.
        metadata = state.get("_metadata") if isinstance(state, dict) else None
        if isinstance(metadata, dict):
            value._metadata = metadata  # type: ignore[attr-defined]
    elif not hasattr(value, "requires_grad"):  # a parameter of torch 0.3, with its backward hooks
        raise Refused(f"it sets the state of a {type(value).__name__}")


def _text_of_python_2(file: Any) -> str:
    """STRING of protocol 0: pickletools takes it for ASCII."""
    line = pickletools.read_stringnl(file, decode=False)
    return codecs.escape_decode(line)[0].decode("latin-1")


_OPCODES: dict[bytes, tuple[str, Callable[[Any], Any] | None]] = {
    opcode.code.encode("latin-1"): (opcode.name, opcode.arg.reader if opcode.arg else None)
    for opcode in pickletools.opcodes
}
_OPCODES[b"S"] = ("STRING", _text_of_python_2)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NEW: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _no_persistent(identity: Any) -> NoReturn:
    # Only in pickles that are part of another format, and in files that are no pickle.
    raise pickle.UnpicklingError("it names objects outside the file")


class PlainUnpickler:
    """`PlainUnpickler(window).load()` reads one pickle and leaves the window behind it.

    Args:
        window: where the pickle starts.
        names: what a pickle may name, "module.name" → a Known, or a value by itself.
        persistent: object of an identity, in formats whose pickles refer to what is beside them.

    The arrays in the result may be read-only; copy what is to be changed.

    Raises (load): Refused, Implausible, and the errors of damaged pickles, of many kinds.
    """

    def __init__(
        self,
        window: Window,
        names: Mapping[str, Any] = PLAIN,
        persistent: Callable[[Any], Any] = _no_persistent,
    ) -> None:
        self._window, self._names, self._persistent = window, names, persistent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks under the marks
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        window = self._window
        while True:
            code = window.read(1)
            if code not in _OPCODES:
                raise pickle.UnpicklingError(f"unknown opcode {code!r}")
            name, reader = _OPCODES[code]
            if name == "STOP":
                value = self._stack.pop()
                self._memo.clear()
                check_parts(value, max(window.size, MIN_PARTS))
                return value
            self._do(name, reader(window) if reader else None)

    def _do(self, name: str, arg: Any) -> None:
        stack, memo, take = self._stack, self._memo, self._window.take
        match name:
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                if arg >> 32:
                    raise Implausible("a place of the memo beyond 32 bits")
                take(_MEMO)
                memo[arg] = stack[-1]
            case "MEMOIZE":
                take(_MEMO)
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                take(_SLOT)
                stack.append(memo[arg])
            case "MARK":
                take(_MARK)
                self._below.append(stack)
                self._stack = []
            case "TUPLE":
                self._push(tuple(self._marked()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = _TUPLES[name]
                if len(stack) < count:
                    raise IndexError("stack underflow")
                stack[-count:] = [tuple(stack[-count:])]
                take(_size(stack[-1]))
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE" | "BININT1":
                # Python has one object of each, and of each number of a byte.
                take(_SLOT)
                stack.append(_CONSTANTS[name] if arg is None else arg)
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_SET":
                self._push(_NEW[name]())
            case "REDUCE" | "NEWOBJ":
                args = stack.pop()
                stack[-1] = self._call(stack[-1], args)
            case "BUILD":
                state = stack.pop()
                self._charge(state)
                before = sys.getsizeof(stack[-1])
                _build(stack[-1], state)
                take(sys.getsizeof(stack[-1]) - before)
            case "BINPERSID":
                take(_PERSISTENT)
                stack[-1] = self._persistent(stack[-1])
            case "PERSID":
                take(_PERSISTENT)
                stack.append(self._persistent(arg))
            case "APPEND":
                self._extend([stack.pop()])
            case "APPENDS":
                self._extend(self._marked())
            case "SETITEM":
                value = stack.pop()
                self._set_items([stack.pop(), value])
            case "SETITEMS":
                self._set_items(self._marked())
            case "GLOBAL":
                take(_SLOT)
                stack.append(self._find(*arg.split(" ", 1)))
            case "STACK_GLOBAL":
                attribute = stack.pop()
                stack[-1] = self._find(stack[-1], attribute)
            case "LIST":
                self._push(self._marked())
            case "DICT":
                items = self._marked()
                self._push({})
                self._set_items(items)
            case "ADDITEMS" | "FROZENSET":
                members = {self._window.key(item) for item in self._marked()}
                if name == "FROZENSET":
                    self._push(frozenset(members))
                elif type(self._stack[-1]) is set:
                    before = sys.getsizeof(self._stack[-1])
                    self._stack[-1].update(members)
                    take(sys.getsizeof(self._stack[-1]) - before)
                else:
                    raise Refused(f"it adds to a {type(self._stack[-1]).__name__}")
            case "NEWOBJ_EX":
                keywords = stack.pop()
                if type(keywords) is not dict or keywords:
                    raise Refused("it calls a class with keywords")
                args = stack.pop()
                stack[-1] = self._call(stack[-1], args)
            case "OBJ":
                cls, *rest = self._marked()
                self._push(self._call(cls, tuple(rest)))
            case "INST":
                rest = self._marked()
                self._push(self._call(self._find(*arg.split(" ", 1)), tuple(rest)))
            case "DUP":
                take(_SLOT)
                stack.append(stack[-1])
            case "POP":
                # Of a mark, where nothing is above it.
                self._stack.pop() if stack else self._marked()
            case "POP_MARK":
                self._marked()
            case "PROTO" | "FRAME":
                pass
            case "EXT1" | "EXT2" | "EXT4":
                raise Refused("it names a registered extension")
            case "NEXT_BUFFER" | "READONLY_BUFFER":
                raise pickle.UnpicklingError("its data is outside the file")
            case _:  # the other numbers, texts and bytes
                if type(arg) is int and arg.bit_length() > MAX_BITS:
                    raise Implausible(f"a whole number of {arg.bit_length()} bits")
                self._push(arg)

    def _charge(self, value: Any) -> None:
        self._window.copies -= _weight(value)
        if self._window.copies < 0:
            raise Implausible("it copies the same objects again and again")

    def _call(self, function: Any, args: Any) -> Any:
        self._charge(args)
        made = _call(function, args, self._window.key)
        self._window.take(function.memory + _size(made))
        return made

    def _push(self, value: Any) -> None:
        """Put what was made for it onto the stack."""
        self._window.take(_SLOT + _size(value))
        self._stack.append(value)

    def _marked(self) -> list[Any]:
        """What is above the topmost mark, which goes."""
        items = self._stack
        self._stack = self._below.pop()
        return items

    def _find(self, module: Any, name: Any = "") -> Any:
        full = f"{module}.{name}" if type(module) is str and type(name) is str else "no name"
        if full not in self._names:
            raise Refused(f"it names {repr(full[:120])[1:-1]}")
        return self._names[full]

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise Refused(f"it appends to a {type(target).__name__}")
        before = sys.getsizeof(target)
        target.extend(items)
        self._window.take(sys.getsizeof(target) - before)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise Refused(f"it sets items of a {type(target).__name__}")
        before, check = sys.getsizeof(target), self._window.key
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[check(key)] = value
        self._window.take(sys.getsizeof(target) - before)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Inert):
        yield from value.args
    if isinstance(value, dict):
        yield from value.values()
        yield from vars(value).values() if isinstance(value, OrderedDict) else ()
    elif isinstance(value, list | tuple):
        yield from value


_DEPTHS = 1 << 10  # more than MAX_DEPTH


def check_parts(root: Any, limit: int) -> None:
    """Raise Implausible unless a walk through all parts of a value ends soon.

    Args:
        root: dictionaries, lists and tuples; anything else has no parts.
        limit: number of parts, each counted as often as it can be reached.
    """
    # object → its parts times _DEPTHS, and its depth: one number is less memory than a tuple
    done: dict[int, int] = {}
    active = {id(root)}
    path = [(root, _parts(root), [1, 0])]
    while path:
        value, rest, sums = path[-1]
        for part in rest:
            if not isinstance(part, dict | list | tuple):
                sums[0] += 1
            elif id(part) in done:
                count, depth = divmod(done[id(part)], _DEPTHS)
                sums[0] += count
                sums[1] = max(sums[1], depth + 1)
            elif id(part) in active:
                raise Implausible("an object that contains itself")
            else:
                active.add(id(part))
                path.append((part, _parts(part), [1, 0]))
                break
        else:
            path.pop()
            active.discard(id(value))
            done[id(value)] = sums[0] * _DEPTHS + sums[1]
            if path:
                above = path[-1][2]
                above[0] += sums[0]
                above[1] = max(above[1], sums[1] + 1)
        if len(path) > MAX_DEPTH or sums[1] > MAX_DEPTH:
            raise Implausible(f"objects nested more than {MAX_DEPTH} deep")
        if sums[0] > limit:
            raise Implausible(
                f"more than {limit} parts, by naming the same objects again and again"
            )
