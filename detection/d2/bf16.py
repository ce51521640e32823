"""Replacements of Detectron2's layers for training in bf16.

Deviation: Detectron2's NaiveSyncBatchNorm computes only fp16 in fp32, and its RoIAlign rounds the
regions to the type of the features. Here both the statistics and the regions are in fp32, and the
regions have the fast gradient on a CPU.
"""

from detectron2.layers import NaiveSyncBatchNorm, ROIAlign
from detectron2.modeling.poolers import ROIPooler
from torch import Tensor, nn

from detection.modeling.roi_align import roi_align


class Fp32RegionsROIAlign(nn.Module):
    """RoIAlign with regions in fp32; `ROIAlign` rounds them to the dtype of the features."""

    def __init__(self, layer: ROIAlign) -> None:
        super().__init__()
        (self.size, _), self.scale = layer.output_size, layer.spatial_scale
        self.sampling_ratio = layer.sampling_ratio

    def forward(self, features: Tensor, rois: Tensor) -> Tensor:
        """Pool (N, C, H, W) in regions (R, 5), image index and box, to (R, C, P, P)."""
        return roi_align(features, rois, self.size, self.scale, self.sampling_ratio)


def replace_roi_align(model: nn.Module) -> None:
    """Use `Fp32RegionsROIAlign` in all poolers (in place); the state dict does not change."""
    for pooler in model.modules():
        if isinstance(pooler, ROIPooler):
            layers = [Fp32RegionsROIAlign(layer) for layer in pooler.level_poolers]
            pooler.level_poolers = nn.ModuleList(layers)


class Fp32NaiveSyncBatchNorm(NaiveSyncBatchNorm):
    """NaiveSyncBatchNorm in fp32, because a variance is a small difference of large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (N, C, H, W) in fp32 and return it in the dtype of `x`."""
        out: Tensor = super().forward(x.float()).to(x.dtype)
        return out


def widen_sync_bn(model: nn.Module) -> None:
    """Compute the statistics of all NaiveSyncBatchNorm layers in fp32 (in place)."""
    for layer in model.modules():
        if isinstance(layer, NaiveSyncBatchNorm):
            layer.__class__ = Fp32NaiveSyncBatchNorm
