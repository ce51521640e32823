"""Detectors and segmenters, bitwise identical to Detectron2's on the CPU in fp32.

Every state-dict name is Detectron2's, so a model_final.pth of either engine loads into the other.
tests/detection/parity/ compares features, proposals, losses, gradients, batch-norm
statistics, weights after several steps, detections, masks and keypoints.

Differences of torchvision's FasterRCNN, MaskRCNN and KeypointRCNN, and where each is implemented
as in Detectron2. Torchvision's models

 1 round the anchors                                               rpn.cell_anchors
 2 order the anchors of a cell by ratio, then size                 rpn.cell_anchors
 3 take the stride from image size // map size                     rpn.grid_anchors
 4 pad images to multiples of 32, whatever the backbone            stack
 5 use RoIAlign without half-pixel alignment                       roi_heads.Pooler
 6 choose a region's level with an epsilon outside the logarithm   roi_heads.Pooler.levels
 7 infer the pooler's scale from the images                        roi_heads.Pooler
 8 rank proposals by sigmoid, minimum side 1e-3 px                 RPN.choose
 9 set beta of the RPN's smooth L1 loss to 1/9                      RPN.losses
10 divide RPN losses by the number sampled                         RPN.losses
11 set beta of the boxes' smooth L1 loss to 1/9                     regions.box_losses
12 have background as class 0                                       RoIHeads.sample_regions
13 drop detections under 0.01 px; offset labels in NMS             regions.select_detections
14 do not clip boxes after rescaling                               boxes.rescale
15 sort the sampled regions by index                               boxes.sample
16 decode boxes in the dtype of autocast                           boxes.decode
17 resize images by F.interpolate, inside the model                data/mapper.py
18 normalize pixels of 0..1                                        Images
19 do not dilate the first block of a dilated stage                convert/modeling/resnet.py
20 train masks on soft targets from bitmaps                         regions.crop_*
21 paste masks at whole pixels                                     regions.paste_masks
22 have no C4 mask head                                            RoIHeads.losses, detect
23 start heads from other distributions                            heads.py
24 have another frozen batch norm                                  layers.FrozenBatchNorm
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from detection.data.sample import Sample, nonempty
from detection.embedded.backbone import BACKBONES, Backbone
from detection.embedded.boxes import rescale
from detection.embedded.layers import NORMS, norm_layer
from detection.embedded.regions import Detections, paste_masks
from detection.embedded.retinanet import RetinaNetHead, build_retinanet_head
from detection.embedded.roi_heads import RoIHeads, build_roi_heads
from detection.embedded.rpn import RPN, build_rpn
from detection.embedded.supported import check_supported
from detection.modeling.fcn16s import FCN16s, FCN16sHead, only_feature
from detection.modeling.focal_loss import compile_focal_loss
from detection.modeling.memory_format import set_memory_format
from detection.modeling.sem_seg_heads import SegmentationHead, build_head
from moco.common.async_copy import to_device_async


def stack(
    tensors: Sequence[Tensor], divisor: int, square_pad: int = 0, value: float = 0.0
) -> Tensor:
    """Stack N tensors (..., H, W), padded at the right and bottom: (N, ..., H', W').

    Args:
        tensors: Tensors to stack.
        divisor: H' and W' are the largest sides rounded up to a multiple of it.
        square_pad: If > 0, both sides are this number of pixels instead, rounded up likewise.
        value: Padding value.
    """
    height, width = (
        -(-(square_pad or max(side)) // divisor) * divisor
        for side in zip(*(x.shape[-2:] for x in tensors), strict=True)
    )
    batch = tensors[0].new_full((len(tensors), *tensors[0].shape[:-2], height, width), value)
    for target, x in zip(batch, tensors, strict=True):
        target[..., : x.shape[-2], : x.shape[-1]].copy_(x)
    return batch


class Images(nn.Module):
    """Preprocessing: moves samples to the device of the model, normalizes and stacks their images.

    `mean` and `std` are of pixels in 0..255, in the order of the channels; see `stack` for the
    other arguments.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], divisor: int, square_pad: int = 0
    ) -> None:
        super().__init__()
        self.divisor, self.square_pad = divisor, square_pad
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, samples: list[Sample]) -> tuple[list[Sample], Tensor]:
        """Return the samples on the device and the batch of images (N, 3, H', W')."""
        device = self.mean.device
        moved: list[Any] = [
            {
                k: to_device_async(v, device) if isinstance(v, Tensor) else v
                for k, v in sample.items()
            }
            for sample in samples
        ]
        images = [(sample["image"] - self.mean) / self.std for sample in moved]
        return moved, stack(images, self.divisor, self.square_pad)


def sizes(sample: Sample) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the sizes (height, width) of the input image and of the original image."""
    height, width = sample["image"].shape[-2:]
    return (height, width), (sample.get("height", height), sample.get("width", width))


class Detector(nn.Module):
    """Two-stage detector of backbone, proposal generator and RoI heads.

    In training a sample has "boxes" (G, 4) in pixels of its image, "classes" (G,) in 0..K-1, and
    the targets of the heads (see `roi_heads.Target`); the model returns losses by Detectron2's
    names. In evaluation it returns one dict per image, in pixels of the original: "boxes" (D, 4),
    "scores" and "classes" (D,), best first, "masks" (D, H, W) bool, "keypoints" (D, number, 3).
    """

    def __init__(
        self, images: Images, backbone: Backbone, proposal_generator: RPN, roi_heads: RoIHeads
    ) -> None:
        super().__init__()
        self.images, self.backbone = images, backbone
        self.proposal_generator, self.roi_heads = proposal_generator, roi_heads

    def forward(self, samples: list[Sample]) -> Any:
        """Return losses in training, else detections."""
        samples, batch = self.images(samples)
        features = self.backbone(batch)
        both_sizes = [sizes(sample) for sample in samples]
        image_sizes = [size for size, _ in both_sizes]
        objects = [sample["boxes"] for sample in samples] if self.training else None
        proposals, rpn_losses = self.proposal_generator(features, image_sizes, objects)
        if self.training:
            losses = self.roi_heads.losses(features, proposals, samples, image_sizes)
            return {**losses, **rpn_losses}
        detections = self.roi_heads.detect(features, proposals, image_sizes)
        return [to_original(one, *size) for one, size in zip(detections, both_sizes, strict=True)]


class DenseDetector(nn.Module):
    """One-stage detector of backbone and RetinaNet head, with the interface of `Detector`."""

    def __init__(self, images: Images, backbone: Backbone, head: RetinaNetHead) -> None:
        super().__init__()
        self.images, self.backbone, self.head = images, backbone, head

    def forward(self, samples: list[Sample]) -> Any:
        """Return losses in training, else detections."""
        samples, batch = self.images(samples)
        features = self.backbone(batch)
        if self.training:
            return self.head.losses(features, samples)
        both_sizes = [sizes(sample) for sample in samples]
        detections = self.head.detect(features, [size for size, _ in both_sizes])
        return [to_original(one, *size) for one, size in zip(detections, both_sizes, strict=True)]


def to_original(
    detections: Detections, size: tuple[int, int], original: tuple[int, int]
) -> Detections:
    """Rescale the detections in an image of `size` to the original image's size, pasting masks."""
    boxes = rescale(detections["boxes"], size, original)
    keep = nonempty(boxes)
    kept = {name: value[keep] for name, value in {**detections, "boxes": boxes}.items()}
    if "masks" in kept:
        kept["masks"] = paste_masks(kept["masks"], kept["boxes"], original)
    if "keypoints" in kept:
        kept["keypoints"][:, :, 0] *= original[1] / size[1]
        kept["keypoints"][:, :, 1] *= original[0] / size[0]
    return kept


class Segmenter(nn.Module):
    """Semantic segmenter of backbone and head.

    In training a sample has labels "sem_seg" (H, W), and the model returns the loss. In evaluation
    it returns for each image "sem_seg", scores (K, H, W) in the original image's size.
    """

    def __init__(
        self, images: Images, backbone: Backbone, sem_seg_head: FCN16s | SegmentationHead
    ) -> None:
        super().__init__()
        self.images, self.backbone, self.sem_seg_head = images, backbone, sem_seg_head

    def forward(self, samples: list[Sample]) -> Any:
        """Return the loss in training, else scores."""
        samples, batch = self.images(samples)
        features = self.backbone(batch)
        if self.training:
            labels = [sample["sem_seg"] for sample in samples]
            padding = self.images.divisor, self.images.square_pad
            labeled = stack(labels, *padding, self.sem_seg_head.ignore_value)
            return self.sem_seg_head(features, labeled)[1]
        outputs = []
        for scores, sample in zip(self.sem_seg_head(features)[0], samples, strict=True):
            (height, width), original = sizes(sample)
            unpadded = scores[None, :, :height, :width]
            outputs.append({"sem_seg": F.interpolate(unpadded, original, mode="bilinear")[0]})
        return outputs


def build_sem_seg_head(model: CfgNode, backbone: Backbone) -> FCN16s | SegmentationHead:
    """Build MODEL.SEM_SEG_HEAD."""
    keys = model.SEM_SEG_HEAD
    if keys.NAME != "FCN16sHead":
        return build_head(keys, backbone.stage_channels, backbone.strides, norm_layer(keys.NORM))
    name = only_feature(keys.IN_FEATURES, backbone.strides)
    channels, norm = backbone.stage_channels[name], NORMS[keys.NORM]
    head = FCN16sHead(channels, keys.NUM_CLASSES, channels=keys.CONVS_DIM, norm=norm)
    return FCN16s(head, name, keys.IGNORE_VALUE, keys.LOSS_WEIGHT)


Model = Detector | DenseDetector | Segmenter


def build_model(cfg: CfgNode) -> Model:
    """Build the model that Detectron2 builds from the same keys, on MODEL.DEVICE.

    With the same torch seed, both have the same initial weights.

    Raises:
        UserError: If a key has a value that this engine does not support.
    """
    check_supported(cfg)
    backbone: Backbone = BACKBONES.get(cfg.MODEL.BACKBONE.NAME)(cfg.MODEL)
    square_pad = cfg.MODEL.BACKBONE.SQUARE_PAD
    mean, std = cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD
    images = Images(mean, std, backbone.size_divisibility, square_pad)
    if cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor":
        model: Model = Segmenter(images, backbone, build_sem_seg_head(cfg.MODEL, backbone))
    elif cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        model = DenseDetector(images, backbone, build_retinanet_head(cfg, backbone))
        compile_focal_loss(cfg.MODEL.DEVICE)
    else:
        rpn, roi_heads = build_rpn(cfg.MODEL, backbone), build_roi_heads(cfg, backbone)
        model = Detector(images, backbone, rpn, roi_heads)
    set_memory_format(model, cfg)
    return model.to(cfg.MODEL.DEVICE)
