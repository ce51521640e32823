"""A split through the detector: predictions on disk, metrics in hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from detection.datasets.base import Record, Split
from detection.embedded.data import evaluation_batches
from detection.embedded.model import Detector
from detection.evaluators import Prediction, build_evaluator
from detection.visualize import Visualizer
from moco.progress import Progress


def evaluate(model: Detector, split: Split, cfg: CfgNode, folder: Path) -> dict[str, float]:
    """Metrics in canonical names, AP in 0..100. The model's mode stays as it was.

    The predictions go to `folder`/<split>.json, boxes in pixels of the original pictures.
    """
    evaluator = build_evaluator(split, cfg, folder)
    with Progress(len(split.records), f"evaluate {split.name}", unit="img") as progress:
        for record, prediction in _predictions(model, split.records, cfg):
            evaluator.add(record, prediction)
            progress.update()
    return evaluator.evaluate()


def draw_predictions(
    model: Detector, split: Split, cfg: CfgNode, folder: Path, number: int
) -> Path:
    """Draw what `model` finds on `number` pictures, spread over the split; returns the folder."""
    visualizer = Visualizer(folder / "visualize", number, split)
    for record, prediction in _predictions(model, visualizer.records, cfg):
        visualizer.add(record, prediction)
    return folder / "visualize"


def _predictions(model: Detector, records: Sequence[Record], cfg: CfgNode) -> Any:
    batches = evaluation_batches(
        records,
        short_edge_px=cfg.INPUT.MIN_SIZE_TEST,
        max_size_px=cfg.INPUT.MAX_SIZE_TEST,
        channel_order=cfg.INPUT.FORMAT,
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )
    was_training = model.training
    model.eval()
    waiting = iter(records)
    with closing(batches), torch.no_grad():
        for samples in batches:
            for found in model(samples):
                prediction: Prediction = {
                    name: found[name].cpu().numpy() for name in ("boxes", "scores", "classes")
                }
                yield next(waiting), prediction
    model.train(was_training)
