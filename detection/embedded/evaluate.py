"""A split through the detector: predictions on disk, VOC metrics in hand."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from detection.datasets import VOCSplit, ground_truth, records
from detection.embedded.data import evaluation_batches
from detection.embedded.model import Detector
from detection.predictions import rows, write
from detection.voc_eval import VOCDetections
from detection.voc_eval import evaluate as voc_metrics
from moco.progress import Progress


def evaluate(model: Detector, split: VOCSplit, cfg: CfgNode, folder: Path) -> dict[str, float]:
    """Metrics in canonical names, AP in 0..100. The model's mode stays as it was.

    The predictions go to `folder`/<split>.json, boxes XYXY in pixels of the original pictures,
    0-based.
    """
    batches = evaluation_batches(
        records(split),
        short_edge_px=cfg.INPUT.MIN_SIZE_TEST,
        max_size_px=cfg.INPUT.MAX_SIZE_TEST,
        channel_order=cfg.INPUT.FORMAT,
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )
    detections = VOCDetections(len(split.classes))
    predictions: list[dict[str, Any]] = []
    was_training = model.training
    model.eval()
    with (
        closing(batches),
        torch.no_grad(),
        Progress(len(split.images), f"evaluate {split.name}", unit="img") as progress,
    ):
        for samples in batches:
            for sample, found in zip(samples, model(samples), strict=True):
                image_id = str(sample["image_id"])
                boxes, scores, classes = (
                    found[name].cpu().numpy() for name in ("boxes", "scores", "classes")
                )
                detections.add(image_id, boxes, scores, classes)
                predictions += rows(image_id, boxes, scores, classes)
            progress.update(len(samples))
    model.train(was_training)
    write(folder, split.name, split.classes, predictions)
    return voc_metrics(detections, ground_truth(split), split.classes, split.source.year)
