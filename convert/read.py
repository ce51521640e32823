"""Readers of checkpoints: files and sharded weights, flattened to a list of values."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moco.common.command import quote
from moco.common.errors import DataError, first_few, format_value
from moco.common.files import (
    PathLike,
    detect_format,
    harmful_objects,
    load_pickle,
    load_safetensors,
    load_torch,
    named_objects,
    open_file,
    sha256_file,
)
from moco.common.pretrained import HUB_FILES, LocalWeights, locate_weights
from moco.common.sharded import METADATA, PART_NAME, list_files, read_distributed, read_index
from moco.common.unpickler import OpaqueObject

if TYPE_CHECKING:
    from torch import Tensor

# Last bytes of a checkpoint's index: tensorflow/core/lib/io/format.h, kTableMagicNumber.
_TENSORFLOW_END = bytes.fromhex("57fb808b247547db")
_TENSORFLOW_PART = re.compile(r"\.(index|meta|data-\d+-of-\d+)\Z")
# transformers and huggingface_hub: name of a shard.
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.")
# Prefix of a key: DistributedDataParallel.
_WRAPPERS = re.compile(r"^(module\.)+")
# Anywhere in a key: torch.compile, FSDP (torch 2.11 torch/distributed/fsdp/_common_utils.py,
# FSDP_WRAPPED_MODULE) and activation checkpointing.
_INNER_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Nesting of tensors in files of known projects, and a limit on the values of a file.
MAX_NESTED_KEYS = 4
MAX_VALUES = 1_000_000


def read_file(path: PathLike, objects: set[str] | None = None) -> Any:
    """Read weights in torch's formats, pickle or safetensors, without running code in the file.

    An index of sharded weights and the `.metadata` of torch.distributed.checkpoint are read as one
    network, whose parts are in the same folder.

    Args:
        path: File of weights, or index of the files of weights next to it.
        objects: Set to which the names of the classes of objects are added that were not loaded
            (moco/common/unpickler.py).

    Raises:
        DataError: If the file is missing, empty, damaged, text, a program, or a part of a network.
    """
    path, objects = Path(path), set() if objects is None else objects
    if path.name == METADATA:
        return read_distributed(path, objects)
    if (parts := read_index(path)) is not None:
        return _join(path, parts, objects)
    if path.suffix == ".distcp":
        raise DataError(f"{path}: a part of a checkpoint of several files; give {path.parent}")
    raw = _read_one(path, objects)
    _refuse_part(path, raw.keys() if isinstance(raw, Mapping) else ())
    return raw


def _read_one(path: PathLike, objects: set[str]) -> Any:
    _refuse_tensorflow(path)
    form = detect_format(path)
    with open_file(path) as file:
        _refuse_dill(path, file.read(512))
    if form == "safetensors":
        tensors, texts = load_safetensors(path)
        raw = _with_contract(path, tensors, texts) if "contract" in texts else tensors
    else:
        raw = load_torch(path, objects) if form == "torch" else load_pickle(path, objects)
    return raw


def _join(path: Path, parts: Mapping[str, str], objects: set[str]) -> dict[str, Any]:
    """Read all parts of a sharded network and return the tensors by name."""
    tensors: dict[str, Any] = {}
    for name in sorted({*parts.values()}):
        file = path.with_name(name)
        if not file.is_file():
            raise DataError(f"{path}: its part {name} is missing; download the whole folder")
        part = _read_one(file, objects)
        listed = {key for key, file_name in parts.items() if file_name == name}
        keys = set(part) if isinstance(part, Mapping) else set()
        if keys != listed:
            raise DataError(
                f"{file}: holds other tensors than {path.name} lists for it: "
                f"{format_keys(map(str, sorted(keys ^ listed, key=str)))}; download it again"
            )
        tensors |= part
    return tensors


def object_messages(objects: Collection[str]) -> tuple[list[str], list[str]]:
    """Return notes and warnings about the objects whose names `read_file` collected."""
    harmful = harmful_objects(objects)
    notes = [f"skipped objects of the file: {named_objects(objects, 20)}"]
    warnings = [
        f"the file names {named_objects(harmful)}, which can run programs and which weights do not "
        "need; nothing was executed here, but do not open it with torch.load or pickle"
    ]
    return notes if objects else [], warnings if harmful else []


CONVERSION = "conversion"  # key of a converted file, see convert/write.py


def is_converted(raw: Any) -> bool:
    """Return whether the contents are those of a file that convert_to_d2.py wrote."""
    return isinstance(raw, dict) and {"model", "__author__", "contract"} <= set(raw)


def to_tensor(key: str, value: Any, where: str) -> Tensor:
    """Convert a value of a file to a contiguous CPU tensor with a storage of its own.

    Raises:
        DataError: If it is not a dense tensor; the message has the key.
    """
    import torch

    if isinstance(value, OpaqueObject):
        raise DataError(
            f"{where}: {format_value(key)} is not a dense tensor but an object, made by "
            f"{named_objects([value.name])}"
        )
    if not is_array(value):
        raise DataError(
            f"{where}: {format_value(key)} is a {type(value).__name__}, expected a tensor"
        )
    if not isinstance(value, torch.Tensor):
        # The copy is writable and in this machine's byte order.
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        raise DataError(
            f"{where}: {format_value(key)} is not a dense tensor with values ({value.layout})"
        )
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise DataError(
            f"{where}: {format_value(key)} has more elements than the file holds for it"
        )
    value = value.detach().contiguous()
    if value.untyped_storage().nbytes() > value.numel() * value.element_size():
        # Saving a view would write the whole storage.
        value = value.clone()
    return value


def describe(raw: Any) -> str:
    """Describe the first keys of a checkpoint, for messages about unknown files."""
    if isinstance(raw, OpaqueObject):
        return f"the file holds an object, made by {named_objects([raw.name])}"
    if not isinstance(raw, Mapping):
        return f"the file holds a {type(raw).__name__}, not a dict"
    parts = [f"top level: {format_keys(raw, 3)}"]
    parts += [
        f"{format_value(key, 30)}: {format_keys(value, 2)}"
        for key, value in raw.items()
        if isinstance(value, Mapping) and any(map(is_array, value.values()))
    ]
    return "; ".join(parts[:2])


def format_keys(keys: Iterable[Any], limit: int = 6) -> str:
    """Format keys for a message, escaped because they come from an untrusted file."""
    return first_few([format_value(key) for key in keys], limit) or "nothing"


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor or a numeric array."""
    import numpy as np
    import torch

    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return isinstance(value, torch.Tensor)


class Entry(NamedTuple):
    """Value of a file.

    Attributes:
        name: Keys of the dicts that contain it, joined by "/", without wrappers of training:
            "state_dict/encoder_q.conv1.weight". A "/" in a key becomes ":". The name is "" inside a
            list, or if a key is not a string.
        keys: The keys as they are in the file.
        value: Tensor, array, object, or plain value.
    """

    name: str
    keys: tuple[Any, ...]
    value: Any


def flatten(raw: Any, where: str) -> list[Entry]:
    """Return every value of nested dicts and lists, in the order of the file.

    An object that was not loaded, a list of plain values, and an empty dict or list are one value
    each, because none contains a network.

    Raises:
        DataError: If there are more than `MAX_VALUES` values, as in a file made to exhaust memory.
    """
    entries: list[Entry] = []
    # Dicts of a hostile file may contain themselves, or each other on too many paths.
    seen: set[int] = set()
    stack: list[tuple[str, tuple[Any, ...], Any]] = [("", (), raw)]
    while stack:
        name, keys, value = stack.pop()
        if not _is_nested(value):
            entries.append(Entry(name, keys, value))
            continue
        if isinstance(value, Mapping) and len(keys) <= MAX_NESTED_KEYS and bool(name) == bool(keys):
            # Visited at each occurrence, because a network may be saved under two keys.
            start = f"{name}/" if keys else ""
            inside = [
                (start + short if (short := strip_wrappers(key)) else "", (*keys, key), item)
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
        if len(entries) + len(stack) > MAX_VALUES:
            raise DataError(f"{where}: more than {MAX_VALUES:,} values in nested dicts")
    return entries


def _is_nested(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and not isinstance(value, OpaqueObject)
    return isinstance(value, list | tuple) and any(
        is_array(item) or isinstance(item, Mapping | list | tuple) for item in value
    )


def get_nested(raw: Any, path: Iterable[Any]) -> Any:
    """Return the value at a path of keys, or None."""
    for key in path:
        if not isinstance(raw, Mapping):
            return None
        raw = raw.get(key)
    return raw


def strip_wrappers(key: Any) -> str:
    """Return a key without the wrappers of training, or "" if it is not a string."""
    if not isinstance(key, str):
        return ""
    return _WRAPPERS.sub("", _INNER_WRAPPERS.sub("", key)).replace("/", ":")


def _with_contract(path: PathLike, tensors: dict[str, Tensor], texts: Mapping[str, str]) -> Any:
    """Return the contents of a converted .safetensors in the structure of a converted .pth."""
    try:
        contract = json.loads(texts["contract"])
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: its contract is not JSON ({error}); convert the checkpoint again"
        ) from error
    return {
        "model": tensors,
        "__author__": texts.get("__author__"),
        "matching_heuristics": True,
        "contract": contract,
    }


def _refuse_dill(path: PathLike, start: bytes) -> None:
    if b"dill._dill" in start:
        raise DataError(
            f"{path}: a pickle by dill, such as DeepMind's BYOL, which runs code when opened; "
            "convert it with github.com/ajtejankar/byol-convert first, and then its output"
        )


def _refuse_part(path: Path, keys: Collection[Any]) -> None:
    """Raise DataError for a shard, which would be recognized as a smaller network."""
    for index in sorted(path.parent.glob("*.index.json")):
        try:
            listed = read_index(index)
        except DataError:
            continue  # index of another tool
        files = set(listed.values()) if listed else set()
        is_listed = len(files) > 1 and path.name in files
        if listed and (
            is_listed or (keys and len(keys) < len(listed) and listed.keys() >= set(keys))
        ):
            raise DataError(
                f"{path}: holds {len(keys)} of the {len(listed)} tensors of a network; give "
                f"{index}, which lists all its files"
            )
    if (part := _SHARD.search(path.name)) and int(part[2]) > 1:
        raise DataError(
            f"{path}: by its name part {int(part[1])} of {int(part[2])}; give the index that lists "
            "all parts (*.index.json), in the same folder"
        )


def _refuse_tensorflow(path: PathLike) -> None:
    """Raise DataError for a checkpoint of TensorFlow, naming the tools that convert it."""
    # The path may be one of several files, or the common start of their names.
    index = _TENSORFLOW_PART.sub("", str(path)) + ".index"
    try:
        with open_file(index) as file:
            file.seek(-len(_TENSORFLOW_END), os.SEEK_END)
            end = file.read()
    except OSError:
        return
    if end == _TENSORFLOW_END:
        raise DataError(
            f"{path}: a checkpoint of TensorFlow; convert SimCLR's with "
            "github.com/tonylins/simclr-converter (v1) or github.com/Separius/SimCLRv2-Pytorch "
            "(v2) first, and then its output"
        )


# Files that hold the network of a folder, in order of preference. Lightning's ModelCheckpoint
# writes the last two, save_fsdp_model in accelerate/utils/fsdp_utils.py the three before.
FILES = (
    *HUB_FILES,
    METADATA,
    "pytorch_model_fsdp.bin",
    f"pytorch_model_fsdp_0/{METADATA}",
    "last.ckpt",
    "checkpoints/last.ckpt",
)
_STATES = "mp_rank_*_model_states.pt"


def find_file(weights: PathLike) -> LocalWeights:
    """Return the file of weights that an argument names, downloaded if necessary.

    Raises:
        UserError: See `moco.common.pretrained.locate_weights`.
        DataError: See `source_file`.
    """
    located = locate_weights(weights)
    return dataclasses.replace(located, path=source_file(located.path))


def source_file(path: Path) -> Path:
    """Return the path of a file, or for a folder the path of the file that holds the network.

    Raises:
        DataError: If the folder has no weights, several networks, or only parts of one.
    """
    if not path.is_dir():
        return path  # `read_file` reports a missing file
    found = next((path / name for name in FILES if (path / name).is_file()), None)
    if found is not None:
        # accelerate/checkpointing.py, save_accelerator_state: further models are numbered.
        others = sorted(path.glob(f"{found.stem}_[1-9]{found.suffix}"))
        if others:
            raise DataError(f"{path}: has several networks; give {found} or {_first(others)}")
        return found
    if (found := _deepspeed(path)) is not None:
        return found
    from moco.engine.checkpoint import list_checkpoints

    if saved := list_checkpoints(path):
        return saved[-1]
    checkpoints = [file for file in sorted(path.glob("*.ckpt")) if file.is_file()]
    if len(checkpoints) == 1:
        return checkpoints[0]
    below = [one for one in sorted(path.iterdir()) if any((one / f).is_file() for f in FILES)]
    if choices := checkpoints or below:
        raise DataError(f"{path}: has several checkpoints; give one, such as {_first(choices)}")
    raise DataError(
        f"{path}: is a folder without weights, such as {first_few(HUB_FILES, 2)}, last.ckpt or "
        "checkpoint_*.pth.tar; give a file"
    )


def _first(paths: list[Path]) -> str:
    return first_few([format_value(str(path), 300)[1:-1] for path in paths], 3)


def _deepspeed(folder: Path) -> Path | None:
    """Return the file of a network that DeepSpeed saved in a folder, or None.

    DeepSpeed writes a folder for each step, and the name of the last one to `latest`. With ZeRO-3
    and tensor parallelism the network is in shards, which DeepSpeed's own program joins.

    Raises:
        DataError: If the network is in shards.
    """
    inside = folder
    if (latest := folder / "latest").is_file():
        with open_file(latest, "r", encoding="utf-8", errors="replace") as file:
            name = file.read(300).strip()
        inside = folder / name if PART_NAME.fullmatch(name) else folder
    states = sorted(inside.glob(f"*{_STATES}"))
    if [file.name for file in states] == [_STATES.replace("*", "00")]:
        return states[0]
    if states or list(inside.glob("*_optim_states.pt")):
        words = [folder] if latest.is_file() else [folder.parent, "--tag", folder.name]
        raise DataError(
            f"{folder}: a checkpoint of DeepSpeed in shards; for a folder that you trust, as this "
            f"runs code in it: python -m deepspeed.utils.zero_to_fp32 {quote(*words)} out; then "
            "give out"
        )
    return None


def digests(path: Path) -> tuple[str, dict[str, str]]:
    """Return the SHA-256 of a checkpoint, and of each file by name if there are several.

    Of several files, the first value is the SHA-256 of the output of `sha256sum` for them.
    """
    if not (files := list_files(path)):
        return sha256_file(path), {}
    each = {file.name: sha256_file(file) for file in files}
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in each.items())
    return hashlib.sha256(lines.encode()).hexdigest(), each
