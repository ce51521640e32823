"""Read a file, a folder, or the index of sharded weights; flatten what is in it; describe it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moco.common.errors import DataError, first_few, shown
from moco.common.files import (
    PathLike,
    format_of,
    harmful_objects,
    load_pickle,
    load_safetensors,
    load_torch,
    named_objects,
    sha256_file,
)
from moco.common.unpickler import Inert

if TYPE_CHECKING:
    from torch import Tensor


# tensorflow/core/lib/io/format.h, kTableMagicNumber: the last bytes of a checkpoint's index.
_TENSORFLOW_END = bytes.fromhex("57fb808b247547db")
_TENSORFLOW_PART = re.compile(r"\.(index|meta|data-\d+-of-\d+)\Z")
# Of transformers and huggingface_hub: a part of a network, the index of all, and what a folder of
# the Hub holds of them.
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.")
_INDEX = re.compile(rb'\s*\{.*"weight_map"', re.DOTALL)
_PART_NAME = re.compile(r"\w[\w.-]{0,200}", re.ASCII)
_HUB_FILES = tuple(
    f"{name}{end}"
    for name in ("model.safetensors", "pytorch_model.bin")
    for end in (".index.json", "")
)
MAX_INDEX_BYTES = 16 << 20
# At the start of a key: DistributedDataParallel.
_WRAPPERS = re.compile(r"^(module\.)+")
# At any level: torch.compile, FSDP (torch 2.11 torch/distributed/fsdp/_common_utils.py,
# FSDP_WRAPPED_MODULE) and activation checkpointing.
_INNER_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Keys above a tensor in the files of known projects, and limits of what else a file may hold.
MAX_DEPTH = 4
MAX_ENTRIES = 1_000_000


def source_file(path: Path) -> Path:
    """Return the file itself; of a folder the one that holds its network.

    A folder of the Hugging Face Hub has weights in one file or an index of several; a run folder of
    this project has checkpoints, of which the last is taken.

    Raises:
        DataError: a folder without any.
    """
    if not path.is_dir():
        return path  # where it is missing the reader says so
    for name in _HUB_FILES:
        if (path / name).is_file():
            return path / name
    from moco.engine.checkpoint import last_checkpoint

    return last_checkpoint(path)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file; of an index that of the list `sha256sum` makes of all files."""
    if (parts := parts_of(path)) is None:
        return sha256_file(path)
    files = [path, *(path.with_name(name) for name in sorted({*parts.values()}))]
    lines = "".join(f"{sha256_file(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def read_file(path: PathLike, objects: set[str] | None = None) -> Any:
    """Read a file of weights: torch's formats, pickle or safetensors; runs nothing in it.

    An index of sharded weights is read as the one network whose parts lie beside it.

    Args:
        objects: takes the names of the classes whose objects are inert in the result (moco/common/
            unpickler.py).

    Raises:
        DataError: missing, empty, damaged, text, or a program; or a part of a network.
    """
    if (parts := parts_of(Path(path))) is not None:
        return _join(Path(path), parts, set() if objects is None else objects)
    raw = _read_one(path, objects)
    _refuse_part(Path(path), raw.keys() if isinstance(raw, Mapping) else ())
    return raw


def _read_one(path: PathLike, objects: set[str] | None) -> Any:
    _refuse_tensorflow(path)
    form = format_of(path)
    with open(path, "rb") as file:
        _refuse_dill(path, file.read(512))
    objects = set() if objects is None else objects
    if form == "safetensors":
        tensors, texts = load_safetensors(path)
        raw = _with_contract(path, tensors, texts) if "contract" in texts else tensors
    else:
        raw = load_torch(path, objects) if form == "torch" else load_pickle(path, objects)
    return raw


def parts_of(path: Path) -> dict[str, str] | None:
    """Return a tensor's name -> the file beside an index that has it; None: this is no index.

    Raises:
        DataError: it is damaged, or names a file in another folder.
    """
    if not path.is_file():
        return None  # the reader says why; opening a pipe would wait for ever
    try:
        with open(path, "rb") as file:
            if not _INDEX.match(file.read(1 << 16)):
                return None
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise DataError(f"{path}: more than {MAX_INDEX_BYTES} bytes, which no index has")
        parts = json.loads(path.read_bytes())["weight_map"]
    except OSError:
        return None
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not JSON ({error}); download it again") from error
    if not isinstance(parts, dict) or not parts:
        raise DataError(f"{path}: its weight_map names no tensors; download it again")
    for name in parts.values():
        if not isinstance(name, str) or not _PART_NAME.fullmatch(name):
            raise DataError(f"{path}: names {shown(name)}, expected files in its own folder")
    return parts


def _join(path: Path, parts: Mapping[str, str], objects: set[str]) -> dict[str, Any]:
    """Return the tensors of every part of a network by their names."""
    tensors: dict[str, Any] = {}
    for name in sorted({*parts.values()}):
        file = path.with_name(name)
        if not file.is_file():
            raise DataError(f"{path}: {name} is not beside it; download the whole folder")
        part = _read_one(file, objects)
        listed = {key for key, its in parts.items() if its == name}
        keys = set(part) if isinstance(part, Mapping) else set()
        if keys != listed:
            raise DataError(
                f"{file}: holds other tensors than {path.name} lists of it: "
                f"{names(map(str, sorted(keys ^ listed, key=str)))}; download it again"
            )
        tensors |= part
    return tensors


def about_objects(objects: Collection[str]) -> tuple[list[str], list[str]]:
    """Notes and warnings about the names that `read_file` gives."""
    harmful = harmful_objects(objects)
    notes = [f"objects that were not loaded, only listed: {named_objects(objects, 20)}"]
    warnings = [
        f"the file names {named_objects(harmful)}, which runs programs and which no weights need; "
        "nothing ran here, but do not open it with torch.load or pickle"
    ]
    return notes if objects else [], warnings if harmful else []


def is_converted(raw: Any) -> bool:
    """Whether this is a file that convert_to_d2.py wrote."""
    return isinstance(raw, dict) and {"model", "__author__", "contract"} <= set(raw)


def to_tensor(key: str, value: Any, where: str) -> Tensor:
    """A value of a file as a contiguous CPU tensor of its own; DataError names the key."""
    import torch

    if isinstance(value, Inert):
        raise DataError(
            f"{where}: {shown(key)} is not a dense tensor but an object, made by "
            f"{named_objects([value.name])}"
        )
    if not is_array(value):
        raise DataError(f"{where}: {shown(key)} is a {type(value).__name__}, expected a tensor")
    if not isinstance(value, torch.Tensor):
        # The copy is writable and in this machine's byte order.
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        raise DataError(f"{where}: {shown(key)} is not a dense tensor with values ({value.layout})")
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise DataError(f"{where}: {shown(key)} has more elements than the file holds for it")
    value = value.detach().contiguous()
    if value.untyped_storage().nbytes() > value.numel() * value.element_size():
        # A view would drag its whole storage into the output.
        value = value.clone()
    return value


def describe(raw: Any) -> str:
    """The first keys of a checkpoint, for the message about a file that nobody knows."""
    if isinstance(raw, Inert):
        return (
            f"the file holds an object, made by {named_objects([raw.name])}; where that is a "
            "module, torch.save(model.state_dict(), FILE) writes its weights"
        )
    if not isinstance(raw, Mapping):
        return f"the file holds a {type(raw).__name__}, not a dict"
    parts = [f"top level: {names(raw)}"]
    parts += [
        f"{shown(key)}: {names(value)}"
        for key, value in raw.items()
        if isinstance(value, Mapping) and any(map(is_array, value.values()))
    ]
    return "; ".join(parts[:4])


def names(keys: Iterable[Any], limit: int = 6) -> str:
    """Keys for an error message; escaped, because they come from an untrusted file."""
    return first_few([shown(key) for key in keys], limit) or "nothing"


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or an array of numbers."""
    import numpy as np
    import torch

    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return isinstance(value, torch.Tensor)


class Entry(NamedTuple):
    """One value of a file.

    Attributes:
        name: keys of the dicts it is in, joined by "/", the last one without the wrappers of
            training: "state_dict/encoder_q.conv1.weight". A "/" of a key's own is ":". There is
            none ("") inside a list and where a key is no text.
        keys: the same keys as they are in the file.
        value: a tensor, an array, an object, or a plain value.
    """

    name: str
    keys: tuple[Any, ...]
    value: Any


def flatten(raw: Any, where: str) -> list[Entry]:
    """Every value of nested dicts and lists, in the order of the file.

    An object of some class is one value: what it holds is no part of a file's networks. So is a
    list of plain values, and an empty dict or list.

    Raises DataError: more values than a checkpoint has; the file was made to take memory.
    """
    entries: list[Entry] = []
    # A file's dicts may hold themselves, or each other so often that every path is too many.
    seen: set[int] = set()
    stack: list[tuple[str, tuple[Any, ...], Any]] = [("", (), raw)]
    while stack:
        name, keys, value = stack.pop()
        if not _is_nested(value):
            entries.append(Entry(name, keys, value))
            continue
        if isinstance(value, Mapping) and len(keys) <= MAX_DEPTH and bool(name) == bool(keys):
            # Every time it is met: a network may be saved under two keys.
            start = f"{'/'.join(keys)}/" if keys else ""
            inside = [
                (start + short if (short := unwrapped(key)) else "", (*keys, key), item)
                for key, item in value.items()
            ]
        elif id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            inside = [("", (*keys, key), item) for key, item in items]
        else:
            inside = []
            entries.append(Entry(name, keys, None))
        stack += reversed(inside)
        if len(entries) + len(stack) > MAX_ENTRIES:
            raise DataError(f"{where}: more than {MAX_ENTRIES:,} values in nested dicts")
    return entries


def _is_nested(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and not isinstance(value, Inert)
    return isinstance(value, list | tuple) and any(
        is_array(item) or isinstance(item, Mapping | list | tuple) for item in value
    )


def at(raw: Any, path: Iterable[Any]) -> Any:
    """Return what is at a path of keys, or None."""
    for key in path:
        if not isinstance(raw, Mapping):
            return None
        raw = raw.get(key)
    return raw


def unwrapped(key: Any) -> str:
    """A key as a part of a name: without the wrappers of training; "" for what is no text."""
    if not isinstance(key, str):
        return ""
    return _WRAPPERS.sub("", _INNER_WRAPPERS.sub("", key)).replace("/", ":")


def _with_contract(path: PathLike, tensors: dict[str, Tensor], texts: Mapping[str, str]) -> Any:
    """Return what write.py writes as safetensors, as it writes it to a .pth."""
    try:
        contract = json.loads(texts["contract"])
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: its contract is not JSON ({error}); convert again") from error
    return {
        "model": tensors,
        "__author__": texts.get("__author__"),
        "matching_heuristics": True,
        "contract": contract,
    }


def _refuse_dill(path: PathLike, start: bytes) -> None:
    if b"dill._dill" in start:
        raise DataError(
            f"{path}: a pickle by dill, as DeepMind's BYOL is, which runs code when it is opened; "
            "convert it with github.com/ajtejankar/byol-convert, and what that writes with this"
        )


def _refuse_part(path: Path, keys: Collection[Any]) -> None:
    """A part of a network would be taken for a shorter one."""
    for index in sorted(path.parent.glob("*.index.json")):
        try:
            listed = parts_of(index)
        except DataError:
            continue  # another tool's
        files = set(listed.values()) if listed else set()
        is_listed = len(files) > 1 and path.name in files
        if listed and (
            is_listed or (keys and len(keys) < len(listed) and listed.keys() >= set(keys))
        ):
            raise DataError(
                f"{path}: {len(keys)} of the {len(listed)} tensors of a network; give {index}, "
                "which lists all its files"
            )
    if (part := _SHARD.search(path.name)) and int(part[2]) > 1:
        raise DataError(
            f"{path}: by its name part {int(part[1])} of {int(part[2])}; give the index that lists "
            "all parts (*.index.json), beside which they lie"
        )


def _refuse_tensorflow(path: PathLike) -> None:
    """A checkpoint of TensorFlow gets a sentence that names who converts it."""
    # A checkpoint of TensorFlow is several files, or the start of their names.
    index = _TENSORFLOW_PART.sub("", str(path)) + ".index"
    try:
        with open(index, "rb") as file:
            file.seek(-len(_TENSORFLOW_END), os.SEEK_END)
            end = file.read()
    except OSError:
        return
    if end == _TENSORFLOW_END:
        raise DataError(
            f"{path}: a checkpoint of TensorFlow; SimCLR's are converted by "
            "github.com/tonylins/simclr-converter (v1) and github.com/Separius/SimCLRv2-Pytorch "
            "(v2), and what those write by this"
        )
