"""Command that evaluates the checkpoints of a running pre-training as they appear.

    moco-transfer watch runs/mine --task voc/faster_rcnn_R_50_C4_24k --init random

It looks at the folder again and again. Whenever there are checkpoints that it has not seen, it runs
the same suite with these as further inits, so that everything is as in `moco-transfer suite`: the
checks, the page, and the end of an interruption, after which the same command continues. A
checkpoint counts once its size and time have not changed since the last look.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.report.along import epoch_of
from benchmarks.run_suite import SuiteFailed, SuiteOptions, add_arguments, configure_suite, run
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.runs import Programs
from benchmarks.suites.suite import Suite
from benchmarks.suites.suite_file import (
    as_name,
    is_pattern,
    match_files,
    name_checkpoints,
    order_by_epoch,
    read_suite,
)
from moco.common.command import command_parser, parse_options
from moco.common.errors import DataError, UserError, echo, first_few, plural, run_cli
from moco.common.files import expand_home
from moco.common.pretrained import ENDINGS
from moco.common.shipped import resolve

SEEDS = 3
# Checkpoints of whole epochs, as facebookresearch/moco and this project name them.
CHECKPOINTS = "checkpoint_????.pth.tar"


@dataclass(frozen=True, kw_only=True)
class WatchOptions(SuiteOptions):
    """Options of the command `watch`; `build_parser` explains them."""

    checkpoints: str
    task: Sequence[str]
    until_epoch: int | None
    poll_seconds: float
    trials: int = SEEDS


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer watch`."""
    parser = command_parser(
        "watch",
        "Evaluate the checkpoints of a pre-training as they appear, each as one more "
        "row. It ends after --until-epoch, or by Ctrl-C; the same command continues.",
    )
    add = parser.add_argument
    where = (
        f"folder of the pre-training, whose {CHECKPOINTS} are watched, or a pattern in quotes, "
        "such as 'runs/ckpt_*.pth'; the name of the rows is that of the folder"
    )
    add("checkpoints", metavar="[NAME=]DIR", help=where)
    task = "task file or its shipped name; may be repeated"
    add("--task", action="append", required=True, metavar="FILE", help=task)
    until = "end when a checkpoint of this epoch or a later one has been evaluated"
    add("--until-epoch", type=int, metavar="N", help=until)
    poll = "seconds between two looks at the folder (%(default)s)"
    add("--poll-seconds", type=float, default=30.0, metavar="S", help=poll)
    add_arguments(parser, trials=SEEDS)
    return parser


def main(argv: Sequence[str] | None = None, programs: Programs | None = None) -> int:
    """Watch a folder, and return 130 after Ctrl-C, as run_cli does."""
    args = parse_options(build_parser(), argv, WatchOptions)
    if not args.poll_seconds > 0:
        raise UserError(f"--poll-seconds: got {args.poll_seconds}, expected seconds above 0")
    name, equals, place = args.checkpoints.partition("=")
    # 'runs/epoch=*.ckpt' has no name, nor has 'epoch=*.ckpt' in a folder with such files.
    if not equals or "/" in name or _versions(args.checkpoints):
        name, place = "", args.checkpoints
    if not is_pattern(place):
        if not expand_home(place).is_dir():
            raise UserError(f"{place}: no such folder; expected a pre-training's, or a pattern")
        place = str(expand_home(place) / CHECKPOINTS)
    name = name or as_name(expand_home(place).resolve().parent.name)
    tasks = [{"config": str(resolve(task).absolute())} for task in args.task]
    suite = read_suite({"name": name, "tasks": tasks, "trials": args.trials}, Path(name))
    suite = configure_suite(suite, args)
    folder = SuiteFolder(args.output or Path("output", name))
    try:
        _watch(place, suite, folder, args, programs or Programs())
    except KeyboardInterrupt:
        echo(f"stopped watching {place}; the same command continues")
        return 130
    return 0


def _watch(
    pattern: str, suite: Suite, folder: SuiteFolder, options: WatchOptions, programs: Programs
) -> None:
    """Run the suite with the checkpoints so far, and again whenever there are more."""
    once = bool(options.dry_run or options.plan)
    evaluated: set[str] = set()
    failure: SuiteFailed | None = None
    before: dict[Path, tuple[int, int]] = {}
    judged: dict[Path, tuple[int, int]] = {}  # versions that were read
    bad: dict[Path, str] = {}  # why a checkpoint is left out, or an empty text
    echo(f"watching {pattern}")
    while True:
        now = _versions(pattern)
        whole = [path for path, version in now.items() if once or before.get(path) == version]
        if once and not whole:
            order_by_epoch(whole, pattern)  # raises
        new = [path for path in whole if judged.get(path) != now[path]]
        judged |= {path: now[path] for path in new}
        bad |= dict.fromkeys(new, "") | programs.unreadable(new)
        whole.sort(key=lambda path: path in new)  # an epoch belongs to the file that was first
        copied = _copied(folder, suite.name)
        rows = copied | name_checkpoints(suite.name, _usable(whole, bad, pattern))
        rows |= {row: path for row, path in copied.items() if Path(path).is_file()}
        for path in new:
            if bad[path]:
                echo(f"warning: left out: {bad[path]}")
        if rows.keys() - evaluated:
            init = [*options.init, *(f"{row}={rows[row]}" for row in sorted(rows))]
            try:
                run(suite, folder, replace(options, init=init), programs)
            except SuiteFailed as error:  # the next checkpoint may do better
                failure = error
                echo(f"warning: {error}")
            except (UserError, OSError):
                gone = [str(path) for path in whole if not path.exists()]
                if not gone:
                    raise
                echo(
                    f"warning: {first_few(gone)} was deleted before it was copied; keep "
                    "checkpoints for longer, e.g. by CHECKPOINT.MILESTONE_EPOCHS"
                )
                continue
            evaluated = set(rows)
        last = max((at[1] for row in evaluated if (at := epoch_of(row))), default=-1)
        if once:
            return
        if options.until_epoch is not None and last >= options.until_epoch:
            break
        before = now
        sleep(options.poll_seconds)
    echo(f"watched {pattern} until epoch {last}: {plural(len(evaluated), 'checkpoint')}")
    if failure:
        raise failure


def _usable(files: Sequence[Path], bad: dict[Path, str], pattern: str) -> dict[int, Path]:
    """Return epoch → usable checkpoint, and add checkpoints without an epoch to `bad`."""
    found: dict[int, Path] = {}
    for path in (each for each in files if not bad[each]):
        try:
            [epoch] = order_by_epoch([path], pattern)
        except (DataError, OSError) as error:
            bad[path] = str(error)
            continue
        if (other := found.setdefault(epoch, path)) != path:
            bad[path] = f"{path}: is of epoch {epoch}, as {other.name} is; give a narrower pattern"
    return found


def _versions(pattern: str) -> dict[Path, tuple[int, int]]:
    """Return the size and time of the files that match a pattern."""
    found = {}
    for path in match_files(pattern):
        with suppress(FileNotFoundError):  # deleted since
            found[path] = path.stat().st_size, path.stat().st_mtime_ns
    return found


def _copied(folder: SuiteFolder, name: str) -> dict[str, str]:
    """Return row → copy, in the suite folder, of checkpoints that were found earlier.

    The pre-training may have deleted the originals.
    """
    found: dict[str, str] = {}
    for row in folder.recorded().get("inits", {}):
        if (at := epoch_of(row)) and at[0] == name:
            copies = [folder.path / "inits" / f"{row}{ending}" for ending in (*ENDINGS, "")]
            found[row] = str(next((copy for copy in copies if copy.is_file()), copies[-1]))
    return found


if __name__ == "__main__":
    run_cli(main)
