"""What is measured of Detectron2 (benchmarks/speed/): its loop, its loader and its VOC metric."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import build_detection_train_loader
from detectron2.evaluation.pascal_voc_evaluation import voc_eval as voc_eval
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from torch import nn

from detection.d2.config import with_builder
from detection.d2.data import build_mapper, register
from detection.d2.trainer import Trainer, inner_loop
from detection.modeling.norms import with_process_norms


def training_step(
    cfg: CfgNode, batch: Sequence[dict[str, Any]]
) -> tuple[nn.Module, Callable[[], None]]:
    """A new model from SEED, and one iteration of its training on one process, always on `batch`.

    The iteration is Detectron2's own inner loop with its schedule, and without the hooks of its
    trainer, which log, evaluate and save.
    """
    cfg = with_builder(with_process_norms(cfg, 1))
    torch.manual_seed(cfg.SEED)
    model = Trainer.build_model(cfg)
    optimizer = Trainer.build_optimizer(cfg, model)
    schedule = Trainer.build_lr_scheduler(cfg, optimizer)
    trainer = inner_loop(cfg)(model, itertools.repeat(batch), optimizer)
    storage = EventStorage()

    def step() -> None:
        with storage:
            trainer.iter = storage.iter
            trainer.run_step()
            schedule.step()
            storage.step()

    return model, step


def training_batches(cfg: CfgNode) -> Iterator[list[dict[str, Any]]]:
    """Batches without end from Detectron2's own loader, from the first one of SEED on."""
    register(cfg, cfg.DATASETS.TRAIN)
    loader = build_detection_train_loader(cfg, mapper=build_mapper(cfg, training=True))
    seed_all_rng(cfg.SEED)
    return iter(loader)
