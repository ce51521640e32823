"""The files of a run that is resumed: what came after the state it resumes from goes aside."""

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
from moco.common.run import RECORD_NAME, drop_metrics, metrics_lines
from moco.engine.checkpoint import POINTER_NAME, set_aside

WRITE_EVERY_ITERS = 20  # lines of metrics.json, as in Detectron2
WINDOW_ITERS = 20  # their values are medians over this many
_FINAL = "model_final.pth"  # fvcore's names
_CHECKPOINT = re.compile(r"model_(\d{7,})\.pth")
_DONE = "iterations_done"


def resume_from(folder: Path, resumed: Path | None, done: int, max_iter: int) -> None:
    """Prepare a folder for a run that resumes; on the main process, once all have read the file.

    Checkpoints of later iterations, and with them the record of the earlier end, move into a
    subfolder. metrics.json loses the lines that the resumed run writes again.

    Args:
        resumed: the checkpoint, None for a run that starts from scratch.
        done: iterations in it. max_iter: of the run.
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
    """Return the iteration of the last lines of metrics.json after `done` iterations; -1: none."""
    return done - 1 - done % WRITE_EVERY_ITERS


def due(done: int, period: int) -> bool:
    """Whether something is due after `done` iterations; period 0: at the end only."""
    return period > 0 and done % period == 0


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run, or None before the first.

    Raises:
        UserError: `last_checkpoint` names a file outside the folder.
    """
    record = folder / POINTER_NAME
    if not record.is_file():
        return None
    name = record.read_text(encoding="utf-8").strip()
    if Path(name).name != name:
        raise UserError(f"{record}: {name!r} is not the name of a file in this folder")
    return folder / name


def evaluation_is_missing(folder: Path, done: int, period: int) -> bool:
    """Whether the evaluation that is due after `done` iterations is not in metrics.json.

    A stop or a kill came before it.
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
    """An error that is raised inside takes along how many iterations were done."""
    try:
        yield
    except Exception as error:
        set_iterations(error, done())
        raise


def check_finite(cfg: CfgNode, model: nn.Module, iteration: int) -> None:
    """Raise NumericError before a tensor that is not finite is saved, averaged or evaluated."""
    for name, value in getattr(model, "module", model).state_dict().items():  # within DDP
        if not torch.isfinite(value).all():
            raise diverged(cfg, iteration, f"{name} is not finite")


def diverged(cfg: CfgNode, iteration: int, what: str) -> NumericError:
    """The error of a loss or weight that is not finite; `what` says which."""
    last = last_checkpoint(Path(cfg.OUTPUT_DIR))
    kept = "no checkpoint was written yet" if last is None else f"the last checkpoint is {last}"
    error = NumericError(
        f"iteration {iteration}: {what}; {kept}; lower SOLVER.BASE_LR "
        f"({cfg.SOLVER.BASE_LR}) or raise SOLVER.WARMUP_ITERS"
    )
    set_iterations(error, iteration)
    return error


def set_iterations(error: Exception, done: int) -> None:
    """Note how many iterations were done before an error."""
    setattr(error, _DONE, done)


def iterations_before(error: Exception, folder: Path | None = None) -> int:
    """How many iterations were done before an error.

    Of one that does not tell, such as that of a killed process: as far as metrics.json goes.
    """
    done = getattr(error, _DONE, 0)
    if done or folder is None:
        return int(done)
    return max((line["iteration"] + 1 for line in metrics_lines(folder) or ()), default=0)
