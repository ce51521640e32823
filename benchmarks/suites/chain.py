"""The runs of the whole chain, from images to detectors: a suite of one task whose weights are made
by runs that come before."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.suites.folder import make_run, project_version
from benchmarks.suites.keep import newest_name
from benchmarks.suites.programs import Programs
from benchmarks.suites.runs import Run
from benchmarks.suites.suite import DETECTION, EMBEDDED, Init, Suite, SuiteTask, expand
from moco.common.cfgnode import read_yaml
from moco.common.command import RANDOM
from moco.common.shipped import CONFIGS

PRETRAIN_CONFIG = CONFIGS / "pretrain" / "quickstart.yaml"
DETECTION_CONFIG = CONFIGS / "voc" / "quickstart_R_10_C4.yaml"
BATCH, QUEUE = 64, 512  # as in PRETRAIN_CONFIG

# On one idle core; only the estimate of the time left depends on them.
IMAGES_SECONDS, SCENES_SECONDS, CONVERT_SECONDS = 12.0, 3.0, 6.0

# Keys on top of the two YAML files: for real scenes, and for --smoke.
OWN_SCENES = {
    "MODEL.ANCHOR_GENERATOR.SIZES": "[[16, 32, 64, 128]]",
    "INPUT.MIN_SIZE_TRAIN": "(224,)",
    "INPUT.MAX_SIZE_TRAIN": "360",
    "INPUT.MIN_SIZE_TEST": "224",
    "INPUT.MAX_SIZE_TEST": "360",
}
SMOKE_IMAGES = ("--images=64", "--knn-train=16", "--knn-val=8")
SMOKE_SCENES = ("--trainval=8", "--test=6")
SMOKE_PRETRAIN = {
    "SOLVER.MAX_ITERS": "4",
    "SOLVER.WARMUP_ITERS": "1",
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
class Network:
    """What `--arch` chooses.

    Attributes:
        pretrain, detection: YAML files.
        seconds: of the pre-training and of a fine-tuning, on one idle core; of own data the second
            two. Only the estimate of the time left depends on them.
        own_images, smoke: keys of the pre-training on photographs, and with --smoke.
        has_queue: whether MOCO.K is a queue's length, which depends on the number of images.
    """

    pretrain: Path
    detection: Path
    seconds: tuple[float, float]
    own_seconds: tuple[float, float]
    own_images: Mapping[str, str]
    smoke: Mapping[str, str]
    has_queue: bool


NETWORKS = {
    "resnet": Network(
        PRETRAIN_CONFIG,
        DETECTION_CONFIG,
        seconds=(200.0, 36.0),
        own_seconds=(240.0, 66.0),
        own_images={
            "AUG.CROP_PX": "64",
            "AUG.CROP_SCALE": "(0.2, 1.0)",
            "AUG.GRAY_PROB": "0.2",
            "SOLVER.MAX_ITERS": "1200",
        },
        smoke=SMOKE_PRETRAIN,
        has_queue=True,
    ),
    "vit": Network(
        CONFIGS / "pretrain" / "quickstart_vit.yaml",
        CONFIGS / "voc" / "quickstart_ViT.yaml",
        seconds=(300.0, 100.0),
        own_seconds=(400.0, 180.0),
        own_images={"AUG.CROP_PX": "96", "AUG.CROP_SCALE": "(0.2, 1.0)", "SOLVER.MAX_ITERS": "500"},
        smoke=SMOKE_PRETRAIN | {"MOCO.K": "16"},
        has_queue=False,
    ),
}


@dataclass(frozen=True)
class Plan:
    """What one call does; everything but the number of seeds is fixed for an output folder.

    Attributes:
        images, voc: the user's folders, or None for generated data.
        smoke: a few iterations of everything, for tests; the numbers mean nothing.
        seeds: trials per row.
        arch: of NETWORKS.
    """

    out: Path
    images: Path | None
    voc: Path | None
    smoke: bool
    seeds: int
    arch: str = "resnet"

    @property
    def network(self) -> Network:
        return NETWORKS[self.arch]

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
            "arch": self.arch,
        }


def make_runs(plan: Plan) -> list[Run]:
    """Everything from the data to the last detector, in the order of starting."""
    images, generate = plan.pretrain_images, "benchmarks.suites.synthetic"
    if plan.images is not None:
        argv = _module("benchmarks.suites.prepare", "images", plan.images, images)
    elif plan.voc is not None:
        argv = _module("benchmarks.suites.prepare", "voc-images", plan.voc, images)
    else:
        argv = _module(generate, images.parent, "--trainval=0")
        argv += SMOKE_IMAGES if plan.smoke else ()
    runs = [step(plan, "images", images, IMAGES_SECONDS, lambda: argv)]
    if plan.voc is None:
        draw = _module(generate, plan.scenes.parent, "--images=0")
        draw += SMOKE_SCENES if plan.smoke else ()
        runs.append(step(plan, "scenes", plan.scenes, SCENES_SECONDS, lambda: draw))

    def convert() -> list[str]:
        newest = plan.pretrain / newest_name(plan.pretrain)
        return _module("convert.convert_to_d2", newest, plan.weights)

    conversion = step(plan, "convert", plan.weights, CONVERT_SECONDS, convert, ("pre-train",))
    from_random, from_moco = detection_runs(plan, RANDOM), detection_runs(plan, "moco")
    return [*runs, pretrain_run(plan), *from_random, conversion, *from_moco]


def step(
    plan: Plan,
    name: str,
    product: Path,
    seconds: float,
    argv: Callable[[], list[str]],
    after: tuple[str, ...] = (),
) -> Run:
    """A run of one step, which makes `product`."""
    folder = plan.out / "steps" / name
    return Run(name, name, folder, argv, (name, "", 0), 0, 1, seconds, after, product)


def pretrain_run(plan: Plan) -> Run:
    """`moco-transfer pretrain`."""
    own = plan.images is not None or plan.voc is not None
    keys: dict[str, object] = {"DATA.ROOT": plan.pretrain_images, "OUTPUT_DIR": plan.pretrain}
    network, knn = plan.network, {"DATA.KNN_ROOT": plan.pretrain_images.with_name("knn")}
    keys |= network.own_images if own else knn
    keys |= network.smoke if plan.smoke else {}

    def argv() -> list[str]:
        length = {}
        if own and network.has_queue and not plan.smoke:
            length["MOCO.K"] = queue_length(len(list(plan.pretrain_images.iterdir())))
        pairs = [part for pair in (keys | length).items() for part in pair]
        flags = ("--resume", "--config-file", network.pretrain)
        return _module("benchmarks", "pretrain", *flags, *pairs)

    seconds, _ = network.own_seconds if own else network.seconds
    iterations = _iterations(network.pretrain, "MAX_ITERS", keys)
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


def detection_runs(plan: Plan, init: str) -> list[Run]:
    """The suite: one task from one of two inits, which differ in MODEL.WEIGHTS; trials in SEED."""
    keys = {"MODEL.DEVICE": "cpu", "DATASETS.VOC_DIR": str(plan.scenes)}
    keys |= OWN_SCENES if plan.voc is not None else {}
    keys |= SMOKE_DETECTION if plan.smoke else {}
    network, config = plan.network, plan.network.detection
    iterations = _iterations(config, "MAX_ITER", keys)
    _, seconds = network.seconds if plan.voc is None else network.own_seconds
    task = SuiteTask(
        config.stem,
        config,
        DETECTION,
        tuple(keys.items()),
        trials=plan.seeds,
        seconds_here=seconds / iterations,
    )
    suite = Suite("quickstart", "", (task,), RANDOM, {})
    inits = {init: Init(RANDOM if init == RANDOM else str(plan.weights), None)}
    after = (() if plan.voc else ("scenes",)) + (() if init == RANDOM else ("convert",))
    runs = []
    for spec in expand(suite, inits, [EMBEDDED], version=project_version()):
        spec = replace(spec, name=f"{init}-{spec.seed}", iterations=iterations)
        folder = plan.out / "runs" / spec.name
        run = make_run(spec, folder, partial(Programs().command, spec, folder))
        # The hash of the weights is not known before they are made.
        expected = {k: v for k, v in run.expected.items() if k != "weights_sha256"}
        title = f"{init} seed {spec.seed}"
        runs.append(replace(run, title=title, expected=expected, after=after))
    return runs


def queue_length(num_images: int) -> int:
    """K for few images: whole batches, at most half the data, so that a key's own image is
    seldom among its negatives."""
    return max(BATCH, min(QUEUE, num_images // 2 // BATCH * BATCH))


def _module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]


def _iterations(config: Path, name: str, keys: Mapping[str, object]) -> int:
    """Length of a run: the override, or what the YAML file says."""
    return int(str(keys.get(f"SOLVER.{name}", read_yaml(config)["SOLVER"][name])))
