"""Plain Detectron2 as the baseline of benchmarks/speed: `DefaultTrainer` and its data loader.

Datasets and backbones are those of the task.
"""

from collections.abc import Callable, Iterable
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import build_detection_train_loader
from detectron2.engine import DefaultTrainer
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage

from detection.d2.catalog import register
from detection.d2.config import with_builder
from detection.modeling.norms import with_process_norms


def training_iteration(cfg: CfgNode) -> Callable[[], None]:
    """Start a training on one process and return a function that runs one whole iteration.

    An iteration includes data loading, the optimizer's step and the hooks.
    """
    register(cfg, (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))
    seed_all_rng(cfg.SEED)
    trainer = DefaultTrainer(with_builder(with_process_norms(cfg, 1)))
    trainer.iter = 0
    with EventStorage(0) as trainer.storage:
        trainer.before_train()

    def step() -> None:
        with trainer.storage:
            trainer.before_step()
            trainer.run_step()
            trainer.after_step()
        trainer.iter += 1

    return step


def training_loader(cfg: CfgNode) -> Iterable[Any]:
    """Build Detectron2's training data loader of the task."""
    register(cfg, cfg.DATASETS.TRAIN)
    seed_all_rng(cfg.SEED)
    loader: Iterable[Any] = build_detection_train_loader(cfg)
    return loader
