"""Layers of parameters: values written out, and Detectron2's own function for ViT."""

import pytest
from fvcore.common.config import CfgNode

from detection.modeling.optimizer import family_with_rule, parameter_layer


def cfg(builder, by_stage=False, **model):
    solver = {"LR_DECAY_BY_STAGE": by_stage}
    return CfgNode({"MODEL": {"BACKBONE": {"NAME": builder}, **model}, "SOLVER": solver})


R50 = cfg("build_resnet_fpn_backbone", RESNETS={"DEPTH": 50})
C4 = cfg("build_resnet_backbone", RESNETS={"DEPTH": 101})
TINY = cfg("build_convnext_fpn_backbone", CONVNEXT={"DEPTHS": (3, 3, 9, 3)})
BASE = cfg("build_convnext_fpn_backbone", CONVNEXT={"DEPTHS": (3, 3, 27, 3)})
STAGES = cfg("build_convnext_backbone", by_stage=True, CONVNEXT={"DEPTHS": (3, 3, 9, 3)})
VIT = cfg("build_vit_sfp_backbone", VIT={"DEPTH": 4})


@pytest.mark.parametrize(
    ("config", "last", "layers"),
    [
        (
            R50,
            6,
            {
                "bottom_up.stem.conv1.weight": 0,
                "bottom_up.stem.conv1.norm.bias": 0,
                "bottom_up.res2.2.conv3.weight": 1,
                "bottom_up.res3.0.shortcut.weight": 2,
                "bottom_up.res4.2.conv1.norm.weight": 3,
                "bottom_up.res4.3.conv1.weight": 4,
                "bottom_up.res5.0.conv1.weight": 5,
                "fpn_lateral4.weight": 6,
            },
        ),
        (C4, 12, {"stem.conv1.weight": 0, "res4.22.conv1.weight": 10, "res3.3.conv1.weight": 2}),
        (
            TINY,
            7,
            {
                "bottom_up.stem.1.weight": 0,
                "bottom_up.stages.0.blocks.2.gamma": 1,
                "bottom_up.stages.1.downsample.0.weight": 2,
                "bottom_up.stages.1.blocks.0.conv_dw.weight": 2,
                "bottom_up.stages.2.downsample.1.weight": 3,
                "bottom_up.stages.2.blocks.5.mlp.fc1.weight": 4,
                "bottom_up.stages.2.blocks.8.norm.bias": 5,
                "bottom_up.stages.3.downsample.1.bias": 6,
                "bottom_up.stages.3.blocks.2.gamma": 6,
                "bottom_up.norm0.weight": 7,
            },
        ),
        (
            BASE,
            13,
            {"bottom_up.stages.2.blocks.26.gamma": 11, "bottom_up.stages.3.norm": 12},
        ),
        (
            STAGES,
            7,
            {
                "stem.1.weight": 0,
                "stages.0.blocks.2.gamma": 1,
                "stages.1.downsample.0.weight": 0,
                "stages.1.blocks.0.conv_dw.weight": 2,
                "stages.2.blocks.0.gamma": 3,
                "stages.2.blocks.8.norm.bias": 3,
                "stages.3.downsample.1.bias": 0,
                "stages.3.blocks.2.gamma": 4,
                "norm3.weight": 7,
            },
        ),
        (
            VIT,
            5,
            {
                "net.pos_embed": 0,
                "net.cls_token": 0,
                "net.reg_token": 0,
                "net.patch_embed.proj.bias": 0,
                "net.blocks.0.norm1.weight": 1,
                "net.blocks.3.attn.rel_pos_h": 4,
                "net.blocks.3.residual.conv1.weight": 5,
                "simfp_2.0.weight": 5,
            },
        ),
    ],
    ids=["R50", "R101-C4", "ConvNeXt-T", "ConvNeXt-B", "stages", "ViT"],
)
def test_layers(config, last, layers):
    found = {name: parameter_layer(f"backbone.{name}", config) for name in layers}
    assert found == {name: (layer, last) for name, layer in layers.items()}
    assert parameter_layer("roi_heads.box_head.fc1.weight", config) == (last, last)


def test_the_last_stage_of_c4_is_the_backbones_and_its_extra_norm_is_not():
    assert parameter_layer("roi_heads.res5.0.conv1.weight", C4) == (11, 12)
    assert parameter_layer("roi_heads.res5.norm.weight", C4) == (12, 12)


def test_families_by_the_name_of_the_builder():
    assert family_with_rule(cfg("build_transfer_resnet_fpn_backbone")) == "resnet"
    assert family_with_rule(cfg("build_timm_fpn_backbone")) == "timm"
    assert family_with_rule(cfg("build_other_fpn_backbone")) is None
    with pytest.raises(KeyError, match="None"):
        parameter_layer("backbone.stem.weight", cfg("build_other_fpn_backbone"))


@pytest.mark.parametrize(
    ("builder", "start"),
    [("timm", ""), ("timm_fpn", "bottom_up."), ("timm_sfp", "net.")],
)
def test_timms_own_layers(builder, start):
    """The stem, the last block, and everything after the backbone."""
    timm = {"NAME": "regnety_002", "ARGUMENTS": ""}
    config = cfg(f"build_{builder}_backbone", TIMM=timm)
    stem, last = parameter_layer(f"backbone.{start}net.stem.conv.weight", config)
    block, _ = parameter_layer(f"backbone.{start}net.s4.b7.conv3.conv.weight", config)
    assert (stem, block) == (0, last - 1)
    assert parameter_layer("roi_heads.box_head.fc1.weight", config) == (last, last)
