"""Layers of the box, mask and keypoint heads.

Parameter names, initial values and the random numbers that these consume are those of
detectron2/modeling/roi_heads/{box_head,fast_rcnn,mask_head,keypoint_head}.py; torchvision's heads
have other names and other initial values.

Shapes: R regions, C channels, P pooled cells per side, K classes (foreground).
"""

from collections.abc import Sequence

from fvcore.nn.weight_init import c2_msra_fill, c2_xavier_fill
from torch import Tensor, nn

from convert.modeling.resnet import NormLayer
from detection.embedded.layers import conv, normal_fill


def convs(
    name: str, channels: int, dims: Sequence[int], norm: NormLayer | None = None
) -> tuple[nn.Sequential, int]:
    """Build 3x3 convolutions `name`1, `name`2, ... with ReLU: (R, C, P, P) -> (R, C', P, P).

    Returns:
        The layers and C'.
    """
    layers = nn.Sequential()
    for number, dim in enumerate(dims, 1):
        layers.add_module(f"{name}{number}", conv(channels, dim, 3, norm))
        layers.add_module(f"{name}_relu{number}", nn.ReLU())
        channels = dim
    return layers, channels


def box_head(
    channels: int,
    pooled: int,
    conv_dims: Sequence[int],
    fc_dims: Sequence[int],
    norm: NormLayer | None,
) -> tuple[nn.Sequential, int]:
    """Build 3x3 convolutions, then fully-connected layers: (R, C, P, P) -> (R, D).

    Returns:
        The layers and D.
    """
    head, channels = convs("conv", channels, conv_dims, norm)
    head.add_module("flatten", nn.Flatten())
    features = channels * pooled**2
    for number, dim in enumerate(fc_dims, 1):
        head.add_module(f"fc{number}", nn.Linear(features, dim))
        head.add_module(f"fc_relu{number}", nn.ReLU())
        features = dim
    for layer in head:
        if isinstance(layer, nn.Conv2d):
            c2_msra_fill(layer)
        elif isinstance(layer, nn.Linear):
            c2_xavier_fill(layer)
    return head, features


class BoxPredictor(nn.Module):
    """Box predictor: (R, D) -> class logits (R, K + 1), background last, and deltas (R, 4 K).

    Args:
        features: D.
        num_classes: K.
        class_agnostic: Predict the same deltas for all classes, (R, 4).
        class_weights: Weights (K,) by which the federated loss samples classes; None without this
            loss. A buffer, as in Detectron2.
    """

    fed_loss_cls_weights: Tensor | None

    def __init__(
        self,
        features: int,
        num_classes: int,
        *,
        class_agnostic: bool = False,
        class_weights: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.cls_score = nn.Linear(features, num_classes + 1)
        self.bbox_pred = nn.Linear(features, 4 if class_agnostic else num_classes * 4)
        normal_fill(self.cls_score, std=0.01)
        normal_fill(self.bbox_pred, std=0.001)
        self.register_buffer("fed_loss_cls_weights", class_weights)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and deltas in fp32."""
        return self.cls_score(x).float(), self.bbox_pred(x).float()  # also under autocast


def mask_head(
    channels: int, num_classes: int, conv_dims: Sequence[int], norm: NormLayer | None
) -> nn.Sequential:
    """Build a mask head: (R, C, P, P) -> logits (R, K, 2P, 2P).

    It has 3x3 convolutions, a transposed one of stride 2, whose channels are the last of
    `conv_dims`, and a 1x1 convolution to one mask per class.
    """
    head, channels = convs("mask_fcn", channels, conv_dims[:-1], norm)
    head.add_module("deconv", nn.ConvTranspose2d(channels, conv_dims[-1], 2, stride=2))
    head.add_module("deconv_relu", nn.ReLU())
    predictor = conv(conv_dims[-1], num_classes, 1)
    for layer in head:
        if not isinstance(layer, nn.ReLU):
            c2_msra_fill(layer)
    normal_fill(predictor, std=0.001)
    head.add_module("predictor", predictor)
    return head


def keypoint_head(channels: int, num_keypoints: int, conv_dims: Sequence[int]) -> nn.Sequential:
    """Build a keypoint head: (R, C, P, P) -> heatmaps (R, `num_keypoints`, 4P, 4P).

    It has 3x3 convolutions, a transposed one of stride 2, and bilinear upsampling by 2.
    """
    head, channels = convs("conv_fcn", channels, conv_dims)
    lowres = nn.ConvTranspose2d(channels, num_keypoints, 4, stride=2, padding=1)
    head.add_module("score_lowres", lowres)
    for layer in head:
        if not isinstance(layer, nn.ReLU):
            c2_msra_fill(layer)
    head.add_module("upsample", nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=False))
    return head
