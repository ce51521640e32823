"""Optimizers of both engines (SOLVER.OPTIMIZER), their parameter groups, and layer-wise decay.

An optimizer is registered as a function of parameter groups and the SOLVER keys.

With layer-wise learning-rate decay (SOLVER.LR_DECAY), a parameter in layer i of 0..L trains with
the learning rate times LR_DECAY ** (L - i). Layer 0 is the stem, and layer L is everything after
the backbone. Each family has its own rule, from the code released with it.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from convert.families.resnet import NUM_BLOCKS

LAYER_RULES = Registry("LAYER_RULES")

_STAGE = re.compile(r"\.(?:res|stages\.)(\d)\.(?:blocks\.)?(\d+)?")


def family_with_rule(cfg: CfgNode) -> str | None:
    """Return the family in MODEL.BACKBONE.NAME if it has a rule, e.g. `vit`."""
    parts = cfg.MODEL.BACKBONE.NAME.split("_")
    return next((part for part in parts if part in LAYER_RULES), None)


def parameter_layer(name: str, cfg: CfgNode) -> tuple[int, int]:
    """Return the layer of a parameter, and the last layer L.

    Raises:
        KeyError: If the backbone's family has no rule.
    """
    layer: tuple[int, int] = LAYER_RULES.get(family_with_rule(cfg))(name, cfg)
    return layer


@LAYER_RULES.register()
def vit(name: str, cfg: CfgNode) -> tuple[int, int]:
    """Use one layer for embeddings, one per block, and one for the rest.

    Equal to `get_vit_lr_decay_rate` in detectron2's vit.py, which knows no tokens.
    """
    last = cfg.MODEL.VIT.DEPTH + 1
    if not name.startswith("backbone."):
        return last, last
    embeddings = ("pos_embed", "patch_embed", "cls_token", "reg_token", "norm_pre")
    if any(f".{part}" in name for part in embeddings):
        return 0, last
    block = re.search(r"\.blocks\.(\d+)\.", name)
    return (int(block[1]) + 1 if block and ".residual." not in name else last), last


@LAYER_RULES.register()
def resnet(name: str, cfg: CfgNode) -> tuple[int, int]:
    """Apply SparK's rule: `lr_factor_func` in keyu-tian/SparK, downstream_d2/lr_decay.py.

    Deviation: the number of layers follows from the blocks of res4. SparK has 5 for ResNet-50 and
    11 for any other, which fits only ResNet-101.
    """
    return _by_stages(name, NUM_BLOCKS[cfg.MODEL.RESNETS.DEPTH], first_stage=2)


@LAYER_RULES.register()
def convnext(name: str, cfg: CfgNode) -> tuple[int, int]:
    """Apply the official rule to timm's names.

    It is `get_num_layer_layer_wise` in facebookresearch/ConvNeXt,
    object_detection/mmcv_custom/layer_decay_optimizer_constructor.py. Its num_layers, 6 for
    ConvNeXt-T and 12 for the others, follow from the depth. The downsampling before a stage belongs
    to the layer of the stage's first block.

    With SOLVER.LR_DECAY_BY_STAGE it is the rule of UPerNet (`decay_type="stage_wise"`), as in
    mmsegmentation, mmseg/engine/optimizers/layer_decay_optimizer_constructor.py: the stages are
    layers 1 to 4, and their downsampling belongs to the stem.
    """
    layer, last = _by_stages(name, cfg.MODEL.CONVNEXT.DEPTHS, first_stage=0)
    if cfg.SOLVER.LR_DECAY_BY_STAGE and 0 < layer < last:
        found = _STAGE.search(name)
        assert found
        layer = 0 if ".downsample." in name else int(found[1]) + 1
    return layer, last


@LAYER_RULES.register()
def timm(name: str, cfg: CfgNode) -> tuple[int, int]:
    """Use the layers of timm's own networks (`group_matcher`), and one for the rest."""
    from convert.modeling.timm_network import layers  # imports timm

    of = layers(cfg.MODEL.TIMM.NAME, cfg.MODEL.TIMM.ARGUMENTS)
    last = max(of.values()) + 1
    start = re.match(r"backbone\.(?:bottom_up\.|net\.(?=net\.))?net\.", name)
    return (of[name[start.end() :]] if start else last), last


def _by_stages(name: str, depths: Sequence[int], first_stage: int) -> tuple[int, int]:
    """Use one layer for the stem, each stage (each 3 blocks of the third) and the rest."""
    top = 4 + (depths[2] - 1) // 3
    if ".stem." in name:
        return 0, top + 1
    found = _STAGE.search(name)
    if found is None or "roi_heads.res5.norm." in name:  # the extra BN of C4 is not pre-trained
        return top + 1, top + 1
    stage, block = int(found[1]) - first_stage, int(found[2] or 0)
    return (1, 2, 3 + block // 3, top)[stage], top + 1


if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

OPTIMIZERS = Registry("OPTIMIZERS")

# Position embeddings, Swin's among them, tokens and LayerScale, which recipes with AdamW do not
# decay. The first two are from Detectron2's ViTDet (projects/ViTDet/configs, `overrides`),
# LayerScale from ConvNeXt's code; `no_weight_decay` of timm's transformers has tokens as well, and
# is used for networks of timm.
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
                layer, last = parameter_layer(f"{module_name}.{name}", cfg)
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
