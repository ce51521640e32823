"""Heads of semantic segmentation: structure, formulas of their sources, losses, refusals."""

import re

import pytest
import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import nn

from detection.config.task import default_task
from detection.embedded import supported
from detection.modeling.sem_seg_heads import HEADS, build_head, normalize_channels
from moco.common.errors import UserError
from tests.oracles import tiny_detector as tiny

RES = {"res2": 4, "res3": 8, "res4": 16, "res5": 32}
WIDTHS = {"res2": 6, "res3": 7, "res4": 8, "res5": 9}


def settings(**keys) -> CfgNode:
    every = {"NUM_CLASSES": 5, "CONVS_DIM": 4, "NORM": "BN", **keys}
    return tiny.task({f"MODEL.SEM_SEG_HEAD.{k}": v for k, v in every.items()}).MODEL.SEM_SEG_HEAD


def head(name, features, channels=WIDTHS, strides=RES, norm=nn.BatchNorm2d, **keys):
    keys = settings(NAME=name, IN_FEATURES=list(features), **keys)
    torch.manual_seed(0)
    built = build_head(keys, channels, strides, norm)
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.3)
    return built


def maps(size=64, strides=RES, channels=WIDTHS, batch=2):
    torch.manual_seed(1)
    return {n: torch.randn(batch, channels[n], size // s, size // s) for n, s in strides.items()}


def test_the_linear_head_is_batch_norm_and_a_linear_layer():
    built = head("LinearHead", ["res4"], DROPOUT=0.1)
    weights = {"predictor.weight": (5, 8, 1, 1), "predictor.bias": (5,)}
    weights |= {"norm.weight": (8,), "norm.bias": (8,)}
    assert {n: tuple(p.shape) for n, p in built.named_parameters()} == weights
    built.eval()
    x = maps()
    scores, losses = built(x)
    state = built.state_dict()
    y = x["res4"] / (1 + 1e-5) ** 0.5 * state["norm.weight"].view(-1, 1, 1)
    y = y + state["norm.bias"].view(-1, 1, 1)
    y = torch.einsum("kc,nchw->nkhw", state["predictor.weight"][..., 0, 0], y)
    y = y + state["predictor.bias"].view(-1, 1, 1)
    expected = F.interpolate(y, (64, 64), mode="bilinear", align_corners=False)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert losses == {}
    labels = torch.randint(0, 5, (2, 64, 64))
    labels[:, :9] = 255
    built.train()
    built.dropout.p = 0.0
    _, losses = built(x, labels)
    full = F.interpolate(
        built.cells([x["res4"]])["loss_sem_seg"], (64, 64), mode="bilinear", align_corners=False
    )
    torch.testing.assert_close(
        losses["loss_sem_seg"], F.cross_entropy(full, labels, ignore_index=255)
    )


def test_maps_are_concatenated_and_normalized():
    same = {"block1": 16, "block2": 16}
    widths = dict.fromkeys(same, 3)
    built = head("LinearHead", same, widths, same, norm=None, FEATURE_NORM=True).eval()
    x = maps(strides=same, channels=widths)
    y = torch.cat([F.layer_norm(m.movedim(1, -1), (3,), eps=1e-6) for m in x.values()], dim=-1)
    state = built.state_dict()
    y = y @ state["predictor.weight"][..., 0, 0].T + state["predictor.bias"]
    expected = F.interpolate(y.movedim(-1, 1), (64, 64), mode="bilinear", align_corners=False)
    torch.testing.assert_close(built(x)[0], expected)


def test_a_learned_scale_of_the_final_norm_vanishes_in_batch_norm():
    """Hence a frozen backbone loses nothing without it."""
    x = torch.randn(4, 6, 5, 5)
    scale, bias = torch.rand(6, 1, 1) + 0.5, torch.randn(6, 1, 1)
    plain, scaled = (
        nn.BatchNorm2d(6, eps=1e-12)(y)
        for y in (normalize_channels(x), normalize_channels(x) * scale + bias)
    )
    torch.testing.assert_close(plain, scaled, rtol=1e-4, atol=1e-5)


def mmsegmentations(state, x, classes=5):
    """Compute UPerHead as mmsegmentation's modules are composed, from a state dict."""

    def module(name, y, padding):
        y = F.conv2d(y, state[f"{name}.0.weight"], None, padding=padding)
        norm = [state[f"{name}.1.{part}"] for part in ("running_mean", "running_var")]
        return F.relu(F.batch_norm(y, *norm, state[f"{name}.1.weight"], state[f"{name}.1.bias"]))

    def resize(y, like):
        return F.interpolate(y, like.shape[2:], mode="bilinear", align_corners=False)

    *lower, top = x.values()
    pooled = [
        resize(module(f"pooled.{i}.1", F.adaptive_avg_pool2d(top, side), 0), top)
        for i, side in enumerate((1, 2, 3, 6))
    ]
    laterals = [module(f"laterals.{i}", y, 0) for i, y in enumerate(lower)]
    laterals.append(module("bottleneck", torch.cat([top, *pooled], dim=1), 1))
    for i in range(3, 0, -1):
        laterals[i - 1] = laterals[i - 1] + resize(laterals[i], laterals[i - 1])
    outs = [module(f"outputs.{i}", y, 1) for i, y in enumerate(laterals[:-1])] + [laterals[-1]]
    fused = module("fuse", torch.cat([resize(y, outs[0]) for y in outs], dim=1), 1)
    return F.conv2d(fused, state["predictor.weight"], state["predictor.bias"])


def test_the_uper_head_is_mmsegmentations():
    built = head("UPerHead", RES, DROPOUT=0.1).eval()
    x = maps(96)
    expected = mmsegmentations(built.state_dict(), x)
    torch.testing.assert_close(built.cells(list(x.values()))["loss_sem_seg"], expected)
    assert built(x)[0].shape == (2, 5, 96, 96)


def test_the_auxiliary_loss_is_of_the_third_map():
    built = head("UPerHead", RES, AUXILIARY_WEIGHT=0.4)
    x, labels = maps(96), torch.randint(0, 5, (2, 96, 96))
    _, losses = built(x, labels)
    assert set(losses) == {"loss_sem_seg", "loss_sem_seg_auxiliary"}
    built.auxiliary[1].p = 0.0  # dropout
    for norm in built.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 0.0
    full = F.interpolate(built.auxiliary(x["res4"]), (96, 96), mode="bilinear")
    expected = 0.4 * F.cross_entropy(full, labels)
    torch.testing.assert_close(built(x, labels)[1]["loss_sem_seg_auxiliary"], expected)
    assert head("UPerHead", RES, AUXILIARY_WEIGHT=0.0).auxiliary is None


def test_maps_of_one_stride_are_scaled_to_four():
    blocks = {f"block{i}": 16 for i in (3, 5, 7, 11)}
    widths = dict.fromkeys(blocks, 8)
    built = head("UPerHead", blocks, widths, blocks).eval()
    assert built(maps(96, blocks, widths))[0].shape == (2, 5, 96, 96)
    assert {name.split(".")[1] for name in built.state_dict() if name.startswith("neck")} == {
        "res2",
        "res3",
    }


@pytest.mark.parametrize(
    ("name", "features", "message"),
    [
        ("LinearHead", ["res4", "res5"], "maps of one stride, these have [16, 32]"),
        ("LinearHead", ["p2"], "expected one or more of res2, res3, res4, res5"),
        ("LinearHead", [], "expected one or more of"),
        ("UPerHead", ["res3", "res4", "res5"], "needs four maps"),
    ],
)
def test_maps_that_do_not_fit(name, features, message):
    with pytest.raises(UserError, match=re.escape(message)):
        head(name, features)


@pytest.mark.parametrize(
    ("features", "fits"),
    [
        (["last_feat"], True),
        (["block7"], True),
        (["block1", "block11"], True),
        (["block12"], False),
        (["block11", "block1"], False),
        (["last_feat", "block1"], False),
        (["p2"], False),
        ([], False),
    ],
)
def test_blocks_of_a_plain_transformer_are_chosen_by_a_key(features, fits):
    cfg = default_task()
    model = cfg.MODEL
    model.META_ARCHITECTURE, model.BACKBONE.NAME = "SemanticSegmentor", "build_vit_backbone"
    model.SEM_SEG_HEAD.NAME, model.SEM_SEG_HEAD.IN_FEATURES = "LinearHead", features
    model.VIT.PATCH_SIZE = 14
    if fits:
        supported.check_supported(cfg)
        return
    with pytest.raises(UserError, match=r"SEM_SEG_HEAD.IN_FEATURES.*block0 to block11"):
        supported.check_supported(cfg)


def test_every_head_is_known_to_the_embedded_engine():
    cfg = default_task()
    cfg.MODEL.META_ARCHITECTURE = "SemanticSegmentor"
    with pytest.raises(UserError, match=", ".join(HEADS)):
        supported.check_supported(cfg)
