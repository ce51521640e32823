"""The whole chain in minutes on a CPU: images → MoCo → conversion → detector → table.

    python -m benchmarks.quickstart                       generated images
    python -m benchmarks.quickstart --images DIR          pre-train on a custom folder of images
    python -m benchmarks.quickstart --voc DIR             fine-tune on a custom VOC-layout dataset
    python -m benchmarks.quickstart --arch vit            a vision transformer, by MoCo v3

It runs the suite configs/suites/quickstart.yaml with defaults, and explains the numbers. The random
and the MoCo row differ in MODEL.WEIGHTS and nothing else; the seeds are 0, 1, 2, ... and all of
them are in the table. After an interruption, the same command continues.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import run_suite
from benchmarks.suites.folder import SUITE_NAME, SuiteFolder
from benchmarks.suites.options import SuiteOptions
from benchmarks.suites.prepare import LIMIT, training_images, voc_splits
from benchmarks.suites.programs import Programs
from benchmarks.suites.runs import Run
from benchmarks.suites.suite import SHRINK, Step, Suite
from benchmarks.suites.suite_file import load_suite
from moco.common.command import parse_options, program, quoted
from moco.common.distributed import usable_cores
from moco.common.errors import UserError, plural, printable, run_cli, say
from moco.common.progress import format_seconds
from moco.common.shipped import CONFIGS, shown
from moco.data.images import find_images

FEW_SEEDS = 3  # trials per row on photographs, which take longer than generated scenes
IMAGES_MIN = 64
BATCH, QUEUE = 64, 512  # of configs/pretrain/quickstart.yaml
# Contents of an output folder; --overwrite removes these and nothing else.
OUTPUTS = (SUITE_NAME, "data", "grid", "inits", "jobs", "moco.pth", "runs", "tables")

# Overrides of the YAML files: for photographs, and for --smoke.
OWN_SCENES = {
    "MODEL.ANCHOR_GENERATOR.SIZES": "[[16, 32, 64, 128]]",
    "INPUT.MIN_SIZE_TRAIN": "(224,)",
    "INPUT.MAX_SIZE_TRAIN": "360",
    "INPUT.MIN_SIZE_TEST": "224",
    "INPUT.MAX_SIZE_TEST": "360",
}
SMOKE_PRETRAIN = {
    "SOLVER.MAX_ITERS": "4",
    "SOLVER.WARMUP_ITERS": "1",
    "SOLVER.BATCH_SIZE": "16",
    "LOG.EVERY_ITERS": "2",
}
SMOKE_DETECTION = {
    "SOLVER.MAX_ITER": "4",
    "SOLVER.STEPS": "(2, 3)",
    "SOLVER.WARMUP_ITERS": "1",
    "SOLVER.IMS_PER_BATCH": "2",
    "TEST.PRECISE_BN.NUM_ITER": "1",
}
SMOKE_ARGUMENTS = {
    "images": ("--images=64",),
    "knn": ("--knn-train=16", "--knn-val=8"),
    "scenes": ("--trainval=8", "--test=6"),
}


@dataclass(frozen=True)
class Network:
    """Choice of `--arch`, and its pre-training.

    Attributes:
        suite: Name of the suite's file.
        own_images: Overrides of the pre-training on photographs.
        own_seconds: Seconds per iteration on photographs, of the pre-training and of fine-tuning.
        smoke: Overrides of the pre-training with --smoke, in addition to `SMOKE_PRETRAIN`.
        has_queue: Whether MOCO.K is the length of a queue, which depends on the number of images.
    """

    suite: str
    own_images: dict[str, str]
    own_seconds: tuple[float, float]
    smoke: dict[str, str]
    has_queue: bool


NETWORKS = {
    "resnet": Network(
        "quickstart",
        own_images={
            "AUG.CROP_PX": "64",
            "AUG.CROP_SCALE": "(0.2, 1.0)",
            "AUG.GRAY_PROB": "0.2",
            "SOLVER.MAX_ITERS": "1200",
        },
        own_seconds=(0.2, 0.11),
        smoke={"MOCO.K": "32"},
        has_queue=True,
    ),
    "vit": Network(
        "quickstart_vit",
        own_images={"AUG.CROP_PX": "96", "AUG.CROP_SCALE": "(0.2, 1.0)", "SOLVER.MAX_ITERS": "500"},
        own_seconds=(0.8, 0.45),
        smoke={"MOCO.K": "16"},
        has_queue=False,
    ),
}


@dataclass(frozen=True)
class Options:
    """Options of the command; `build_parser` explains them."""

    output: Path | None = None
    images: Path | None = None
    voc: Path | None = None
    seeds: int | None = None
    arch: str = "resnet"
    workers: int = 0
    overwrite: bool = False
    smoke: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    """Run the quickstart's suite, or resume it; print the table and the next commands."""
    args = parse_options(build_parser(), argv, Options)
    output = args.output or Path("quickstart_out_smoke" if args.smoke else "quickstart_out")
    suite, folder = make_suite(args), SuiteFolder(output)
    if args.overwrite and (output / SUITE_NAME).is_file():
        with folder.lock():
            remove_outputs(output)
    start, trials = time.monotonic(), suite.tasks[0].trials
    workers = args.workers or min(usable_cores(), trials + 1)
    finish = partial(report, args=args, trials=trials)
    options = SuiteOptions(executor="cpu", workers=workers, engine="embedded", retry_failed=True)
    run_suite.run(suite, folder, options, Programs(), fail_fast=True, finish=finish)
    print(f"\nDone in {format_seconds(time.monotonic() - start)}, {plural(workers, 'worker')}.")


def make_suite(args: Options) -> Suite:
    """Return the shipped suite with the user's folders and options filled in.

    Raises:
        UserError: If a folder has too few images, or --seeds is out of range.
        DataError: If a folder is missing or has no VOC layout.
    """
    network = NETWORKS[args.arch]
    suite = load_suite(CONFIGS / "suites" / f"{network.suite}.yaml")
    steps = {step.name: step for step in suite.steps}
    pretrain: dict[str, str] = {}
    own_images, own_scenes = args.images or args.voc, args.voc is not None
    if args.voc is not None:
        voc_splits(args.voc)
    if own_images is not None:
        kind, find = ("images", find_images) if args.images else ("voc-images", training_images)
        number = len(find(own_images))
        if number < IMAGES_MIN:
            flag = "--images" if args.images else "--voc"
            raise UserError(
                f"{flag} {own_images}: found {number} images to pre-train on, expected at least "
                f"{IMAGES_MIN}"
            )
        steps["images"] = _shrink("images", kind, own_images, "data/images")
        del steps["knn"]
        pretrain |= network.own_images
        if network.has_queue:
            pretrain["MOCO.K"] = str(queue_length(min(number, LIMIT)))
    if args.voc is not None:
        limits = ("--limit=8", "--test-limit=6") if args.smoke else ("--limit=2000",)
        scenes = _shrink("scenes", "voc", args.voc, f"data/{args.voc.resolve().name}", *limits)
        steps["scenes"] = scenes
    if args.smoke:
        pretrain |= SMOKE_PRETRAIN | network.smoke
        for name, arguments in SMOKE_ARGUMENTS.items():
            if name in steps and steps[name].program != SHRINK:
                own = (*steps[name].arguments, *arguments)
                steps[name] = replace(steps[name], arguments=own)
    training, own_seconds = steps["pretrain"], network.own_seconds
    keys = dict(training.overrides)
    if own_images is not None:
        del keys["DATA.KNN_ROOT"]
        training = replace(training, seconds_per_iteration=own_seconds[0])
    steps["pretrain"] = replace(training, overrides=tuple((keys | pretrain).items()))
    [task] = suite.tasks
    keys = dict(task.overrides)
    keys |= (OWN_SCENES if own_scenes else {}) | (SMOKE_DETECTION if args.smoke else {})
    changes: dict[str, Any] = {"seconds_here": own_seconds[1]} if own_scenes else {}
    seeds = args.seeds if args.seeds is not None else FEW_SEEDS if own_scenes else task.trials
    if not 1 <= seeds <= 100:
        raise UserError(f"--seeds: got {seeds}, expected 1 to 100")
    task = replace(task, overrides=tuple(keys.items()), trials=seeds, **changes)
    return replace(suite, tasks=(task,), steps=tuple(steps.values()))


def _shrink(name: str, kind: str, source: Path, makes: str, *more: str) -> Step:
    """Return a step that makes small copies of the user's images."""
    arguments = (kind, *more, str(source.resolve()))
    return Step(name, SHRINK, arguments=arguments, makes=makes, gpus=0, seconds=15.0)


def queue_length(num_images: int) -> int:
    """Compute the queue length K for a small dataset.

    K is a multiple of the batch size, and at most half the number of images if that is at least a
    batch, so that a query's own image is seldom among its negatives.
    """
    return max(BATCH, min(QUEUE, num_images // 2 // BATCH * BATCH))


def remove_outputs(output: Path) -> None:
    """Remove the files of an earlier quickstart; the caller holds the folder's lock."""
    for path in (output / name for name in OUTPUTS):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def report(
    folder: SuiteFolder,
    runs: Sequence[Run],
    baseline: str | None,
    *,
    args: Options,
    trials: int,
) -> None:
    """Write the tables and figures; print the files, the next commands and, last, the table."""
    from benchmarks.report.content import Report
    from benchmarks.report.records import collect
    from benchmarks.report.render import to_terminal
    from benchmarks.report.samples import save_samples
    from benchmarks.report.tables import make_tables, whereabouts, write_files
    from detection.datasets.voc import VOCSource, annotated_classes

    results = collect([run.folder for run in runs if run.product is None])
    [table] = make_tables(results, baseline)
    report_ = Report([table], results)
    for run in results.pretraining:
        metrics = run.record.metrics.items()
        numbers = ", ".join(f"{name} {value:.1f}" for name, value in metrics if value is not None)
        print(printable(f"The pre-training itself: {numbers}"))
    files = write_files(folder.tables, report_)
    scenes = Path(table.runs[0].record.config["DATASETS.VOC_DIR"])
    classes, [name] = annotated_classes(scenes), table.tested_on
    tested = VOCSource(name, scenes, "test", 2007, classes, published=False).read()
    files.append(save_samples(folder.tables / "samples.png", table, tested))
    say("", "Files:", *(f"  {each}" for each in (*files, folder.path / "moco.pth", folder.runs)))
    print(next_commands(folder.path, args, trials))
    print(f"\n{to_terminal(report_, color=sys.stdout.isatty())}")
    print(whereabouts(files))


def next_commands(output: Path, args: Options, trials: int) -> str:
    """Format the commands to try next, on custom data and with more seeds."""
    again = quoted(output.with_name(f"{output.name}_mine"))
    more = [f"--seeds={trials + 3}", f"--output={output}"]
    more += [f"--images={args.images}"] if args.images else []
    more += [f"--voc={args.voc}"] if args.voc else []
    more += ["--smoke"] if args.smoke else []
    more += [f"--arch={args.arch}"]
    quickstart = program("quickstart", "python -m benchmarks.quickstart")
    pretrain = program("pretrain", "python -m benchmarks pretrain")
    return f"""
Next, on your own data:
  {quickstart} --images path/to/images --output {again}
  {quickstart} --voc path/to/voc_layout --output {again}
or step by step, longer and larger:
  {pretrain} --config-file {shown("pretrain/small_r18")} DATA.ROOT path/to/images
More seeds for this table (finished runs are not repeated):
  {quickstart} {quoted(*more)}"""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer quickstart`."""
    parser = argparse.ArgumentParser(
        prog=program("quickstart", "python -m benchmarks.quickstart"),
        description="Pre-train with MoCo, convert, fine-tune a detector from random and from MoCo "
        "weights over several seeds, and show the table. This takes minutes on two CPU cores. "
        "After an interruption, the same command continues.",
    )
    add = parser.add_argument
    out = "output folder (quickstart_out; with --smoke quickstart_out_smoke)"
    add("--output", type=Path, metavar="DIR", help=out)
    add("--images", type=Path, metavar="DIR", help="pre-train on the images in this folder")
    voc = (
        "fine-tune on this VOC-layout dataset, its classes read from its annotations; without "
        "--images, pre-train on its training images"
    )
    add("--voc", type=Path, metavar="DIR", help=voc)
    add("--seeds", type=int, help=f"trials per row (5; {FEW_SEEDS} with --voc and for a ViT)")
    arch = "a ResNet with MoCo, or a vision transformer with MoCo v3 (%(default)s)"
    add("--arch", choices=tuple(NETWORKS), default="resnet", help=arch)
    add("--workers", type=int, default=0, help="parallel processes (default: one per core)")
    add("--overwrite", action="store_true", help="remove the files of an earlier quickstart first")
    smoke = "run a few iterations of everything, as a smoke test"
    add("--smoke", action="store_true", help=smoke)
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    run_cli(main)
