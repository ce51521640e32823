"""Registry of optimizers, by their value of SOLVER.OPTIMIZER.

Each entry is a function of the parameters to train and of the keys under SOLVER.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fvcore.common.registry import Registry

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode
    from torch import Tensor
    from torch.optim import Optimizer

OPTIMIZERS = Registry("OPTIMIZERS")


@OPTIMIZERS.register()
def sgd(parameters: Iterable["Tensor"], solver: "CfgNode") -> "Optimizer":
    """Build SGD with momentum (the paper, sec. 4) and weight decay on all parameters."""
    import torch

    return torch.optim.SGD(
        parameters, solver.BASE_LR, solver.MOMENTUM, weight_decay=solver.WEIGHT_DECAY
    )


@OPTIMIZERS.register()
def adamw(parameters: Iterable["Tensor"], solver: "CfgNode") -> "Optimizer":
    """Build AdamW with torch's betas (0.9, 0.999), decaying all parameters as in MoCo v3."""
    import torch

    return torch.optim.AdamW(parameters, solver.BASE_LR, weight_decay=solver.WEIGHT_DECAY)


@OPTIMIZERS.register()
def lars(parameters: Iterable["Tensor"], solver: "CfgNode") -> "Optimizer":
    """Build LARS, for large batches; see `moco.engine.lars.LARS`."""
    from moco.engine.lars import LARS

    return LARS(parameters, solver.BASE_LR, solver.MOMENTUM, solver.WEIGHT_DECAY)
