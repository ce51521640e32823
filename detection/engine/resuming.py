"""Files of a resumed run: results after the checkpoint that it resumes from are set aside."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import nn

from detection.evaluation.metrics import HEADLINE
from moco.common.errors import NumericError, UserError
from moco.common.files import read_text
from moco.common.run import RECORD_NAME, drop_metrics, metrics_lines
from moco.engine.checkpoint import POINTER_NAME, set_aside

WRITE_EVERY_ITERS = 20  # Period of the lines of metrics.json, as in Detectron2.
WINDOW_ITERS = 20  # Number of iterations that their values are medians over.
_FINAL = "model_final.pth"  # File names are fvcore's.
_CHECKPOINT = re.compile(r"model_(\d{7,})\.pth")
_DONE = "iterations_done"


def resume_from(folder: Path, resumed: Path | None, done: int, max_iter: int) -> None:
    """Prepare the folder of a resumed run, on the main process, after all have read the checkpoint.

    Checkpoints of later iterations, together with the record of the earlier end, move to a
    subfolder. The lines that the resumed run writes again are removed from metrics.json.

    Args:
        folder: Folder of the run.
        resumed: Checkpoint file; None for a run that starts from scratch.
        done: Number of iterations of the checkpoint.
        max_iter: Number of iterations of the run.
    """
    later = []
    for path in sorted(folder.glob("model_*.pth")):
        match = _CHECKPOINT.fullmatch(path.name)
        if path != resumed and (path.name == _FINAL or (match and int(match[1]) >= done)):
            later.append(path)
    if later or (resumed and resumed.name == _FINAL and done < max_iter):
        later.append(folder / RECORD_NAME)
    set_aside(folder, later, resumed)
    last = done - 1 if done == max_iter else last_written(done)

    def is_kept(line: Mapping[str, Any]) -> bool:
        return line["iteration"] <= last or _is_evaluation(line)

    drop_metrics(folder, done - 1, is_kept)


def last_written(done: int) -> int:
    """Return the iteration of metrics.json's last line after `done` iterations; -1 without one."""
    return done - 1 - done % WRITE_EVERY_ITERS


def due(done: int, period: int) -> bool:
    """Return whether an action is due after `done` iterations; period 0: only at the end."""
    return period > 0 and done % period == 0


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run, or None before the first.

    Raises:
        UserError: If `last_checkpoint` names a file outside the folder.
    """
    record = folder / POINTER_NAME
    if not record.is_file():
        return None
    name = read_text(record).strip()
    if Path(name).name != name:
        raise UserError(f"{record}: {name!r} is not the name of a file in this folder")
    return folder / name


def evaluation_is_missing(folder: Path, done: int, period: int) -> bool:
    """Return whether metrics.json lacks the evaluation that was due after `done` iterations.

    This is so if the run was stopped or killed before the evaluation.
    """
    if done == 0 or not due(done, period):
        return False
    return not any(
        line["iteration"] == done - 1 and _is_evaluation(line)
        for line in metrics_lines(folder) or ()
    )


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    return any(name.split("/")[0] in HEADLINE for name in line)


@contextmanager
def counting(done: Callable[[], int]) -> Iterator[None]:
    """Attach the number of iterations done to an error that is raised in the context."""
    try:
        yield
    except Exception as error:
        set_iterations(error, done())
        raise


def check_finite(cfg: CfgNode, model: nn.Module, iteration: int) -> None:
    """Raise NumericError if a tensor of the model is not finite, before it is used or saved."""
    for name, value in getattr(model, "module", model).state_dict().items():  # DDP has a module.
        if not torch.isfinite(value).all():
            raise diverged(cfg, iteration, f"{name} is not finite")


def diverged(cfg: CfgNode, iteration: int, what: str) -> NumericError:
    """Return the error for a loss or weight that is not finite, which `what` describes."""
    last = last_checkpoint(Path(cfg.OUTPUT_DIR))
    kept = "no checkpoint was written yet" if last is None else f"the last checkpoint is {last}"
    error = NumericError(
        f"iteration {iteration}: {what}; {kept}; lower SOLVER.BASE_LR "
        f"({cfg.SOLVER.BASE_LR}) or raise SOLVER.WARMUP_ITERS"
    )
    set_iterations(error, iteration)
    return error


def set_iterations(error: Exception, done: int) -> None:
    """Attach the number of iterations done to an error."""
    setattr(error, _DONE, done)


def known_iterations(error: Exception) -> int | None:
    """Return the number of iterations attached to an error; None if it has none."""
    done: int | None = getattr(error, _DONE, None)
    return done


def iterations_before(error: Exception, folder: Path) -> int:
    """Return the number of iterations done before an error.

    If the error has no number, as when a process was killed, it is read from metrics.json.
    """
    if (done := known_iterations(error)) is not None:
        return done
    return max((line["iteration"] + 1 for line in metrics_lines(folder) or ()), default=0)
