"""Detectors and segmenters, equal to Detectron2's bit for bit on the CPU in fp32.

Every state-dict name is Detectron2's, so a model_final.pth of either engine loads into the other.
tests/detection/test_parity_*.py compare features, proposals, losses, gradients, batch-norm
statistics, weights after several steps, detections, masks and keypoints.

What torchvision's own FasterRCNN, MaskRCNN and KeypointRCNN do differently, and where it is done:
 1 round the anchors                                               rpn.cell_anchors
 2 order the anchors of a cell by ratio, then size                 rpn.cell_anchors
 3 take the stride from image size // map size                     rpn.grid_anchors
 4 pad images to multiples of 32, whatever the backbone            stack
 5 RoIAlign without half-pixel alignment                           roi_heads.Pooler
 6 choose a region's level with an epsilon outside the logarithm   roi_heads.Pooler.levels
 7 infer the pooler's scale from the images                        roi_heads.Pooler
 8 rank proposals by sigmoid, minimum side 1e-3 px                 rpn.choose_proposals
 9 RPN localisation loss smooth L1 with beta 1/9                   rpn.rpn_losses
10 divide RPN losses by the number sampled                         rpn.rpn_losses
11 box loss smooth L1 with beta 1/9                                roi_heads.box_losses
12 background is class 0                                           roi_heads.sample_regions
13 drop detections under 0.01 px; offset labels in NMS             roi_heads.choose_detections
14 do not clip boxes after rescaling                               boxes.rescale
15 sort the sampled regions by index                               boxes.sample
16 decode boxes in the dtype of autocast                           boxes.decode
17 resize by F.interpolate, and 25 inside the model                data.py
18 normalise pixels of 0..1                                        Pixels
19 do not dilate the first block of a dilated stage                convert/backbone.py
20 learn masks from bitmaps, softly                                masks.crop_polygons, crop_bitmaps
21 paste masks at whole pixels                                     masks.paste
22 have no C4 mask head                                            roi_heads.Res5RoIHeads
23 start heads from other distributions                            heads.py
24 have another frozen batch norm                                  layers.FrozenBatchNorm
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detection.embedded.backbone import Backbone
from detection.embedded.boxes import nonempty, rescale
from detection.embedded.masks import paste
from detection.embedded.roi_heads import Detections, RoIHeads
from detection.embedded.rpn import RPN
from detection.fcn16s import FCN16s

# A picture as a model takes it: "image" (3, H, W) in 0..255; in evaluation "height" and "width" of
# the original, which the answer fits (default: as given); in training what there is to learn.
Sample = dict[str, Any]


def stack(tensors: Sequence[Tensor], divisor: int, value: float = 0.0) -> Tensor:
    """(..., H, W) each -> (N, ..., H', W'), padded at the right and bottom to the largest sides.

    `divisor`: H' and W' are multiples of it.
    """
    height, width = (
        -(-max(side) // divisor) * divisor
        for side in zip(*(x.shape[-2:] for x in tensors), strict=True)
    )
    batch = tensors[0].new_full((len(tensors), *tensors[0].shape[:-2], height, width), value)
    for target, x in zip(batch, tensors, strict=True):
        target[..., : x.shape[-2], : x.shape[-1]].copy_(x)
    return batch


class Pixels(nn.Module):
    """(3, H, W) in 0..255 -> normalised; mean and std per channel, in the channels' order."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        return (image.to(self.mean.device) - self.mean) / self.std


class Detector(nn.Module):
    """Backbone, proposals, heads: samples -> losses by Detectron2's names, or detections.

    In training a sample has "boxes" (G, 4) in its pixels, "classes" (G,) in 0..K-1, and what its
    heads learn (see roi_heads.Target). A detection has "boxes" (D, 4), "scores" and "classes"
    (D,), best first, "masks" (D, H, W) bool, "keypoints" (D, number, 3) in the original's pixels.
    """

    def __init__(
        self, backbone: Backbone, proposal_generator: RPN, roi_heads: RoIHeads, pixels: Pixels
    ) -> None:
        super().__init__()
        self.backbone, self.proposal_generator = backbone, proposal_generator
        self.roi_heads, self.pixels = roi_heads, pixels

    def forward(self, samples: list[Sample]) -> Any:
        images = [self.pixels(sample["image"]) for sample in samples]
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        features = self.backbone(stack(images, self.backbone.size_divisibility))
        if self.training:
            targets = [self._target(sample) for sample in samples]
            objects = [target["boxes"] for target in targets]
            proposals, rpn_losses = self.proposal_generator(features, sizes, objects)
            _, losses = self.roi_heads(features, proposals, sizes, targets)
            return {**losses, **rpn_losses}
        proposals, _ = self.proposal_generator(features, sizes)
        detections, _ = self.roi_heads(features, proposals, sizes)
        return [
            to_original(found, size, (sample.get("height", size[0]), sample.get("width", size[1])))
            for found, size, sample in zip(detections, sizes, samples, strict=True)
        ]

    def _target(self, sample: Sample) -> dict[str, Any]:
        target = {name: sample[name] for name in _LEARNT if name in sample}
        return {
            name: value.to(self.pixels.mean.device) if isinstance(value, Tensor) else value
            for name, value in target.items()
        }


_LEARNT = ("boxes", "classes", "masks", "keypoints")


def to_original(found: Detections, size: tuple[int, int], original: tuple[int, int]) -> Detections:
    """Detections in an image of `size` -> in the picture of size `original` that it was."""
    boxes = rescale(found["boxes"], size, original)
    keep = nonempty(boxes)
    found = {name: value[keep] for name, value in {**found, "boxes": boxes}.items()}
    if "masks" in found:
        found["masks"] = paste(found["masks"], found["boxes"], original)
    if "keypoints" in found:
        found["keypoints"][:, :, 0] *= original[1] / size[1]
        found["keypoints"][:, :, 1] *= original[0] / size[0]
    return found


class Segmenter(nn.Module):
    """Backbone and FCN-16s: a batch of samples -> the loss, or "sem_seg" scores (K, H, W) of each.

    In training a sample has labels "sem_seg" (H, W) as well.
    """

    def __init__(self, backbone: Backbone, sem_seg_head: FCN16s, pixels: Pixels) -> None:
        super().__init__()
        self.backbone, self.sem_seg_head, self.pixels = backbone, sem_seg_head, pixels

    def forward(self, samples: list[Sample]) -> Any:
        images = [self.pixels(sample["image"]) for sample in samples]
        features = self.backbone(stack(images, self.backbone.size_divisibility))
        if self.training:
            labels = [sample["sem_seg"].to(images[0].device) for sample in samples]
            ignored = self.sem_seg_head.ignore_value
            batch = stack(labels, self.backbone.size_divisibility, ignored)
            return self.sem_seg_head(features, batch)[1]
        scores, _ = self.sem_seg_head(features)
        answers = []
        for own, image, sample in zip(scores, images, samples, strict=True):
            height, width = image.shape[-2:]
            size = (sample.get("height", height), sample.get("width", width))
            cut = own[None, :, :height, :width]
            answers.append({"sem_seg": F.interpolate(cut, size, mode="bilinear")[0]})
        return answers


Model = Detector | Segmenter
