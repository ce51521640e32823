"""Evaluation of a model on the test split.

Semantic segmentation may predict in overlapping windows (TEST.SEM_SEG_WINDOW). With a stride this
is mmsegmentation's `slide` mode (mmseg/models/segmentors/encoder_decoder.py), without one the
windows of arXiv 2404.12172 (tue-mps/benchmark-vfm-ss, training/lightning_module.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from detection.config.engines import Engine
from detection.data.batches import raise_on_all
from detection.data.pipeline import build_evaluation, is_semantic
from detection.data.sample import Sample
from detection.datasets import read_split
from detection.datasets.base import Record, Split
from detection.evaluation.base import Evaluator, Prediction
from detection.evaluation.evaluators import build_evaluator
from detection.evaluation.predictions import encode_mask
from detection.evaluation.visualize import Visualizer
from moco.common import distributed
from moco.common.errors import DataError
from moco.common.progress import Progress
from moco.common.run import check_in_place

Predict = Callable[[Sequence[Sample]], Sequence[dict[str, Tensor]]]


def evaluate(
    model: nn.Module, cfg: CfgNode, engine: Engine, name: str = "inference"
) -> dict[str, float]:
    """Evaluate a model on DATASETS.TEST, and restore its training mode.

    The predictions go to OUTPUT_DIR/`name`/<split>.json, boxes in pixels of the original images.
    Each of W processes evaluates a contiguous W-th of the images.

    Returns:
        The metrics as kind/name, AP in 0..100, on the main process; {} on the others.

    Raises:
        DataError: On all processes, if one of them cannot read an image.
    """
    split, folder = read_split(cfg.DATASETS.TEST[0], cfg), Path(cfg.OUTPUT_DIR) / name
    evaluator = engine.evaluator(split, cfg, folder) or GatheredEvaluator(
        split, cfg, folder, engine
    )
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
    check_in_place(cfg.OUTPUT_DIR)
    return dict(evaluator.evaluate())


class GatheredEvaluator:
    """This project's evaluator of a split, computed on the main process from all predictions."""

    def __init__(self, split: Split, cfg: CfgNode, folder: Path, engine: Engine) -> None:
        self._evaluator: Evaluator = build_evaluator(split, cfg, folder)
        self._engine = engine

    def process(self, records: Sequence[Record], outputs: Any) -> None:
        """Process the model's outputs for the images of `records`."""
        for record, tensors in zip(records, self._engine.to_predictions(outputs), strict=True):
            self._evaluator.add(record, to_prediction(tensors))

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on the main process, {} on the others."""
        gathered = distributed.gather_objects(self._evaluator)
        if not gathered:
            return {}
        whole, *others = gathered
        for other in others:
            whole.extend(other)
        return whole.evaluate()


def draw_predictions(model: nn.Module, cfg: CfgNode, engine: Engine, number: int) -> Path:
    """Draw the predictions on `number` evenly spaced test images, and return their folder."""
    folder = Path(cfg.OUTPUT_DIR) / "inference" / "visualize"
    split = read_split(cfg.DATASETS.TEST[0], cfg)
    visualizer = Visualizer(folder, number, split, engine.open_url)
    for record, outputs in _outputs(model, visualizer.records, cfg, engine):
        check_in_place(cfg.OUTPUT_DIR)
        visualizer.add(record, to_prediction(engine.to_predictions(outputs)[0]))
    return folder


def _outputs(
    model: nn.Module, records: Sequence[Record], cfg: CfgNode, engine: Engine
) -> Iterator[tuple[Record, Any]]:
    was_training = model.training
    model.eval()
    own = engine.mapper(cfg, training=False)
    side, stride = cfg.TEST.SEM_SEG_WINDOW, cfg.TEST.SEM_SEG_STRIDE

    def whole(samples: Sequence[Sample]) -> Any:
        return model(engine.to_model(samples))

    def windows(samples: Sequence[Sample]) -> Any:
        return [predict_in_windows(whole, sample, side, stride) for sample in samples]

    predict = windows if side and is_semantic(cfg) else whole
    try:
        with (
            closing(build_evaluation(cfg, records, own, engine.open_url)) as batches,
            torch.no_grad(),
        ):
            for record, samples in zip(records, batches, strict=True):
                yield record, predict(samples)
    finally:
        model.train(was_training)


def to_prediction(answer: dict[str, Tensor]) -> Prediction:
    """Convert the outputs for one image to the format of detection/evaluation."""
    if "sem_seg" in answer:
        return {"sem_seg": answer["sem_seg"].argmax(dim=0).cpu().numpy()}
    prediction: Prediction = {name: value.cpu().numpy() for name, value in answer.items()}
    if "masks" in prediction:
        prediction["masks"] = [encode_mask(mask) for mask in prediction["masks"]]
    return prediction


def window_starts(size: int, side: int, stride: int) -> list[int]:
    """Return where windows of `side` px start along an image's side of `size` px.

    They are `stride` apart, except the last one, which ends with the image; with stride 0, as few
    as cover the image are evenly spaced.
    """
    if size <= side:
        return [0]
    if stride:
        number = -(-(size - side) // stride) + 1
        return [min(i * stride, size - side) for i in range(number)]
    number = -(-size // side)
    return [int(i * (size - side) / (number - 1)) for i in range(number)]


def predict_in_windows(
    predict: Predict, sample: Sample, side: int, stride: int
) -> dict[str, Tensor]:
    """Return the scores of an image, averaged over windows, in the original image's size.

    Args:
        predict: Returns "sem_seg" (K, H, W) for each sample, in its `height` and `width`.
        sample: Sample of one image.
        side: Side of the windows, px of the sample's image.
        stride: See `window_starts`.
    """
    image = sample["image"]
    height, width = image.shape[-2:]
    total = counts = torch.zeros(())
    for top, left in product(
        window_starts(height, side, stride), window_starts(width, side, stride)
    ):
        window = image[:, top : top + side, left : left + side]
        h, w = window.shape[-2:]
        part: Sample = {**sample, "image": window.contiguous(), "height": h, "width": w}
        scores = predict([part])[0]["sem_seg"]
        if not total.ndim:
            total = scores.new_zeros(len(scores), height, width)
            counts = scores.new_zeros(height, width)
        total[:, top : top + h, left : left + w] += scores
        counts[top : top + h, left : left + w] += 1
    original = sample.get("height", height), sample.get("width", width)
    mean = (total / counts)[None]
    return {"sem_seg": F.interpolate(mean, original, mode="bilinear", align_corners=False)[0]}
