"""A split through the detector: predictions on disk, metrics in hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from detection.datasets.base import Record, Split
from detection.embedded.data import raise_on_all
from detection.embedded.model import Model
from detection.embedded.pipeline import build_evaluation
from detection.evaluation.base import Prediction
from detection.evaluation.evaluators import build_evaluator, evaluate_together
from detection.evaluation.predictions import encode_mask
from detection.evaluation.visualize import Visualizer
from moco.common import distributed
from moco.common.errors import DataError
from moco.common.progress import Progress


def evaluate(model: Model, split: Split, cfg: CfgNode, folder: Path) -> dict[str, float]:
    """Metrics in canonical names, AP in 0..100. The model's mode stays as it was.

    The predictions go to `folder`/<split>.json, boxes in pixels of the original images. Each of
    W processes takes a W-th of them in a row; the metrics are the main one's, {} on the others.

    Raises:
        DataError: on all processes, where one of them cannot read an image.
    """
    evaluator = build_evaluator(split, cfg, folder)
    rank, processes, number = distributed.rank(), distributed.world_size(), len(split.records)
    records = split.records[number * rank // processes : number * (rank + 1) // processes]
    silent = not distributed.is_main()
    error = None
    with Progress(len(records), f"evaluate {split.name}", unit="img", silent=silent) as progress:
        try:
            for record, prediction in _predictions(model, records, cfg):
                evaluator.add(record, prediction)
                progress.update()
        except DataError as found:
            error = found
    raise_on_all(error)
    gathered = distributed.gather_objects(evaluator)
    return evaluate_together(gathered) if gathered else {}


def draw_predictions(model: Model, split: Split, cfg: CfgNode, folder: Path, number: int) -> Path:
    """Draw what `model` finds on `number` images, spread over the split; returns the folder."""
    visualizer = Visualizer(folder / "visualize", number, split)
    for record, prediction in _predictions(model, visualizer.records, cfg):
        visualizer.add(record, prediction)
    return folder / "visualize"


def _predictions(model: Model, records: Sequence[Record], cfg: CfgNode) -> Any:
    batches = build_evaluation(cfg, records)
    was_training = model.training
    model.eval()
    waiting = iter(records)
    try:
        with closing(batches), torch.no_grad():
            for samples in batches:
                for answer in model(samples):
                    yield next(waiting), to_prediction(answer)
    finally:
        model.train(was_training)


def to_prediction(answer: dict[str, Tensor]) -> Prediction:
    """A model's output for one image in the evaluators' form (detection/evaluation)."""
    if "sem_seg" in answer:
        return {"sem_seg": answer["sem_seg"].argmax(dim=0).cpu().numpy()}
    prediction: Prediction = {name: value.cpu().numpy() for name, value in answer.items()}
    if "masks" in prediction:
        prediction["masks"] = [encode_mask(mask) for mask in prediction["masks"]]
    return prediction
