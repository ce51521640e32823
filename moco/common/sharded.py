"""Weights in several files: shards with an index, and folders of torch.distributed.checkpoint.

Both have one file that names the others in the same folder: the index of transformers
(`model.safetensors.index.json`), or `.metadata`. The latter is a pickle, which torch itself
unpickles with `pickle.load`; here its objects are inert (moco/common/unpickler.py).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moco.common.errors import DataError, format_value, printable
from moco.common.files import harmful_objects, load_pickle, load_torch, open_file, read_bytes

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"  # torch/distributed/checkpoint/filesystem.py
_INDEX = re.compile(rb'\s*\{.*"weight_map"', re.DOTALL)
PART_NAME = re.compile(r"\w[\w.-]{0,200}", re.ASCII)
MAX_LEVELS = 32  # keys above a value


def read_index(path: Path) -> dict[str, str] | None:
    """Return the map from tensors to files of an index of sharded weights, or None for other files.

    Raises:
        DataError: If the index is damaged or names a file in another folder.
    """
    try:
        with open_file(path) as file:
            if not _INDEX.match(file.read(1 << 16)):
                return None
        parts = json.loads(read_bytes(path))["weight_map"]
    except OSError:
        return None  # the code that reads the weights reports the error
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not JSON ({error}); download it again") from error
    if not isinstance(parts, dict) or not parts:
        raise DataError(f"{path}: its weight_map names no tensors; download it again")
    for name in parts.values():
        _check_name(path, name)
    return parts


def _check_name(path: Path, name: Any) -> None:
    if not isinstance(name, str) or not PART_NAME.fullmatch(name):
        raise DataError(
            f"{path}: names file {format_value(name)}, expected files in its own folder"
        )


def list_files(path: Path) -> list[Path]:
    """Return a file that names others, followed by those files; [] for a file of weights.

    Raises:
        DataError: If the file is damaged or names a file in another folder.
    """
    if path.name == METADATA:
        names = {piece.file for value in _values(path, set()) for piece in value.pieces}
    else:
        names = set((read_index(path) or {}).values())
    return [path, *(path.with_name(name) for name in sorted(names))] if names else []


class _Piece(NamedTuple):
    """Part of a file, and the offset of its tensor in the whole tensor."""

    file: str
    start: int
    length: int
    offset: tuple[int, ...]


class _Value(NamedTuple):
    """Value of a checkpoint.

    Attributes:
        place: Keys of the nested dicts that lead to the value.
        size: Size of a tensor; None for other values.
        pieces: Parts of files that hold the value.
    """

    place: tuple[str, ...]
    size: tuple[int, ...] | None
    pieces: list[_Piece]


def read_distributed(path: Path, objects: set[str]) -> dict[str, Any]:
    """Read a folder of torch.distributed.checkpoint, given its `.metadata`.

    The result equals that of torch's `dcp_to_torch_save`, but with inert objects, and with dicts
    instead of lists.

    Args:
        path: Path of `.metadata`.
        objects: See `moco.common.files.load_torch`.

    Raises:
        DataError: If a file is missing, damaged, or in a format that torch alone reads.
    """
    values = _values(path, objects)
    _check_bytes(path, [piece for value in values for piece in value.pieces])
    content: dict[str, Any] = {}
    for value in values:
        read = [
            load_torch(path.with_name(piece.file), objects, (piece.start, piece.length))
            for piece in value.pieces
        ]
        inside: Any = content
        for key in value.place[:-1]:
            inside = inside.setdefault(key, {}) if isinstance(inside, dict) else None
        if not isinstance(inside, dict) or value.place[-1] in inside:
            raise DataError(f"{path}: has two values at {format_value('.'.join(value.place))}")
        inside[value.place[-1]] = read[0] if value.size is None else _joined(path, value, read)
    return content


def _values(path: Path, objects: set[str]) -> list[_Value]:
    """Read the metadata, which torch/distributed/checkpoint/metadata.py defines."""
    from moco.common.unpickler import check_sizes

    def sizes(value: Any) -> tuple[int, ...]:  # of an inert torch.Size
        return check_sizes(value.args[0]) if value.args else ()

    named: set[str] = set()
    metadata = load_pickle(path, named)
    objects |= {*harmful_objects(named)}  # nothing else of the metadata is in the result
    try:
        pieces: dict[str, list[_Piece]] = {}
        for index, info in metadata["storage_data"].items():
            if info.get("transform_descriptors"):
                raise ValueError("its values are compressed")
            _check_name(path, info["relative_path"])
            start, length = check_sizes((info["offset"], info["length"]))
            offset = sizes(index["offset"]) if index.get("offset") is not None else ()
            piece = _Piece(info["relative_path"], start, length, offset)
            pieces.setdefault(index["fqn"], []).append(piece)
        places = metadata.get("planner_data") or {}
        values = []
        for name, entry in metadata["state_dict_metadata"].items():
            place = places.get(name) or (name,)
            if len(place) > MAX_LEVELS or not all(isinstance(key, str | int) for key in place):
                raise ValueError("a place that is no path of keys")
            size = sizes(entry["size"]) if "size" in entry else None
            values.append(_Value(tuple(map(str, place)), size, pieces[name]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: not the metadata of torch.distributed.checkpoint that is read here "
            f"({printable(str(error))[:100]}); for a folder that you trust, because this runs "
            "code in it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{path.parent} out.pth"
        ) from error
    return values


def _check_bytes(path: Path, pieces: list[_Piece]) -> None:
    """Check that the pieces of each file together have at most the bytes of the file."""
    claimed: Counter[str] = Counter()
    for piece in pieces:
        file = path.with_name(piece.file)
        if not file.is_file():
            raise DataError(f"{path}: its part {piece.file} is missing; copy the whole folder")
        claimed[piece.file] += piece.length
        if claimed[piece.file] > file.stat().st_size:
            raise DataError(f"{path}: declares more bytes of {piece.file} than it has")


def _joined(path: Path, value: _Value, read: list[Any]) -> Tensor:
    """Join the pieces of a tensor."""
    import torch

    size = value.size or ()
    wrong = DataError(f"{path}: no whole tensor is at {format_value('.'.join(value.place))}")
    if not all(isinstance(part, torch.Tensor) and part.dtype == read[0].dtype for part in read):
        raise wrong
    # Expanded tensors have more elements than bytes and would take the memory when copied.
    held = sum(piece.length for piece in value.pieces) // read[0].element_size()
    if sum(part.numel() for part in read) != math.prod(size) or math.prod(size) > held:
        raise wrong
    if len(read) == 1 and tuple(read[0].shape) == size:
        return read[0]
    whole = torch.zeros(size, dtype=read[0].dtype)
    for piece, part in zip(value.pieces, read, strict=True):
        place = whole
        try:
            for i, (start, n) in enumerate(zip(piece.offset, part.shape, strict=True)):
                place = place.narrow(i, start, n)
            place.copy_(part)
        except (IndexError, RuntimeError, ValueError) as error:
            raise wrong from error
    return whole
