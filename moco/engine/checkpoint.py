"""Checkpoints: contents, names, search for the newest, removal of old ones.

The four keys and the names of the official code (`epoch, arch, state_dict, optimizer`;
`module.encoder_q.*`) are those that other projects' tools read. Everything else is in further keys
of plain values and tensors, readable with `weights_only=True`.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from moco.common.errors import DataError, say
from moco.common.files import PathLike, atomic_torch_save, atomic_write_text, load_torch, read_text
from moco.common.run import RECORD_NAME

FORMAT = "moco-transfer/1"
CLASSIFIER_FORMAT = "moco-transfer-classifier/1"
WRITERS = {FORMAT: "moco-transfer pretrain", CLASSIFIER_FORMAT: "moco-transfer linear or finetune"}
PREFIX = "module."
POINTER_NAME = "last_checkpoint"  # as in Detectron2: contains the newest checkpoint's name
SUPERSEDED = "superseded_"  # prefix of the folders for files that a resumed run replaces
REQUIRED = {
    **dict.fromkeys(("epoch", "step", "seed", "num_images"), int),
    **dict.fromkeys(("state_dict", "optimizer", "encoder", "input", "config"), Mapping),
    "arch": str,
    "format": str,
    "seconds": float,
}
_NAME = re.compile(r"checkpoint_(\d{4,})(?:_step(\d{8}))?\.pth\.tar")


def checkpoint_name(epoch: int, step: int | None = None) -> str:
    """Return `checkpoint_0007.pth.tar` for the end of epoch 7 (from 0); else with the step."""
    inside = "" if step is None else f"_step{step:08d}"
    return f"checkpoint_{epoch:04d}{inside}.pth.tar"


def list_checkpoints(folder: PathLike) -> list[Path]:
    """List the checkpoints in a folder, sorted by epoch and step with the newest last."""
    paths = Path(folder).glob("checkpoint_*.pth.tar")
    return sorted((p for p in paths if _NAME.fullmatch(p.name)), key=lambda p: order(p.name))


def order(name: str) -> tuple[int, float]:
    """Return epoch and step of a checkpoint's name; an epoch's end sorts after its steps."""
    match = _NAME.fullmatch(name)
    assert match, name
    return int(match[1]), int(match[2]) if match[2] else math.inf


def save_checkpoint(path: PathLike, state: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically, then point `last_checkpoint` at it."""
    path = Path(path)
    atomic_torch_save(path, dict(state))
    atomic_write_text(path.parent / POINTER_NAME, path.name)


def load_checkpoint(path: PathLike, form: str = FORMAT) -> dict[str, Any]:
    """Read a checkpoint that this project wrote in the format `form`.

    Raises:
        DataError: If the file is missing, damaged, or not such a checkpoint.
    """
    state = load_torch(path)
    if not isinstance(state, dict):
        raise DataError(f"{path}: got a {type(state).__name__}, expected a checkpoint's dictionary")
    for key, kind in REQUIRED.items():
        if not isinstance(state.get(key), kind):
            raise DataError(
                f"{path}: {'no' if key not in state else 'a malformed'} {key!r}; "
                f"expected a checkpoint written by {WRITERS[form]}"
            )
    if state["format"] != form:
        raise DataError(f"{path}: format {state['format']!r}, expected {form!r}")
    return state


def newest_checkpoint(
    folder: PathLike, form: str = FORMAT
) -> tuple[Path, dict[str, Any], list[str]] | None:
    """Return the newest readable checkpoint of a folder, or None if it has no checkpoints.

    Returns:
        Path, content, and warnings about newer checkpoints that cannot be read.

    Raises:
        DataError: If there are checkpoints but none can be read.
    """
    warnings: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return path, load_checkpoint(path, form), warnings
        except DataError as error:
            warnings.append(f"skipped a checkpoint: {error}")
    if warnings:
        raise DataError(f"no checkpoint in {folder} can be read; the newest: {warnings[0]}")
    return None


def remove_old_checkpoints(
    folder: PathLike, keep: int, milestone_epochs: int, never: Collection[str] = ()
) -> None:
    """Delete old checkpoints.

    Args:
        folder: Folder of the run.
        keep: Number of newest checkpoints to keep.
        milestone_epochs: Also keep checkpoints at multiples of this many epochs; 0 for none.
        never: Names of further checkpoints to keep.
    """
    for path in list_checkpoints(folder)[:-keep]:
        epoch, step = order(path.name)
        milestone = milestone_epochs and step == math.inf and (epoch + 1) % milestone_epochs == 0
        if not (path.name in never or milestone):
            path.unlink()


def set_aside(folder: PathLike, outdated: Sequence[Path], last: Path | None) -> None:
    """Move the files that a run resumed from an older state replaces into a subfolder.

    Args:
        folder: Folder of the run.
        outdated: Checkpoints of later steps, and the record of the earlier end. The record gets
            another name, because a folder with a record counts as a finished run.
        last: Newest checkpoint that stays, which the pointer then names, or None.
    """
    folder = Path(folder)
    if last is not None:
        atomic_write_text(folder / POINTER_NAME, last.name)
    else:
        (folder / POINTER_NAME).unlink(missing_ok=True)
    moved = [path for path in outdated if path.exists()]
    if not moved:
        return
    aside = next(p for n in count(1) if not (p := folder / f"{SUPERSEDED}{n}").exists())
    aside.mkdir()
    for path in moved:
        name = f"earlier_{RECORD_NAME}" if path.name == RECORD_NAME else path.name
        path.rename(aside / name)
    names = ", ".join(path.name for path in moved)
    say(f"note: resumed from before {names}, which moved to {aside}")


def last_checkpoint(folder: PathLike) -> Path:
    """Return the checkpoint that a run folder's pointer names, else the newest by name.

    Raises:
        DataError: If the folder contains no checkpoint.
    """
    paths = list_checkpoints(folder)
    if not paths:
        raise DataError(
            f"{folder}: is a folder without checkpoint_*.pth.tar; give a file, or the folder of a "
            "run of moco-transfer pretrain, linear or finetune"
        )
    pointer = Path(folder) / POINTER_NAME
    try:
        name = read_text(pointer, errors="replace").strip()
    except OSError:
        name = ""
    return next((path for path in paths if path.name == name), paths[-1])
