"""Datasets, loaders and evaluators for Detectron2, from the same readers as the other engine."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2 import data as detectron2_data
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from detectron2.data import transforms as T
from detectron2.evaluation import DatasetEvaluator, inference_context
from detectron2.structures import Instances
from detectron2.utils import comm
from torch import nn

from detection.d2 import catalog, densepose, semantic_seg
from detection.d2.loader import NamesImages, ReadableLoader, ResumableLoader
from detection.data.corruptions import with_corruption
from detection.datasets import read_split
from detection.datasets.base import Record, Split, image_key
from detection.evaluation.base import Evaluator, Prediction
from detection.evaluation.evaluators import build_evaluator as build_shared_evaluator
from detection.evaluation.evaluators import evaluate_together
from detection.evaluation.predictions import encode_mask
from detection.evaluation.visualize import Visualizer
from moco.common.errors import DataError


def register(cfg: CfgNode, names: Iterable[str]) -> None:
    """Let Detectron2 read `names` through this project's readers.

    For Detectron2's own names that replaces its readers, whose records are the same where they
    work (tests/detection), and which for LVIS and Cityscapes do not work on today's stack.
    """
    for name in dict.fromkeys(names):
        split = read_split(name, cfg)
        if split.from_catalog:
            continue
        if split.evaluator_type == "densepose":
            densepose.register(split)  # its records hold objects of that project
            continue
        if name in DatasetCatalog:
            DatasetCatalog.remove(name)
        if name in MetadataCatalog.list():
            MetadataCatalog.remove(name)
        DatasetCatalog.register(name, lambda name=name: list(read_split(name, cfg).records))
        # What Detectron2 itself would call the dataset's metadata.
        MetadataCatalog.get(name).set(evaluator_type=split.evaluator_type, **split.metadata)


def build_train_loader(cfg: CfgNode) -> ResumableLoader:
    """Endless batches of DATASETS.TRAIN."""
    mapper = NamesImages(build_mapper(cfg, training=True))
    loader = _package(cfg).build_detection_train_loader(cfg, mapper=mapper)
    return ResumableLoader(loader, cfg.SEED)


def build_test_loader(cfg: CfgNode, dataset_name: str) -> ReadableLoader:
    """Every test image once."""
    mapper = NamesImages(build_mapper(cfg, training=False))
    return ReadableLoader(
        _package(cfg).build_detection_test_loader(cfg, dataset_name, mapper=mapper)
    )


def build_mapper(cfg: CfgNode, *, training: bool) -> Callable[[Record], dict[str, Any]]:
    """A record → what the model takes in training or in evaluation."""
    mapper: Callable[[Record], dict[str, Any]]
    if cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor":
        mapper = semantic_seg.build_mapper(cfg, training=training)
    elif training and cfg.INPUT.LSJ.ENABLED:
        changes, boxes = _large_scale_jitter(cfg), cfg.MODEL.MASK_ON
        mapper = DatasetMapper(cfg, True, augmentations=changes, recompute_boxes=boxes)
    else:
        mapper = _package(cfg).DatasetMapper(cfg, training)
    return mapper if training else with_corruption(mapper, cfg)


def _large_scale_jitter(cfg: CfgNode) -> list[T.Augmentation]:
    """INPUT.LSJ in the order of ViTDet's configs (projects/ViTDet/configs/common).

    Deviation: masks in run lengths are filled up with background; Detectron2's default, meant for
    labels of semantic segmentation, makes what is beyond the image part of every object.
    """
    given, flip = cfg.INPUT.LSJ, cfg.INPUT.RANDOM_FLIP
    flips = {
        "horizontal": [T.RandomFlip(horizontal=True)],
        "vertical": [T.RandomFlip(horizontal=False, vertical=True)],
        "none": [],
    }
    return [
        *flips[flip],
        T.ResizeScale(*given.SCALE_RANGE, given.SIZE, given.SIZE),
        T.FixedSizeCrop((given.SIZE, given.SIZE), pad=given.PAD, seg_pad_value=0),
    ]


def _package(cfg: CfgNode) -> Any:
    """Mapper and loaders: Detectron2's, or those of its DensePose project."""
    dense_pose = cfg.MODEL.get("DENSEPOSE_ON", False)
    return densepose.data_package() if dense_pose else detectron2_data


def build_evaluator(cfg: CfgNode, dataset_name: str, folder: str = "inference") -> DatasetEvaluator:
    """The evaluator of the dataset's `evaluator_type`.

    Args:
        folder: of the predictions, below OUTPUT_DIR.
    """
    split = read_split(dataset_name, cfg)
    if split.evaluator_type == "densepose":
        return densepose.build_evaluator(cfg, dataset_name)
    if split.from_catalog:
        return catalog.build_evaluator(split, cfg, Path(cfg.OUTPUT_DIR) / folder)
    return SharedEvaluator(split, cfg, Path(cfg.OUTPUT_DIR) / folder)


class SharedEvaluator(DatasetEvaluator):
    """This project's metric of a split (detection/evaluation/evaluators.py) behind Detectron2's
    interface."""

    def __init__(self, split: Split, cfg: CfgNode, folder: Path) -> None:
        self._build: Callable[[], Evaluator] = lambda: build_shared_evaluator(split, cfg, folder)
        self._records = {image_key(record): record for record in split.records}
        self.reset()

    def reset(self) -> None:
        self._evaluator = self._build()

    def process(self, inputs: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]]) -> None:
        for image, output in zip(inputs, outputs, strict=True):
            self._evaluator.add(self._records[image_key(image)], to_prediction(output))

    def evaluate(self) -> OrderedDict[str, dict[str, float]] | None:
        """`{"bbox": {"AP": …}}` on the main process, None on the others."""
        gathered = comm.gather(self._evaluator, dst=0)
        if not comm.is_main_process():
            return None
        results: OrderedDict[str, dict[str, float]] = OrderedDict()
        for name, value in evaluate_together(gathered).items():
            kind, metric = name.split("/", 1)
            results.setdefault(kind, {})[metric] = value
        return results


def plot_predictions(cfg: CfgNode, model: nn.Module, number: int) -> Path:
    """Plot what `model` finds on `number` test images, spread over the split.

    Returns:
        The folder with the images.
    """
    split = read_split(cfg.DATASETS.TEST[0], cfg)
    mapper = NamesImages(build_mapper(cfg, training=False))
    folder = Path(cfg.OUTPUT_DIR) / "inference" / "visualize"
    visualizer = Visualizer(folder, number, split)
    with inference_context(model), torch.no_grad():
        for record in visualizer.records:
            sample = mapper(copy.deepcopy(record))
            if isinstance(sample, DataError):
                raise sample
            (output,) = model([sample])
            visualizer.add(record, to_prediction(output))
    return folder


def to_prediction(output: dict[str, Any]) -> Prediction:
    """A model's output for one image in the evaluators' form (detection/evaluation)."""
    if "sem_seg" in output:
        return {"sem_seg": output["sem_seg"].argmax(dim=0).cpu().numpy()}
    instances: Instances = output["instances"].to("cpu")
    prediction: Prediction = {
        "boxes": instances.pred_boxes.tensor.numpy(),
        "scores": instances.scores.numpy(),
        "classes": instances.pred_classes.numpy(),
    }
    if instances.has("pred_masks"):
        prediction["masks"] = [encode_mask(mask) for mask in instances.pred_masks.numpy()]
    if instances.has("pred_keypoints"):
        prediction["keypoints"] = instances.pred_keypoints.numpy()
    return prediction
