"""`torch.save`'s two formats, read as data (moco/common/unpickler.py).

Not by `torch.load`: with `weights_only` it refuses a file for any class that it does not know,
believes the sizes in a file, and could be made to run code (CVE-2025-32434, CVE-2026-24747). What
both read is equal, bit by bit (tests/moco/common/test_torch_files.py). The formats are those of
torch/serialization.py: `_save` (zip) and `_legacy_save`.

Tensors are on the CPU. What a tensor reaches is checked against its storage, and a storage against
the file. Tensors that are not dense (sparse, quantized, on "meta") are `Inert`.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import sys
import zipfile
import zlib
from typing import Any, BinaryIO, NamedTuple

import torch

from moco.common.unpickler import (
    NAMES,
    Implausible,
    Inert,
    Known,
    Refused,
    Source,
    Unpickler,
    integers,
)

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_ZIP_END = b"PK\5\6"
_ZIP_END_BYTES = 22
_ZIP64 = 0xFFFFFFFF  # in place of a size that another record has
# A file of 5 GB lists its parts in 2 MB; each byte of a list takes about ten of memory.
MAX_LIST_BYTES = 16 << 20
_CHUNK = 1 << 20  # still in the cache when its checksum is taken
# An expanded tensor has few bytes in the file; more than this and than the file it must not claim.
MIN_TENSOR_BYTES = 256 << 20

_DTYPES = {
    **{name: dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()},
    "UntypedStorage": torch.uint8,
}


class _Storage(NamedTuple):
    """What a persistent identity stands for: bytes, and the type they were saved with."""

    data: torch.UntypedStorage
    dtype: torch.dtype


def read_torch(file: BinaryIO, size: int, objects: set[str]) -> Any:
    """The value in a file of `size` bytes.

    Args:
        objects: takes the name of each class or function that is an `Inert` in the value.

    Raises:
        Refused: a TorchScript archive.
        Implausible: as said there.
        Exception: of many kinds where the file is damaged or in another format.
    """
    start = file.read(2)
    file.seek(0)
    return (_read_zip if start == b"PK" else _read_legacy)(file, size, objects)


def _names(limit: int) -> dict[str, Any]:
    """What torch's own pickles may name; a tensor may stand for `limit` bytes, repeated or not."""
    limit = max(limit, MIN_TENSOR_BYTES)

    def tensor(
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        requires_grad: Any = False,
        hooks: Any = None,
        *dtype_and_metadata: Any,
    ) -> Any:
        if not isinstance(storage, _Storage):
            return Inert("torch.Tensor", (storage,))
        rest = dtype_and_metadata
        is_typed = bool(rest) and isinstance(rest[0], torch.dtype)
        if any(rest[is_typed:]):  # negated or conjugated lazily
            return Inert("torch.Tensor", (storage, *rest))
        dtype = rest[0] if is_typed else storage.dtype
        view = _view(storage.data, dtype, offset, shape, stride, limit)
        return view.requires_grad_(requires_grad is True)

    def parameter(data: Any, requires_grad: Any = True, *hooks_and_state: Any) -> Any:
        if not isinstance(data, torch.Tensor):
            return Inert("torch.nn.Parameter", (data,))
        return torch.nn.Parameter(data.detach(), requires_grad is True)

    def with_attributes(function: Any, cls: Any, args: Any, state: Any = None) -> Any:
        if function not in (tensors, parameters) or type(args) is not tuple:
            return Inert("torch.Tensor", (function, args))
        return function.make(*args)

    tensors, parameters = Known(tensor), Known(parameter)
    rebuilt = ("tensor", tensors), ("tensor_v2", tensors), ("tensor_v3", tensors)
    return {
        **NAMES,
        **{f"torch._utils._rebuild_{name}": known for name, known in rebuilt},
        "torch._utils._rebuild_parameter": parameters,
        "torch._utils._rebuild_parameter_with_state": parameters,
        "torch.nn.parameter.Parameter": parameters,
        "torch.Tensor": Inert("torch.Tensor"),  # the class, where it has attributes
        "torch._tensor._rebuild_from_type_v2": Known(with_attributes),
        "torch.Size": Known(lambda sizes=(): torch.Size(integers(sizes))),
        "torch.device": Known(lambda kind, *index: torch.device(kind, *index)),
        **{f"torch.{k}": v for k, v in vars(torch).items() if isinstance(v, torch.dtype)},
        **{
            f"{module}.{name}": dtype
            for name, dtype in _DTYPES.items()
            for module in ("torch", "torch.cuda", "torch.storage")
        },
    }


def _view(
    data: torch.UntypedStorage, dtype: torch.dtype, offset: Any, shape: Any, stride: Any, limit: int
) -> torch.Tensor:
    """A tensor over a storage; torch itself would let the storage grow to what is claimed."""
    shape, stride = integers(shape), integers(stride)
    (offset,) = integers((offset,))
    if len(shape) != len(stride):
        raise Implausible("a tensor with more sizes than strides")
    if 0 not in shape:
        end = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        for claimed, held in ((end, data.nbytes()), (math.prod(shape), limit)):
            if claimed * dtype.itemsize > held:
                raise Implausible(
                    f"a tensor of shape {list(shape)} claims more elements than the file holds "
                    f"for it ({claimed * dtype.itemsize} bytes of {held})"
                )
    return torch.empty(0, dtype=dtype).set_(data, offset, shape, stride)


def _identity(identity: Any) -> tuple[torch.dtype, str, int, Any]:
    """dtype, key, bytes and view of ("storage", type, key, device, elements[, view])."""
    match identity:
        case ("storage", torch.dtype() as dtype, str() | int() as key, _, int(count), *view) if (
            count >= 0
        ):
            return dtype, str(key), count * dtype.itemsize, view[0] if view else None
    raise pickle.UnpicklingError("it refers to something that is not a storage")


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    """A storage's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data


def _read_zip(file: BinaryIO, size: int, objects: set[str]) -> Any:
    file.seek(-_ZIP_END_BYTES, os.SEEK_END)
    end = file.read()
    if end.startswith(_ZIP_END) and MAX_LIST_BYTES < int.from_bytes(end[12:16], "little") < _ZIP64:
        raise Implausible(f"its list of parts claims more than {MAX_LIST_BYTES} bytes")
    with zipfile.ZipFile(file) as archive:
        if not end.startswith(_ZIP_END):
            raise Implausible("bytes follow its end")
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
        members = _members(archive)
        order = archive.read(f"{root}byteorder") if f"{root}byteorder" in members else b"little"
        if order != sys.byteorder.encode():
            raise pickle.UnpicklingError(f"its byte order is {order[:16]!r}, not this machine's")
        storages: dict[str, torch.UntypedStorage] = {}

        def persistent(identity: Any) -> _Storage:
            dtype, key, count, _ = _identity(identity)
            if key not in storages:
                info = members[f"{root}data/{key}"]
                if info.file_size < count:
                    raise Implausible(
                        f"a storage claims {count} bytes where the file holds {info.file_size}"
                    )
                storages[key] = torch.UntypedStorage(info.file_size)
                _read_member(file, info, _bytes(storages[key]))
            return _Storage(storages[key], dtype)

        content = archive.read(pickles[0])
        source = Source(io.BytesIO(content), len(content))
        return Unpickler(source, objects, _names(size), persistent).load()


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """An archive's members by name: none of them compressed, no two in one place."""
    members: dict[str, zipfile.ZipInfo] = {}
    end = 0
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        if info.compress_type != zipfile.ZIP_STORED:
            raise Implausible(f"{info.filename[:60]!r} is compressed, which torch.save never does")
        if info.header_offset < end or info.filename in members:
            raise Implausible(f"{info.filename[:60]!r} overlaps with another of its parts")
        end = info.header_offset + info.file_size
        members[info.filename] = info
    if end > archive.start_dir:
        raise Implausible("its parts claim more bytes than the file has")
    return members


def _read_member(file: BinaryIO, info: zipfile.ZipInfo, target: memoryview) -> None:
    """Fill memory with a member; zipfile's own reader would copy each byte twice."""
    file.seek(info.header_offset)
    *_, name_bytes, extra_bytes = struct.unpack("<4s5H3I2H", file.read(30))
    file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
    checksum = 0
    for start in range(0, len(target), _CHUNK):
        chunk = target[start : start + _CHUNK]
        file.readinto(chunk)  # type: ignore[attr-defined]
        checksum = zlib.crc32(chunk, checksum)
    if checksum != info.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for {info.filename[:60]!r}")


def _read_legacy(file: BinaryIO, size: int, objects: set[str]) -> Any:
    source = Source(file, size)

    def load() -> Any:
        return Unpickler(source, objects).load()

    if load() != _LEGACY_MAGIC:
        raise pickle.UnpicklingError("it does not start as torch.save's files do")
    version = load()
    if version != _LEGACY_PROTOCOL:
        raise pickle.UnpicklingError("a version of torch's file format that is not known")
    load()  # about the machine that wrote it
    storages: dict[str, _Storage] = {}
    claimed = 0

    def persistent(identity: Any) -> Any:
        nonlocal claimed
        if isinstance(identity, tuple) and identity[:1] == ("module",):
            return identity[1]  # a class, with its source
        dtype, key, count, view = _identity(identity)
        if key not in storages:
            claimed += count
            if claimed > size:
                raise Implausible(f"its storages claim {claimed} bytes where the file has {size}")
            storages[key] = _Storage(torch.UntypedStorage(count), dtype)
        data, _ = storages[key]
        if view is not None:
            _, first, length = view
            first, length = (n * dtype.itemsize for n in integers((first, length)))
            if first + length > data.nbytes():
                raise Implausible("a view of a storage claims more elements than the file holds")
            data = data[first : first + length]
        return _Storage(data, dtype)

    value = Unpickler(source, objects, _names(size), persistent).load()
    keys = load()
    # The text of anything else could be endless.
    if not isinstance(keys, list) or not all(isinstance(key, str | int) for key in keys):
        raise pickle.UnpicklingError("its list of storages is none")
    if sorted(map(str, keys)) != sorted(storages):
        raise pickle.UnpicklingError("its storages are not those that its tensors need")
    for key in map(str, keys):
        data, dtype = storages[key]
        (count,) = struct.unpack("<q", source.read(8))
        if count * dtype.itemsize != data.nbytes():
            raise pickle.UnpicklingError("a storage has another size than its tensors say")
        source.claim(data.nbytes()).readinto(_bytes(data))  # type: ignore[attr-defined]
    source.finish()
    return value
