"""Features of objects' boxes and of background, and the LogME of a backbone on a task.

Det-LogME (arXiv 2403.09432) scores detectors' backbones by the features pooled in the ground-truth
boxes. Here its part for classification is used, with background as one more class: a detector has
to tell objects from it, and a dataset of one class has a score.

Shapes: R boxes as (x1, y1, x2, y2), G objects, C channels.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from numpy.typing import NDArray
from torch import Tensor, nn

from detection.config.engines import Engine
from detection.data.mapper import AugmentationParams, Mapper
from detection.data.pipeline import training_records
from detection.engine.per_image import PerImage, network_of
from detection.evaluation.logme import logme
from detection.modeling.roi_align import roi_align
from moco.engine.device import autocast

MOST_IMAGES = 500
SEED, TRIES, MOST_IOU = 0, 50, 0.3  # of background boxes
STRIDE, SIZE = 16, 7  # of the map that boxes are pooled from, in cells per side


def score_backbone(
    cfg: CfgNode, engine: Engine, model: nn.Module, per_image: PerImage | None = None
) -> float:
    """Return the LogME of a detector's backbone on up to `MOST_IMAGES` training images.

    Images have the size of the test, the maps the precision of the training. The numbers of the
    heads do not matter, and no random stream of the process is advanced.

    Args:
        cfg: The task.
        engine: Engine that built the model.
        model: Model of the task with the weights to score.
        per_image: What computes the maps if the backbone runs image by image.

    Raises:
        UserError: If no training image has an object.
        DataError: If an image cannot be read.
    """
    was_training = model.training
    model.eval()
    try:
        device = torch.device(cfg.MODEL.DEVICE)
        with torch.no_grad(), autocast(device, cfg.SOLVER.PRECISION):
            pairs = list(box_features(cfg, engine, model, per_image))
    finally:
        model.train(was_training)
    features, labels = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return logme(features, labels)


def box_features(
    cfg: CfgNode, engine: Engine, model: nn.Module, per_image: PerImage | None = None
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield features (R, C) and classes (R,) of each image; -1 is background."""
    keys, records = cfg.INPUT, training_records(cfg)
    chosen = np.linspace(0, len(records) - 1, min(len(records), MOST_IMAGES)).round().astype(int)
    mapper = Mapper(keys.MAX_SIZE_TEST, keys.FORMAT, open_url=engine.open_url)
    network, strides = with_strides(network_of(cfg, model))
    rng = np.random.default_rng(SEED)
    for index in chosen.tolist():
        sample = mapper(records[index], AugmentationParams(keys.MIN_SIZE_TEST))
        boxes, size = sample["boxes"], sample["image"].shape[-2:]
        background = background_boxes(boxes, (size[0], size[1]), rng)
        batch = engine.to_model([sample])
        if per_image:
            per_image.see(batch)
        to_network: Any = getattr(model, "preprocess_image", None)  # Detectron2's
        images = to_network(batch).tensor if to_network else model.get_submodule("images")(batch)[1]
        pooled = pool(network(images), strides, torch.cat([boxes, background]))
        classes = [sample["classes"], torch.full((len(background),), -1)]
        yield pooled.float().cpu().numpy(), torch.cat(classes).numpy()


def with_strides(network: Any) -> tuple[nn.Module, Mapping[str, int]]:
    """Return a network and the strides of its maps by name."""
    if hasattr(network, "output_shape"):  # Detectron2's
        return network, {name: shape.stride for name, shape in network.output_shape().items()}
    return network, network.strides


def pool(maps: Mapping[str, Tensor], strides: Mapping[str, int], boxes: Tensor) -> Tensor:
    """Return the mean (R, C) of RoIAlign in boxes (R, 4), px of the only image of `maps`.

    The map is the last one of stride 16, or the last one.
    """
    names = [name for name in maps if strides[name] == STRIDE] or [*maps]
    features = maps[names[-1]]
    rois = torch.cat([boxes.new_zeros(len(boxes), 1), boxes], dim=1).to(features.device)
    return roi_align(features, rois, SIZE, 1 / strides[names[-1]], 0).mean(dim=(2, 3))


def background_boxes(objects: Tensor, size: tuple[int, int], rng: np.random.Generator) -> Tensor:
    """Sample a box of the size of each object whose IoU with every object is below 0.3.

    Args:
        objects: (G, 4), px.
        size: Height and width of the image.
        rng: Generator of the positions.

    Returns:
        (R, 4), R <= G: an object that leaves no place in `TRIES` random ones has none.
    """
    from torchvision.ops import box_iou  # takes longer to import than torch

    found = []
    for box in objects:
        sides = box[2:] - box[:2]
        free = (torch.tensor([size[1], size[0]]) - sides).clamp(min=0)
        corners = torch.from_numpy(rng.random((TRIES, 2))).to(box) * free
        places = torch.cat([corners, corners + sides], dim=1)
        fitting = (box_iou(places, objects) < MOST_IOU).all(dim=1).nonzero()
        found += [places[fitting[0]]] if len(fitting) else []
    return torch.cat(found) if found else objects[:0]
