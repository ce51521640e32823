"""``torch.save``'s three formats, read by the machine of moco/plain_pickle.py.

Not by ``torch.load`` with ``weights_only``, which could be made to run code (CVE-2025-32434,
CVE-2026-24747), believes the sizes in a file, and reads neither the tar format nor protocols above
3. What both read is equal, bit by bit (tests/moco/test_plain_torch.py). The formats are those of
torch/serialization.py: ``_save`` (zip), ``_legacy_save``, and ``legacy_load`` (tar, before 0.1.10).

Tensors are on the CPU. What a tensor reaches is checked against its storage, and a storage against
the file. Sparse and quantised tensors become empty ones of their kind: nothing here could use them.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import sys
import tarfile
import zipfile
from typing import Any, BinaryIO, NamedTuple

import torch

from moco.inert import Known
from moco.plain_pickle import (
    MAX_DIMENSIONS,
    PLAIN,
    Implausible,
    PlainUnpickler,
    Refused,
    Window,
    integers,
)

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
# A file of 5 GB lists its parts in 2 MB; each byte of a list takes about ten of memory.
MAX_LIST_BYTES = 16 << 20
_MAX_TAR_MEMBERS = 16  # the format has four
_CHUNK = 4 << 20
_TENSOR_MEMORY = 900  # of a tensor without its elements, which Python does not tell
# An expanded tensor has few bytes in the file; more than this and than the file it must not claim.
MIN_TENSOR_BYTES = 256 << 20

_STORAGE_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "QInt32Storage": torch.qint32,
    "QInt8Storage": torch.qint8,
    "QUInt2x4Storage": torch.quint2x4,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt8Storage": torch.quint8,
    "ShortStorage": torch.int16,
    "UntypedStorage": torch.uint8,
}


class _Storage(NamedTuple):
    """What a persistent identity stands for: bytes, and the type they were saved with."""

    data: torch.UntypedStorage
    dtype: torch.dtype


def read_torch(file: BinaryIO, size: int) -> Any:
    """The value in a file of `size` bytes.

    Raises:
        Refused, Implausible: as PlainUnpickler.
        Exception: of many kinds where the file is damaged or in another format.
    """
    start = file.read(512)
    if start.startswith(b"PK"):
        return _read_zip(file, size)
    if start[257:262] == b"ustar":
        return _read_tar(file, size)
    return _read_legacy(file, size)


def _integers(values: Any) -> tuple[int, ...]:
    """Sizes or strides: few, not negative, none beyond torch's own integers."""
    checked = integers(values)
    if checked is None:
        raise Implausible("a tensor whose shape is not a tuple of sizes")
    return checked


def _view(
    storage: _Storage, dtype: torch.dtype, offset: Any, shape: Any, stride: Any, limit: int
) -> torch.Tensor:
    """A tensor over a storage; torch itself would let the storage grow to what is claimed."""
    shape, stride = _integers(shape), _integers(stride)
    (offset,) = _integers((offset,))
    if len(shape) != len(stride):
        raise Implausible("a tensor with more sizes than strides")
    item = dtype.itemsize
    if 0 not in shape:
        end = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if end * item > storage.data.nbytes():
            raise Implausible(
                f"a tensor of shape {list(shape)} claims more elements than the file holds for it "
                f"({end * item} bytes of {storage.data.nbytes()})"
            )
        count = 1
        for n in shape:
            count *= n
        if count * item > max(limit, MIN_TENSOR_BYTES):
            raise Implausible(
                f"a tensor of shape {list(shape)} claims more elements than the file holds "
                f"({count * item} bytes, the file has {limit})"
            )
    return torch.empty(0, dtype=dtype).set_(storage.data, offset, shape, stride)


# Tensors still to be filled, and what with: a legacy file's elements come after its pickle.
_Pending = list[tuple[torch.Tensor, torch.Tensor]]


def _fill(pending: _Pending) -> None:
    with torch.no_grad():
        for tensor, source in pending:
            tensor.copy_(source)


def _names(limit: int, pending: _Pending) -> dict[str, Any]:
    """What torch's own pickles may name; a tensor may stand for `limit` bytes, repeated or not."""
    resolved = 0

    def plain(tensor: torch.Tensor, metadata: Any) -> torch.Tensor:
        """With what the bits of a lazy negation or conjugation stand for: x.conj().imag."""
        nonlocal resolved
        if metadata is None or metadata == {}:
            return tensor
        if type(metadata) is not dict or not all(
            type(name) is str and name in ("conj", "neg") and value is True
            for name, value in metadata.items()
        ):
            raise Refused("it makes a tensor with unknown metadata")
        if "conj" in metadata and not tensor.is_complex():
            raise Implausible("a conjugated tensor of real numbers")
        # Unlike views these have elements of their own.
        resolved += tensor.numel() * tensor.element_size()
        if resolved > max(limit, MIN_TENSOR_BYTES):
            raise Implausible("negated or conjugated tensors claim more than the file holds")
        source = tensor.conj() if "conj" in metadata else tensor
        source = torch._neg_view(source) if "neg" in metadata else source
        pending.append((torch.empty(tensor.shape, dtype=tensor.dtype), source))
        return pending[-1][0]

    def rebuild(
        storage: _Storage,
        offset: Any,
        shape: Any,
        stride: Any,
        requires_grad: Any = False,
        hooks: Any = None,
        metadata: Any = None,
    ) -> torch.Tensor:
        dtype = getattr(storage, "dtype", None)
        args = storage, offset, shape, stride, requires_grad, hooks, dtype, metadata
        return rebuild_typed(*args)

    def rebuild_typed(
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        requires_grad: Any,
        hooks: Any,
        dtype: Any,
        metadata: Any = None,
    ) -> torch.Tensor:
        if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
            raise Refused("it makes a tensor of something else than a storage")
        tensor = plain(_view(storage, dtype, offset, shape, stride, limit), metadata)
        return tensor.requires_grad_(requires_grad is True)

    def parameter(
        data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None
    ) -> torch.nn.Parameter:
        if not isinstance(data, torch.Tensor):
            raise Refused("it makes a parameter of something else than a tensor")
        return torch.nn.Parameter(data.detach(), requires_grad is True)

    # One of each is enough: a sparse tensor takes 3 KB.
    @functools.cache
    def empty_quantised() -> torch.Tensor:
        return torch.quantize_per_tensor(torch.zeros(0), 1.0, 0, torch.qint8)

    @functools.cache
    def empty_sparse() -> torch.Tensor:
        return torch.zeros(0).to_sparse()

    def quantised(*_: Any) -> torch.Tensor:
        return empty_quantised()

    def sparse(*_: Any) -> torch.Tensor:
        return empty_sparse()

    def meta(dtype: Any, shape: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
        shape, stride = _integers(shape), _integers(stride)
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def typed(function: Any, cls: Any, args: Any, state: Any) -> Any:
        # A tensor with attributes of its own, which go.
        if function not in tensors or type(args) is not tuple:
            raise Refused("it makes a tensor in an unknown way")
        return function.make(*args)

    def named(kind: type, name: Any) -> Any:
        """A layout or memory format by name, as torch.strided."""
        value = vars(torch).get(name.removeprefix("torch.")) if type(name) is str else None
        if not isinstance(value, kind):
            raise Refused(f"it names an unknown {kind.__name__}")
        return value

    def size(dimensions: Any = ()) -> torch.Size:
        return torch.Size(_integers(dimensions))

    def device(kind: Any, index: Any = None) -> torch.device:
        if type(kind) is not str or type(index) not in (int, type(None)):
            raise Refused("it names a device that is no text")
        return torch.device(kind) if index is None else torch.device(kind, index)

    makers: tuple[tuple[str, Any], ...] = (
        ("tensor", rebuild),
        ("tensor_v2", rebuild),
        ("tensor_v3", rebuild_typed),
        ("parameter", parameter),
        ("parameter_with_state", parameter),
        ("qtensor", quantised),
        ("sparse_tensor", sparse),
        ("meta_tensor_no_storage", meta),
    )
    tensors = {Known(f"torch._utils._rebuild_{n}", make, _TENSOR_MEMORY) for n, make in makers}
    others = {
        Known("torch._tensor._rebuild_from_type_v2", typed, _TENSOR_MEMORY),
        Known("torch.nn.parameter.Parameter", parameter, _TENSOR_MEMORY),
        Known("torch.Tensor", None),
        Known("torch.Size", size),
        Known("torch.device", device),
        Known("torch.serialization._get_layout", functools.partial(named, torch.layout)),
        Known("torch._utils._get_memory_format", functools.partial(named, torch.memory_format)),
    }
    values: dict[str, Any] = {
        f"torch.{name}": value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype | torch.qscheme | torch.layout | torch.memory_format)
    }
    for name in _STORAGE_DTYPES:
        for module in ("torch", "torch.cuda", "torch.storage"):
            values[f"{module}.{name}"] = Known(name, None)
            tensor = f"{module}.{name.replace('Storage', 'Tensor')}"
            values[tensor] = Known(tensor, None)
    return PLAIN | values | {known.name: known for known in tensors | others}


def _identity(identity: Any) -> tuple[torch.dtype, Any, int, Any]:
    """dtype, key, bytes and view of ("storage", type, key, device, elements[, view])."""
    match identity:
        case ("storage", Known(name=name), str() | int() as key, _, int(count), *view) if (
            name in _STORAGE_DTYPES and count >= 0
        ):
            dtype = _STORAGE_DTYPES[name]
            return dtype, key, count * dtype.itemsize, view[0] if view else None
    if isinstance(identity, tuple) and identity[:1] == ("module",):
        raise Refused("it holds a whole module")
    raise pickle.UnpicklingError("it refers to something that is not a storage")


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    """A storage's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data


def _read_zip(file: BinaryIO, size: int) -> Any:
    with zipfile.ZipFile(_ShortReads(file)) as archive:
        names = archive.namelist()
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise pickle.UnpicklingError("a zip file, but not one of torch.save")
        root = pickles[0].removesuffix("data.pkl")
        if f"{root}constants.pkl" in names:  # torch.serialization._is_torchscript_zip
            raise Refused(
                "it is a TorchScript archive, which is a program; where it is trusted, "
                "torch.save(torch.jit.load(FILE).state_dict(), NEW_FILE) takes the weights out"
            )
        entries = _entries(archive, size)
        order = b"little"
        if f"{root}byteorder" in entries:
            with archive.open(entries[f"{root}byteorder"]) as stream:
                order = stream.read(16)
        if order != sys.byteorder.encode():
            raise pickle.UnpicklingError(f"its byte order is {order!r}, this machine's is not")
        storages: dict[str, torch.UntypedStorage] = {}

        def persistent(identity: Any) -> _Storage:
            dtype, key, count, _ = _identity(identity)
            if window.key(key) not in storages:
                info = entries[f"{root}data/{key}"]
                if info.file_size < count:
                    raise Implausible(
                        f"a storage claims {count} bytes where the file holds {info.file_size}"
                    )
                storages[key] = torch.UntypedStorage(info.file_size)
                target = _bytes(storages[key])
                with archive.open(info) as stream:  # its end checks the CRC
                    for start in range(0, len(target) + 1, _CHUNK):
                        chunk = stream.read(min(_CHUNK, len(target) - start))
                        target[start : start + len(chunk)] = chunk
            return _Storage(storages[key], dtype)

        # Read whole, so that its CRC is known before a byte of it is used.
        with archive.open(entries[pickles[0]]) as stream:
            content = b"".join(iter(lambda: stream.read(_CHUNK), b""))
        window = Window(io.BytesIO(content), 0, len(content))
        pending: _Pending = []
        value = PlainUnpickler(window, _names(size, pending), persistent).load()
        _fill(pending)
        return value


def _entries(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """The archive's members by name: not compressed, together not larger than the file."""
    entries = archive.infolist()
    for info in entries:
        if info.compress_type != zipfile.ZIP_STORED:
            raise Implausible(f"{info.filename[:60]!r} is compressed, which torch.save never does")
    if sum(info.file_size for info in entries) > size:
        raise Implausible("its parts claim more bytes than the file has")
    named = {info.filename: info for info in entries}
    if len(named) != len(entries):
        raise Implausible("two of its parts have one name")
    return named


class _ShortReads:
    """A file whose readers read a list of parts from it, and so must not ask for much at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, count: int = -1) -> bytes:
        # Without a count they want the rest, after seeking to a place near the end.
        data = self._file.read(min(count if count >= 0 else MAX_LIST_BYTES + 1, MAX_LIST_BYTES + 1))
        if max(count, len(data)) > MAX_LIST_BYTES:
            raise Implausible(f"its list of parts claims more than {MAX_LIST_BYTES} bytes")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _element_count(window: Window) -> int:
    return int(struct.unpack("<q", window.read(8))[0])


def _read_legacy(file: BinaryIO, size: int) -> Any:
    window = Window(file, 0, size)

    def load(names: Any = PLAIN) -> Any:
        return PlainUnpickler(window, names).load()

    if load() != _LEGACY_MAGIC:
        raise pickle.UnpicklingError("it does not start as torch.save's files do")
    version = load()
    if version != _LEGACY_PROTOCOL:
        raise pickle.UnpicklingError("a version of torch's file format that is not known")
    load()  # about the machine that wrote it
    storages: dict[Any, _Storage] = {}
    claimed = 0

    def persistent(identity: Any) -> _Storage:
        nonlocal claimed
        dtype, key, count, view = _identity(identity)
        if window.key(key) not in storages:
            claimed += count
            if claimed > size:
                raise Implausible(f"its storages claim {claimed} bytes where the file has {size}")
            storages[key] = _Storage(torch.UntypedStorage(count), dtype)
        data = storages[key].data
        if view is None:
            return _Storage(data, dtype)
        _, start, length = view
        return _Storage(_slice(data, dtype, start, length), dtype)

    pending: _Pending = []
    value = PlainUnpickler(window, _names(size, pending), persistent).load()
    keys = load()
    # The text of anything else could be endless.
    if not isinstance(keys, list) or not all(isinstance(key, str | int) for key in keys):
        raise pickle.UnpicklingError("its list of storages is none")
    if sorted(map(str, keys)) != sorted(map(str, storages)):
        raise pickle.UnpicklingError("its storages are not those that its tensors need")
    for key in keys:
        data, dtype = storages[key]
        if _element_count(window) * dtype.itemsize != data.nbytes():
            raise pickle.UnpicklingError("a storage has another size than its tensors say")
        window.readinto(_bytes(data))
    _fill(pending)
    return value


def _slice(
    data: torch.UntypedStorage, dtype: torch.dtype, start: Any, length: Any
) -> torch.UntypedStorage:
    start, length = (n * dtype.itemsize for n in _integers((start, length)))
    if start + length > data.nbytes():
        raise Implausible("a view of a storage claims more elements than the file holds for it")
    return data[start : start + length]


def _tar_members(file: BinaryIO, size: int) -> dict[str, tuple[int, int]]:
    """Name → where the member's bytes are, and how many."""
    file.seek(0)
    found: dict[str, tuple[int, int]] = {}
    with tarfile.open(fileobj=_ShortReads(file), mode="r:") as tar:
        for _ in range(_MAX_TAR_MEMBERS):
            member = tar.next()
            if member is None:
                return found
            if member.sparse is not None or member.offset_data + member.size > size:
                raise Implausible(f"{member.name[:60]!r} claims more bytes than the file has")
            found[member.name] = member.offset_data, member.size
    raise pickle.UnpicklingError("a tar file, but not one of torch.save")


def _read_tar(file: BinaryIO, size: int) -> Any:
    members = _tar_members(file, size)
    objects: dict[Any, Any] = {}
    pending: _Pending = []
    names = _names(size, pending)

    def load(window: Window) -> Any:
        return PlainUnpickler(window, names).load()

    window = Window(file, *members["storages"])
    for _ in range(load(window)):
        key, _, kind = load(window)
        window.key(key)
        dtype = _STORAGE_DTYPES[kind.name]
        count = _element_count(window) * dtype.itemsize
        if not 0 <= count <= window.left:
            raise Implausible(f"a storage claims {count} bytes where {window.left} are left")
        data = torch.UntypedStorage(count)
        window.readinto(_bytes(data))
        objects[key] = _Storage(data, dtype)
    for target, key, start, length in load(window):
        data, dtype = objects[window.key(key)]
        objects[window.key(target)] = _Storage(_slice(data, dtype, start, length), dtype)

    window = Window(file, *members["tensors"])
    for _ in range(load(window)):
        key, storage, _ = load(window)
        (dimensions,) = struct.unpack("<i4x", window.read(8))
        if not 0 <= dimensions <= MAX_DIMENSIONS:
            raise Implausible(f"a tensor of {dimensions} dimensions")
        shape = struct.unpack(f"<{dimensions}q", window.read(8 * dimensions))
        stride = struct.unpack(f"<{dimensions}q", window.read(8 * dimensions))
        (offset,) = struct.unpack("<q", window.read(8))
        data, dtype = objects[window.key(storage)]
        objects[window.key(key)] = _view(objects[storage], dtype, offset, shape, stride, size)

    def persistent(identity: Any) -> Any:
        if isinstance(identity, tuple):
            raise Refused("it holds a whole module")
        return objects[int(identity)]

    value = PlainUnpickler(Window(file, *members["pickle"]), names, persistent).load()
    _fill(pending)
    return value
