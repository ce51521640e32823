"""The test split through a model: predictions on disk, metrics in hand."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from detection.data.batches import raise_on_all
from detection.data.pipeline import build_evaluation
from detection.datasets import read_split
from detection.datasets.base import Record
from detection.evaluation.base import Prediction
from detection.evaluation.evaluators import build_evaluator, evaluate_together
from detection.evaluation.predictions import encode_mask
from detection.evaluation.visualize import Visualizer
from moco.common import distributed
from moco.common.errors import DataError
from moco.common.progress import Progress


def evaluate(model: nn.Module, cfg: CfgNode) -> dict[str, float]:
    """Metrics of DATASETS.TEST in canonical names, AP in 0..100; on the main process, else {}.

    The predictions go to OUTPUT_DIR/inference/<split>.json, boxes in pixels of the original
    images. Each of W processes takes a W-th of them in a row. The model's mode stays as it was.

    Raises:
        DataError: on all processes, where one of them cannot read an image.
    """
    split = read_split(cfg.DATASETS.TEST[0], cfg)
    evaluator = build_evaluator(split, cfg, Path(cfg.OUTPUT_DIR) / "inference")
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


def draw_predictions(model: nn.Module, cfg: CfgNode, number: int) -> Path:
    """Draw what `model` finds on `number` test images, spread over them; returns the folder."""
    folder = Path(cfg.OUTPUT_DIR) / "inference" / "visualize"
    visualizer = Visualizer(folder, number, read_split(cfg.DATASETS.TEST[0], cfg))
    for record, prediction in _predictions(model, visualizer.records, cfg):
        visualizer.add(record, prediction)
    return folder


def _predictions(
    model: nn.Module, records: Sequence[Record], cfg: CfgNode
) -> Iterator[tuple[Record, Prediction]]:
    was_training = model.training
    model.eval()
    try:
        with closing(build_evaluation(cfg, records)) as batches, torch.no_grad():
            for record, samples in zip(records, batches, strict=True):
                yield record, to_prediction(model(samples)[0])
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
