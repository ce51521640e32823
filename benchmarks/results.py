"""Run folders → validated records. Only a finished run has numbers; the others are listed by name.

A record (``run.json``) is written last by the run itself, so a folder with other traces of a run
but without it is unfinished. Nothing is read from logs.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from detection.metrics import HEADLINE
from moco.errors import UserError
from moco.fileio import PathLike
from moco.run import METRICS_NAME, RECORD_NAME, RunRecord, read_record


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and its record."""

    folder: Path
    record: RunRecord


@dataclass(frozen=True)
class Unusable:
    """A run that has no numbers, and why."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class Results:
    """What a set of folders holds."""

    transfer: tuple[Run, ...]  # everything but pre-training: what tables are made of
    pretraining: tuple[Run, ...]
    unusable: tuple[Unusable, ...]


def collect(paths: Sequence[PathLike]) -> Results:
    """Read every run below ``paths`` (run folders, folders of run folders, or ``run.json`` files).

    A folder reached twice counts once. The order is that of the folders' names.

    Raises:
        UserError: a path that does not exist, no run below any of them, or an invalid record.
    """
    folders: set[Path] = set()
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such run folder")
        if path.is_file():
            folders.add(path.parent.resolve())
        else:
            folders.update(_run_folders(path.resolve()))
    transfer, pretraining, unusable = [], [], []
    for folder in sorted(folders):
        if not (folder / RECORD_NAME).is_file():
            unusable.append(Unusable(folder, f"unfinished: it has no {RECORD_NAME} yet"))
            continue
        record = _validated(folder)
        if record.status != "done":
            reason = record.notes[-1] if record.notes else "no reason recorded"
            unusable.append(Unusable(folder, f"failed: {reason}"))
        elif record.kind == "pretrain":
            pretraining.append(Run(folder, record))
        else:
            transfer.append(Run(folder, record))
    if not folders:
        raise UserError(
            f"no runs below {', '.join(map(str, paths))}; expected folders with a {RECORD_NAME}, "
            "as detection/train_net.py, moco.linear and moco.finetune write them into OUTPUT_DIR"
        )
    return Results(tuple(transfer), tuple(pretraining), tuple(unusable))


def _run_folders(root: Path) -> list[Path]:
    """Folders below ``root`` with a record or, as traces of an unfinished run, metrics.

    What lies inside a run's folder belongs to that run: ``--eval-only`` leaves the record of an
    evaluation in ``inference/``, which is not another trial.
    """
    found = []
    for folder, below, files in os.walk(root):
        if RECORD_NAME in files or METRICS_NAME in files:
            found.append(Path(folder))
            below.clear()
    return found


def _validated(folder: Path) -> RunRecord:
    path = folder / RECORD_NAME
    record = read_record(path)
    if not isinstance(record.seed, int) or isinstance(record.seed, bool):
        raise UserError(f"{path}: seed: got {record.seed!r}, expected an integer")
    for name, value in record.metrics.items():
        if value is None:
            continue
        if isinstance(value, bool) or not math.isfinite(value):
            raise UserError(f"{path}: metric {name}: got {value!r}, expected a number or null")
        if name.split("/", 1)[0] in HEADLINE and not 0 <= value <= 100:
            raise UserError(f"{path}: metric {name}: got {value}, expected 0 to 100")
    return record
