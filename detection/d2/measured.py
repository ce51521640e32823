"""Detectron2's side of benchmarks/speed/: plain, or as this project runs it.

Plain: `DefaultTrainer` and Detectron2's loader, with the datasets and backbones of the task.
"""

from collections.abc import Callable, Iterable
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import build_detection_train_loader
from detectron2.engine import DefaultTrainer
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage

from detection.d2.config import with_builder
from detection.d2.data import build_train_loader, register
from detection.d2.trainer import CustomTrainer, Trainer
from detection.modeling.norms import with_process_norms


def training_iteration(cfg: CfgNode, *, plain: bool) -> Callable[[], None]:
    """Return one whole iteration of a new training on one process: loader, step, hooks."""
    register(cfg, (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))
    cfg = with_builder(with_process_norms(cfg, 1))
    kind: type[DefaultTrainer] = CustomTrainer if cfg.SOLVER.PRECISION == "bf16" else Trainer
    seed_all_rng(cfg.SEED)
    trainer = DefaultTrainer(cfg) if plain else kind(cfg)
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


def training_loader(cfg: CfgNode, *, plain: bool, start: int = 0) -> Iterable[Any]:
    """Return training batches from iteration `start` on, where plain Detectron2 has only 0."""
    register(cfg, cfg.DATASETS.TRAIN)
    seed_all_rng(cfg.SEED)
    if plain:
        plain_loader: Iterable[Any] = build_detection_train_loader(cfg)
        return plain_loader
    loader = build_train_loader(cfg)
    done = start * cfg.SOLVER.IMS_PER_BATCH
    loader.load_state_dict({**loader.state_dict(), "done": done})
    return loader
