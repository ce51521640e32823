"""Heads of semantic segmentation on the maps of any backbone, shared by both engines.

`LinearHead` is a classifier of cells, `UPerHead` that of UPerNet (arXiv 1807.10221). Shapes: N
images, C channels, K classes, H W pixels of the input, h w cells of a map.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from detection.modeling.fcn16s import labeled_mean
from detection.modeling.vit_maps import FourMaps
from moco.common.errors import UserError

NormLayer = Callable[[int], nn.Module]
POOLED = (1, 2, 3, 6)  # sides of UPerHead's pooled maps
AUXILIARY_CHANNELS = 256


class Maps(NamedTuple):
    """Input maps of a head: names, channels and strides."""

    names: tuple[str, ...]
    channels: tuple[int, ...]
    strides: tuple[int, ...]


class SegmentationHead(nn.Module):
    """Base of heads: returns (None, losses) in training, else (scores of pixels, {}).

    A subclass has `cells`, which returns the scores of the first map's cells by name of their loss,
    the main one first.

    Args:
        maps: Maps of the backbone.
        settings: MODEL.SEM_SEG_HEAD.
    """

    def __init__(self, maps: Maps, settings: CfgNode) -> None:
        super().__init__()
        self.names, self.stride = maps.names, maps.strides[0]
        self.feature_norm: bool = settings.FEATURE_NORM
        self.ignore_value: int = settings.IGNORE_VALUE
        self.weights = {"loss_sem_seg": settings.LOSS_WEIGHT}

    def cells(self, maps: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the scores (N, K, h, w) of each loss."""
        raise NotImplementedError

    def forward(
        self, features: Mapping[str, Tensor], targets: Tensor | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return losses from features and labels `targets` (N, H, W) in training, else scores."""
        maps = [features[name] for name in self.names]
        if self.feature_norm:
            maps = [normalize_channels(x) for x in maps]
        found = self.cells(maps)
        if self.training:
            assert targets is not None
            size = (targets.shape[-2], targets.shape[-1])
            return None, {
                name: self.weights[name]
                * labeled_mean(resize_map(scores.float(), size), targets, self.ignore_value)
                for name, scores in found.items()
            }
        height, width = maps[0].shape[-2:]
        size = (height * self.stride, width * self.stride)
        return resize_map(found["loss_sem_seg"], size), {}


class LinearHead(SegmentationHead):
    """Linear classifier of cells: dropout of channels, a norm, and a 1x1 convolution.

    With batch norm it is the probe of DINOv2 and DINOv3 (dinov3/eval/segmentation/models/heads/
    linear_head.py), without any norm that of arXiv 2404.12172. Several maps of one stride are
    concatenated.

    Args:
        maps: Maps of the backbone.
        settings: MODEL.SEM_SEG_HEAD.
        norm: Builds a norm for a number of channels; None: no norm.
    """

    def __init__(self, maps: Maps, settings: CfgNode, norm: NormLayer | None) -> None:
        super().__init__(maps, settings)
        if len(set(maps.strides)) > 1:
            raise UserError(
                f"MODEL.SEM_SEG_HEAD.IN_FEATURES {list(maps.names)}: LinearHead concatenates maps "
                f"of one stride, these have {list(maps.strides)}; name fewer"
            )
        channels = sum(maps.channels)
        self.dropout = nn.Dropout2d(settings.DROPOUT)
        self.norm = norm(channels) if norm else nn.Identity()
        self.predictor = classifier(channels, settings.NUM_CLASSES)

    def cells(self, maps: Sequence[Tensor]) -> dict[str, Tensor]:
        """Classify every cell."""
        x = torch.cat(list(maps), dim=1)
        return {"loss_sem_seg": self.predictor(self.norm(self.dropout(x)))}


class UPerHead(SegmentationHead):
    """UPerNet's head: pyramid pooling of the last map, an FPN, and a classifier of all of its maps.

    Its layers are those of mmsegmentation (mmseg/models/decode_heads/uper_head.py, psp_head.py,
    fcn_head.py). Four maps of one stride, as a plain transformer's, are first scaled to four.

    Deviation: the loss is the mean over labeled pixels; mmsegmentation's divides by all of them.

    Args:
        maps: Four maps of the backbone, from fine to coarse.
        settings: MODEL.SEM_SEG_HEAD.
        norm: Builds a norm for a number of channels; None: no norm.
    """

    def __init__(self, maps: Maps, settings: CfgNode, norm: NormLayer | None) -> None:
        super().__init__(maps, settings)
        if len(maps.names) != 4:
            raise UserError(
                f"MODEL.SEM_SEG_HEAD.IN_FEATURES {list(maps.names)}: UPerHead needs four maps"
            )
        self.neck: FourMaps | None = None
        if len(set(maps.strides)) == 1:
            width = maps.channels[0]
            self.neck = FourMaps(width, maps.strides[0], (norm or _no_norm)(width))
        channels, classes = settings.CONVS_DIM, settings.NUM_CLASSES
        *lower, top = maps.channels
        self.pooled = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(side), conv(top, channels, 1, norm))
            for side in POOLED
        )
        self.bottleneck = conv(top + len(POOLED) * channels, channels, 3, norm)
        self.laterals = nn.ModuleList(conv(width, channels, 1, norm) for width in lower)
        self.outputs = nn.ModuleList(conv(channels, channels, 3, norm) for _ in lower)
        self.fuse = conv(4 * channels, channels, 3, norm)
        self.dropout = nn.Dropout2d(settings.DROPOUT)
        self.predictor = classifier(channels, classes)
        self.auxiliary: nn.Sequential | None = None
        if settings.AUXILIARY_WEIGHT:
            self.auxiliary = nn.Sequential(
                conv(maps.channels[2], AUXILIARY_CHANNELS, 3, norm),
                nn.Dropout2d(settings.DROPOUT),
                classifier(AUXILIARY_CHANNELS, classes),
            )
            self.weights["loss_sem_seg_auxiliary"] = settings.AUXILIARY_WEIGHT

    def cells(self, maps: Sequence[Tensor]) -> dict[str, Tensor]:
        """Classify the cells of the finest map, and in training those of the third for its loss."""
        if self.neck is not None:
            maps = list(self.neck(dict(zip(self.names, maps, strict=True))).values())
        top = maps[-1]
        size = (top.shape[-2], top.shape[-1])
        pooled = [resize_map(part(top), size) for part in self.pooled]
        x = self.bottleneck(torch.cat([top, *pooled], dim=1))
        found = [x]
        lower = zip(self.laterals, self.outputs, maps[:-1], strict=True)
        for lateral, output, y in reversed(list(lower)):
            x = lateral(y) + resize_map(x, (y.shape[-2], y.shape[-1]))
            found.insert(0, output(x))
        size = (found[0].shape[-2], found[0].shape[-1])
        x = self.fuse(torch.cat([resize_map(y, size) for y in found], dim=1))
        scores = {"loss_sem_seg": self.predictor(self.dropout(x))}
        if self.training and self.auxiliary is not None:
            scores["loss_sem_seg_auxiliary"] = self.auxiliary(maps[2])
        return scores


HEADS: dict[str, Callable[[Maps, CfgNode, NormLayer | None], SegmentationHead]] = {
    "LinearHead": LinearHead,
    "UPerHead": UPerHead,
}


def build_head(
    settings: CfgNode,
    channels: Mapping[str, int],
    strides: Mapping[str, int],
    norm: NormLayer | None,
) -> SegmentationHead:
    """Build the head of MODEL.SEM_SEG_HEAD.NAME.

    Args:
        settings: MODEL.SEM_SEG_HEAD.
        channels: Channels of the backbone's maps by name.
        strides: Strides of the backbone's maps by name.
        norm: Builds a norm for a number of channels; None: no norm.

    Raises:
        UserError: If the maps do not fit the head.
    """
    names = tuple(settings.IN_FEATURES)
    if not names or not set(names) <= strides.keys():
        raise UserError(
            f"MODEL.SEM_SEG_HEAD.IN_FEATURES {list(names)}: expected one or more of "
            f"{', '.join(strides)}"
        )
    maps = Maps(
        names, tuple(map(channels.__getitem__, names)), tuple(map(strides.__getitem__, names))
    )
    return HEADS[settings.NAME](maps, settings, norm)


def normalize_channels(x: Tensor) -> Tensor:
    """Normalize a map (N, C, h, w) over its channels.

    Deviation: a transformer's final norm also has a learned scale and bias, which converted weights
    do not have. A linear layer or batch norm after it can learn both.
    """
    return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], eps=1e-6).permute(0, 3, 1, 2)


def resize_map(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize a map bilinearly, (N, C, h, w) -> (N, C, *size)."""
    return F.interpolate(x, size, mode="bilinear", align_corners=False)


def classifier(channels: int, num_classes: int) -> nn.Conv2d:
    """Build a 1x1 convolution whose weights start at N(0, 0.01) and biases at 0."""
    layer = nn.Conv2d(channels, num_classes, 1)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.get_parameter("bias"))
    return layer


def conv(inputs: int, outputs: int, kernel: int, norm: NormLayer | None) -> nn.Sequential:
    """Build a convolution that keeps the map's size, a norm and a ReLU, as mmcv's ConvModule."""
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=norm is None)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, (norm or _no_norm)(outputs), nn.ReLU(inplace=True))


def _no_norm(channels: int) -> nn.Module:
    return nn.Identity()
