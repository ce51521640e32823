"""MODEL.CHANNELS_LAST: how a model's kernels, and so its maps, lie in memory."""

import torch
from fvcore.common.config import CfgNode
from torch import nn


def set_memory_format(model: nn.Module, cfg: CfgNode) -> None:
    """(H, W, C) with MODEL.CHANNELS_LAST, else as it is (in place).

    On a CPU in bf16 the res5 of a C4 head stays (C, H, W): the many small maps of regions are
    slower the other way, their batch norms above all.
    """
    if not cfg.MODEL.CHANNELS_LAST:
        return
    model.to(memory_format=torch.channels_last)
    if cfg.MODEL.DEVICE == "cpu" and cfg.SOLVER.PRECISION == "bf16":
        for name, module in model.named_modules():
            if name == "roi_heads.res5":
                module.to(memory_format=torch.contiguous_format)
