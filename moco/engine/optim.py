"""The registry of optimizers, by their value of SOLVER.OPTIMIZER.

What is registered is a function of the parameters to be trained and of the keys under SOLVER.
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
    """SGD with momentum (the paper, sec. 4); weight decay on all parameters."""
    import torch

    return torch.optim.SGD(
        parameters, solver.BASE_LR, solver.MOMENTUM, weight_decay=solver.WEIGHT_DECAY
    )


@OPTIMIZERS.register()
def adamw(parameters: Iterable["Tensor"], solver: "CfgNode") -> "Optimizer":
    """AdamW with torch's betas (0.9, 0.999); weight decay on all parameters, as MoCo v3 has it."""
    import torch

    return torch.optim.AdamW(parameters, solver.BASE_LR, weight_decay=solver.WEIGHT_DECAY)


@OPTIMIZERS.register()
def lars(parameters: Iterable["Tensor"], solver: "CfgNode") -> "Optimizer":
    """Rates scaled by layer, for large batches; see `moco.engine.lars.LARS`."""
    from moco.engine.lars import LARS

    return LARS(parameters, solver.BASE_LR, solver.MOMENTUM, solver.WEIGHT_DECAY)
