"""The optimizers of both engines, by SOLVER.OPTIMIZER, and what each parameter is trained with.

What is registered is a function of parameter groups and of the keys under SOLVER.
"""

from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from detection.modeling.layer_decay import layer_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

OPTIMIZERS = Registry("OPTIMIZERS")

# Position embeddings and the scale of layers, which recipes with AdamW do not decay. The first is
# from Detectron2's ViTDet (projects/ViTDet/configs, `overrides`), the second from ConvNeXt's.
EMBEDDINGS = ("pos_embed", "gamma")


@OPTIMIZERS.register()
def SGD(groups: list[dict[str, Any]], solver: CfgNode) -> "Optimizer":  # noqa: N802
    """With momentum, as detectron2/solver/build.py."""
    import torch

    return torch.optim.SGD(groups, solver.BASE_LR, solver.MOMENTUM, nesterov=solver.NESTEROV)


@OPTIMIZERS.register()
def AdamW(groups: list[dict[str, Any]], solver: CfgNode) -> "Optimizer":  # noqa: N802
    """Loshchilov and Hutter 2019 (arXiv 1711.05101), with torch's epsilon of 1e-8."""
    import torch

    return torch.optim.AdamW(groups, solver.BASE_LR, tuple(solver.BETAS))


def build_optimizer(cfg: CfgNode, model: "nn.Module") -> "Optimizer":
    """SOLVER.OPTIMIZER on the trainable parameters of a detector that is not wrapped yet."""
    build = OPTIMIZERS.get(cfg.SOLVER.OPTIMIZER)
    optimizer: Optimizer = build(parameter_groups(cfg, model), cfg.SOLVER)
    return optimizer


def parameter_groups(cfg: CfgNode, model: "nn.Module") -> list[dict[str, Any]]:
    """Group the trainable parameters by learning rate and weight decay, one that is shared once.

    As `get_default_optimizer_params` in detectron2/solver/build.py: norms have their weight decay,
    a norm being what torch has as one (Detectron2's own channels-first LayerNorm is not), and
    biases that of the weights, unless WEIGHT_DECAY_BIAS is given, which counts for the biases of
    norms, too. SOLVER.LR_DECAY multiplies the learning rate by layer.
    """
    from torch import nn

    norms = (
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.SyncBatchNorm,
        nn.GroupNorm,
        nn.InstanceNorm1d,
        nn.InstanceNorm2d,
        nn.InstanceNorm3d,
        nn.LayerNorm,
        nn.LocalResponseNorm,
    )
    solver, seen = cfg.SOLVER, set[nn.Parameter]()
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            lr, decay = solver.BASE_LR, solver.WEIGHT_DECAY
            if solver.LR_DECAY != 1.0:
                layer, last = layer_of(f"{module_name}.{name}", cfg)
                lr *= solver.LR_DECAY ** (last - layer)
            if isinstance(module, norms):
                decay = solver.WEIGHT_DECAY_NORM
            if name == "bias":
                lr *= solver.BIAS_LR_FACTOR
                decay = decay if solver.WEIGHT_DECAY_BIAS is None else solver.WEIGHT_DECAY_BIAS
            if name in EMBEDDINGS and solver.OPTIMIZER == "AdamW":
                decay = solver.WEIGHT_DECAY_EMBED
            groups.setdefault((lr, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": lr, "initial_lr": lr, "weight_decay": decay}
        for (lr, decay), parameters in groups.items()
    ]
