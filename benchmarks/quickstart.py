"""The whole chain in minutes on a CPU: images → MoCo → conversion → detector → table.

    python -m benchmarks.quickstart                       generated images
    python -m benchmarks.quickstart --images DIR          pre-train on a custom folder of images
    python -m benchmarks.quickstart --voc DIR             fine-tune on a custom VOC-layout dataset
    python -m benchmarks.quickstart --arch vit            a vision transformer, by MoCo v3

It draws the images, pre-trains beside the runs from random weights, converts the result, runs the
suite of both rows, and explains the numbers. The random and the MoCo row differ in MODEL.WEIGHTS
and nothing else; the seeds are 0, 1, 2, ... and all of them are in the table. After an
interruption, the same command continues.
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
from benchmarks.run_suite import SuiteOptions
from benchmarks.suites import forkserver
from benchmarks.suites.folder import SUITE_NAME, SuiteFolder
from benchmarks.suites.prepare import (
    LIMIT,
    convert_checkpoint,
    limit_voc,
    sample,
    shrink_images,
    training_images,
    voc_splits,
)
from benchmarks.suites.runs import Programs, Run, read_json
from benchmarks.suites.suite import DETECTION, EMBEDDED, MOCO, Suite, SuiteTask
from benchmarks.suites.suite_file import TRIALS, check
from benchmarks.suites.synthetic import write_images, write_knn, write_scenes
from moco.common.cfgnode import flatten, read_yaml
from moco.common.command import RANDOM, command_parser, parse_options, program, quote
from moco.common.distributed import usable_cores
from moco.common.errors import UserError, echo, plural, printable, run_cli
from moco.common.files import atomic_write_json, expand_home
from moco.common.progress import format_seconds
from moco.common.shipped import CONFIGS, display_name
from moco.data.images import find_images

FEW_SEEDS = 3  # trials per row on photographs, which take longer than generated scenes
IMAGES_MIN = 64
BATCH, QUEUE = 64, 512  # of configs/pretrain/quickstart.yaml
SIDE_PX = 128  # shorter side of the copies of the user's images
SEED = 0  # of the drawn images
OPTIONS_NAME = "quickstart.json"
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


@dataclass(frozen=True)
class Network:
    """Choice of `--arch`: pre-training and detector. Seconds are those of one idle core.

    Attributes:
        pretraining: YAML file of the pre-training.
        task: YAML file of the detector.
        images: Images that are drawn for the pre-training.
        seeds: Trials per row on generated scenes.
        seconds: Seconds per iteration of the pre-training and of fine-tuning.
        own_images: Overrides of the pre-training on photographs.
        own_seconds: As `seconds`, on photographs.
        smoke: Overrides of the pre-training with --smoke, in addition to `SMOKE_PRETRAIN`.
        has_queue: Whether MOCO.K is the length of a queue, which depends on the number of images.
    """

    pretraining: str
    task: str
    images: int
    seeds: int
    seconds: tuple[float, float]
    own_images: dict[str, str]
    own_seconds: tuple[float, float]
    smoke: dict[str, str]
    has_queue: bool


NETWORKS = {
    "resnet": Network(
        "pretrain/quickstart.yaml",
        "voc/quickstart_R_10_C4.yaml",
        images=6144,
        seeds=5,
        seconds=(0.133, 0.06),
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
        "pretrain/quickstart_vit.yaml",
        "voc/quickstart_ViT.yaml",
        images=8192,
        seeds=3,
        seconds=(0.429, 0.25),
        own_images={"AUG.CROP_PX": "96", "AUG.CROP_SCALE": "(0.2, 1.0)", "SOLVER.MAX_ITERS": "500"},
        own_seconds=(0.8, 0.45),
        smoke={"MOCO.K": "16"},
        has_queue=False,
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Make images, pre-train, convert and run the suite, unless done; explain the results."""
    args = parse_options(build_parser(), argv, Options)
    output = args.output or Path("quickstart_out_smoke" if args.smoke else "quickstart_out")
    folder, own = SuiteFolder(output, OPTIONS_NAME), own_images(args)
    suite = make_suite(args, folder.path)
    if args.overwrite and (output / OPTIONS_NAME).is_file():
        with folder.lock():
            remove_outputs(output)
            atomic_write_json(folder.path / OPTIONS_NAME, _kept(args))
    start, trials = time.monotonic(), suite.tasks[0].trials
    workers = args.workers or min(usable_cores(), trials + 1)
    folder.recorded()  # raises if the folder holds other files
    check_options(args, folder.path)
    with folder.lock():
        atomic_write_json(folder.path / OPTIONS_NAME, _kept(args))
        make_data(args, own, folder.path)
    options = SuiteOptions(executor="cpu", workers=workers, engine="embedded", retry_failed=True)
    pretraining, weights = make_pretraining(args, own, folder.path), folder.path / "moco.pth"

    def run(inits: dict[str, str], finish: Any) -> None:
        each = replace(suite, inits=inits)
        more: dict[str, Any] = {"fail_fast": True, "finish": finish, "beside": [pretraining]}
        more["show_notes"] = False  # the records have them
        run_suite.run(each, folder, options, Programs(), **more)

    if not weights.is_file():
        # The rows from random weights need no pre-training, so that both are computed at once.
        run({RANDOM: RANDOM}, lambda *seen: None)
        with folder.lock():
            agreement = forkserver.call(convert_checkpoint, pretraining.folder, weights)
        echo(f"converted: {weights}, features of one image {agreement} to the checkpoint's")
    finish = partial(report, args=args, trials=trials)
    run({RANDOM: RANDOM, "moco": str(weights)}, finish)
    print(f"\nDone in {format_seconds(time.monotonic() - start)}, {plural(workers, 'worker')}.")


def _kept(args: Options) -> dict[str, Any]:
    """Return the options that may not change between two calls on one folder."""
    folders = {name: getattr(args, name) for name in ("images", "voc")}
    own = {name: path and str(path.resolve()) for name, path in folders.items()}
    return {"arch": args.arch, "smoke": args.smoke, **own}


def check_options(args: Options, output: Path) -> None:
    """Check that an earlier call on this folder had the same options.

    Raises:
        UserError: If it had others; names the first one.
    """
    before, now = read_json(output / OPTIONS_NAME), _kept(args)
    for name in now if before else ():
        if before.get(name) != now[name]:
            raise UserError(
                f"{output} was made by another command (--{name}: {before.get(name)} before, "
                f"{now[name]} now); repeat that command, or choose another --output"
            )


def make_suite(args: Options, output: Path) -> Suite:
    """Return the suite of one task on the scenes in the output folder, without inits.

    Raises:
        UserError: If --seeds is out of range.
        DataError: If --voc has no VOC layout.
    """
    network = NETWORKS[args.arch]
    if args.voc is not None:
        voc_splits(args.voc)
    seeds = args.seeds if args.seeds is not None else FEW_SEEDS if args.voc else network.seeds
    check("--seeds", seeds, TRIALS)
    keys = {"MODEL.DEVICE": "cpu", "DATASETS.VOC_DIR": str(scenes_of(args, output))}
    keys |= (OWN_SCENES if args.voc else {}) | (SMOKE_DETECTION if args.smoke else {})
    config = CONFIGS / network.task
    task = SuiteTask(
        config.stem,
        config,
        DETECTION,
        overrides=tuple(keys.items()),
        gpus=0,
        engines=(EMBEDDED,),
        trials=seeds,
        seconds_per_iteration=(network.own_seconds if args.voc else network.seconds)[1],
    )
    title = "Quickstart with a vision transformer" if args.arch == "vit" else "Quickstart"
    return Suite(Path(network.pretraining).stem, title, (task,), RANDOM, {})


def own_images(args: Options) -> list[Path]:
    """Return the images of the user for pre-training; empty without --images and --voc.

    Raises:
        UserError: If there are too few.
    """
    if (folder := args.images or args.voc) is None:
        return []
    found = (find_images if args.images else training_images)(folder)
    if len(found) < IMAGES_MIN:
        flag = "--images" if args.images else "--voc"
        raise UserError(
            f"{flag} {folder}: found {len(found)} images to pre-train on, expected at least "
            f"{IMAGES_MIN}"
        )
    return found


def scenes_of(args: Options, output: Path) -> Path:
    """Return the folder of the scenes; for data of the user, it is named after the dataset."""
    return output / "data" / (args.voc.resolve().name if args.voc else "scenes")


def make_data(args: Options, own: Sequence[Path], output: Path) -> None:
    """Draw images and scenes, or make small copies of those of the user, unless they exist."""
    images, knn = (output / "data" / name for name in ("images", "knn"))
    scenes = scenes_of(args, output)
    if not images.exists():
        if own:
            shrink_images(sample(own, LIMIT), images, SIDE_PX)
        else:
            write_images(images, 64 if args.smoke else NETWORKS[args.arch].images, SEED)
    if not own and not knn.exists():
        write_knn(knn, *((16, 8) if args.smoke else (1024, 512)), SEED)
    if not scenes.exists():
        if args.voc is not None:
            limit_voc(args.voc, scenes, *((8, 6) if args.smoke else (2000, 300)))
        else:
            write_scenes(scenes, *((8, 6) if args.smoke else (200, 200)), SEED)


def make_pretraining(args: Options, own: Sequence[Path], output: Path) -> Run:
    """Return the run of the pre-training, on the images of the user if there are any."""
    network = NETWORKS[args.arch]
    config, folder = CONFIGS / network.pretraining, output / "runs" / "pretrain"
    keys = {"DATA.ROOT": str(output / "data" / "images")}
    if own:
        keys |= network.own_images
        if network.has_queue:
            keys["MOCO.K"] = str(queue_length(min(len(own), LIMIT)))
    else:
        keys["DATA.KNN_ROOT"] = str(output / "data" / "knn")
    keys |= SMOKE_PRETRAIN | network.smoke if args.smoke else {}
    pairs = [part for pair in {**keys, "OUTPUT_DIR": str(folder)}.items() for part in pair]
    flags = ["--config-file", str(config), "--resume", *pairs]
    return Run(
        name="pretrain",
        title="pretrain",
        folder=folder,
        argv=[sys.executable, "-m", "benchmarks", "pretrain", *flags],
        speed_key=("pretrain", MOCO, 0),
        gpus=0,
        iterations=int((flatten(read_yaml(config)) | keys)["SOLVER.MAX_ITERS"]),
        seconds_per_iteration=(network.own_seconds if own else network.seconds)[0],
        expected={"kind": "pretrain"},
    )


def queue_length(num_images: int) -> int:
    """Compute the queue length K for a small dataset.

    K is a multiple of the batch size, and at most half the number of images if that is at least a
    batch, so that a query's own image is seldom among its negatives.
    """
    return max(BATCH, min(QUEUE, num_images // 2 // BATCH * BATCH))


def remove_outputs(output: Path) -> None:
    """Remove the files of an earlier quickstart; the caller holds the lock of the folder."""
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
    from benchmarks.report.export import format_paths, to_terminal, write_files
    from benchmarks.report.records import collect
    from benchmarks.report.report import Report, make_tables
    from benchmarks.report.samples import save_samples
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
    echo("", "Files:", *(f"  {each}" for each in (*files, folder.path / "moco.pth", folder.runs)))
    print(next_commands(folder.path, args, trials))
    print(f"\n{to_terminal(report_, color=sys.stdout.isatty())}")
    print(format_paths(files))


def next_commands(output: Path, args: Options, trials: int) -> str:
    """Format the commands to try next, on custom data and with more seeds."""
    again = quote(output.with_name(f"{output.name}_mine"))
    more = [f"--seeds={trials + 3}", f"--output={output}"]
    more += [f"--images={args.images}"] if args.images else []
    more += [f"--voc={args.voc}"] if args.voc else []
    more += ["--smoke"] if args.smoke else []
    more += [f"--arch={args.arch}"]
    quickstart = program("quickstart")
    pretrain = program("pretrain")
    return f"""
Next, on your own data:
  {quickstart} --images path/to/images --output {again}
  {quickstart} --voc path/to/voc_layout --output {again}
or step by step, longer and larger:
  {pretrain} --config-file {display_name("pretrain/small_r18")} DATA.ROOT path/to/images
More seeds for this table (finished runs are not repeated):
  {quickstart} {quote(*more)}"""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer quickstart`."""
    parser = command_parser(
        "quickstart",
        "Pre-train with MoCo, convert, fine-tune a detector from random and from MoCo "
        "weights over several seeds, and show the table. This takes minutes on two CPU cores. "
        "After an interruption, the same command continues.",
    )
    add = parser.add_argument
    out = "output folder (quickstart_out; with --smoke quickstart_out_smoke)"
    add("--output", type=expand_home, metavar="DIR", help=out)
    add("--images", type=expand_home, metavar="DIR", help="pre-train on the images in this folder")
    voc = (
        "fine-tune on this VOC-layout dataset, its classes read from its annotations; without "
        "--images, pre-train on its training images"
    )
    add("--voc", type=expand_home, metavar="DIR", help=voc)
    add("--seeds", type=int, help=f"trials per row (5; {FEW_SEEDS} with --voc and for a ViT)")
    arch = "a ResNet with MoCo, or a vision transformer with MoCo v3 (%(default)s)"
    add("--arch", choices=tuple(NETWORKS), default="resnet", help=arch)
    add("--workers", type=int, default=0, help="parallel processes (default: one per core)")
    add("--overwrite", action="store_true", help="remove the files of an earlier quickstart first")
    smoke = "run a few iterations of everything, as a smoke test"
    add("--smoke", action="store_true", help=smoke)
    return parser


if __name__ == "__main__":
    run_cli(main)
