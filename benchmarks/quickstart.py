"""The whole chain in minutes on a CPU: images → MoCo → conversion → detector → table.

    python -m benchmarks.quickstart                       generated images
    python -m benchmarks.quickstart --images DIR          pre-train on one's own images
    python -m benchmarks.quickstart --voc DIR             fine-tune on one's own VOC-layout dataset

It runs the same command lines that a user would (moco.pretrain, convert.convert_to_d2,
detection.train_net, one process and one thread each) and averages the records that they write.
Random and MoCo rows differ in MODEL.WEIGHTS and nothing else; the seeds are 0, 1, 2, ... and every
one is in the table. Interrupted, it continues when it is called again.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.style import format_gap
from benchmarks.suites.jobs import Job, processes_left, run_jobs, time_left
from benchmarks.suites.prepare import limit_voc, training_images, voc_splits
from moco.common.cfgnode import read_yaml
from moco.common.distributed import usable_cores
from moco.common.errors import LockedError, UserError, printable, run_cli
from moco.common.files import atomic_write_json
from moco.common.progress import format_seconds
from moco.common.run import METRICS_NAME, RECORD_NAME, read_record

if TYPE_CHECKING:
    from benchmarks.report.aggregate import Table

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PRETRAIN_CONFIG = CONFIGS / "pretrain" / "quickstart.yaml"
DETECTION_CONFIG = CONFIGS / "voc" / "quickstart_R_10_C4.yaml"
SETTINGS_NAME = "quickstart.json"
POINTER_NAME = "last_checkpoint"
INITS = ("random", "moco")
BATCH, QUEUE = 64, 512  # as in PRETRAIN_CONFIG
SEEDS, OWN_SEEDS = 5, 3  # trials per row; real scenes take longer
IMAGES_MIN = 64
VOC_LIMITS = (2000, 300)  # images to train and to test on
# What a quickstart leaves in its output folder; --overwrite removes these and nothing else.
OWN = (SETTINGS_NAME, "data", "pretrain", "moco.pth", "runs", "logs")
OWN_PATTERNS = ("table.*", "runs.csv", "loss-*.png", "ap-*.png")

IMAGES, SCENES, PRETRAIN, CONVERT = "images", "scenes", "pre-train", "convert"
# On one idle core; only the estimate of the time left depends on them.
IMAGES_SECONDS, SCENES_SECONDS, CONVERT_SECONDS = 12.0, 3.0, 6.0
PRETRAIN_SECONDS, OWN_PRETRAIN_SECONDS = 240.0, 290.0
TUNE_SECONDS, OWN_TUNE_SECONDS = 50.0, 110.0

# KEY VALUE pairs on top of the two YAML files: for real photographs and scenes, and for --smoke.
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
    """What one call does; everything but the seeds is fixed for an output folder.

    Attributes:
        images, voc: the user's folders, or None for generated data.
        smoke: a few iterations of everything, for tests; the numbers mean nothing.
    """

    out: Path
    images: Path | None
    voc: Path | None
    smoke: bool
    seeds: tuple[int, ...]

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

    def run_folder(self, init: str, seed: int) -> Path:
        return self.out / "runs" / f"{init}-{seed}"

    def is_done(self, init: str, seed: int) -> bool:
        return is_done(self.run_folder(init, seed))

    def log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.txt"

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
    workers = args.workers or min(usable_cores(), len(plan.seeds) + 1)
    from moco.common.run import RunFolder

    start, cpu_start = time.monotonic(), _child_cpu_seconds()
    with RunFolder(plan.out, resume=True):
        claim(plan, overwrite=args.overwrite)
        if plan.voc is not None and not plan.scenes.exists():
            limit_voc(plan.voc, plan.scenes, *(VOC_LIMITS if not plan.smoke else SMOKE_VOC_LIMITS))
        jobs = make_jobs(plan)
        print(announcement(plan, jobs, workers), flush=True)
        run_jobs(jobs, workers)
        minutes = format_seconds(time.monotonic() - start)
        cpu = _child_cpu_seconds() - cpu_start
        print(f"\nDone in {minutes} ({cpu:.0f} CPU-seconds, {workers} at a time).\n")
        report(plan)


def make_plan(args: argparse.Namespace) -> Plan:
    """Arguments → plan.

    Raises:
        UserError: a number of seeds or workers that cannot be.
    """
    seeds = args.seeds
    if seeds is None:
        seeds = SEEDS if args.voc is None else OWN_SEEDS
    if not 1 <= seeds <= 100:
        raise UserError(f"--seeds: got {seeds}, expected 1 to 100")
    if args.workers < 0:
        raise UserError(f"--workers: got {args.workers}, expected at least 1 (0: one per core)")
    return Plan(args.out, args.images, args.voc, args.smoke, tuple(range(seeds)))


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


def claim(plan: Plan, overwrite: bool) -> None:
    """Make the output folder this plan's: new, continued, or emptied of an earlier plan's files.

    Raises:
        UserError: the folder holds something else, or results of other settings.
    """
    path = plan.out / SETTINGS_NAME
    if path.is_file():
        before = json.loads(path.read_text())
        changed = [key for key, value in plan.settings().items() if before.get(key) != value]
        if overwrite:
            if left := processes_left(plan.out / "logs"):
                raise LockedError(
                    f"{plan.out}: {', '.join(left)} is still computed by a process of an earlier "
                    "call; wait for it, or continue that call and stop it with Ctrl-C"
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


def make_jobs(plan: Plan) -> list[Job]:
    """What is still to do, in the order of starting; what is done is not in it."""
    tunings = {
        init: [
            detection_job(plan, init, seed) for seed in plan.seeds if not plan.is_done(init, seed)
        ]
        for init in INITS
    }
    jobs = [
        *([] if plan.pretrain_images.exists() else [images_job(plan)]),
        *([] if plan.scenes.exists() else [scenes_job(plan)]),
        *([] if is_done(plan.pretrain) else [pretrain_job(plan)]),
        *tunings["random"],
        *([] if plan.weights.exists() else [convert_job(plan)]),
        *tunings["moco"],
    ]
    names = {job.name for job in jobs}
    return [replace(job, after=tuple(n for n in job.after if n in names)) for job in jobs]


def images_job(plan: Plan) -> Job:
    """Draws the images to pre-train on, or makes small copies of the user's."""
    if plan.images is not None:
        command = _module("benchmarks.suites.prepare", "images", plan.images, plan.pretrain_images)
    elif plan.voc is not None:
        command = _module("benchmarks.suites.prepare", "voc-images", plan.voc, plan.pretrain_images)
    else:
        command = _module(
            "benchmarks.suites.synthetic", plan.pretrain_images.parent, "--trainval", 0
        )
        command += _options(SMOKE_IMAGES) if plan.smoke else []
    log, is_done = plan.log("images"), plan.pretrain_images.exists
    return Job(IMAGES, lambda: command, log, IMAGES_SECONDS, is_done=is_done)


def scenes_job(plan: Plan) -> Job:
    """Draws the labeled scenes."""
    command = _module("benchmarks.suites.synthetic", plan.scenes.parent, "--images", 0)
    command += _options(SMOKE_SCENES) if plan.smoke else []
    log, is_done = plan.log("scenes"), plan.scenes.exists
    return Job(SCENES, lambda: command, log, SCENES_SECONDS, is_done=is_done)


def pretrain_job(plan: Plan) -> Job:
    """`python -m moco.pretrain`, continued where it was interrupted."""
    own = plan.images is not None or plan.voc is not None
    keys: dict[str, object] = {"DATA.ROOT": plan.pretrain_images, "OUTPUT_DIR": plan.pretrain}
    if own:
        keys |= OWN_IMAGES
    else:
        keys["DATA.KNN_ROOT"] = plan.pretrain_images.with_name("knn")
    if plan.smoke:
        keys |= SMOKE_PRETRAIN

    def command() -> list[str]:
        if own and not plan.smoke:
            keys["MOCO.K"] = queue_length(len(list(plan.pretrain_images.iterdir())))
        flags = ["--resume", "--config-file", PRETRAIN_CONFIG]
        return _module("moco.pretrain", *flags) + _pairs(keys)

    seconds = OWN_PRETRAIN_SECONDS if own else PRETRAIN_SECONDS
    metrics = plan.pretrain / METRICS_NAME
    iterations = _iterations(PRETRAIN_CONFIG, "MAX_ITERS", keys)
    return Job(
        PRETRAIN,
        command,
        plan.log("pretrain"),
        seconds,
        (IMAGES,),
        metrics,
        iterations,
        lambda: is_done(plan.pretrain),
    )


def convert_job(plan: Plan) -> Job:
    """`python -m convert.convert_to_d2` on the checkpoint that pre-training points at."""

    def command() -> list[str]:
        newest = (plan.pretrain / POINTER_NAME).read_text().strip()
        return _module("convert.convert_to_d2", plan.pretrain / newest, plan.weights)

    log, is_done = plan.log("convert"), plan.weights.exists
    return Job(CONVERT, command, log, CONVERT_SECONDS, (PRETRAIN,), is_done=is_done)


def detection_job(plan: Plan, init: str, seed: int) -> Job:
    """`python -m detection.train_net`; rows differ in MODEL.WEIGHTS, trials in SEED."""
    folder = plan.run_folder(init, seed)
    keys: dict[str, object] = {
        "MODEL.WEIGHTS": "random" if init == "random" else plan.weights,
        "MODEL.DEVICE": "cpu",
        "DATASETS.VOC_DIR": plan.scenes,
        "OUTPUT_DIR": folder,
        "SEED": seed,
    }
    if plan.voc is not None:
        keys |= OWN_SCENES
    if plan.smoke:
        keys |= SMOKE_DETECTION
    flags = ["--engine", "embedded", "--resume", "--config-file", DETECTION_CONFIG]
    command = _module("detection.train_net", *flags) + _pairs(keys)
    after = (SCENES,) if init == "random" else (SCENES, CONVERT)
    seconds = TUNE_SECONDS if plan.voc is None else OWN_TUNE_SECONDS
    iterations = _iterations(DETECTION_CONFIG, "MAX_ITER", keys)
    return Job(
        f"{init} seed {seed}",
        lambda: command,
        plan.log(f"{init}-{seed}"),
        seconds,
        after,
        folder / METRICS_NAME,
        iterations,
        lambda: is_done(folder),
    )


def queue_length(num_images: int) -> int:
    """K for few images: whole batches, at most half the data, so that a key's own image is
    seldom among its negatives."""
    return max(BATCH, min(QUEUE, num_images // 2 // BATCH * BATCH))


def announcement(plan: Plan, jobs: Sequence[Job], workers: int) -> str:
    """What is about to happen."""
    images = plan.images or plan.voc or "generated images"
    scenes = plan.voc or "generated scenes"
    seeds = ", ".join(map(str, plan.seeds))
    lines = [
        f"Pre-train on {images}, then fine-tune a detector on {scenes} "
        f"from {' and from '.join(INITS)} weights, seeds {seeds}.",
        f"{len(jobs)} steps to do, {workers} at a time, one thread each; "
        f"logs in {plan.out / 'logs'}.",
    ]
    if plan.smoke:
        lines.append("--smoke: a few iterations only; the numbers will mean nothing.")
    elif jobs:
        left = {job.name: job.expected_seconds for job in jobs}
        estimate = time_left(jobs, left, (), workers)
        lines.append(f"About {format_seconds(estimate)} where the cores have nothing else to do.")
    return "\n".join(lines)


def report(plan: Plan) -> None:
    """Print the table, write every file, name them and what to do next."""
    from benchmarks.make_table import write_files
    from benchmarks.report.aggregate import aggregate
    from benchmarks.report.records import collect
    from benchmarks.report.render import to_terminal

    folders = [plan.run_folder(init, seed) for init in INITS for seed in plan.seeds]
    results = collect([plan.pretrain, *folders])
    tables = aggregate(results.transfer, baseline="random")
    print(to_terminal(tables, results.unusable, color=sys.stdout.isatty()))
    print(f"\n{verdict(tables[0])}")
    for run in results.pretraining:
        metrics = run.record.metrics.items()
        numbers = ", ".join(f"{name} {value:.1f}" for name, value in metrics if value is not None)
        print(printable(f"The pre-training itself: {numbers}"))
    files = write_files(plan.out, tables, results)
    print("\nFiles:")
    for path in (*files, plan.weights, plan.pretrain, plan.out / "runs", plan.out / "logs"):
        print(f"  {path}")
    print(next_commands(plan))


def verdict(table: "Table") -> str:
    """What the numbers say, and what they do not: they vary the fine-tuning seed alone."""
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
    """Commands to try next, on one's own data."""
    again = plan.out.with_name(f"{plan.out.name}_mine")
    more = [f"--seeds={len(plan.seeds) + 3}", f"--out={plan.out}"]
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


def is_done(folder: Path) -> bool:
    """Whether the folder holds the record of a run that reached its end."""
    path = folder / RECORD_NAME
    return path.is_file() and read_record(path).status == "done"


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


def _pairs(keys: Mapping[str, object]) -> list[str]:
    return [str(part) for pair in keys.items() for part in pair]


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
