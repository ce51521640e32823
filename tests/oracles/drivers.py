"""The commands that train, on tiny data, for tests/test_stop_and_resume.py."""

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.detection.conftest import write_layouts
from tests.moco.classification.classify_runs import words as classify
from tests.moco.classification.classify_runs import write_labeled, write_pretrained
from tests.moco.conftest import options as pretrain_options
from tests.oracles import small_tasks
from tests.oracles.commands import AGENT, ROOT, TORCHRUN
from tests.oracles.tiny_voc import write_voc


@dataclass(frozen=True)
class Driver:
    """A command, and what the scenarios have to know of it.

    Attributes:
        words: of a tiny run in the folder `run`, given the folder of the data.
        train: a read of an image in the middle of the training, given that of a process's start.
        test: one of an evaluation before the last, or None.
        takes_file: whether --resume takes a file, and refuses another number of processes.
        steps: of the run.
        changes: words that make it another run → what the refusal says.
    """

    name: str
    words: Callable[[Path], list[str]]
    train: tuple[str, int] | tuple[str, int, str]
    test: tuple[str, int] | None
    takes_file: bool
    steps: int
    changes: dict[tuple[str, ...], str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def command(self, data: Path, *more: str) -> list[str]:
        words = [*self.launcher, *self.words(data), *self.flags, *more]
        return [word.format(data=data) for word in words]

    def param(self) -> Any:
        marks = [pytest.mark.detectron2] if "detectron2" in self.name else []
        return pytest.param(self, id=self.name, marks=marks)


def pretraining(data: Path, **changes: object) -> list[str]:
    where = {"DATA__ROOT": data / "images", "DATA__KNN_ROOT": data / "labeled", "OUTPUT_DIR": "run"}
    knn = {"KNN__EVERY_EPOCHS": 1, "KNN__K": 3, "KNN__RESIZE_PX": 16, "KNN__CROP_PX": 16}
    return [
        "benchmarks",
        "pretrain",
        *pretrain_options(**{**where, **knn, "LOG__EVERY_ITERS": 3, **changes}),
    ]


def classification(program: str, data: Path, **changes: object) -> list[str]:
    keys = {"LOG__EVERY_ITERS": 3, "SOLVER__BASE_LR": 0.1, "SOLVER__MAX_EPOCHS": 4, **changes}
    words = classify(Path("run"), data / "labeled", data / "moco.pth", **keys)
    return ["benchmarks", program, *words]


def detection(engine: str, data: Path, **changes: object) -> list[str]:
    keys = small_tasks.SMALL_VOC | {
        "MODEL.WEIGHTS": data / "narrow_r18.pth",
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,  # a quarter; the task's file says 64
        "DATASETS.VOC_DIR": data / "shapes",
        "INPUT.MIN_SIZE_TRAIN": "(64, 80, 96)",  # an image that waits has been sampled before
        "SOLVER.MAX_ITER": 8,
        "SOLVER.STEPS": "(6,)",
        "SOLVER.CHECKPOINT_PERIOD": 3,
        "TEST.EVAL_PERIOD": 3,
        "DATALOADER.NUM_WORKERS": 0,
        "OUTPUT_DIR": "run",
    }
    return task("voc/faster_rcnn_R_18_C4_small", engine, keys | unfolded(changes))


def variant(name: str, engine: str, data: Path, **changes: object) -> list[str]:
    """Four iterations of a task of the paper on tiny data."""
    weights = "random" if "ViT" in name else data / "narrow_r50.pth"
    keys = small_tasks.options(name) | {"MODEL.WEIGHTS": weights, "OUTPUT_DIR": "run"}
    keys |= {"SOLVER.MAX_ITER": 5, "SOLVER.STEPS": "(3,)", "SOLVER.CHECKPOINT_PERIOD": 2}
    return task(name, engine, keys | unfolded(changes))


def task(name: str, engine: str, keys: dict[str, object]) -> list[str]:
    file = ROOT / "configs" / f"{name}.yaml"
    pairs = [str(word) for pair in keys.items() for word in pair]
    return ["detection.train_net", "--config-file", str(file), "--engine", engine, *pairs]


def unfolded(changes: dict[str, object]) -> dict[str, object]:
    return {key.replace("__", "."): value for key, value in changes.items()}


def suite(data: Path) -> list[str]:
    """Return the arguments of a suite of two linear classifications, one after the other."""
    words = [
        "benchmarks.run_suite",
        str(data / "suite.yaml"),
        "--init",
        f"mine={data / 'moco.pth'}",
    ]
    return [*words, "--output", "run", "--executor", "cpu", "--workers", "1"]


OTHER_KEYS = {
    ("SOLVER.MOMENTUM", "0.5"): "SOLVER.MOMENTUM",
    ("DATA.ROOT", "{data}/fewer"): "fewer: has",
}
FROM_WEIGHTS = {("MODEL.WEIGHTS", "{data}/moco.pth"): "MODEL.WEIGHTS"}
OTHER_WEIGHTS = {("--checkpoint", "{data}/other.pth"): "trained with other weights_sha256"}
OTHER_TASK = {
    ("SOLVER.GAMMA", "0.5"): "SOLVER.GAMMA",
    ("MODEL.WEIGHTS", "{data}/other_r18.pth"): "started from",
}
IMAGE = "JPEGImages/0000"
PRETRAIN = Driver(
    "pretrain", pretraining, ("/images/", 12), ("/val/", 10), True, 8, OTHER_KEYS | FROM_WEIGHTS
)
LINEAR, FINETUNE = (
    Driver(
        name,
        functools.partial(classification, name),
        ("/train/", 12),
        ("/val/", 10),
        True,
        8,
        OTHER_KEYS | OTHER_WEIGHTS,
    )
    for name in ("linear", "finetune")
)
EMBEDDED, DETECTRON2 = (
    Driver(
        engine,
        functools.partial(detection, engine),
        (IMAGE, 12),
        (f"{IMAGE}08", 2),
        False,
        8,
        OTHER_TASK,
    )
    for engine in ("embedded", "detectron2")
)
TRAININGS = [driver.param() for driver in (PRETRAIN, LINEAR, FINETUNE, EMBEDDED, DETECTRON2)]
SAVING = [driver.param() for driver in (PRETRAIN, EMBEDDED)]  # the others save as these do
# Read by one of two processes after their first step, before which the other may still be starting.
# Pre-training and fine-tuning share their loop, and both engines their trainer.
TWO = [
    replace(PRETRAIN, name="pretrain, torchrun", launcher=TORCHRUN, train=("/images/", 15)),
    replace(EMBEDDED, name="embedded, as torchrun", launcher=AGENT, train=(IMAGE, 12)),
    replace(EMBEDDED, name="embedded, two", flags=("--num-gpus", "2"), train=(IMAGE, 9)),
]
V3 = {"MOCO__MECHANISM": "moco_v3", "MOCO__K": 8, "MOCO__BN_SPLITS": 1, "MOCO__SYMMETRIC": True}
ADAMW = {"SOLVER__OPTIMIZER": "AdamW", "SOLVER__BASE_LR": 1e-3, "SOLVER__LR_DECAY": 0.8}
ADAMW |= {"SOLVER__LR_SCHEDULER_NAME": "WarmupCosineLR"}
MECHANISMS = {
    "end to end": {"MOCO__MECHANISM": "end_to_end", "MOCO__K": 8},
    "memory bank": {"MOCO__MECHANISM": "memory_bank", "MOCO__K": 12},
    "v3, lars": {**V3, "MOCO__MLP_DIM": 32, "SOLVER__OPTIMIZER": "lars"},
    "bf16": {"SOLVER__PRECISION": "bf16", "SOLVER__CHANNELS_LAST": True, "AUG__KIND": "v2"},
    "fp16": {"SOLVER__PRECISION": "fp16"},
    "from weights": {"MODEL__WEIGHTS": "{data}/moco.pth"},
}
TASKS = {  # of every architecture that is not C4, and every way to sample and group images
    ("coco/mask_rcnn_R_50_FPN_1x", "embedded"): {},
    ("coco/keypoint_rcnn_R_50_FPN_2x", "embedded"): {},
    ("coco/retinanet_R_50_FPN_90k", "embedded"): {},
    ("voc/fcn16s_R_50_30k", "embedded"): {"DATALOADER__NUM_WORKERS": 2},
    ("lvis/mask_rcnn_R_50_FPN_1x", "embedded"): {"DATALOADER__REPEAT_THRESHOLD": 0.9},
    ("coco/mask_rcnn_ViT_B_100ep", "embedded"): {},
    ("coco/mask_rcnn_ViT_B_FPN_25ep", "embedded"): {"SOLVER__PRECISION": "bf16"},
    ("coco/retinanet_R_50_FPN_90k", "detectron2"): {"DATALOADER__NUM_WORKERS": 2},
    ("coco/mask_rcnn_ViT_B_FPN_25ep", "detectron2"): {"SOLVER__PRECISION": "bf16"},
}
VARIANTS = [
    replace(
        PRETRAIN,
        name="workers",
        words=functools.partial(pretraining, DATA__NUM_WORKERS=2),
        train=("run/metrics.json", 1, "change"),
    ),
    *(
        replace(PRETRAIN, name=name, words=functools.partial(pretraining, **keys))
        for name, keys in MECHANISMS.items()
    ),
    *(
        replace(
            EMBEDDED if engine == "embedded" else DETECTRON2,
            name=f"{name}, {engine}",
            words=functools.partial(variant, name, engine, **keys),
            train=("run/last_checkpoint", 1, "change"),
        )
        for (name, engine), keys in TASKS.items()
    ),
    *(
        replace(
            driver,
            name=f"{driver.name}, AdamW",
            words=functools.partial(detection, driver.name, **ADAMW),
        )
        for driver in (EMBEDDED, DETECTRON2)
    ),
]


def write_data(folder: Path) -> Path:
    """Write what the drivers read."""
    write_labeled(folder / "labeled")
    shutil.copytree(folder / "labeled" / "train", folder / "images")
    fewer = shutil.copytree(folder / "labeled", folder / "fewer")
    for path in (fewer / "train" / "red").iterdir():
        path.unlink()
    shutil.copy(folder / "labeled/train/blue/00.png", fewer / "train" / "red")
    write_voc(folder / "shapes", {"trainval": 6, "test": 3})
    write_layouts(folder / "layouts")
    state = torch.load(write_pretrained(folder / "moco.pth"), weights_only=True)
    state["state_dict"]["module.encoder_q.conv1.weight"] += 1
    torch.save(state, folder / "other.pth")
    for depth in (50, 18):
        path = small_tasks.narrow_file(depth, folder)
    state = torch.load(path, weights_only=True)
    state["model"]["stem.conv1.weight"] += 1
    torch.save(state, folder / "other_r18.pth")
    keys = {"AUG.CROP_PX": 16, "SOLVER.BATCH_SIZE": 8, "SOLVER.MAX_EPOCHS": 4}
    keys |= {"SOLVER.MILESTONES_EPOCHS": [1], "EVAL.RESIZE_PX": 16, "EVAL.CROP_PX": 16}
    keys |= {"DATA.ROOT": str(folder / "labeled"), "DATA.NUM_WORKERS": 0, "LOG.EVERY_ITERS": 3}
    linear = {"config": str(ROOT / "configs/imagenet/linear.yaml"), "program": "linear"}
    content = {"name": "s", "title": "S", "trials": 2, "tasks": [{**linear, "overrides": keys}]}
    (folder / "suite.yaml").write_text(yaml.safe_dump(content))
    return folder
