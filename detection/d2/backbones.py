"""R50-dilated-C5 (appendix A.1): res5 dilated by 2 with stride 1, a 3x3 convolution to 512."""

from detectron2.config import CfgNode
from detectron2.layers import Conv2d, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, Backbone, build_resnet_backbone
from fvcore.nn.weight_init import c2_xavier_fill
from torch import Tensor

from moco.errors import UserError

FEATURE = "c5"
CHANNELS = 512


class DilatedC5(Backbone):
    """One feature map, "c5": (N, 512, H/16, W/16).

    "the backbone includes the ResNet conv5 stage with a dilation of 2 and stride 1, followed by a
    3x3 convolution (with BN) that reduces dimension to 512" (A.1). The text names a ReLU where
    there is one (A.5) and names none here, so there is none, as after the convolutions of an FPN.

    Args:
        bottom_up: a trunk whose one output is res5 at stride 16.
        norm: of the 3x3 convolution, as detectron2.layers.get_norm takes it.
    """

    def __init__(self, bottom_up: Backbone, norm: str, channels: int = CHANNELS) -> None:
        super().__init__()
        shape = bottom_up.output_shape()["res5"]
        self.bottom_up = bottom_up
        self.reduce = Conv2d(
            shape.channels,
            channels,
            kernel_size=3,
            padding=1,
            bias=False,
            norm=get_norm(norm, channels),
        )
        c2_xavier_fill(self.reduce)
        self._shape = ShapeSpec(channels=channels, stride=shape.stride)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(N, 3, H, W) → {"c5": (N, 512, H/16, W/16)}."""
        return {FEATURE: self.reduce(self.bottom_up(images)["res5"])}

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {FEATURE: self._shape}


@BACKBONE_REGISTRY.register()
def build_resnet_dilated_c5_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> DilatedC5:
    """MODEL.BACKBONE.NAME of the dilated-C5 tasks.

    Raises:
        UserError: res5 is not the dilated one that the name promises.
    """
    resnets = cfg.MODEL.RESNETS
    if list(resnets.OUT_FEATURES) != ["res5"] or resnets.RES5_DILATION != 2:
        raise UserError(
            "build_resnet_dilated_c5_backbone: got MODEL.RESNETS.OUT_FEATURES "
            f"{list(resnets.OUT_FEATURES)}, RES5_DILATION {resnets.RES5_DILATION}; expected "
            "['res5'] and 2"
        )
    return DilatedC5(build_resnet_backbone(cfg, input_shape), resnets.NORM)
