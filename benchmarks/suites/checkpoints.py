"""Retention of the checkpoints of a suite's runs: `--keep final`, `last` or `all`.

A run writes a checkpoint every CHECKPOINT_PERIOD, 36 in the longest schedules. A run resumes from
the newest one, and the tables are made from the final one.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moco.common.files import existing_folder
from moco.engine.checkpoint import list_checkpoints

if TYPE_CHECKING:
    from benchmarks.suites.suite import RunSpec

FINAL, LAST, ALL = "final", "last", "all"
KEEP = (FINAL, LAST, ALL)
KEEP_SECONDS = 60.0  # interval between two searches for checkpoints to delete
RESERVE = 2  # kept of an unfinished run: the newest, and the one before in case that is damaged


@dataclass(frozen=True)
class Checkpoints:
    """Size of one checkpoint of a run, and the number of checkpoints if none is deleted."""

    num_bytes: int
    number: int


def number_kept(keep: str, done: bool) -> int | None:
    """Return the number of checkpoints of a run that a policy keeps, or None for all."""
    return {FINAL: 1 if done else RESERVE, LAST: RESERVE, ALL: None}[keep]


def remove_checkpoints(folder: Path, keep: str, *, done: bool) -> None:
    """Delete the checkpoints that a policy does not keep; never the one to resume from.

    Args:
        folder: Folder of the run.
        keep: One of `KEEP`.
        done: Whether the run has finished.
    """
    number = number_kept(keep, done)
    for path in list_checkpoints(folder, "*.pth*")[:-number] if number else ():
        path.unlink(missing_ok=True)


def format_disk_space(
    specs: "Sequence[RunSpec]",
    checkpoints: Mapping[tuple[str, str, str], Checkpoints],
    keep: str,
    folder: Path,
) -> str:
    """Format the disk space that checkpoints will take under each policy, and the free space.

    Args:
        specs: Runs that are not done.
        checkpoints: (task, engine, init) → known checkpoints of such runs.
        keep: The chosen policy, which is named first.
        folder: Folder of the suite, which need not exist yet.
    """
    found = {spec.name: checkpoints.get((spec.task, spec.engine, spec.init)) for spec in specs}
    known = [each for each in found.values() if each is not None]
    parts: list[str] = []
    for policy in sorted(KEEP, key=lambda name: name != keep):
        number = number_kept(policy, done=True)
        total = sum(each.num_bytes * min(number or each.number, each.number) for each in known)
        parts.append(f"{total / 1e9:.1f} GB with {'' if parts else '--keep '}{policy}")
    unknown = dict.fromkeys(spec.task for spec in specs if found[spec.name] is None)
    missing = f"; the space for {', '.join(unknown)} is not known" if unknown else ""
    near = existing_folder(folder)
    free = f"{shutil.disk_usage(near).free / 1e9:.1f} GB are free in {near}"
    return f"disk for checkpoints: {', '.join(parts)}{missing}; {free}"
