"""Optimizers of both engines, by SOLVER.OPTIMIZER, and their parameter groups.

An optimizer is registered as a function of parameter groups and the SOLVER keys.
"""

from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from detection.modeling.layer_decay import layer_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

OPTIMIZERS = Registry("OPTIMIZERS")

# Position embeddings, Swin's among them, tokens and LayerScale, which recipes with AdamW do not
# decay. The first two are from Detectron2's ViTDet (projects/ViTDet/configs, `overrides`),
# LayerScale from ConvNeXt's code; `no_weight_decay` of timm's transformers has tokens as well, and
# is asked in a network of timm.
EMBEDDINGS = ("pos_embed", "relative_position_bias_table", "cls_token", "reg_token", "gamma")


@OPTIMIZERS.register()
def SGD(groups: list[dict[str, Any]], solver: CfgNode) -> "Optimizer":  # noqa: N802
    """Build SGD with momentum, as detectron2/solver/build.py."""
    import torch

    return torch.optim.SGD(groups, solver.BASE_LR, solver.MOMENTUM, nesterov=solver.NESTEROV)


@OPTIMIZERS.register()
def AdamW(groups: list[dict[str, Any]], solver: CfgNode) -> "Optimizer":  # noqa: N802
    """Build AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), with torch's epsilon of 1e-8."""
    import torch

    return torch.optim.AdamW(groups, solver.BASE_LR, tuple(solver.BETAS))


def build_optimizer(cfg: CfgNode, model: "nn.Module") -> "Optimizer":
    """Build SOLVER.OPTIMIZER for the trainable parameters of a detector that is not wrapped yet."""
    build = OPTIMIZERS.get(cfg.SOLVER.OPTIMIZER)
    optimizer: Optimizer = build(parameter_groups(cfg, model), cfg.SOLVER)
    return optimizer


def parameter_groups(cfg: CfgNode, model: "nn.Module") -> list[dict[str, Any]]:
    """Group the trainable parameters by learning rate and weight decay; shared ones count once.

    As in `get_default_optimizer_params` of detectron2/solver/build.py, torch's norms have
    WEIGHT_DECAY_NORM (Detectron2's own channels-first LayerNorm does not), and WEIGHT_DECAY_BIAS,
    if set, applies to all biases, including those of norms. SOLVER.LR_DECAY multiplies the learning
    rate by layer, SOLVER.BACKBONE_LR_FACTOR that of the whole backbone.
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
    undecayed = {
        f"{start}.{name}"
        for start, module in model.named_modules()
        if hasattr(module, "no_weight_decay")
        for name in module.no_weight_decay()
    }
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
            if f"{module_name}.{name}".startswith("backbone."):
                lr *= solver.BACKBONE_LR_FACTOR
            if isinstance(module, norms):
                decay = solver.WEIGHT_DECAY_NORM
            if name == "bias":
                lr *= solver.BIAS_LR_FACTOR
                decay = decay if solver.WEIGHT_DECAY_BIAS is None else solver.WEIGHT_DECAY_BIAS
            is_embedding = name in EMBEDDINGS or f"{module_name}.{name}" in undecayed
            if is_embedding and solver.OPTIMIZER == "AdamW":
                decay = solver.WEIGHT_DECAY_EMBED
            groups.setdefault((lr, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": lr, "initial_lr": lr, "weight_decay": decay}
        for (lr, decay), parameters in groups.items()
    ]
