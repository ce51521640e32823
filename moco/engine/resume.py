"""Resuming: choice of the checkpoint, check that it is of the same run, extension of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moco.common import distributed
from moco.common.cfgnode import flatten
from moco.common.command import AUTO
from moco.common.errors import DataError, UserError, plural, say
from moco.common.keys import Role, names_of
from moco.engine.checkpoint import load_checkpoint, newest_checkpoint
from moco.engine.keys import FORMER, RESUMABLE
from moco.engine.training import Training

LENGTH = ("SOLVER.MAX_EPOCHS", "SOLVER.MAX_ITERS")  # what --extend may change


def find_checkpoint(resume: str, folder: Path, form: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the path and content of the checkpoint to resume from, or None if there is none.

    Args:
        resume: `"auto"` for the newest checkpoint in `folder`, or a path.
        folder: Folder of the run.
        form: Format of `moco.engine.checkpoint`.

    Raises:
        DataError: If the checkpoint is missing or damaged.
    """
    if resume != AUTO:
        return Path(resume), load_checkpoint(resume, form)
    found = newest_checkpoint(folder, form)
    if distributed.is_main():
        if found is None:
            say(f"no checkpoint in {folder}: starting from scratch")
        for warning in found[2] if found else ():
            say(f"warning: {warning}")
    return found[:2] if found else None


def check_same_run(
    path: Path, state: Mapping[str, Any], training: Training[Any, Any], extend: bool
) -> None:
    """Check that a checkpoint is of a run with the same keys and number of images.

    Args:
        path: Path of the checkpoint, for messages.
        state: Content of the checkpoint.
        training: Training that resumes from it.
        extend: Allow another length of the run.

    Raises:
        UserError: If a key differs that a resumed run may not change.
        DataError: If the number of images differs.
    """
    may_change = (*names_of(training.config_keys, Role.PLACE, Role.SPEED), *RESUMABLE, *FORMER)
    if extend:
        may_change += LENGTH
    mine = flatten(training.cfg)
    theirs = {**flatten(training.defaults), **state["config"]}
    for key in sorted(mine.keys() | theirs.keys()):
        if key in may_change:
            continue
        if key not in mine:
            raise UserError(
                f"{path}: was written by another version of this project, which has the key {key}; "
                "use that version, or start from scratch"
            )
        if _plain(mine[key]) != _plain(theirs[key]):
            longer = ", make it longer with --extend" if key in LENGTH else ""
            raise UserError(
                f"{path}: was trained with {key} {theirs[key]!r}, this run has "
                f"{mine[key]!r}; set the same{longer}, or set another OUTPUT_DIR"
            )
    if state["num_images"] != len(training.images):
        raise DataError(
            f"{training.cfg.DATA.ROOT}: has {plural(len(training.images), 'image')}, the run in "
            f"{path} was started with {state['num_images']}; give the same data or start from "
            "scratch"
        )


def extensions(
    path: Path, state: Mapping[str, Any], training: Training[Any, Any], extend: bool
) -> list[str]:
    """Return one note for each extension of the run in a checkpoint, including this one.

    Raises:
        UserError: If the run is to be extended, but is not longer than before.
    """
    notes = [str(note) for note in state.get("extensions", [])]
    step, total, rate = state["step"], training.total_steps, training.rate
    before = state.get("total_steps", step)
    # The same command was repeated: the extended run was interrupted, or is finished.
    if not extend or (total == before and (step < before or notes)):
        return notes
    if total <= before:
        raise UserError(
            f"--extend: {path} is of a run of {before} steps, this one has {total}; "
            f"set a larger {' or '.join(key for key in LENGTH if key in flatten(training.cfg))}"
        )
    note = f"extended from {before} to {total} steps, after step {step}"
    if rate.of_total(before)(step - 1) != rate(step - 1):
        last = state["optimizer"]["param_groups"][0]["lr"]
        note += (
            f"; not equivalent to a run of {total} steps: the schedule of the shorter run ended at "
            f"a learning rate of {last:g}, that of the longer run continues at {rate(step):g}"
        )
    return [*notes, note]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
