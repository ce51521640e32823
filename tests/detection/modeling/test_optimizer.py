"""Parameter groups and optimizers: values written out, and Detectron2's for a ViT."""

from functools import partial

import pytest
import torch
from fvcore.common.config import CfgNode
from torch import nn

from detection.modeling.optimizer import build_optimizer, parameter_groups
from tests.oracles import tiny_detector as tiny


def config(**keys):
    return tiny.task({f"SOLVER.{name}": value for name, value in keys.items()})


def test_groups():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Linear(2, 2))
    model[2].weight.requires_grad = False
    keys = {"WEIGHT_DECAY": 0.1, "WEIGHT_DECAY_NORM": 0.0, "BIAS_LR_FACTOR": 2.0}
    optimizer = build_optimizer(config(BASE_LR=0.5, **keys), model)
    groups = optimizer.param_groups
    found = {(g["lr"], g["weight_decay"]): [id(p) for p in g["params"]] for g in groups}
    assert found == {
        (0.5, 0.1): [id(model[0].weight)],
        (1.0, 0.1): [id(model[0].bias), id(model[2].bias)],
        (0.5, 0.0): [id(model[1].weight)],
        (1.0, 0.0): [id(model[1].bias)],
    }


def test_the_backbone_has_a_rate_of_its_own():
    model = nn.ModuleDict({"backbone": nn.Linear(1, 1), "sem_seg_head": nn.Linear(1, 1)})
    groups = parameter_groups(config(BASE_LR=0.5, BACKBONE_LR_FACTOR=0.1), model)
    found = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert [found[id(p)] for p in model["backbone"].parameters()] == [0.05, 0.05]
    assert [found[id(p)] for p in model["sem_seg_head"].parameters()] == [0.5, 0.5]


def test_a_shared_parameter_is_optimized_once():
    """A user's heads may share parameters."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    (group,) = parameter_groups(config(), model)
    assert [id(parameter) for parameter in group["params"]] == [id(model[0].weight)]


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(2),
        nn.BatchNorm3d(2),
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
        nn.InstanceNorm2d(2, affine=True),
    ],
)
def test_weight_decay_of_biases_wins_over_that_of_norms(norm):
    keys = {"WEIGHT_DECAY": 0.1, "WEIGHT_DECAY_NORM": 0.2, "WEIGHT_DECAY_BIAS": 0.3}
    optimizer = build_optimizer(config(**keys), norm)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.3]


class Tiny(nn.Module):
    """Parameters by the names that a ViT and a ResNet have in a detector."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.bottom_up = nn.ModuleDict({"stem": nn.Linear(2, 2), "res2": nn.Linear(2, 2)})
        for name in ("pos_embed", "cls_token", "reg_token"):
            setattr(self.backbone.bottom_up, name, nn.Parameter(torch.ones(2)))
        self.head = nn.Linear(2, 2, bias=False)


def rates(groups):
    return sorted((len(g["params"]), g["lr"], g["weight_decay"]) for g in groups)


def test_adamw_with_layer_decay():
    keys = {"BASE_LR": 1.0, "WEIGHT_DECAY": 0.1, "LR_DECAY": 0.5, "WEIGHT_DECAY_EMBED": 0.01}
    cfg = config(OPTIMIZER="AdamW", BETAS=(0.8, 0.9), **keys)  # a ResNet-50: 6 layers and the stem
    model = Tiny()
    optimizer = build_optimizer(cfg, model)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert rates(optimizer.param_groups) == [
        (1, 1.0, 0.1),
        (2, 0.5**6, 0.1),
        (2, 0.5**5, 0.1),
        (3, 1.0, 0.01),
    ]
    # SGD trains embeddings as any other weight, as before there was the key.
    groups = parameter_groups(config(OPTIMIZER="SGD", **keys), model)
    assert rates(groups) == [(2, 0.5**6, 0.1), (2, 0.5**5, 0.1), (4, 1.0, 0.1)]


@pytest.mark.detectron2
@pytest.mark.filterwarnings("ignore::FutureWarning")  # where its ViT imports timm from
def test_a_vits_parameters_are_those_of_vitdet(detectron2):
    """Detectron2's own network and function, as projects/ViTDet/configs calls it."""
    from detectron2.modeling.backbone.fpn import LastLevelMaxPool
    from detectron2.modeling.backbone.vit import SimpleFeaturePyramid, ViT, get_vit_lr_decay_rate
    from detectron2.solver.build import get_default_optimizer_params

    vit = ViT(64, embed_dim=8, depth=3, num_heads=2, use_rel_pos=True, residual_block_indexes=(1,))
    model = nn.Module()
    model.backbone = SimpleFeaturePyramid(
        vit, "last_feat", 8, (4.0, 2.0, 1.0, 0.5), LastLevelMaxPool(), norm="LN"
    )
    model.roi_heads = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    cfg = config(OPTIMIZER="AdamW", BASE_LR=1e-4, WEIGHT_DECAY=0.1, LR_DECAY=0.7)
    cfg.defrost()
    cfg.MODEL.BACKBONE.NAME, cfg.MODEL.VIT = "build_vit_sfp_backbone", CfgNode({"DEPTH": 3})
    theirs = torch.optim.AdamW(
        get_default_optimizer_params(
            model,
            base_lr=1e-4,
            weight_decay_norm=0.0,
            lr_factor_func=partial(get_vit_lr_decay_rate, lr_decay_rate=0.7, num_layers=3),
            overrides={"pos_embed": {"weight_decay": 0.0}},
        ),
        lr=1e-4,
        weight_decay=0.1,
    )
    expected, found = (
        {p: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
        for optimizer in (theirs, build_optimizer(cfg, model))
    )
    assert len(expected) == len(list(model.parameters()))
    assert found == expected
    assert len(set(found.values())) > 6
