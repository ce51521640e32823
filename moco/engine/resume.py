"""Resuming: which checkpoint, whether it is of the same run, and by how much the run got longer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moco.common import distributed
from moco.common.cfgnode import flatten
from moco.common.command import AUTO
from moco.common.errors import DataError, UserError, plural, say
from moco.engine.checkpoint import load_checkpoint, newest_checkpoint
from moco.engine.training import Training

LENGTH = ("SOLVER.MAX_EPOCHS", "SOLVER.MAX_ITERS")  # what --extend may change


def find_checkpoint(resume: str, folder: Path, form: str) -> tuple[Path, dict[str, Any]] | None:
    """Path and content of the checkpoint to resume from; None where there is none.

    Args:
        resume: `"auto"` for the newest one in `folder`, or a path.
        form: a format of `moco.engine.checkpoint`.

    Raises:
        DataError: damaged.
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
    """Whether a checkpoint was made by a run with these keys and as many images.

    Args:
        extend: the length of the run may differ.

    Raises:
        UserError: with other keys. DataError: with other data.
    """
    may_change = training.may_change
    if extend:
        may_change += LENGTH
    mine = flatten(training.cfg)
    theirs = {**flatten(training.defaults), **state["config"]}
    for key in sorted(mine.keys() | theirs.keys()):
        if any(key == name or key.startswith(f"{name}.") for name in may_change):
            continue
        if key not in mine:
            raise UserError(
                f"{path}: was written by another version of this project, in which {key} is known; "
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
            f"{training.cfg.DATA.ROOT}: holds {plural(len(training.images), 'image')}, the run in "
            f"{path} was started with {state['num_images']}; give the same data or start from "
            "scratch"
        )


def extensions(
    path: Path, state: Mapping[str, Any], training: Training[Any, Any], extend: bool
) -> list[str]:
    """A note for each time that the run in a checkpoint was made longer.

    Raises:
        UserError: a run that is to be extended is not longer than before.
    """
    notes = [str(note) for note in state.get("extensions", [])]
    step, total, rate = state["step"], training.total_steps, training.rate
    before = state.get("total_steps", step)
    # The same command again: an extended run was interrupted, or is finished.
    if not extend or (total == before and (step < before or notes)):
        return notes
    if total <= before:
        raise UserError(
            f"--extend: {path} is of a run of {before} steps, and this one has {total}; "
            f"set a larger {' or '.join(key for key in LENGTH if key in flatten(training.cfg))}"
        )
    note = f"extended from {before} to {total} steps, after step {step}"
    if rate.of_total(before)(step - 1) != rate(step - 1):
        last = state["optimizer"]["param_groups"][0]["lr"]
        note += (
            f"; not equivalent to a run of {total} steps: the schedule of the shorter one had come "
            f"to a learning rate of {last:g}, and the longer one's continues at {rate(step):g}"
        )
    return [*notes, note]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
