"""Detectron2's layers under bf16.

Deviation: Detectron2 widens fp16 alone. Here RoIAlign has its regions in fp32, and on a CPU the
fast gradient, and NaiveSyncBatchNorm its statistics.
"""

from detectron2.layers import NaiveSyncBatchNorm, ROIAlign
from detectron2.modeling.poolers import ROIPooler
from torch import Tensor, nn

from detection.modeling.roi_align import roi_align


class Fp32RegionsROIAlign(nn.Module):
    """As `layer`, which would round the regions to the features' dtype."""

    def __init__(self, layer: ROIAlign) -> None:
        super().__init__()
        (self.size, _), self.scale = layer.output_size, layer.spatial_scale
        self.sampling_ratio = layer.sampling_ratio

    def forward(self, features: Tensor, rois: Tensor) -> Tensor:
        return roi_align(features, rois, self.size, self.scale, self.sampling_ratio)


def replace_roi_align(model: nn.Module) -> None:
    """In all poolers (in place); there is nothing in a checkpoint about it."""
    for pooler in model.modules():
        if isinstance(pooler, ROIPooler):
            own = [Fp32RegionsROIAlign(layer) for layer in pooler.level_poolers]
            pooler.level_poolers = nn.ModuleList(own)


class Fp32NaiveSyncBatchNorm(NaiveSyncBatchNorm):
    """Takes mean and variance, which is a small difference of large numbers, in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x.float()).to(x.dtype)
        return out


def widen_sync_bn(model: nn.Module) -> None:
    """Let all layers take their statistics in fp32 (in place)."""
    for layer in model.modules():
        if isinstance(layer, NaiveSyncBatchNorm):
            layer.__class__ = Fp32NaiveSyncBatchNorm
