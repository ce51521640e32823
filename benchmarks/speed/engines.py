"""One training iteration, one image's inference, one batch of images: of either engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from fvcore.nn.precise_bn import update_bn_stats
from torch import nn

from detection.config.task import load_task
from moco.engine.stop import StopRequest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SEED = 0
# Of the classifier's first weights, to give some tens of detections per image.
SCORE_SCALE = 20.0
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


def task_config(engine: str, config: str, keys: dict[str, Any], folder: Path) -> CfgNode:
    """`configs/<config>.yaml` with other values, checked as for training."""
    given = {"MODEL.WEIGHTS": "random", "OUTPUT_DIR": folder, "SEED": SEED, **keys}
    opts = [str(item) for pair in given.items() for item in pair]
    return load_task(CONFIGS / f"{config}.yaml", opts, engine).cfg


def embedded(cfg: CfgNode) -> Side:
    """This project's own engine; its log goes to OUTPUT_DIR."""
    from detection.datasets import read_split
    from detection.embedded.build import build_model
    from detection.embedded.evaluate import to_prediction
    from detection.embedded.pipeline import build_evaluation
    from detection.embedded.trainer import Trainer
    from detection.modeling.norms import with_process_norms

    cfg = with_process_norms(cfg, 1)
    torch.manual_seed(cfg.SEED)
    model = build_model(cfg)
    train_batch = next(embedded_batches(cfg))
    test_batch = next(build_evaluation(cfg, read_split(cfg.DATASETS.TEST[0], cfg).records))
    trainer = Trainer(cfg, model, StopRequest())
    numbers, batches = itertools.count(), itertools.repeat(train_batch)

    def step() -> None:
        torch.manual_seed(cfg.SEED)
        trainer.step(next(numbers), batches)

    def infer() -> Any:
        with torch.no_grad():
            return to_prediction(model(test_batch)[0])

    return Side(model, step, infer, train_batch)


def embedded_batches(cfg: CfgNode) -> Batches:
    """Training batches without end."""
    from detection.embedded.pipeline import build_training

    return build_training(cfg, num_workers=0)


def detectron2(cfg: CfgNode) -> Side:
    """Detectron2's model, loaders, optimizer and inner loop."""
    from detection.d2.data import build_test_loader, register, to_prediction
    from detection.d2.measured import training_step

    train_batch = next(detectron2_batches(cfg))
    register(cfg, cfg.DATASETS.TEST)
    test_batch = next(iter(build_test_loader(cfg, cfg.DATASETS.TEST[0])))
    model, iteration = training_step(cfg, train_batch)

    def step() -> None:
        torch.manual_seed(cfg.SEED)
        iteration()

    def infer() -> Any:
        with torch.no_grad():
            return to_prediction(model(test_batch)[0])

    return Side(model, step, infer, train_batch)


def detectron2_batches(cfg: CfgNode) -> Batches:
    """Training batches without end, from Detectron2's own loader."""
    from detection.d2.measured import training_batches

    return training_batches(cfg)


BUILD = {"embedded": embedded, "detectron2": detectron2}
BATCHES = {"embedded": embedded_batches, "detectron2": detectron2_batches}


def imitate_training(side: Side) -> None:
    """Statistics of BN as they are on images, and scores that differ from each other (in place).

    What a network at random does not have: its maps grow from block to block, and no detection
    passes the threshold.
    """
    side.model.train()
    update_bn_stats(side.model, [side.train_batch] * 2, 2)
    for name, parameter in side.model.named_parameters():
        if name.endswith("cls_score.weight"):
            parameter.data.mul_(SCORE_SCALE)
