"""Memory format of a model's kernels, and so of its maps (MODEL.CHANNELS_LAST)."""

import torch
from fvcore.common.config import CfgNode
from torch import nn


def set_memory_format(model: nn.Module, cfg: CfgNode) -> None:
    """Convert a model to channels last if MODEL.CHANNELS_LAST is set (in place).

    On a CPU in bf16 the res5 of a C4 head keeps channels first, because its many small maps of
    regions, and above all their batch norms, are slower in channels last.
    """
    if not cfg.MODEL.CHANNELS_LAST:
        return
    model.to(memory_format=torch.channels_last)
    if cfg.MODEL.DEVICE == "cpu" and cfg.SOLVER.PRECISION == "bf16":
        for name, module in model.named_modules():
            if name == "roi_heads.res5":
                module.to(memory_format=torch.contiguous_format)
