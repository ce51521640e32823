"""Goals of detection: the embedded engine against Detectron2, the evaluators, a GPU's levers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from fvcore.common.config import CfgNode
from fvcore.nn.precise_bn import update_bn_stats
from torch import nn

from benchmarks.speed import evaluators, scenes
from benchmarks.speed.measure import Setting, every_round, interleaved
from benchmarks.speed.results import Result, Run, compare, with_noise
from detection.config.task import load_task
from detection.datasets.layout import DATASETS_VARIABLE

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
KEYS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("tasks.yaml").read_text(encoding="utf-8")
)
WARMUP_ITERS = 3  # after which the weights are compared
SCORE_SCALE = 20.0  # of the classifier's first weights, to give some tens of detections per image
VOC_C4, FCN, VIT_B = "Faster R-CNN C4, extra BN", "FCN-16s", "Faster R-CNN ViT-B, 320 px"
LOADED = (VOC_C4, "Mask R-CNN FPN", "Keypoint R-CNN FPN", FCN)
ENGINES = {"ours": "embedded", "reference": "detectron2"}
Batches = Iterator[list[dict[str, Any]]]


@dataclass(frozen=True)
class Side:
    """An engine with a model.

    Attributes:
        step: one training iteration on `train_batch`, as far as the fetch: losses, gradients,
            clipping, optimizer, schedule, log.
        infer: one image's prediction in the form that both engines share.
    """

    model: nn.Module
    step: Callable[[], None]
    infer: Callable[[], Any]
    train_batch: list[dict[str, Any]]


def task_config(setting: Setting, engine: str, *keys: Mapping[str, Any]) -> CfgNode:
    """A task of tasks.yaml with other values, the last ones counting, checked as for training."""
    given = {"MODEL.WEIGHTS": "random", "OUTPUT_DIR": setting.scratch, "SEED": 0}
    for each in keys:
        given |= each
    path = CONFIGS / f"{given.pop('config')}.yaml"
    return load_task(path, [str(item) for pair in given.items() for item in pair], engine).cfg


def build_side(cfg: CfgNode, engine: str) -> Side:
    """The engine with a new model from SEED; the embedded one logs to OUTPUT_DIR."""
    train_batch = next(training_batches(cfg, engine))
    model: nn.Module
    to_prediction: Callable[[Any], Any]
    if engine == "embedded":
        from detection.datasets import read_split
        from detection.embedded import evaluate
        from detection.embedded.build import build_model
        from detection.embedded.pipeline import build_evaluation
        from detection.embedded.trainer import Trainer
        from detection.modeling.norms import with_process_norms
        from moco.engine.stop import StopRequest

        cfg = with_process_norms(cfg, 1)
        test_batch = next(build_evaluation(cfg, read_split(cfg.DATASETS.TEST[0], cfg).records))
        torch.manual_seed(cfg.SEED)
        model, to_prediction = build_model(cfg), evaluate.to_prediction
        trainer = Trainer(cfg, model, StopRequest())
        numbers, batches = itertools.count(), itertools.repeat(train_batch)

        def iteration() -> None:
            trainer.step(next(numbers), batches)
    else:
        from detection.d2 import data
        from detection.d2.measured import training_step

        data.register(cfg, cfg.DATASETS.TEST)
        test_batch = next(iter(data.build_test_loader(cfg, cfg.DATASETS.TEST[0])))
        model, iteration = training_step(cfg, train_batch)
        to_prediction = data.to_prediction

    def step() -> None:
        torch.manual_seed(cfg.SEED)
        iteration()

    def infer() -> Any:
        with torch.no_grad():
            return to_prediction(model(test_batch)[0])

    return Side(model, step, infer, train_batch)


def training_batches(cfg: CfgNode, engine: str) -> Batches:
    """Training batches without end, from the engine's own loader."""
    if engine == "embedded":
        from detection.embedded.pipeline import build_training

        return build_training(cfg, num_workers=0)
    from detection.d2 import measured

    return measured.training_batches(cfg)


@contextmanager
def generated_datasets(setting: Setting) -> Iterator[int]:
    """While open, $DETECTRON2_DATASETS has the generated ones; the number of their images."""
    before = os.environ.get(DATASETS_VARIABLE)
    root = _datasets(setting)
    os.environ[DATASETS_VARIABLE] = str(root)
    try:
        yield len(list((root / "images").iterdir()))
    finally:
        del os.environ[DATASETS_VARIABLE]
        if before is not None:
            os.environ[DATASETS_VARIABLE] = before


@cache
def _datasets(setting: Setting) -> Path:
    root = setting.scratch / "datasets"
    scenes.write_datasets(root, 4 if setting.quick else 16)
    return root


@cache
def pair(setting: Setting, name: str) -> tuple[Side, Side]:
    """The embedded engine and Detectron2 with a task of tasks.yaml and the same weights.

    Statistics of BN are as on images, and scores differ from each other, what a network at random
    does not have: its maps grow from block to block, and no detection passes the threshold.
    """
    keys = (KEYS["small"], KEYS["quick"] if setting.quick else {}, KEYS["tasks"][name])
    with generated_datasets(setting):
        ours, theirs = (
            build_side(task_config(setting, engine, *keys), engine) for engine in ENGINES.values()
        )
    ours.model.train()
    update_bn_stats(ours.model, [ours.train_batch] * 2, 2)
    for parameter_name, parameter in ours.model.named_parameters():
        if parameter_name.endswith("cls_score.weight"):
            parameter.data.mul_(SCORE_SCALE)
    theirs.model.load_state_dict(ours.model.state_dict())
    return ours, theirs


def training(setting: Setting) -> list[Result]:
    """Iterations of both trainers."""
    rows = []
    for name in KEYS["tasks"]:
        ours, theirs = pair(setting, name)
        for side in (ours, theirs):
            side.model.train()
            for _ in range(WARMUP_ITERS):
                side.step()
        differs = not same(ours.model.state_dict(), theirs.model.state_dict())
        seconds = every_round({"ours": ours.step, "reference": theirs.step}, setting.rounds)
        sizes = f"{name}; weights after {WARMUP_ITERS} of them compared"
        rows.append(with_noise("training", seconds, sizes, differs))
    return rows


def inference(setting: Setting) -> list[Result]:
    """Inference, from an image to detections."""
    rows = []
    for name in KEYS["tasks"]:
        ours, theirs = pair(setting, name)
        theirs.model.load_state_dict(ours.model.state_dict())
        for side in (ours, theirs):
            side.model.eval()
        found = ours.infer()
        differs = not same(found, theirs.infer())
        number = f"{len(found['scores'])} detections" if "scores" in found else "label map"
        seconds = every_round({"ours": ours.infer, "reference": theirs.infer}, setting.rounds)
        rows.append(with_noise("inference", seconds, f"{name}; {number} compared", differs))
    return rows


def loading(setting: Setting) -> list[Result]:
    """The generated images once."""

    def fetch(batches: Batches, count: int) -> None:
        for _ in itertools.islice(batches, count):
            pass

    rows = []
    for name in LOADED:
        # Whole images at the task's largest size, in place of a random one; crops have their own.
        size = {"INPUT.MIN_SIZE_TRAIN": [800]} if name != FCN else {}
        contenders = {}
        with generated_datasets(setting) as count:
            for side, engine in ENGINES.items():
                keys = (KEYS["tasks"][name], KEYS["loading"], size)
                cfg = task_config(setting, engine, *keys)
                batches = training_batches(cfg, engine)
                contenders[side] = partial(fetch, batches, count // cfg.SOLVER.IMS_PER_BATCH)
            found = every_round(contenders, setting.rounds)
        seconds = {side: [value / count for value in all_] for side, all_ in found.items()}
        rows.append(with_noise("loading", seconds, name))
    return rows


def evaluation(setting: Setting) -> list[Result]:
    """The evaluators."""
    voc, coco = ((30, 3), (8, 30)) if setting.quick else ((4952, 20), (1000, 30))
    rows = [evaluators.voc_row(*voc, setting.scratch, setting.rounds)]
    return rows + evaluators.coco_rows(*coco, setting.scratch, setting.rounds)


def gpu_training(setting: Setting) -> list[Result]:
    """Iterations on a GPU with the fast settings."""
    plain = (KEYS["tasks"][VOC_C4], KEYS["gpu"], KEYS["quick"] if setting.quick else {})
    fast = (*plain, KEYS["fast"])
    contenders = {"default": plain, "detectron2": fast, "embedded": fast}
    steps = {}
    with generated_datasets(setting):
        for name, keys in contenders.items():
            engine = "detectron2" if name == "default" else name
            side = build_side(task_config(setting, engine, *keys), engine)
            side.model.train()
            steps[name] = side.step
    seconds = interleaved(steps, setting.rounds, "cuda")
    return [
        compare("gpu_training", seconds, name, "default", f"engine {name}")
        for name in ("embedded", "detectron2")
    ]


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Bitwise identical, be they tensors, arrays or lists."""
    return set(a) == set(b) and all(
        np.array_equal(value, b[name])
        if isinstance(value, np.ndarray | torch.Tensor)
        else value == b[name]
        for name, value in a.items()
    )


GOALS: dict[str, Run | None] = {
    "training": training,
    "inference": inference,
    "loading": loading,
    "evaluation": evaluation,
    "gpu_training": gpu_training,
}
