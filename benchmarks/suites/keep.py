"""Which checkpoints of a suite's runs stay on disk: `--keep final`, `last` or `all`.

A run writes one every CHECKPOINT_PERIOD, 36 in the longest schedules. Only the newest is resumed
from, and only the last one is what the tables are about.
"""

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.suites.suite import RunSpec

FINAL, LAST, ALL = "final", "last", "all"
KEEP = (FINAL, LAST, ALL)
KEEP_SECONDS = 60.0  # between two looks for checkpoints that need not be kept
RESERVE = 2  # of a run that is not done: the newest, and the one before should that be damaged
POINTER_NAME = "last_checkpoint"  # where all programs write the name of the newest one
_NAME = re.compile(r"model_(\d{7}|final)\.pth|checkpoint_(\d{4,})(?:_step(\d{8}))?\.pth\.tar")


@dataclass(frozen=True)
class Checkpoints:
    """What a run writes: bytes of one checkpoint, and how many are left when none is deleted."""

    num_bytes: int
    number: int


def newest_name(folder: Path) -> str:
    """The name of a run's newest checkpoint; empty before the first."""
    try:
        return (folder / POINTER_NAME).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a run's folder, of whichever program, the newest last."""
    newest = newest_name(folder)

    def age(path: Path) -> tuple[bool, float, float]:
        match = _NAME.fullmatch(path.name)
        assert match
        final, epoch, step = (float(n) if n.isdecimal() else math.inf for n in match.groups("inf"))
        return path.name == newest, min(final, epoch), step

    return sorted((p for p in folder.glob("*.pth*") if _NAME.fullmatch(p.name)), key=age)


def number_kept(keep: str, done: bool) -> int | None:
    """How many checkpoints of a run stay; None: all."""
    return {FINAL: 1 if done else RESERVE, LAST: RESERVE, ALL: None}[keep]


def remove_checkpoints(folder: Path, keep: str, *, done: bool) -> None:
    """Delete the checkpoints that a policy does not keep; never the one to resume from.

    Args:
        keep: one of `KEEP`.
        done: whether the run has reached its end.
    """
    number = number_kept(keep, done)
    for path in list_checkpoints(folder)[:-number] if number else ():
        path.unlink(missing_ok=True)


def disk_line(
    specs: "Sequence[RunSpec]",
    checkpoints: Mapping[tuple[str, str, str], Checkpoints],
    keep: str,
    folder: Path,
) -> str:
    """How much disk the checkpoints of these runs will take, by policy, and how much is free.

    Args:
        checkpoints: (task, engine, init) → what such a run writes, where that is known.
        keep: the policy that was chosen, named first.
        folder: of the suite, or where it will be.
    """
    found = {spec.name: checkpoints.get((spec.task, spec.engine, spec.init)) for spec in specs}
    known = [each for each in found.values() if each is not None]
    parts: list[str] = []
    for policy in sorted(KEEP, key=lambda name: name != keep):
        number = number_kept(policy, done=True)
        total = sum(each.num_bytes * min(number or each.number, each.number) for each in known)
        parts.append(f"{total / 1e9:.1f} GB with {'' if parts else '--keep '}{policy}")
    unknown = dict.fromkeys(spec.task for spec in specs if found[spec.name] is None)
    missing = f"; how much {', '.join(unknown)} takes is not known" if unknown else ""
    path = folder.absolute()
    near = next(place for place in (path, *path.parents) if place.exists())
    free = f"{shutil.disk_usage(near).free / 1e9:.1f} GB are free in {near}"
    return f"disk for checkpoints: {', '.join(parts)}{missing}; {free}"
