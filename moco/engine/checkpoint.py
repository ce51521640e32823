"""Checkpoint files of a run: atomic writes, search, resuming, removal.

Pre-training, classification and detection share this module. Their files have different contents
and names: `load_checkpoint` reads files of the first two, detection/engine/checkpoint.py files with
Detectron2's names.

The keys `epoch, arch, state_dict, optimizer` and the names `module.encoder_q.*` are those of MoCo's
official code, which other projects' tools read. Everything else is in further keys of plain values
and tensors, readable with `weights_only=True`.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from moco.common import distributed
from moco.common.command import AUTO
from moco.common.errors import DataError, UserError, echo, format_value
from moco.common.files import PathLike, atomic_torch_save, atomic_write_text, load_torch, read_text
from moco.common.run import RECORD_NAME, check_in_place, drop_metrics, read_record

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
Found = tuple[Path, dict[str, Any]]  # a checkpoint and its content
OF_MOCO, OF_DETECTRON2 = "checkpoint_*.pth.tar", "model_*.pth"
_NAME = re.compile(
    r"checkpoint_(\d{4,})(?:_step(\d{8}))?\.pth\.tar|model_(?:(\d{7,})|final)\.pth", re.ASCII
)


def checkpoint_name(epoch: int, step: int | None = None) -> str:
    """Return `checkpoint_0007.pth.tar` for the end of epoch 7 (from 0), or a name with the step."""
    inside = "" if step is None else f"_step{step:08d}"
    return f"checkpoint_{epoch:04d}{inside}.pth.tar"


def list_checkpoints(folder: PathLike, pattern: str = OF_MOCO) -> list[Path]:
    """List the checkpoints in a folder by `sort_key`, with the one to resume from last.

    A run resumes from the checkpoint named in `last_checkpoint`, or else from the newest.
    """
    newest = read_pointer(folder)
    paths = [path for path in Path(folder).glob(pattern) if _NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (path.name == newest, sort_key(path.name)))


def read_pointer(folder: PathLike) -> str:
    """Read the name in `last_checkpoint`; "" if there is no such file."""
    try:
        return read_text(Path(folder) / POINTER_NAME, errors="replace").strip()
    except OSError:
        return ""


def sort_key(name: str) -> tuple[float, float]:
    """Return epoch (or iteration) and step of a checkpoint's name; infinity for an end."""
    match = _NAME.fullmatch(name)
    assert match, name
    epoch, step, iteration = (math.inf if n is None else int(n) for n in match.groups())
    return min(epoch, iteration), step


def save_checkpoint(path: PathLike, state: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically, then point `last_checkpoint` at it."""
    path = Path(path)
    check_in_place(path.parent)
    atomic_torch_save(path, dict(state))
    atomic_write_text(path.parent / POINTER_NAME, path.name)


def read_checkpoint(path: PathLike, required: Mapping[str, type], writer: str) -> dict[str, Any]:
    """Read a checkpoint with the keys and types of `required`.

    Raises:
        DataError: If the file is missing or damaged, or not a checkpoint of `writer`.
    """
    state = load_torch(path)
    if not isinstance(state, dict):
        raise DataError(f"{path}: got a {type(state).__name__}, expected a checkpoint's dictionary")
    for key, kind in required.items():
        if not isinstance(state.get(key), kind):
            raise DataError(
                f"{path}: {'no' if key not in state else 'a malformed'} {key!r}; "
                f"expected a checkpoint written by {writer}"
            )
    return state


def load_checkpoint(path: PathLike, form: str = FORMAT) -> dict[str, Any]:
    """Read a checkpoint that pre-training or classification wrote in the format `form`.

    Raises:
        DataError: If the file is missing, damaged, or not such a checkpoint.
    """
    state = read_checkpoint(path, REQUIRED, WRITERS[form])
    if state["format"] != form:
        raise DataError(f"{path}: format {state['format']!r}, expected {form!r}")
    return state


def newest_checkpoint(
    folder: PathLike, load: Callable[[Path], dict[str, Any]], pattern: str = OF_MOCO
) -> Found | None:
    """Read the checkpoint to resume from.

    Damaged checkpoints are skipped with a warning, and the newest of the others is read.

    Args:
        folder: Folder of the run.
        load: Function that reads a checkpoint, or raises DataError.
        pattern: `OF_MOCO` or `OF_DETECTRON2`.

    Returns:
        Path and content; None if the folder has no checkpoints.

    Raises:
        DataError: If there are checkpoints but none can be read.
    """
    paths, name, found = list_checkpoints(folder, pattern), read_pointer(folder), None
    warnings: list[str] = []
    if name and name not in [path.name for path in paths]:
        warnings.append(
            f"{Path(folder) / POINTER_NAME} names {format_value(name)}, which is not there"
        )
    for path in reversed(paths):
        try:
            found = path, load(path)
            break
        except DataError as error:
            warnings.append(f"skipped a checkpoint: {error}")
    if found is None and warnings:
        raise DataError(f"no checkpoint in {folder} can be read; the newest: {warnings[0]}")
    if distributed.is_main():
        for warning in warnings:
            echo(f"warning: {warning}")
    return found


def resume_run(
    folder: Path,
    read: Callable[[Path], dict[str, Any]],
    restore: Callable[[Found | None], Path | None],
    total: int,
    source: str = AUTO,
    pattern: str = OF_MOCO,
    is_kept: Callable[[Any, int], bool] = lambda line, done: line["iteration"] <= done,
) -> None:
    """Resume a run from a checkpoint, or start it from scratch; all processes call it together.

    Checkpoints of later steps and the record of an earlier end are moved to a subfolder. Lines that
    the run will write again are removed from metrics.json.

    Args:
        folder: Folder of the run.
        read: Function that reads a checkpoint, whose `step` is the number of steps done, or raises
            DataError.
        restore: Function that restores the state of the loop from path and content of a checkpoint
            and returns the checkpoint's path from then on; it is called with None if the run starts
            from scratch.
        total: Number of steps of the run.
        source: Checkpoint to resume from, or `AUTO` for the newest readable one of the folder.
        pattern: `OF_MOCO` or `OF_DETECTRON2`.
        is_kept: Function of a line of metrics.json and the number of steps done that returns
            whether the line is kept.
    """
    if source == AUTO:
        found = newest_checkpoint(folder, read, pattern)
    else:
        found = Path(source), read(Path(source))
    done: int = found[1]["step"] if found else 0
    distributed.check_equal(done, "the checkpoint to resume from")
    path = restore(found)
    distributed.barrier()  # all processes have read it
    if not distributed.is_main():
        return
    checkpoints = sorted(list_checkpoints(folder, pattern), key=lambda p: sort_key(p.name))
    kept = [p for p in checkpoints if path and sort_key(p.name) <= sort_key(path.name)]
    later = checkpoints[len(kept) :]
    if done < total and not _is_failed(folder / RECORD_NAME):
        later.append(folder / RECORD_NAME)
    set_aside(folder, later, kept[-1] if kept else None)
    drop_metrics(folder, lambda line: is_kept(line, done))


def _is_failed(record: Path) -> bool:
    try:
        return read_record(record).status == "failed"
    except UserError:
        return False


def remove_old_checkpoints(
    folder: PathLike, keep: int, milestone_epochs: int, never: Collection[str] = ()
) -> None:
    """Delete old checkpoints of a training.

    Args:
        folder: Folder of the run.
        keep: Number of newest checkpoints to keep.
        milestone_epochs: Also keep checkpoints at multiples of this many epochs; 0 for none.
        never: Names of further checkpoints to keep.
    """
    for path in list_checkpoints(folder)[:-keep]:
        epoch, step = sort_key(path.name)
        milestone = milestone_epochs and step == math.inf and (epoch + 1) % milestone_epochs == 0
        if not (path.name in never or milestone):
            path.unlink()


def delete_checkpoints(folder: PathLike, pattern: str = OF_MOCO) -> None:
    """Delete the checkpoints of an overwritten run, so that a later --resume does not find them."""
    (Path(folder) / POINTER_NAME).unlink(missing_ok=True)
    for path in list_checkpoints(folder, pattern):
        path.unlink()


def set_aside(folder: PathLike, outdated: Sequence[Path], last: Path | None) -> None:
    """Move files that a run resumed from an older state will replace into a subfolder.

    Args:
        folder: Folder of the run.
        outdated: Checkpoints of later steps, and the record of the earlier end. The record is
            renamed, because a folder with a record counts as a finished run.
        last: Newest checkpoint that stays, which `last_checkpoint` names from then on, or None.
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
    echo(f"note: resumed from before {names}, which moved to {aside}")
