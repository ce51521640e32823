"""The whole chain in minutes on a CPU: images → MoCo → conversion → detector → table.

    python -m benchmarks.quickstart                       generated images
    python -m benchmarks.quickstart --images DIR          pre-train on a custom folder of images
    python -m benchmarks.quickstart --voc DIR             fine-tune on a custom VOC-layout dataset
    python -m benchmarks.quickstart --arch vit            a vision transformer, by MoCo v3

It is a suite of one task whose weights are made by runs that come before, and it runs the same
commands that a user would, one process and one thread each. Random and MoCo rows differ in
MODEL.WEIGHTS and nothing else; the seeds are 0, 1, 2, ... and every one is in the table.
Interrupted, it continues when it is called again.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.run_suite import refresh_tables
from benchmarks.suites import locks
from benchmarks.suites.chain import NETWORKS, Plan, make_runs
from benchmarks.suites.executors.base import Options
from benchmarks.suites.executors.local import cpu
from benchmarks.suites.forecast import foresee
from benchmarks.suites.live import Live
from benchmarks.suites.prepare import limit_voc, training_images, voc_splits
from benchmarks.suites.runs import DONE, LOCK_NAME, Run
from benchmarks.suites.scheduler import Scheduler
from moco.common.command import RANDOM, program
from moco.common.distributed import usable_cores
from moco.common.errors import LockedError, UserError, printable, run_cli
from moco.common.files import atomic_write_json
from moco.common.progress import format_seconds
from moco.common.shipped import shown
from moco.data.images import find_images

if TYPE_CHECKING:
    from benchmarks.report.aggregate import Table

SETTINGS_NAME = "quickstart.json"
SEEDS, FEW_SEEDS = 5, 3  # trials per row; real scenes and vision transformers take longer
IMAGES_MIN = 64
VOC_LIMITS, SMOKE_VOC_LIMITS = (2000, 300), (8, 6)  # images to train and to test on
# What a quickstart leaves in its output folder; --overwrite removes these and nothing else.
OWN = (
    SETTINGS_NAME,
    "data",
    "pretrain",
    "moco.pth",
    "runs",
    "steps",
    "logs",
    ".slots",
    "table.*",
    "runs.csv",
    "loss-*.png",
    "loss-*.svg",
    "ap-*.png",
    "ap-*.svg",
    "samples.png",
)


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    plan = make_plan(args)
    check_sources(plan)
    from moco.common.run import RunFolder

    workers = args.workers or min(usable_cores(), plan.seeds + 1)
    executor = cpu(Options(plan.out, workers))
    start = time.monotonic()
    with RunFolder(plan.out, resume=True):
        open_folder(plan, args.overwrite)
        runs = make_runs(plan)
        if plan.voc is not None and not plan.scenes.exists():
            limit_voc(plan.voc, plan.scenes, *(VOC_LIMITS if not plan.smoke else SMOKE_VOC_LIMITS))
        print(announcement(plan, runs, workers), flush=True)
        refresh = partial(refresh_tables, plan.out, runs, RANDOM)
        with Live("Quickstart", runs, refresh) as live:
            Scheduler(
                runs,
                executor,
                name="quickstart",
                retry_failed=True,
                fail_fast=True,
                watch=live.update,
            ).run()
            live.pause()
            minutes, times = format_seconds(time.monotonic() - start), os.times()
            seconds = times.children_user + times.children_system
            print(f"\nDone in {minutes} ({seconds:.0f} CPU-seconds, {workers} at a time).\n")
            report(plan, runs)


def make_plan(args: argparse.Namespace) -> Plan:
    default = SEEDS if args.voc is None and args.arch == "resnet" else FEW_SEEDS
    seeds = default if args.seeds is None else args.seeds
    if not 1 <= seeds <= 100:
        raise UserError(f"--seeds: got {seeds}, expected 1 to 100")
    out = args.out or Path("quickstart_out_smoke" if args.smoke else "quickstart_out")
    return Plan(out, args.images, args.voc, args.smoke, seeds, args.arch)


def check_sources(plan: Plan) -> None:
    """Whether the user's folders can be used, before anything is made.

    Raises:
        UserError, DataError: a folder that is missing or holds too little.
    """
    if plan.voc is not None:
        voc_splits(plan.voc)
    for source, folder, find in (
        ("--images", plan.images, find_images),
        ("--voc", None if plan.images else plan.voc, training_images),
    ):
        if folder is not None and (number := len(find(folder))) < IMAGES_MIN:
            raise UserError(
                f"{source} {folder}: {number} images to pre-train on, "
                f"expected at least {IMAGES_MIN}"
            )


def open_folder(plan: Plan, overwrite: bool) -> None:
    """Make the output folder this plan's: new, continued, or emptied of an earlier plan's files.

    Raises:
        UserError: the folder holds something else, or results of other settings.
        LockedError: processes of an earlier call are to be overwritten.
    """
    path = plan.out / SETTINGS_NAME
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key, value in plan.settings().items() if before.get(key) != value]
        if overwrite:
            if held := [lock for lock in plan.out.glob(f"**/{LOCK_NAME}") if locks.held(lock)]:
                raise LockedError(
                    f"{held[0].parent} is still computed by a process of an earlier call; "
                    "wait for it, or end it"
                )
            for old in [p for pattern in OWN for p in plan.out.glob(pattern)]:
                if old.is_dir() and not old.is_symlink():
                    shutil.rmtree(old)
                else:
                    old.unlink()
        elif changed:
            raise UserError(
                f"{plan.out} was made with another --{', --'.join(changed)}; "
                "choose another --out, or start from scratch with --overwrite"
            )
    elif others := sorted(p.name for p in plan.out.iterdir() if not p.name.startswith(".")):
        raise UserError(f"{plan.out} holds other files ({others[0]}); choose another --out")
    atomic_write_json(path, plan.settings())


def announcement(plan: Plan, runs: Sequence[Run], workers: int) -> str:
    """What is about to happen."""
    images, scenes = plan.images or plan.voc or "generated images", plan.voc or "generated scenes"
    seeds = ", ".join(map(str, range(plan.seeds)))
    states = {run.name: run.state() for run in runs}
    number = sum(state.kind != DONE for state in states.values())
    if plan.smoke:
        last = "--smoke: a few iterations only; the numbers will mean nothing."
    elif number:
        left = foresee(runs, states, {}, workers).seconds_left
        last = f"About {format_seconds(left)} where the cores have nothing else to do."
    else:
        last = ""
    return f"""\
Pre-train on {images}, then fine-tune a detector on {scenes} from random and from moco weights, \
seeds {seeds}.
{number} steps to do, {workers} at a time, one thread each; logs are suite.log in \
{plan.out}/{{steps,pretrain,runs}}.
{last}""".rstrip()


def report(plan: Plan, runs: Sequence[Run]) -> None:
    """Print the table, write every file, name them and what to do next."""
    from benchmarks.make_table import write_files
    from benchmarks.report.aggregate import aggregate
    from benchmarks.report.content import Report
    from benchmarks.report.records import collect
    from benchmarks.report.render import to_terminal
    from benchmarks.report.samples import save_samples
    from detection.datasets.voc import VOCSource, annotated_classes

    results = collect([run.folder for run in runs if run.product is None])
    [table] = aggregate(results.transfer, baseline=RANDOM)
    made = Report([table], results)
    print(to_terminal(made, color=sys.stdout.isatty()))
    print(f"\n{verdict(table)}")
    for run in results.pretraining:
        metrics = run.record.metrics.items()
        numbers = ", ".join(f"{name} {value:.1f}" for name, value in metrics if value is not None)
        print(printable(f"The pre-training itself: {numbers}"))
    files = write_files(plan.out, made)
    classes, [name] = annotated_classes(plan.scenes), table.tested_on
    tested = VOCSource(name, plan.scenes, "test", 2007, classes, published=False).read()
    files.append(save_samples(plan.out / "samples.png", table, tested))
    print("\nFiles:", *files, plan.weights, plan.pretrain, plan.out / "runs", sep="\n  ")
    print(next_commands(plan))


def verdict(table: "Table") -> str:
    """What the numbers say, and what they do not: they vary the fine-tuning seed alone."""
    from benchmarks.report.style import format_gap

    [row] = [row for row in table.rows if row.init == "moco"]
    gap = row.gaps["bbox/AP"]
    if gap is None:
        return "There is no AP to compare."
    shown = f"{format_gap(gap.printed)} AP"
    if gap.low is None or gap.high is None:
        return f"{shown} against random, but one fine-tuning seed says little: it may be chance."
    chance = "what chance explains among fine-tuning seeds"
    one = "It is one pre-training: how much another would differ was not measured."
    if gap.low > 0:
        return f"Pre-training with MoCo helped: {shown} over random, more than {chance}. {one}"
    if gap.high < 0:
        return f"Pre-training with MoCo hurt: {shown} against random, more than {chance}. {one}"
    return f"No clear gain: {shown} against random is within {chance}. {one}"


def next_commands(plan: Plan) -> str:
    """Commands to try next, on custom data."""
    again = plan.out.with_name(f"{plan.out.name}_mine")
    more = [f"--seeds={plan.seeds + 3}", f"--out={plan.out}"]
    more += [f"--images={plan.images}"] if plan.images else []
    more += [f"--voc={plan.voc}"] if plan.voc else []
    more += ["--smoke"] if plan.smoke else []
    more += [f"--arch={plan.arch}"]
    quickstart = program("quickstart", "python -m benchmarks.quickstart")
    pretrain = program("pretrain", "python -m benchmarks pretrain")
    return f"""
Next, on your own data:
  {quickstart} --images path/to/images --out {again}
  {quickstart} --voc path/to/voc_layout --out {again}
or step by step, longer and larger:
  {pretrain} --config-file {shown("pretrain/small_r18")} DATA.ROOT path/to/images
More seeds for this table (finished runs are not repeated):
  {quickstart} {shlex.join(more)}"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("quickstart", "python -m benchmarks.quickstart"),
        description="Pre-train with MoCo, convert, fine-tune a detector from random and from MoCo "
        "weights over several seeds, and show the table; minutes on two CPU cores. Called again, "
        "it continues where it was interrupted.",
    )
    add = parser.add_argument
    add("--out", type=Path, help="(quickstart_out; with --smoke quickstart_out_smoke)")
    add("--images", type=Path, metavar="DIR", help="pre-train on the images in this folder")
    voc = (
        "fine-tune on this VOC-layout dataset, its classes read from its annotations; without "
        "--images, pre-train on its training images"
    )
    add("--voc", type=Path, metavar="DIR", help=voc)
    add("--seeds", type=int, help=f"trials per row ({SEEDS}; {FEW_SEEDS} with --voc and for a ViT)")
    arch = "a ResNet by MoCo, or a vision transformer by MoCo v3 (%(default)s)"
    add("--arch", choices=tuple(NETWORKS), default="resnet", help=arch)
    add("--workers", type=int, default=0, help="processes at a time (default: one per core)")
    add("--overwrite", action="store_true", help="remove an earlier quickstart's files first")
    smoke = "a few iterations of everything, to try the machinery"
    add("--smoke", action="store_true", help=smoke)
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    run_cli(main)
