"""FCN-16s head of the paper (appendix A.5), shared by both engines.

Shapes: N images, C channels of the feature map, K classes, H W pixels of the input, h w =
ceil(H/16), ceil(W/16) cells of the feature map.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moco.common.errors import UserError

STRIDE = 16


class FCN16sHead(nn.Module):
    """Two dilated 3x3 convolutions with norm and ReLU, and a 1x1 classifier.

    "two extra 3x3 convolutions of 256 channels, with BN and ReLU, and then a 1x1 convolution for
    per-pixel classification ... dilation = 6 in the two extra 3x3 convolutions" (A.5).

    Args:
        in_channels: C.
        num_classes: K.
        channels: Output channels of the 3x3 convolutions.
        dilation: Dilation of the 3x3 convolutions.
        norm: Builds a norm layer for a number of channels.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        channels: int = 256,
        dilation: int = 6,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs in (in_channels, channels):
            conv = nn.Conv2d(inputs, channels, 3, padding=dilation, dilation=dilation, bias=False)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            layers += [conv, norm(channels), nn.ReLU(inplace=True)]
        self.convs = nn.Sequential(*layers)
        self.predictor = nn.Conv2d(channels, num_classes, 1)
        nn.init.kaiming_normal_(self.predictor.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.predictor.get_parameter("bias"))

    def forward(self, features: Tensor) -> Tensor:
        """Map features (N, C, h, w) to scores (N, K, h, w)."""
        return self.predictor(self.convs(features))


def only_feature(names: Sequence[str], strides: Mapping[str, int]) -> str:
    """Return the only name in MODEL.SEM_SEG_HEAD.IN_FEATURES.

    Args:
        names: The key's value.
        strides: Strides of the backbone's maps by name.

    Raises:
        UserError: If there is not exactly one name, or its map does not have stride 16.
    """
    names = list(names)
    if len(names) != 1 or strides.get(names[0]) != STRIDE:
        raise UserError(
            f"MODEL.SEM_SEG_HEAD.IN_FEATURES: got {names}, expected one feature map of stride "
            f"{STRIDE}; the backbone has {dict(strides)} (res5 with MODEL.RESNETS.RES5_DILATION 2)"
        )
    return names[0]


def upsample(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """Upsample scores (N, K, h, w) bilinearly to pixels (N, K, H, W), `size` = (H, W).

    If every layer pads symmetrically, cell i is centered at pixel 16 i, and so pixel p is at p / 16
    between the cells. Hence corners are aligned on 16 (h - 1) + 1 pixels, the size of crops of 513
    and 769. Pixels beyond the last cell's center take its scores.
    """
    scores = F.pad(scores, (0, 1, 0, 1), mode="replicate")
    height, width = (STRIDE * (cells - 1) + 1 for cells in scores.shape[-2:])
    scores = F.interpolate(scores, (height, width), mode="bilinear", align_corners=True)
    return scores[..., : size[0], : size[1]]


def pixel_loss(scores: Tensor, labels: Tensor, ignore_value: int) -> Tensor:
    """Compute the mean cross-entropy over the batch's labeled pixels; 0 if there are none.

    Args:
        scores: (N, K, h, w) of cells.
        labels: (N, H, W), in 0..K-1 or `ignore_value`.
        ignore_value: Label of pixels that do not count.
    """
    full = upsample(scores.float(), (labels.shape[-2], labels.shape[-1]))
    return labeled_mean(full, labels, ignore_value)


def labeled_mean(scores: Tensor, labels: Tensor, ignore_value: int) -> Tensor:
    """Compute the mean cross-entropy of scores (N, K, H, W) over labeled pixels; 0 without any."""
    total = F.cross_entropy(scores, labels, ignore_index=ignore_value, reduction="sum")
    return total / torch.clamp((labels != ignore_value).sum(), min=1)


class FCN16s(nn.Module):
    """FCN-16s head with its loss: returns (None, losses) in training, else (scores of pixels, {}).

    Args:
        head: Computes the scores of cells.
        in_feature: Name of the backbone's map, of stride 16.
        ignore_value: Label of pixels that do not count.
        loss_weight: Weight of the loss.
    """

    def __init__(
        self, head: FCN16sHead, in_feature: str, ignore_value: int, loss_weight: float
    ) -> None:
        super().__init__()
        self.head, self.in_feature = head, in_feature
        self.ignore_value, self.loss_weight = ignore_value, loss_weight

    def forward(
        self, features: Mapping[str, Tensor], targets: Tensor | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return losses from features and labels `targets` (N, H, W) in training, else scores."""
        scores = self.head(features[self.in_feature])
        if self.training:
            assert targets is not None
            loss = pixel_loss(scores, targets, self.ignore_value)
            return None, {"loss_sem_seg": loss * self.loss_weight}
        # The model crops the scores to the size of each image.
        height, width = scores.shape[-2:]
        return upsample(scores, (height * STRIDE, width * STRIDE)), {}
