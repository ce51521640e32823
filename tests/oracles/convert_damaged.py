"""Files with one thing wrong in them: a tensor, a record, a name."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import models

from tests.oracles.checkpoints import caffe2, detectron2_layout, official, own
from tests.oracles.convert_files import File, changed, resnet, untrained, without
from tests.oracles.convert_transformers import convnext, transformers_vit, vit, with_layer_scale
from tests.oracles.layouts_projects import LAYOUTS, made
from tests.oracles.resnets import make_resnet

Q = "module.encoder_q."
ONE = torch.ones(1)
NARROW = {  # of the official code's checkpoint here
    "stride_in_1x1": False,
    "depth": 18,
    "stem": "imagenet",
    "stem_out_channels": 8,
    "res2_out_channels": 8,
    "num_groups": 1,
    "width_per_group": 64,
}


def damaged_resnets() -> dict[str, File]:
    """Return files with one or two wrong tensors in the official code's query encoder."""
    edits: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
        "without a weight": ("layer3.1.conv2.weight", lambda t: None),
        "without a statistic": ("bn1.running_mean", lambda t: None),
        "one more tensor": ("layer1.0.extra", lambda t: torch.zeros(1)),
        "a convolution's bias": ("layer1.0.conv1.bias", lambda t: torch.zeros(8)),
        "one more block": ("layer4.2.conv1.weight", lambda t: torch.ones(64, 64, 3, 3)),
        "transposed": ("layer2.0.conv1.weight", lambda t: t.transpose(0, 1)),
        "half a bias": ("layer1.1.bn2.bias", lambda t: t[:4]),
        "integers": ("layer1.1.bn2.bias", lambda t: t.int()),
        "complex": ("conv1.weight", lambda t: t.cfloat()),
        "NaN": ("layer4.0.conv1.weight", lambda t: t * torch.nan),
        "infinite": ("bn1.running_var", lambda t: t / 0),
        "negative variance": ("bn1.running_var", lambda t: -t),
        "zero weight": ("layer2.0.conv2.weight", torch.zeros_like),
        "zero scale": ("layer2.0.bn2.weight", torch.zeros_like),
        "a number": ("layer2.0.bn2.weight", lambda t: 3.0),
        "sparse": ("layer2.0.bn2.weight", lambda t: t.to_sparse()),
        "meta": ("layer2.0.bn2.weight", lambda t: t.to("meta")),
        "gray": ("conv1.weight", lambda t: t[:, :1]),
        "5x5 stem": ("conv1.weight", lambda t: t[..., :5, :5]),
        "a stem of three dimensions": ("conv1.weight", lambda t: t[0]),
        "7x3 stem": ("conv1.weight", lambda t: t[..., :3]),
        "empty": ("layer1.0.conv2.weight", lambda t: t[:0]),
        "larger than its storage": ("bn1.weight", lambda t: torch.zeros(1).expand(2**40)),
        "overflowing features": ("layer3.0.bn1.weight", lambda t: torch.full_like(t, 3e38)),
    }
    files = {name: File(lambda one=one: _edited(one)) for name, one in edits.items()}
    three = ("layer3.1.conv2.weight", "bn1.bias", "layer4.1.bn1.weight")
    keys = ("layer1.0.se.fc1.weight", "conv2.weight", "bn1.scale", "layer5.0.conv1.weight")
    for key in keys:
        files[f"{key} in a plain one"] = File(
            lambda key=key: {"state_dict": {**resnet(), key: torch.ones(1)}}
        )
    return files | {
        "three at once": File(
            lambda: _edited(
                (three[0], lambda t: None),
                (three[1], lambda t: t * torch.nan),
                (three[2], lambda t: t[:3]),
            )
        ),
        "without a stage": File(lambda: without(resnet(), "layer4")),
        "never trained": File(lambda: untrained().state_dict()),
        "wrapped and plain": File(lambda: resnet() | {"module.bn1.bias": resnet()["bn1.bias"] + 1}),
        "an index of 5000 digits": File(
            lambda: resnet() | {"layer1." + "1" * 5000 + ".conv1.weight": ONE}
        ),
        "one storage for sixty tensors": File(_one_storage),
        "other numbers of blocks": File(
            lambda: models.ResNet(models.resnet.BasicBlock, [1, 2, 1, 1]).state_dict()
        ),
        "simclr v2, selective kernels": File(
            lambda: made("simclr v2 with selective kernels").checkpoint
        ),
        "mmpretrain, deep stem": File(_deep_stem),
        "pycontrast, L": File(_cmc, {"encoder": "L"}),
        "pycontrast, ab": File(_cmc, {"encoder": "ab"}),
    }


def damaged_records() -> dict[str, File]:
    """Return files with wrong metadata."""
    files: dict[str, File] = {}
    edits: dict[str, tuple[str, str, Any]] = {
        "without a mean": ("input", "mean", None),
        "two deviations": ("input", "std", [0.2, 0.2]),
        "a mean of letters": ("input", "mean", ["a", "b", "c"]),
        "an unknown order": ("input", "channel_order", "XYZ"),
        "deviations of zero": ("input", "std", [0, 0, 0]),
        "an unknown stem": ("encoder", "stem", "vgg"),
        "another stem": ("encoder", "stem", "cifar"),
        "another width": ("encoder", "width", 1.0),
        "another arch": ("encoder", "arch", "resnet34"),
    }
    for name, (part, key, value) in edits.items():
        files[f"own, {name}"] = File(
            lambda part=part, key=key, value=value: changed(own(), part, **{key: value})
        )
    files["own, without its encoder"] = File(lambda: without(own(), "encoder"))
    files["own, another format"] = File(lambda: {**own(), "format": "moco-transfer/9"})
    for damage in (torch.ones(2), np.ones(2), 7, [1, 2]):
        files[f"own, its input is a {type(damage).__name__}"] = File(
            lambda damage=damage: {**own(), "input": damage}
        )
    forged: dict[str, dict[str, Any]] = {
        "its source": {"source": "x\x1b[2J"},
        "its encoder": {"encoder": "x\nnext  rm"},
        "its sha256": {"source_sha256": "x"},
        "its mean": {"pixel_mean": [10**250, 0, 0]},
        "its version": {"version": ["x" * 10**6] * 50},
        "a later version": {"version": 7},
        "its depth": {"architecture": {**NARROW, "depth": 50}},
        "its groups": {"architecture": {**NARROW, "num_groups": 5}},
        "its channels": {"architecture": {**NARROW, "res2_out_channels": 2**60}},
        "the first version": {"version": 1},
        "one more field": {"color": "RGB"},
    }
    for name, change in forged.items():
        files[f"converted, {name} forged"] = File(
            lambda change=change: functools.partial(_forged, change, {})
        )
    model: dict[str, dict[str, Any]] = {
        "a missing tensor": {"res2.0.conv1.weight": None},
        "an unknown tensor": {"x": ONE},
        "NaN": {"stem.conv1.weight": torch.full((8, 3, 7, 7), torch.nan)},
        "no tensor": {"stem.conv1.weight": 1},
    }
    for name, change in model.items():
        files[f"converted, {name}"] = File(
            lambda change=change: functools.partial(_forged, {}, change)
        )
    config = {"model_type": "vit", "hidden_size": 24, "num_attention_heads": 3}
    for name, text in {
        "another width": json.dumps({**config, "hidden_size": 32}),
        "another patch": json.dumps({**config, "patch_size": 8}),
        "no square": json.dumps({**config, "image_size": [16, 32]}),
        "another activation": json.dumps({**config, "hidden_act": "relu"}),
        "a small epsilon": json.dumps({**config, "layer_norm_eps": "small"}),
        "no heads": json.dumps({**config, "num_attention_heads": -1}),
        "a list": "[1]",
        "an open brace": "{",
        "100,000 brackets": "[" * 100_000,
        "2 MB of blanks": " " * 2_000_000,
    }.items():
        files[f"config.json: {name}"] = File(
            transformers_vit, name="pytorch_model.bin", sidecars={"config.json": text}
        )
    return files


def damaged_others() -> dict[str, File]:
    """Caffe2's blobs, Detectron2's names, vision transformers and ConvNeXts."""
    blobs: dict[str, tuple[str, Any]] = {
        "without a weight": ("res4_1_branch2b_w", None),
        "without a variance": ("res_conv1_bn_running_var", None),
        "group norm": ("res2_0_branch2a_gn_s", np.ones(8)),
        "a block of two digits": ("res2_00_branch2a_w", np.ones(8)),
        "an unknown branch": ("res2_0_branch2d_w", np.ones(8)),
        "an unknown statistic": ("res2_0_branch2a_bn_riv", np.ones(8)),
        "a classifier": ("pred_w", np.ones(8)),
        "an RPN": ("rpn_cls_logits_w", np.ones(8)),
        "a bias": ("res2_0_branch2a_b", np.ones(8)),
        "a shift": ("res2_0_branch2a_bn_b", np.ones(8)),
        "NaN": ("conv1_w", np.full((8, 3, 7, 7), np.nan, np.float32)),
        "integers": ("conv1_w", np.ones((8, 3, 7, 7), np.int32)),
    }
    files = {
        f"MSRA, {name}": File(
            lambda key=key, value=value: {
                k: v for k, v in {**caffe2(make_resnet(50)), key: value}.items() if v is not None
            },
            pickled=2,
        )
        for name, (key, value) in blobs.items()
    }
    files |= {
        "MSRA, folded and not": File(
            lambda: caffe2(make_resnet(50)) | caffe2(make_resnet(50), folded=True), pickled=2
        ),
        "MSRA, a ResNeXt": File(_msra_resnext, pickled=2),
        "Detectron2, without a statistic": File(
            lambda: changed(
                detectron2_layout(make_resnet(50)),
                "model",
                res3__0__shortcut__norm__running_mean=None,
            )
        ),
        "Detectron2, one more": File(
            lambda: changed(
                detectron2_layout(make_resnet(50)), "model", proposal__weight=np.ones(1)
            )
        ),
    }
    transformers: dict[str, tuple[str, Any]] = {
        "without positions": ("pos_embed", None),
        "15 positions": ("pos_embed", torch.ones(1, 15, 24)),
        "11 positions": ("pos_embed", torch.ones(1, 11, 24)),
        "gray": ("patch_embed.proj.weight", torch.ones(24, 1, 4, 4)),
        "without a bias": ("blocks.1.mlp.fc2.bias", None),
        "BEiT's bias table": ("blocks.0.attn.relative_position_bias_table", torch.ones(3)),
        "BEiT's query bias": ("blocks.1.attn.q_bias", torch.ones(3)),
        "rotary": ("rope_embed.periods", torch.ones(3)),
        "masked biases": ("blocks.0.attn.qkv.bias_mask", torch.ones(3)),
        "gated": ("blocks.0.mlp.w12.weight", torch.ones(3)),
        "distillation": ("dist_token", torch.ones(3)),
        "CLIP's norm": ("norm_pre.weight", torch.ones(3)),
        "a damaged class token": ("cls_token", torch.full((1, 1, 24), torch.nan)),
    }
    for name, (key, value) in transformers.items():
        files[f"ViT, {name}"] = File(
            lambda key=key, value=value: {
                k: v for k, v in {**vit(), key: value}.items() if v is not None
            },
            {"num_heads": 3},
        )
    for name, damage, options in (
        ("positions of integers", {"pos_embed": torch.ones(1, 17, 24).long()}, {"image_size": 24}),
        ("a short LayerScale", {"blocks.1.ls1.gamma": torch.ones(3)}, {"fold_layer_scale": True}),
        ("a scalar bias", {"blocks.1.mlp.fc2.bias": torch.ones(())}, {"fold_layer_scale": True}),
    ):
        files[f"ViT, {name}"] = File(
            lambda damage=damage: with_layer_scale(vit()) | damage, {"num_heads": 3, **options}
        )
    norms = {f"blocks.{i}.norm{k}" for i in (0, 1) for k in (1, 2)}
    start = {f"{norm}.weight": torch.ones(24) for norm in norms} | {"norm.weight": torch.ones(24)}
    start |= {f"{norm}.bias": torch.zeros(24) for norm in norms} | {"norm.bias": torch.zeros(24)}
    files["ViT, never trained"] = File(lambda: vit() | start, {"num_heads": 3})
    return files | {
        "ConvNeXt, overlapping stem": File(lambda: convnext() | {"stem.2.weight": torch.ones(8)}),
        "ConvNeXt, without a weight": File(
            lambda: without(convnext(), "stages.1.blocks.0.conv_dw.weight")
        ),
        "ConvNeXt, without a block": File(lambda: without(convnext(), "stages.1.blocks.0")),
        "ConvNeXt, without a stage": File(lambda: without(convnext(), "stages.3")),
        "ConvNeXt, patches of 2": File(
            lambda: convnext() | {"stem.0.weight": torch.ones(8, 3, 2, 2)}
        ),
        "ConvNeXt, never trained": File(
            lambda: {
                k: torch.full_like(v, k.endswith("weight")) if v.dim() == 1 else v
                for k, v in convnext().items()
            }
        ),
    }


def _edited(*edits: tuple[str, Callable[[Tensor], Any]]) -> dict[str, Any]:
    """Return the official code's checkpoint with other tensors in its query encoder."""
    content = official()
    state = content["state_dict"]
    for name, edit in edits:
        value = edit(state.get(Q + name, ONE))
        state[Q + name] = value
        if value is None:
            del state[Q + name]
    return content


def _one_storage() -> dict[str, Tensor]:
    one = torch.ones(3_000_000)
    return resnet() | {f"layer1.{i}.conv1.weight": one[i:] for i in range(60)}


def _deep_stem() -> dict[str, Any]:
    content = LAYOUTS["mmpretrain published"].make().checkpoint
    state = content["state_dict"]
    state["backbone.stem.0.weight"] = state.pop("backbone.conv1.weight")
    return content


def _cmc() -> dict[str, Any]:
    return made("pycontrast CMC").checkpoint


def _msra_resnext() -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    bottleneck = models.resnet.Bottleneck
    net = models.ResNet(bottleneck, [3, 4, 6, 3], groups=2, width_per_group=4, num_classes=4)
    return caffe2(net)


def _forged(contract: dict[str, Any], model: dict[str, Any], path: Path) -> None:
    """Write a converted file of the official code's checkpoint with another contract or model."""
    from convert.convert_to_d2 import convert_file

    source, result = path.with_name("source"), path.with_name("result.pth")
    torch.save(official(), source)
    convert_file(source, result)
    content = torch.load(result, weights_only=True)
    content["contract"].update(contract)
    content["model"].update(model)
    content["model"] = {key: v for key, v in content["model"].items() if v is not None}
    torch.save(content, path)
