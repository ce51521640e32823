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
 8 rank proposals by sigmoid, minimum side 1e-3 px                 rpn.RPN.choose
 9 RPN localisation loss smooth L1 with beta 1/9                   rpn.RPN.losses
10 divide RPN losses by the number sampled                         rpn.RPN.losses
11 box loss smooth L1 with beta 1/9                                roi_heads.RoIHeads.box_losses
12 background is class 0                                           roi_heads.RoIHeads.losses
13 drop detections under 0.01 px; offset labels in NMS             roi_heads.RoIHeads.choose
14 do not clip boxes after rescaling                               boxes.rescale
15 sort the sampled regions by index                               boxes.sample
16 decode boxes in the dtype of autocast                           boxes.decode
17 resize by F.interpolate, and 25 inside the model                data.py
18 normalise pixels of 0..1                                        Model.prepare
19 do not dilate the first block of a dilated stage                convert/backbone.py
20 learn masks from bitmaps, softly                                masks.crop_polygons, crop_bitmaps
21 paste masks at whole pixels                                     masks.paste
22 have no C4 mask head                                            roi_heads.RoIHeads
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


class Model(nn.Module):
    """What a detector and a segmenter share: a backbone, and pictures made ready for it.

    Args:
        pixel_mean, pixel_std: per channel of pictures in 0..255, in the channels' order.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self, backbone: Backbone, pixel_mean: Sequence[float], pixel_std: Sequence[float]
    ) -> None:
        super().__init__()
        self.backbone = backbone
        for name, values in (("pixel_mean", pixel_mean), ("pixel_std", pixel_std)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def prepare(self, samples: list[Sample]) -> tuple[list[Sample], Tensor]:
        """The samples on the model's device, and their normalised pictures as one batch."""
        device = self.pixel_mean.device
        samples = [
            {name: x.to(device) if isinstance(x, Tensor) else x for name, x in sample.items()}
            for sample in samples
        ]
        images = [(sample["image"] - self.pixel_mean) / self.pixel_std for sample in samples]
        return samples, stack(images, self.backbone.size_divisibility)


def sizes(sample: Sample) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of the picture as given, and of the original, which the answer fits."""
    height, width = sample["image"].shape[-2:]
    return (height, width), (sample.get("height", height), sample.get("width", width))


class Detector(Model):
    """Backbone, proposals, heads: samples -> losses by Detectron2's names, or detections.

    In training a sample has "boxes" (G, 4) in its pixels, "classes" (G,) in 0..K-1, and what its
    heads learn (see roi_heads.Target). A detection has "boxes" (D, 4), "scores" and "classes"
    (D,), best first, "masks" (D, H, W) bool, "keypoints" (D, number, 3) in the original's pixels.
    """

    def __init__(
        self, backbone: Backbone, proposal_generator: RPN, roi_heads: RoIHeads, **pixels: Any
    ) -> None:
        super().__init__(backbone, **pixels)
        self.proposal_generator, self.roi_heads = proposal_generator, roi_heads

    def forward(self, samples: list[Sample]) -> Any:
        samples, batch = self.prepare(samples)
        features = self.backbone(batch)
        given, originals = zip(*(sizes(sample) for sample in samples), strict=True)
        objects = [sample["boxes"] for sample in samples] if self.training else None
        proposals, rpn_losses = self.proposal_generator(features, given, objects)
        if self.training:
            return {**self.roi_heads.losses(features, proposals, samples), **rpn_losses}
        found = self.roi_heads.detect(features, proposals, given)
        return [to_original(*one) for one in zip(found, given, originals, strict=True)]


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


class Segmenter(Model):
    """Backbone and FCN-16s: a batch of samples -> the loss, or "sem_seg" scores (K, H, W) of each.

    In training a sample has labels "sem_seg" (H, W) as well.
    """

    def __init__(self, backbone: Backbone, sem_seg_head: FCN16s, **pixels: Any) -> None:
        super().__init__(backbone, **pixels)
        self.sem_seg_head = sem_seg_head

    def forward(self, samples: list[Sample]) -> Any:
        samples, batch = self.prepare(samples)
        features = self.backbone(batch)
        if self.training:
            labels = [sample["sem_seg"] for sample in samples]
            divisor, ignored = self.backbone.size_divisibility, self.sem_seg_head.ignore_value
            return self.sem_seg_head(features, stack(labels, divisor, ignored))[1]
        answers = []
        for scores, sample in zip(self.sem_seg_head(features)[0], samples, strict=True):
            (height, width), original = sizes(sample)
            own = scores[None, :, :height, :width]
            answers.append({"sem_seg": F.interpolate(own, original, mode="bilinear")[0]})
        return answers
