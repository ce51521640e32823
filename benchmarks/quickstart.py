"""The whole chain in minutes on a CPU: images → MoCo → conversion → detector → table.

    python -m benchmarks.quickstart                       generated images
    python -m benchmarks.quickstart --images DIR          pre-train on a custom folder of images
    python -m benchmarks.quickstart --voc DIR             fine-tune on a custom VOC-layout dataset

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suites import locks, programs
from benchmarks.suites.executors.base import Options
from benchmarks.suites.executors.cpu import cpu
from benchmarks.suites.folder import make_run, project_version
from benchmarks.suites.forecast import foresee
from benchmarks.suites.prepare import limit_voc, training_images, voc_splits
from benchmarks.suites.runs import DONE, LOCK_NAME, Run
from benchmarks.suites.scheduler import Scheduler
from benchmarks.suites.suite import DETECTION, EMBEDDED, RANDOM, Init, Suite, SuiteTask, expand
from moco.common.cfgnode import read_yaml
from moco.common.distributed import usable_cores
from moco.common.errors import LockedError, UserError, printable, run_cli
from moco.common.files import atomic_write_json
from moco.common.progress import format_seconds

if TYPE_CHECKING:
    from benchmarks.report.aggregate import Table

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PRETRAIN_CONFIG = CONFIGS / "pretrain" / "quickstart.yaml"
DETECTION_CONFIG = CONFIGS / "voc" / "quickstart_R_10_C4.yaml"
SETTINGS_NAME = "quickstart.json"
POINTER_NAME = "last_checkpoint"
BATCH, QUEUE = 64, 512  # as in PRETRAIN_CONFIG
SEEDS, OWN_SEEDS = 5, 3  # trials per row; real scenes take longer
IMAGES_MIN = 64
VOC_LIMITS = (2000, 300)  # images to train and to test on
LINE_EVERY_SECONDS = 10.0
# What a quickstart leaves in its output folder; --overwrite removes these and nothing else.
OWN = (SETTINGS_NAME, "data", "pretrain", "moco.pth", "runs", "steps", "logs", ".slots")
OWN_PATTERNS = ("table.*", "runs.csv", "loss-*.png", "ap-*.png")

# On one idle core; only the estimate of the time left depends on them.
IMAGES_SECONDS, SCENES_SECONDS, CONVERT_SECONDS = 12.0, 3.0, 6.0
PRETRAIN_SECONDS, OWN_PRETRAIN_SECONDS = 240.0, 290.0
TUNE_SECONDS, OWN_TUNE_SECONDS = 50.0, 110.0

# Keys on top of the two YAML files: for real photographs and scenes, and for --smoke.
OWN_IMAGES = {
    "AUG.CROP_PX": "64",
    "AUG.CROP_SCALE": "(0.2, 1.0)",
    "AUG.GRAY_PROB": "0.2",
    "SOLVER.MAX_ITERS": "1200",
}
OWN_SCENES = {
    "MODEL.ANCHOR_GENERATOR.SIZES": "[[16, 32, 64, 128]]",
    "INPUT.MIN_SIZE_TRAIN": "(224,)",
    "INPUT.MAX_SIZE_TRAIN": "360",
    "INPUT.MIN_SIZE_TEST": "224",
    "INPUT.MAX_SIZE_TEST": "360",
}
SMOKE_IMAGES = {"images": 64, "knn-train": 16, "knn-val": 8}
SMOKE_SCENES = {"trainval": 8, "test": 6}
SMOKE_VOC_LIMITS = (8, 6)
SMOKE_PRETRAIN = {
    "SOLVER.MAX_ITERS": "4",
    "SOLVER.BATCH_SIZE": "16",
    "MOCO.K": "32",
    "LOG.EVERY_ITERS": "2",
}
SMOKE_DETECTION = {
    "SOLVER.MAX_ITER": "4",
    "SOLVER.STEPS": "(2, 3)",
    "SOLVER.WARMUP_ITERS": "1",
    "SOLVER.IMS_PER_BATCH": "2",
    "TEST.PRECISE_BN.NUM_ITER": "1",
}


@dataclass(frozen=True)
class Plan:
    """What one call does; everything but the number of seeds is fixed for an output folder.

    Attributes:
        images, voc: the user's folders, or None for generated data.
        smoke: a few iterations of everything, for tests; the numbers mean nothing.
        seeds: trials per row.
    """

    out: Path
    images: Path | None
    voc: Path | None
    smoke: bool
    seeds: int

    @property
    def pretrain_images(self) -> Path:
        return self.out / "data" / "images"

    @property
    def scenes(self) -> Path:
        return self.out / "data" / ("scenes" if self.voc is None else self.voc.resolve().name)

    @property
    def weights(self) -> Path:
        return self.out / "moco.pth"

    @property
    def pretrain(self) -> Path:
        return self.out / "pretrain"

    def settings(self) -> dict[str, Any]:
        """What must not change between two calls on one folder."""
        return {
            "images": None if self.images is None else str(self.images.resolve()),
            "voc": None if self.voc is None else str(self.voc.resolve()),
            "smoke": self.smoke,
        }


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    plan = make_plan(args)
    check_sources(plan)
    from moco.common.run import RunFolder

    workers = args.workers or min(usable_cores(), plan.seeds + 1)
    executor = cpu(Options(plan.out, workers))
    start, cpu_start = time.monotonic(), _child_cpu_seconds()
    with RunFolder(plan.out, resume=True):
        open_folder(plan, args.overwrite)
        runs = make_runs(plan)
        if plan.voc is not None and not plan.scenes.exists():
            limit_voc(plan.voc, plan.scenes, *(VOC_LIMITS if not plan.smoke else SMOKE_VOC_LIMITS))
        print(announcement(plan, runs, workers), flush=True)
        Scheduler(
            runs,
            executor,
            name="quickstart",
            retry_failed=True,
            fail_fast=True,
            line_every_seconds=LINE_EVERY_SECONDS,
        ).run()
        minutes = format_seconds(time.monotonic() - start)
        cpu_seconds = _child_cpu_seconds() - cpu_start
        print(f"\nDone in {minutes} ({cpu_seconds:.0f} CPU-seconds, {workers} at a time).\n")
        report(plan, runs)


def make_plan(args: argparse.Namespace) -> Plan:
    """Arguments → plan.

    Raises:
        UserError: an impossible number of seeds.
    """
    seeds = args.seeds
    if seeds is None:
        seeds = SEEDS if args.voc is None else OWN_SEEDS
    if not 1 <= seeds <= 100:
        raise UserError(f"--seeds: got {seeds}, expected 1 to 100")
    return Plan(args.out, args.images, args.voc, args.smoke, seeds)


def check_sources(plan: Plan) -> None:
    """Whether the user's folders can be used, before anything is made.

    Raises:
        UserError, DataError: a folder that is missing or holds too little.
    """
    if plan.voc is not None:
        voc_splits(plan.voc)
    if plan.images is not None:
        from moco.data.images import find_images

        number, source = len(find_images(plan.images)), f"--images {plan.images}"
    elif plan.voc is not None:
        number, source = len(training_images(plan.voc)), f"--voc {plan.voc}"
    else:
        return
    if number < IMAGES_MIN:
        raise UserError(
            f"{source}: {number} images to pre-train on, expected at least {IMAGES_MIN}"
        )


def open_folder(plan: Plan, overwrite: bool) -> None:
    """Make the output folder this plan's: new, continued, or emptied of an earlier plan's files.

    Raises:
        UserError: the folder holds something else, or results of other settings.
        LockedError: processes of an earlier call are to be overwritten.
    """
    path = plan.out / SETTINGS_NAME
    if path.is_file():
        before = json.loads(path.read_text())
        changed = [key for key, value in plan.settings().items() if before.get(key) != value]
        if overwrite:
            if held := [lock for lock in plan.out.glob(f"**/{LOCK_NAME}") if locks.held(lock)]:
                raise LockedError(
                    f"{held[0].parent} is still computed by a process of an earlier call; "
                    "wait for it, or end it"
                )
            _remove_own(plan.out)
        elif changed:
            raise UserError(
                f"{plan.out} was made with another --{', --'.join(changed)}; "
                "choose another --out, or start from scratch with --overwrite"
            )
    elif others := sorted(p.name for p in plan.out.iterdir() if not p.name.startswith(".")):
        raise UserError(f"{plan.out} holds other files ({others[0]}); choose another --out")
    atomic_write_json(path, plan.settings())


def make_runs(plan: Plan) -> list[Run]:
    """Everything from the data to the last detector, in the order of starting."""
    tunings = detection_runs(plan)
    return [
        images_run(plan),
        *([scenes_run(plan)] if plan.voc is None else []),
        pretrain_run(plan),
        *(run for run in tunings if "convert" not in run.after),
        convert_run(plan),
        *(run for run in tunings if "convert" in run.after),
    ]


def step(
    plan: Plan, name: str, product: Path, seconds: float, argv: Callable[[], list[str]]
) -> Run:
    """A run of one step, which makes `product`."""
    folder = plan.out / "steps" / name
    key = (name, "", 0)
    return Run(name, name, folder, argv, key, 0, 1, seconds, product=product)


def images_run(plan: Plan) -> Run:
    """Generates the images to pre-train on, or makes small copies of the user's."""
    out = plan.pretrain_images
    if plan.images is not None:
        argv = _module("benchmarks.suites.prepare", "images", plan.images, out)
    elif plan.voc is not None:
        argv = _module("benchmarks.suites.prepare", "voc-images", plan.voc, out)
    else:
        argv = _module("benchmarks.suites.synthetic", out.parent, "--trainval", 0)
        argv += _options(SMOKE_IMAGES) if plan.smoke else []
    return step(plan, "images", out, IMAGES_SECONDS, lambda: argv)


def scenes_run(plan: Plan) -> Run:
    """Generates the labeled scenes."""
    argv = _module("benchmarks.suites.synthetic", plan.scenes.parent, "--images", 0)
    argv += _options(SMOKE_SCENES) if plan.smoke else []
    return step(plan, "scenes", plan.scenes, SCENES_SECONDS, lambda: argv)


def pretrain_run(plan: Plan) -> Run:
    """`python -m moco.pretrain`."""
    own = plan.images is not None or plan.voc is not None
    keys: dict[str, object] = {"DATA.ROOT": plan.pretrain_images, "OUTPUT_DIR": plan.pretrain}
    if own:
        keys |= OWN_IMAGES
    else:
        keys["DATA.KNN_ROOT"] = plan.pretrain_images.with_name("knn")
    if plan.smoke:
        keys |= SMOKE_PRETRAIN

    def argv() -> list[str]:
        length = {}
        if own and not plan.smoke:
            length["MOCO.K"] = queue_length(len(list(plan.pretrain_images.iterdir())))
        pairs = [part for pair in (keys | length).items() for part in pair]
        return _module("moco.pretrain", "--resume", "--config-file", PRETRAIN_CONFIG, *pairs)

    seconds = OWN_PRETRAIN_SECONDS if own else PRETRAIN_SECONDS
    iterations = _iterations(PRETRAIN_CONFIG, "MAX_ITERS", keys)
    return Run(
        "pre-train",
        "pre-train",
        plan.pretrain,
        argv,
        ("pre-train", "moco", 0),
        iterations=iterations,
        seconds_per_iteration=seconds / iterations,
        after=("images",),
        expected={"kind": "pretrain"},
    )


def convert_run(plan: Plan) -> Run:
    """`python -m convert.convert_to_d2` on the checkpoint that pre-training points at."""

    def argv() -> list[str]:
        newest = (plan.pretrain / POINTER_NAME).read_text().strip()
        return _module("convert.convert_to_d2", plan.pretrain / newest, plan.weights)

    run = step(plan, "convert", plan.weights, CONVERT_SECONDS, argv)
    return replace(run, after=("pre-train",))


def detection_runs(plan: Plan) -> list[Run]:
    """The suite: one task from two inits, which differ in MODEL.WEIGHTS; trials differ in SEED."""
    keys = {"MODEL.DEVICE": "cpu", "DATASETS.VOC_DIR": str(plan.scenes)}
    keys |= OWN_SCENES if plan.voc is not None else {}
    keys |= SMOKE_DETECTION if plan.smoke else {}
    iterations = _iterations(DETECTION_CONFIG, "MAX_ITER", keys)
    seconds = TUNE_SECONDS if plan.voc is None else OWN_TUNE_SECONDS
    task = SuiteTask(
        DETECTION_CONFIG.stem,
        DETECTION_CONFIG,
        DETECTION,
        tuple(keys.items()),
        seconds_here=seconds / iterations,
    )
    suite = Suite("quickstart", "", (task,), plan.seeds, RANDOM, {})
    inits = {RANDOM: Init(RANDOM, None), "moco": Init(str(plan.weights), None)}
    runs = []
    for spec in expand(suite, inits, None, [EMBEDDED], version=project_version()):
        spec = replace(spec, name=f"{spec.init}-{spec.seed}", iterations=iterations)
        folder = plan.out / "runs" / spec.name
        run = make_run(spec, folder, partial(programs.command, spec, folder))
        # The hash of the weights is not known before they are made.
        expected = {k: v for k, v in run.expected.items() if k != "weights_sha256"}
        after = ["scenes"] if plan.voc is None else []
        after += ["convert"] if spec.init != RANDOM else []
        title = f"{spec.init} seed {spec.seed}"
        runs.append(replace(run, title=title, expected=expected, after=tuple(after)))
    return sorted(runs, key=lambda run: "convert" in run.after)


def queue_length(num_images: int) -> int:
    """K for few images: whole batches, at most half the data, so that a key's own image is
    seldom among its negatives."""
    return max(BATCH, min(QUEUE, num_images // 2 // BATCH * BATCH))


def announcement(plan: Plan, runs: Sequence[Run], workers: int) -> str:
    """What is about to happen."""
    images = plan.images or plan.voc or "generated images"
    scenes = plan.voc or "generated scenes"
    seeds = ", ".join(map(str, range(plan.seeds)))
    states = {run.name: run.state() for run in runs}
    number = sum(state.kind != DONE for state in states.values())
    lines = [
        f"Pre-train on {images}, then fine-tune a detector on {scenes} "
        f"from random and from moco weights, seeds {seeds}.",
        f"{number} steps to do, {workers} at a time, one thread each; "
        f"logs are suite.log in {plan.out}/{{steps,pretrain,runs}}.",
    ]
    if plan.smoke:
        lines.append("--smoke: a few iterations only; the numbers will mean nothing.")
    elif number:
        left = foresee(runs, states, (), workers).seconds_left
        lines.append(f"About {format_seconds(left)} where the cores have nothing else to do.")
    return "\n".join(lines)


def report(plan: Plan, runs: Sequence[Run]) -> None:
    """Print the table, write every file, name them and what to do next."""
    from benchmarks.make_table import write_files
    from benchmarks.report.aggregate import aggregate
    from benchmarks.report.records import collect
    from benchmarks.report.tables import to_terminal

    results = collect([run.folder for run in runs if run.product is None])
    tables = aggregate(results.transfer, baseline=RANDOM)
    print(to_terminal(tables, results.unusable, color=sys.stdout.isatty()))
    print(f"\n{verdict(tables[0])}")
    for run in results.pretraining:
        metrics = run.record.metrics.items()
        numbers = ", ".join(f"{name} {value:.1f}" for name, value in metrics if value is not None)
        print(printable(f"The pre-training itself: {numbers}"))
    files = write_files(plan.out, tables, results)
    print("\nFiles:")
    for path in (*files, plan.weights, plan.pretrain, plan.out / "runs"):
        print(f"  {path}")
    print(next_commands(plan))


def verdict(table: "Table") -> str:
    """What the numbers say, and what they do not: they vary the fine-tuning seed alone."""
    from benchmarks.report.tables import format_gap

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
    more += [] if plan.images is None else [f"--images={plan.images}"]
    more += [] if plan.voc is None else [f"--voc={plan.voc}"]
    more += ["--smoke"] if plan.smoke else []
    return f"""
Next, on your own data:
  python -m benchmarks.quickstart --images path/to/images --out {again}
  python -m benchmarks.quickstart --voc path/to/voc_layout --out {again}
or step by step, longer and larger:
  python -m moco.pretrain --config-file configs/pretrain/small_r18.yaml DATA.ROOT path/to/images
More seeds for this table (finished runs are not repeated):
  python -m benchmarks.quickstart {shlex.join(more)}"""


def build_parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.quickstart",
        description="Pre-train with MoCo, convert, fine-tune a detector from random and from MoCo "
        "weights over several seeds, and show the table; minutes on two CPU cores. Called again, "
        "it continues where it was interrupted.",
    )
    result.add_argument("--out", type=Path, default=Path("quickstart_out"), help="(%(default)s)")
    result.add_argument(
        "--images", type=Path, metavar="DIR", help="pre-train on the images in this folder"
    )
    result.add_argument(
        "--voc",
        type=Path,
        metavar="DIR",
        help="fine-tune on this VOC-layout dataset, its classes read from its annotations; "
        "without --images, pre-train on its training images",
    )
    result.add_argument(
        "--seeds", type=int, help=f"trials per row ({SEEDS}; {OWN_SEEDS} with --voc)"
    )
    result.add_argument(
        "--workers", type=int, default=0, help="processes at a time (default: one per core)"
    )
    result.add_argument(
        "--overwrite", action="store_true", help="remove an earlier quickstart's files first"
    )
    result.add_argument(
        "--smoke", action="store_true", help="a few iterations of everything, to try the machinery"
    )
    result.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return result


def _module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]


def _iterations(config: Path, name: str, keys: Mapping[str, object]) -> int:
    """Length of a run: the override, or what the YAML file says."""
    return int(str(keys.get(f"SOLVER.{name}", read_yaml(config)["SOLVER"][name])))


def _options(values: Mapping[str, int]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def _remove_own(out: Path) -> None:
    for path in [out / name for name in OWN] + [p for g in OWN_PATTERNS for p in out.glob(g)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _child_cpu_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    run_cli(main)
