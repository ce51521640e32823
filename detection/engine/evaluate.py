"""The test split through a model: predictions on disk, metrics in hand."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from detection.config.engines import Engine
from detection.data.batches import raise_on_all
from detection.data.pipeline import build_evaluation
from detection.datasets import read_split
from detection.datasets.base import Record, Split
from detection.evaluation.base import Evaluator, Prediction
from detection.evaluation.evaluators import build_evaluator, evaluate_together
from detection.evaluation.predictions import encode_mask
from detection.evaluation.visualize import Visualizer
from moco.common import distributed
from moco.common.errors import DataError
from moco.common.progress import Progress


def evaluate(
    model: nn.Module, cfg: CfgNode, engine: Engine, name: str = "inference"
) -> dict[str, float]:
    """Evaluate a model on DATASETS.TEST; the model's mode stays as it was.

    The predictions go to OUTPUT_DIR/`name`/<split>.json, boxes in pixels of the original images.
    Each of W processes takes a W-th of the images in a row.

    Returns:
        The metrics as kind/name, AP in 0..100, on the main process; {} on the others.

    Raises:
        DataError: on all processes, where one of them cannot read an image.
    """
    split, folder = read_split(cfg.DATASETS.TEST[0], cfg), Path(cfg.OUTPUT_DIR) / name
    evaluator = engine.evaluator(split, cfg, folder) or Gathered(split, cfg, folder, engine)
    rank, processes, number = distributed.rank(), distributed.world_size(), len(split.records)
    records = split.records[number * rank // processes : number * (rank + 1) // processes]
    silent = not distributed.is_main()
    error = None
    with Progress(len(records), f"evaluate {split.name}", unit="img", silent=silent) as progress:
        try:
            for record, outputs in _outputs(model, records, cfg, engine):
                evaluator.process([record], outputs)
                progress.update()
        except DataError as found:
            error = found
    raise_on_all(error)
    return dict(evaluator.evaluate())


class Gathered:
    """This project's metric of a split, computed on the main process from what all have found."""

    def __init__(self, split: Split, cfg: CfgNode, folder: Path, engine: Engine) -> None:
        self._evaluator: Evaluator = build_evaluator(split, cfg, folder)
        self._engine = engine

    def process(self, records: Sequence[Record], outputs: Any) -> None:
        """Take the model's outputs for the images of `records`."""
        for record, tensors in zip(records, self._engine.to_predictions(outputs), strict=True):
            self._evaluator.add(record, to_prediction(tensors))

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on the main process, {} on the others."""
        gathered = distributed.gather_objects(self._evaluator)
        return evaluate_together(gathered) if gathered else {}


def draw_predictions(model: nn.Module, cfg: CfgNode, engine: Engine, number: int) -> Path:
    """Draw what `model` finds on `number` test images, spread over them; returns the folder."""
    folder = Path(cfg.OUTPUT_DIR) / "inference" / "visualize"
    split = read_split(cfg.DATASETS.TEST[0], cfg)
    visualizer = Visualizer(folder, number, split, engine.open_url)
    for record, outputs in _outputs(model, visualizer.records, cfg, engine):
        visualizer.add(record, to_prediction(engine.to_predictions(outputs)[0]))
    return folder


def _outputs(
    model: nn.Module, records: Sequence[Record], cfg: CfgNode, engine: Engine
) -> Iterator[tuple[Record, Any]]:
    was_training = model.training
    model.eval()
    own = engine.mapper(cfg, training=False)
    try:
        with (
            closing(build_evaluation(cfg, records, own, engine.open_url)) as batches,
            torch.no_grad(),
        ):
            for record, samples in zip(records, batches, strict=True):
                yield record, model(engine.to_model(samples))
    finally:
        model.train(was_training)


def to_prediction(answer: dict[str, Tensor]) -> Prediction:
    """Return a model's answer for one image in the evaluators' form (detection/evaluation)."""
    if "sem_seg" in answer:
        return {"sem_seg": answer["sem_seg"].argmax(dim=0).cpu().numpy()}
    prediction: Prediction = {name: value.cpu().numpy() for name, value in answer.items()}
    if "masks" in prediction:
        prediction["masks"] = [encode_mask(mask) for mask in prediction["masks"]]
    return prediction
