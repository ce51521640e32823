"""Goals of detection: the embedded engine against Detectron2, the evaluators, a GPU's levers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speed import engines, evaluators, scenes
from benchmarks.speed.measure import description, every_round, interleaved
from benchmarks.speed.report import Row, duration, faster
from convert.detectron2_backbone import installed
from detection.datasets.layout import DATASETS_VARIABLE

TITLE = "Detection"
ABOUT = """
The embedded engine (ours) ÷ Detectron2 (the reference) in CPU time, both built from the same
task file, with the same weights, on the same batch and from the same random numbers; in turn in one
process, the smallest of all rounds. Small images and few regions keep the network's share small.
An iteration is all that each trainer does for it but reading the images, the optimizer's step and
gradient clipping among it; Detectron2 without the hooks of its trainer. Inference goes as far as
boxes, masks and keypoints in the original image. The images come from each engine's own loader,
without processes of its own.

A goal is met by the ratio rounded to two digits. In brackets the noise: by how much the second
fastest round took longer than the fastest, on the side where that is more.
"""
NEEDS_DETECTRON2, NEEDS_GPU = "needs Detectron2", "needs a GPU"
OURS, REFERENCE = "ours", "reference"

TASKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Faster R-CNN C4, extra BN": ("voc/faster_rcnn_R_50_C4_9k", {}),
    "Faster R-CNN dilated C5": (
        "voc/faster_rcnn_R_50_dilated_C5_24k",
        {"DATASETS.TRAIN": ("voc_2007_trainval",)},
    ),
    "Mask R-CNN FPN": ("coco/mask_rcnn_R_50_FPN_1x", {}),
    "Mask R-CNN C4": ("coco/mask_rcnn_R_50_C4_1x", {}),
    "Keypoint R-CNN FPN": ("coco/keypoint_rcnn_R_50_FPN_2x", {}),
    "FCN-16s": ("voc/fcn16s_R_50_30k", {"INPUT.SEM_SEG_CROP_SIZE": 225}),
}
# The rest of each task is as in its file.
SMALL: Mapping[str, Any] = {
    "MODEL.DEVICE": "cpu",
    "MODEL.RPN.POST_NMS_TOPK_TEST": 50,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 16,
    "INPUT.MIN_SIZE_TRAIN": (200,),
    "INPUT.MIN_SIZE_TEST": 200,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.CLIP_GRADIENTS.ENABLED": True,
    "DATALOADER.NUM_WORKERS": 0,
}
QUICK: Mapping[str, Any] = {
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 8,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 32,
    "MODEL.RESNETS.WIDTH_PER_GROUP": 8,
    "MODEL.FPN.OUT_CHANNELS": 16,
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 50,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 20,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 20,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 16,
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 8,
    "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS": (8, 8),
    "MODEL.SEM_SEG_HEAD.CONVS_DIM": 8,
    "INPUT.MIN_SIZE_TRAIN": (96,),
    "INPUT.MIN_SIZE_TEST": 96,
}
# Whole images at the task's largest size: reading one costs nothing else.
PIPELINE: Mapping[str, Any] = {"MODEL.DEVICE": "cpu", "DATALOADER.NUM_WORKERS": 0}
GPU_KEYS: Mapping[str, Any] = {"SOLVER.AMP.ENABLED": True, "MODEL.CHANNELS_LAST": True}
UNTRIED = "this measurement has never run: no GPU was at hand when it was written"


@dataclass(frozen=True)
class Setting:
    """What to measure with.

    Args:
        scratch: folder for datasets and logs.
        rounds: of each timing.
        quick: tiny sizes.
    """

    scratch: Path
    rounds: int
    quick: bool

    @cached_property
    def datasets(self) -> Path:
        """The folder for $DETECTRON2_DATASETS."""
        root = self.scratch / "datasets"
        scenes.write_datasets(root, 4 if self.quick else 16, mean_objects=7.0)
        return root

    @cached_property
    def pairs(self) -> dict[str, tuple[engines.Side, engines.Side]]:
        """Ours and Detectron2's, by the task's name; built when asked for."""
        return {}

    def pair(self, name: str) -> tuple[engines.Side, engines.Side]:
        """Both engines with the same weights.

        Raises:
            ValueError: they read different images (a fault of an engine).
        """
        if name not in self.pairs:
            config, keys = TASKS[name]
            keys = {**SMALL, **(QUICK if self.quick else {}), **keys}
            folder = self.folder(name)
            with self.data():
                cfg = engines.task_config("embedded", config, keys, folder)
                ours = engines.embedded(cfg)
                cfg = engines.task_config("detectron2", config, keys, folder)
                theirs = engines.detectron2(cfg)
            check_same_images(ours, theirs)
            engines.with_trained_look(ours)
            theirs.model.load_state_dict(ours.model.state_dict())
            self.pairs[name] = ours, theirs
        return self.pairs[name]

    def folder(self, name: str) -> Path:
        """For the log of a task."""
        path = self.scratch / "runs" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def data(self) -> Iterator[None]:
        """While open, the generated datasets are Detectron2's."""
        before = os.environ.get(DATASETS_VARIABLE)
        os.environ[DATASETS_VARIABLE] = str(self.datasets)
        try:
            yield
        finally:
            del os.environ[DATASETS_VARIABLE]
            if before is not None:
                os.environ[DATASETS_VARIABLE] = before

    def description(self) -> list[str]:
        """Hardware, versions, command; sizes."""
        small = ", ".join(f"{key} {value}" for key, value in SMALL.items())
        return [
            *description(self.rounds),
            f"R50, random weights, generated images; the task files with {small}; FCN-16s on "
            f"crops of {TASKS['FCN-16s'][1]['INPUT.SEM_SEG_CROP_SIZE']} px",
        ]


def training(setting: Setting) -> list[Row]:
    """D1."""
    rows = []
    for name in TASKS:
        ours, theirs = setting.pair(name)
        for side in (ours, theirs):
            side.model.train()
        seconds = every_round({REFERENCE: theirs.step, OURS: ours.step}, setting.rounds)
        same = same_weights(ours.model, theirs.model)
        what = f"training iteration, {name}; weights after {setting.rounds + 1} of them {same}"
        rows.append(ratio_row("D1", what, seconds))
    return rows


def inference(setting: Setting) -> list[Row]:
    """D2."""
    rows = []
    for name in TASKS:
        ours, theirs = setting.pair(name)
        for side in (ours, theirs):
            side.model.eval()
        found = ours.infer()
        theirs.model.load_state_dict(ours.model.state_dict())
        same = "equal" if same_prediction(found, theirs.infer()) else "DIFFERENT"
        number = f"{len(found['scores'])} detections" if "scores" in found else "label map"
        seconds = every_round({REFERENCE: theirs.infer, OURS: ours.infer}, setting.rounds)
        what = f"inference of an image, {name}; {number}, {same}"
        rows.append(ratio_row("D2", what, seconds))
    return rows


def pipeline(setting: Setting) -> list[Row]:
    """D3: the generated images once, with the task's largest size in place of a random one."""
    rows = []
    for name in ("Faster R-CNN C4, extra BN", "Mask R-CNN FPN", "Keypoint R-CNN FPN", "FCN-16s"):
        config, keys = TASKS[name]
        crop = {} if name == "FCN-16s" else {"INPUT.MIN_SIZE_TRAIN": (800,)}
        keys = {**PIPELINE, "SOLVER.IMS_PER_BATCH": 4, **crop, **keys}
        keys.pop("INPUT.SEM_SEG_CROP_SIZE", None)
        with setting.data():
            folder = setting.folder(name)
            cfg = engines.task_config("embedded", config, keys, folder)
            ours = engines.embedded_batches(cfg)
            count = len(list((setting.datasets / "images").iterdir())) // cfg.SOLVER.IMS_PER_BATCH
            theirs = engines.detectron2_batches(
                engines.task_config("detectron2", config, keys, folder)
            )
            contenders = {
                REFERENCE: partial(_fetch, theirs, count),
                OURS: partial(_fetch, ours, count),
            }
            seconds = every_round(contenders, setting.rounds)
        images = count * cfg.SOLVER.IMS_PER_BATCH
        seconds = {side: [value / images for value in all_] for side, all_ in seconds.items()}
        rows.append(ratio_row("D3", f"a training image, {name}", seconds))
    return rows


def evaluation(setting: Setting) -> list[Row]:
    """C9."""
    folder = setting.folder("evaluation")
    images = 30 if setting.quick else 4952
    rows = [evaluators.voc_row(images, 3 if setting.quick else 20, folder, setting.rounds)]
    images = 8 if setting.quick else 1000
    return rows + evaluators.coco_rows(images, 30, folder, setting.rounds)


def gpu_training(setting: Setting) -> list[Row]:
    """G9: VOC C4 as the paper trains it, a GPU's share of its batch."""
    config, _ = TASKS["Faster R-CNN C4, extra BN"]
    plain: dict[str, Any] = {
        "MODEL.DEVICE": "cuda",
        "INPUT.MIN_SIZE_TRAIN": (800,),
        "SOLVER.IMS_PER_BATCH": 2,
        "DATALOADER.NUM_WORKERS": 0,
        **(QUICK if setting.quick else {}),
    }
    fast = {**plain, **GPU_KEYS}
    folder = setting.folder("gpu")
    with setting.data():
        sides = {
            REFERENCE: engines.detectron2(engines.task_config("detectron2", config, plain, folder)),
            "detectron2": engines.detectron2(
                engines.task_config("detectron2", config, fast, folder)
            ),
            "embedded": engines.embedded(engines.task_config("embedded", config, fast, folder)),
        }
    for side in sides.values():
        side.model.train()
    steps = {name: side.step for name, side in sides.items()}
    seconds = interleaved(steps, setting.rounds, "cuda")
    what = "training iteration, VOC C4 at 800 px, 2 images, AMP and channels_last, engine"
    return [
        replace(faster("G9", f"{what} {name}", seconds, REFERENCE, name, 1.3), note=UNTRIED)
        for name in ("embedded", "detectron2")
    ]


GOALS: Mapping[str, Callable[[Setting], list[Row]]] = {
    "D1": training,
    "D2": inference,
    "D3": pipeline,
    "C9": evaluation,
    "G9": gpu_training,
}
WITH_DETECTRON2 = {
    "D1": "training iteration ÷ Detectron2's",
    "D2": "inference of an image ÷ Detectron2's",
    "D3": "a training image ÷ Detectron2's",
    "G9": "training iteration with AMP and channels_last ÷ Detectron2's default",
}


def measure(setting: Setting, goals: Sequence[str]) -> list[Row]:
    """The rows of these goals, with progress on the terminal."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    start = time.monotonic()
    for goal in goals:
        print(f"{time.monotonic() - start:4.0f} s  {goal} ...", flush=True)
        if goal == "G9" and not torch.cuda.is_available():
            rows.append(Row(goal, f"{WITH_DETECTRON2[goal]}: {NEEDS_GPU}", note=UNTRIED))
        elif goal in WITH_DETECTRON2 and not installed():
            rows.append(Row(goal, f"{WITH_DETECTRON2[goal]}: {NEEDS_DETECTRON2}"))
        else:
            rows += GOALS[goal](setting)
    return rows


def ratio_row(goal: str, what: str, seconds: Mapping[str, Sequence[float]]) -> Row:
    """Ours ÷ the reference's, at most 1.00; `seconds`: of each side all rounds."""
    best = {side: min(values) for side, values in seconds.items()}
    ratio = best[OURS] / best[REFERENCE]
    noise = max(second_fastest(values) / min(values) - 1 for values in seconds.values())
    return Row(
        goal,
        what,
        duration(best[OURS]),
        duration(best[REFERENCE]),
        f"{ratio:.3f} ({noise:.1%})",
        "<= 1.00",
        round(ratio, 2) <= 1.0 and "DIFFERENT" not in what,
    )


def second_fastest(values: Sequence[float]) -> float:
    """The only one, if there is one."""
    return sorted(values)[:2][-1]


def _fetch(batches: Iterator[Any], count: int) -> None:
    for _ in islice(batches, count):
        pass


def check_same_images(ours: engines.Side, theirs: engines.Side) -> None:
    """Raise ValueError where the engines' loaders give different images."""
    for mine, other in (
        (ours.train_batch, theirs.train_batch),
        (ours.test_batch, theirs.test_batch),
    ):
        for a, b in zip(mine, other, strict=True):
            if not torch.equal(a["image"], b["image"]):
                raise ValueError(f"the engines read {a['file_name']} and {b['file_name']}")


def same_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> str:
    """ "equal" to the last bit, or "DIFFERENT"."""
    a, b = ours.state_dict(), theirs.state_dict()
    same = set(a) == set(b) and all(torch.equal(value, b[name]) for name, value in a.items())
    return "equal" if same else "DIFFERENT"


def same_prediction(a: Any, b: Any) -> bool:
    """To the last bit."""
    if set(a) != set(b):
        return False
    return all(
        np.array_equal(value, b[name]) if isinstance(value, np.ndarray) else value == b[name]
        for name, value in a.items()
    )
