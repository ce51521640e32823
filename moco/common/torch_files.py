"""Reader of `torch.save`'s two formats that executes nothing (moco/common/unpickler.py).

It replaces `torch.load`, which with `weights_only` refuses a file for any unknown class, trusts the
sizes in a file, and could be made to run code (CVE-2025-32434, CVE-2026-24747). Files that both can
read give bitwise identical tensors. The formats are those of torch/serialization.py: `_save` (zip)
and `_legacy_save`. Tensors are on the CPU; sparse and quantized tensors become `OpaqueObject`.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
from typing import Any, BinaryIO, NamedTuple

import torch

from moco.common.limits import CorruptFileError, open_zip, read_part
from moco.common.unpickler import (
    OpaqueObject,
    RefusedFileError,
    Unpickler,
    check_sizes,
    require_end,
)

_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_CHUNK = 1 << 20  # bytes; small enough to stay in the CPU cache while it is copied
MAX_EXPANDED_BYTES = 256 << 20  # limit for an expanded tensor larger than its storage


class _Storage(NamedTuple):
    """Storage that a persistent id refers to: its bytes, and the dtype they were saved with."""

    data: torch.UntypedStorage
    dtype: torch.dtype


def read_torch(file: BinaryIO, size: int, objects: set[str]) -> Any:
    """Read the value in a file of `size` bytes.

    The name of each class or function that is an `OpaqueObject` in the value is added to `objects`.

    Raises:
        RefusedFileError: If the file is a TorchScript archive.
        CorruptFileError: If the file declares more than it contains.
        Exception: Various kinds if the file is damaged or in another format.
    """
    start = file.read(2)
    file.seek(0)
    return (_read_zip if start == b"PK" else _read_legacy)(file, size, objects)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, grad: Any = 0, *more: Any) -> Any:
    dtype_and_metadata = more[1:]  # after hooks
    is_typed = dtype_and_metadata and isinstance(dtype_and_metadata[0], torch.dtype)
    # Metadata means that the tensor is lazily negated or conjugated.
    if not isinstance(storage, _Storage) or any(dtype_and_metadata[bool(is_typed) :]):
        return OpaqueObject("torch.Tensor", (storage,))
    dtype = dtype_and_metadata[0] if is_typed else storage.dtype
    shape, stride, (offset,) = check_sizes(shape), check_sizes(stride), check_sizes((offset,))
    if 0 not in shape:  # torch itself would enlarge the storage to the claimed size
        end = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        held = storage.data.nbytes()
        for claimed, limit in ((end, held), (math.prod(shape), max(held, MAX_EXPANDED_BYTES))):
            if claimed * dtype.itemsize > limit:
                raise CorruptFileError(f"{list(shape)} declares more elements than the file holds")
    view = torch.empty(0, dtype=dtype).set_(storage.data, offset, shape, stride)
    return view.requires_grad_(grad is True)


def _parameter(data: Any, requires_grad: Any = True, *hooks_and_state: Any) -> Any:
    if not isinstance(data, torch.Tensor):
        return OpaqueObject("torch.nn.Parameter", (data,))
    return torch.nn.Parameter(data.detach(), requires_grad is True)


def _with_attributes(function: Any, cls: Any, args: Any, state: Any = None) -> Any:
    if function not in (_tensor, _parameter) or not isinstance(args, tuple):
        return OpaqueObject("torch.Tensor", (function, args))
    return function(*args)


_STORAGES = {name: dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()}
_NAMES = {
    **{f"torch._utils._rebuild_tensor{version}": _tensor for version in ("", "_v2", "_v3")},
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.Tensor": lambda *args: OpaqueObject("torch.Tensor", args),
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.Size": lambda sizes=(): torch.Size(check_sizes(sizes)),
    "torch.device": lambda kind, *index: torch.device(kind, *index),
    **{f"torch.{k}": v for k, v in vars(torch).items() if isinstance(v, torch.dtype)},
    **{
        f"{module}.{name}": dtype
        for name, dtype in {**_STORAGES, "UntypedStorage": torch.uint8}.items()
        for module in ("torch", "torch.cuda", "torch.storage")
    },
}


def _identity(identity: Any) -> tuple[torch.dtype, str, int]:
    """Return dtype, key and bytes of ("storage", type, key, device, elements[, view])."""
    match identity:
        case ("storage", torch.dtype() as dtype, str(key), _, int(count), *view) if not any(view):
            (count,) = check_sizes((count,))
            return dtype, key, count * dtype.itemsize
    raise pickle.UnpicklingError("it refers to something that is not a storage")


def _fill(storage: torch.UntypedStorage, file: Any) -> None:
    """Read a storage's bytes; raise UnpicklingError if the file has fewer."""
    memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
    for start in range(0, len(memory), _CHUNK):
        chunk = memory[start : start + _CHUNK]
        if file.readinto(chunk) != len(chunk):
            raise pickle.UnpicklingError("a storage ends too early")


def _read_zip(file: BinaryIO, size: int, objects: set[str]) -> Any:
    with open_zip(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise pickle.UnpicklingError("a zip file, but not one of torch.save")
        root = pickles[0].removesuffix("data.pkl")
        if f"{root}constants.pkl" in members:  # torch.serialization._is_torchscript_zip
            raise RefusedFileError(
                "it is a TorchScript archive, which is a program; where it is trusted, "
                "torch.save(torch.jit.load(FILE).state_dict(), NEW_FILE) takes the weights out"
            )
        parts = archive.infolist()
        if any(p.compress_type for p in parts) or sum(p.file_size for p in parts) > size:
            raise CorruptFileError("its parts are compressed, or claim more bytes than it has")
        byteorder = members.get(f"{root}byteorder")
        order = read_part(archive, byteorder) if byteorder else b"little"
        if order != sys.byteorder.encode():
            raise pickle.UnpicklingError(f"its byte order is {order[:16]!r}, not this machine's")
        storages: dict[str, torch.UntypedStorage] = {}

        def persistent(identity: Any) -> _Storage:
            dtype, key, count = _identity(identity)
            if key not in storages:
                info = members[f"{root}data/{key}"]
                if info.file_size < count:
                    raise CorruptFileError(
                        f"a storage declares {count} bytes and has {info.file_size}"
                    )
                storages[key] = torch.UntypedStorage(info.file_size)
                with archive.open(info) as part:  # checks the CRC at its end
                    _fill(storages[key], part)
            return _Storage(storages[key], dtype)

        content = read_part(archive, members[pickles[0]])
        return Unpickler(io.BytesIO(content), len(content), objects, _NAMES, persistent).load()


def _read_legacy(file: BinaryIO, size: int, objects: set[str]) -> Any:
    def load() -> Any:
        return Unpickler(file, size, objects).load()

    if load() != _LEGACY_MAGIC or load() != _LEGACY_PROTOCOL:
        raise pickle.UnpicklingError("not a version of torch's file format that is known")
    load()  # metadata of the machine that wrote the file
    storages: dict[str, _Storage] = {}
    claimed = 0

    def persistent(identity: Any) -> Any:
        nonlocal claimed
        if isinstance(identity, tuple) and identity[:1] == ("module",):
            return identity[1]  # a class, with its source
        dtype, key, count = _identity(identity)
        if key not in storages:
            claimed += count
            if claimed > size:
                raise CorruptFileError(
                    f"its storages claim {claimed} bytes where the file has {size}"
                )
            storages[key] = _Storage(torch.UntypedStorage(count), dtype)
        return _Storage(storages[key].data, dtype)

    value = Unpickler(file, size, objects, _NAMES, persistent).load()
    keys = load()
    if sorted(keys) != sorted(storages):
        raise pickle.UnpicklingError("its storages are not those that its tensors need")
    for key in keys:
        data, dtype = storages[key]
        if struct.unpack("<q", file.read(8))[0] * dtype.itemsize != data.nbytes():
            raise pickle.UnpicklingError("a storage has another size than its tensors say")
        _fill(data, file)
    require_end(file)
    return value
