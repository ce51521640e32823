"""What is not converted, and the one line that says why: strictness, mix-ups, payloads."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision import models

from convert.convert_to_d2 import convert_file
from convert.files import read_file
from convert.inspect_file import inspect_file
from convert.sources import recognize
from convert.verify import read_converted
from moco.common.errors import DataError, UserError
from tests.oracles.checkpoints import detectron2_layout, official, own
from tests.oracles.layouts_frameworks import wrapped
from tests.oracles.resnets import make_resnet

Q = "module.encoder_q."


# Every key and every tensor counts.


def edit(checkpoint: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Replace (or with None remove) tensors of the query encoder; __ stands for a dot."""
    state = checkpoint["state_dict"]
    for name, value in changes.items():
        key = Q + name.replace("__", ".")
        if value is None:
            del state[key]
        else:
            state[key] = value(state[key]) if callable(value) else value
    return checkpoint


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (
            "layer3__1__conv2__weight",
            None,
            r"missing: .*_q\.layer3\.1\.conv2\.weight'",
        ),
        ("bn1__running_mean", None, r"missing: 'module\.encoder_q\.bn1\.running_mean'"),
        ("layer1__0__extra", torch.zeros(1), r"1 keys.*'module\.encoder_q\.layer1\.0\.extra'"),
        ("layer1__0__conv1__bias", torch.zeros(8), r"'module\.encoder_q\.layer1\.0\.conv1\.bias'"),
        ("layer4__2__conv1__weight", torch.ones(64, 64, 3, 3), r"\[2, 2, 2, 3\] basic blocks"),
        ("layer2__0__conv1__weight", lambda t: t.transpose(0, 1), r"shape \[8, 16, 3, 3\] where"),
        (
            "layer1__1__bn2__bias",
            lambda t: t[:4],
            r"shape \[4\] where \[8\].*_q\.layer1\.1\.bn2",
        ),
        ("layer1__1__bn2__bias", lambda t: t.int(), r"int32 where torch\.float32"),
        (
            "conv1__weight",
            lambda t: t.cfloat(),
            r"complex64 where torch\.float32.*_q\.conv1",
        ),
        (
            "layer4__0__conv1__weight",
            lambda t: t * torch.nan,
            r"NaN or Inf: .*_q\.layer4\.0\.conv1",
        ),
        ("bn1__running_var", lambda t: t / 0, r"NaN or Inf: 'module\.encoder_q\.bn1\.running_var'"),
        ("bn1__running_var", lambda t: -t, r"negative variance: 'module\.encoder_q\.bn1"),
        (
            "layer2__0__conv2__weight",
            torch.zeros_like,
            r"all zero: 'module\.encoder_q\.layer2\.0\.conv2\.weight'",
        ),
        (
            "layer2__0__bn2__weight",
            torch.zeros_like,
            r"all zero: 'module\.encoder_q\.layer2\.0\.bn2\.weight'",
        ),
        ("layer2__0__bn2__weight", 3.0, r"is a float, expected a tensor"),
        ("layer2__0__bn2__weight", lambda t: t.to_sparse(), r"not a dense tensor"),
        ("layer2__0__bn2__weight", lambda t: t.to("meta"), r"not a dense tensor"),
        ("conv1__weight", lambda t: t[:, :1], r"takes 1 channels, expected 3"),
        ("conv1__weight", lambda t: t[..., :5, :5], r"is 5x5, expected 7x7 or 3x3"),
        ("conv1__weight", lambda t: t[0], r"_q\.conv1\.weight' has shape .* expected 4 dimensions"),
        ("conv1__weight", lambda t: t[..., :3], r"\[8, 3, 7, 3\] where \[8, 3, 7, 7\]"),
        ("layer1__0__conv2__weight", lambda t: t[:0], r"layer1\.0\.conv2\.weight' has shape \[0,"),
    ],
)
def test_one_wrong_tensor(name: str, value: Any, reason: str, refuse: Callable[..., str]) -> None:
    refuse(edit(official(), **{name: value}), reason)


def test_zero_biases_and_means_are_an_initial_value(save: Any, tmp_path: Path) -> None:
    checkpoint = edit(official(), bn1__bias=torch.zeros_like, bn1__running_mean=torch.zeros_like)
    assert convert_file(save(checkpoint), tmp_path / "out.pth").mapped == 100


def test_all_problems_are_listed_at_once(refuse: Callable[..., str]) -> None:
    checkpoint = edit(
        official(),
        layer3__1__conv2__weight=None,
        bn1__bias=lambda t: t * torch.nan,
        layer4__1__bn1__weight=lambda t: t[:3],
    )
    message = refuse(checkpoint, "not a sound ResNet-18")
    for key in ("layer3.1.conv2.weight", "bn1.bias", "layer4.1.bn1.weight"):
        assert repr(Q + key) in message


def test_a_tensor_larger_than_its_storage(refuse: Callable[..., str]) -> None:
    huge = torch.zeros(1).expand(2**40)
    refuse(edit(official(), bn1__weight=huge), "more elements than the file holds")


def test_keys_outside_the_encoders() -> None:
    checkpoint = official()
    checkpoint["state_dict"]["module.predictor.weight"] = torch.ones(2, 2)
    checkpoint["state_dict"][3] = torch.ones(2)
    (note,) = recognize(checkpoint, "x").notes
    assert note.startswith("ignored") and note.endswith("'module.predictor.weight', 3")


def test_a_second_network_is_ambiguous(refuse: Callable[..., str]) -> None:
    ema = {**official(), "state_dict_ema": make_resnet().state_dict()}
    refuse(ema, "ambiguous.* --encoder with one of query, key, state_dict_ema$")
    both = {**official(), **make_resnet().state_dict()}
    refuse(both, "ambiguous.* --encoder with one of query, key, single$")


def test_numbers_and_texts_beside_the_state_are_harmless(save: Any, tmp_path: Path) -> None:
    checkpoint = {**official(), "best_acc1": 1.0, "args": {"lr": 0.03, "schedule": [120, 160]}}
    report = convert_file(save(checkpoint), tmp_path / "out.pth")
    assert report.dropped["training record"] == 4


# Files that are something else.


def test_only_a_key_encoder(refuse: Callable[..., str], save: Any) -> None:
    checkpoint = official()
    checkpoint["state_dict"] = {
        key: value for key, value in checkpoint["state_dict"].items() if not key.startswith(Q)
    }
    message = refuse(checkpoint, r"no query encoder \(state_dict/encoder_q\.\*\)")
    assert "--encoder key" in message
    src = save(checkpoint)
    assert convert_file(src, src.parent / "key.pth", encoder="key").contract.encoder == "key"


def test_an_encoder_that_the_source_does_not_have(refuse: Callable[..., str]) -> None:
    state = make_resnet().state_dict()
    refuse(
        state, "--encoder key: .* torchvision checkpoint with one network", UserError, encoder="key"
    )


@pytest.mark.parametrize(
    ("stem", "asked", "reason"),
    [("imagenet", "cifar", "can only have imagenet"), ("cifar", "imagenet", "cifar or stride2")],
)
def test_a_stem_that_the_tensors_contradict(
    stem: str, asked: str, reason: str, refuse: Callable[..., str]
) -> None:
    refuse(
        make_resnet(stem=stem).state_dict(), f"--stem {asked}: .*{reason}", UserError, stem=asked
    )


def test_a_stem_that_the_checkpoint_contradicts(refuse: Callable[..., str]) -> None:
    refuse(own(stem="stride2"), "can only have stride2", UserError, stem="cifar")
    checkpoint = own(stem="stride2")
    checkpoint["encoder"]["stem"] = "imagenet"
    refuse(checkpoint, "says stem 'imagenet', but conv1.weight is 3x3")


def test_another_architecture_than_the_file_says(refuse: Callable[..., str]) -> None:
    checkpoint = {**official(), "arch": "resnet50"}
    refuse(checkpoint, "says arch 'resnet50', but its tensors are of ResNet-18")


def test_an_unknown_arch_is_decided_by_the_tensors(save: Any, tmp_path: Path) -> None:
    report = convert_file(save({**official(), "arch": "rn18"}), tmp_path / "out.pth")
    assert report.contract.architecture.depth == 18
    assert report.notes == ["the file names arch 'rn18'; the tensors decide"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.pop("encoder"), "damaged record.*encoder"),
        (lambda c: c["input"].pop("mean"), "damaged record.*mean"),
        (lambda c: c["input"].update(std=[0.2, 0.2]), "damaged record"),
        (lambda c: c["input"].update(mean=["a", "b", "c"]), "damaged record"),
        (lambda c: c["input"].update(channel_order="XYZ"), "channel_order: got 'XYZ'"),
        (lambda c: c["encoder"].update(stem="vgg"), "stem: got 'vgg'"),
        (lambda c: c["input"].update(std=[0, 0, 0]), "input.std"),
        (lambda c: c["encoder"].update(width=1.0), "says width 1.0, but .*conv1.weight' has 8"),
        (lambda c: c["encoder"].update(arch="resnet34"), "says arch 'resnet34'"),
        (lambda c: c.update(format="moco-transfer/9"), "format 'moco-transfer/9' is not known"),
    ],
)
def test_a_damaged_own_checkpoint(change: Any, reason: str, refuse: Callable[..., str]) -> None:
    checkpoint = own()
    change(checkpoint)
    refuse(checkpoint, reason, UserError)


@pytest.mark.parametrize(
    "name", ["alexnet", "mobilenet_v3_small", "efficientnet_b0", "densenet121"]
)
def test_other_architectures(name: str, refuse: Callable[..., str]) -> None:
    with torch.device("meta"):
        shapes = models.get_model(name).state_dict()
    state = {key: torch.tensor(1.0).expand(value.shape) for key, value in shapes.items()}
    message = refuse(state, r"unknown layout \(top level: '")
    assert next(iter(state)) in message


def test_other_resnets(refuse: Callable[..., str]) -> None:
    odd = models.ResNet(models.resnet.BasicBlock, [1, 2, 1, 1], num_classes=2)
    refuse(
        odd.state_dict(),
        r"\[1, 2, 1, 1\] basic blocks, not one of ResNet-\[10, 18, 34, 50, 101, 152\]",
    )
    refuse(nn.Sequential(OrderedDict(conv1=nn.Conv2d(3, 6, 5))).state_dict(), "unknown layout")


def test_unknown_layout_lists_what_was_seen_and_what_is_known(refuse: Callable[..., str]) -> None:
    ours = {"backbone/" + key: value for key, value in make_resnet().state_dict().items()}
    message = refuse({"epoch": 1, "state_dict": ours}, "unknown layout")
    for text in ("'epoch', 'state_dict'", "'backbone/conv1.weight'", "and 116 more"):
        assert text in message
    assert "docs/guides/converting.md has the known ones" in message
    escape = refuse({"\x1b[31mred\n": torch.ones(1)}, "unknown layout")
    assert "\x1b" not in escape


@pytest.mark.parametrize("value", [[], torch.ones(3), 7, "text", {}, {"state_dict": {}}])
def test_files_without_a_network(value: Any, refuse: Callable[..., str]) -> None:
    refuse(value, "unknown layout")


def test_detection_models_and_finished_weights(refuse: Callable[..., str], tmp_path: Path) -> None:
    detector = {"model": {"backbone.stem.conv1.weight": torch.ones(1)}, "iteration": 9}
    refuse(detector, "a detection model.*--eval-only")
    one = torch.ones(1)
    zoo = {"model": {"stem.conv1.weight": one, "res2.0.conv1.weight": one}, "__author__": "ACME"}
    refuse(
        zoo, "without an input contract.* give --mean --std --channel-order --stride-in-1x1 as its"
    )
    caffe2 = {"conv1_w": np.ones(3), "res2_0_branch2a_w": np.ones(3)}
    reasons = {
        "a.pkl": (caffe2, r"Caffe2 weights, but not of MSRA's networks \('conv1_w'"),
        "b.pkl": ({"blobs": caffe2, "cfg": "x"}, r"a detection model of Detectron \(Caffe2\)"),
    }
    for name, (content, reason) in reasons.items():
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
        refuse(tmp_path / name, reason)


def test_numpy_state_dicts_are_read(tmp_path: Path) -> None:
    state = {key: value.numpy() for key, value in make_resnet().state_dict().items()}
    state["bn1.weight"] = state["bn1.weight"].astype(">f4")
    (tmp_path / "x").write_bytes(pickle.dumps(state, protocol=5))  # 5 keeps the byte order
    assert convert_file(tmp_path / "x", tmp_path / "out.pth").mapped == 100


def test_missing_files_and_folders(refuse: Callable[..., str], tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "does not exist")
    (tmp_path / "folder").mkdir()
    refuse(tmp_path / "folder", "is a folder")
    os.mkfifo(tmp_path / "pipe")
    refuse(tmp_path / "pipe", "is a pipe")  # and does not wait for somebody who writes into it


# Converted files are read as strictly (the detection room opens them with read_converted).


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c["model"].pop("res2.0.conv1.weight"), r"missing: 'res2\.0\.conv1\.weight'"),
        (lambda c: c["model"].update(x=torch.ones(1)), "unknown: 'x'"),
        (lambda c: c["model"]["stem.conv1.weight"].fill_(torch.nan), "NaN or Inf: 'stem.conv1"),
        (lambda c: c["model"].update({"stem.conv1.weight": 1}), "expected a tensor"),
        (lambda c: c.update(model=[]), "'model' is a list"),
        (lambda c: c.pop("contract"), "not a file that convert/convert_to_d2.py wrote"),
        (lambda c: c["contract"].update(depth=50), "not a sound ResNet-50"),
        (lambda c: c["contract"].update(version=7), "version 7"),
        (lambda c: c["contract"].update(res2_out_channels=2**60), "res2_out_channels"),
    ],
)
def test_read_converted_is_strict(change: Any, reason: str, save: Any, tmp_path: Path) -> None:
    convert_file(save(official()), tmp_path / "out.pth")
    content = torch.load(tmp_path / "out.pth", weights_only=True)
    change(content)
    path = save(content, "changed.pth")
    with pytest.raises(DataError, match=reason) as caught:
        read_converted(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# Names of tensors, and of what a file looks like.


def test_tensors_are_named_as_in_the_file() -> None:
    """What is missing has no name in the file: its layout's, with the wrappers of the others."""
    plain = make_resnet(50).state_dict()
    net = make_resnet(50)
    numbered = nn.Sequential(*list(net.children())[:-1]).state_dict()
    unpooled = nn.Sequential(
        *(m for n, m in net.named_children() if n not in ("maxpool", "fc"))
    ).state_dict()
    cases = {
        "module._orig_mod.layer2.0.downsample.1.bias": wrapped(net, "module._orig_mod."),
        "net.layer2.0.shortcut.1.bias": {
            "net." + key.replace("downsample", "shortcut"): value for key, value in plain.items()
        },
        "f.5.0.downsample.1.bias": {f"f.{key}": value for key, value in numbered.items()},
        "f.4.0.downsample.1.bias": {f"f.{key}": value for key, value in unpooled.items()},
    }
    for key, state in cases.items():
        raw = {k: v for k, v in state.items() if k != key}
        assert len(raw) == len(state) - 1, key
        assert recognize(raw, "x").named("layer2.0.downsample.1.bias") == key
        assert recognize(state, "x").named("layer2.0.downsample.1.bias") == key
    raw = detectron2_layout(net)
    assert recognize(raw, "x").named("layer2.0.downsample.1.bias") == "res3.0.shortcut.norm.bias"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("downsample_layers.0.0.weight", "stages.0.0.depthwise_conv.weight"), "a ConvNeXt"),
        (("stem.0.weight", "trunk_output.block1.block1-0.f.a.0.weight"), "a RegNet"),
        (("stem.conv.weight", "s1.b1.conv1.conv.weight"), "a RegNet"),
        (("patch_embed.proj.0.weight", "blocks.0.norm1.weight"), "MoCo v3's transformer"),
        (
            (
                *("visual.conv1.weight", "visual.conv3.weight", "visual.layer1.0.conv1.weight"),
                "visual.attnpool.positional_embedding",
            ),
            "CLIP's ResNet",
        ),
        (("visual.class_embedding", "visual.transformer.resblocks.0.ln_1.weight"), "CLIP's vision"),
        (
            (
                "resnet.embedder.embedder.convolution.weight",
                "resnet.encoder.stages.0.layers.0.layer.0.convolution.weight",
            ),
            "in transformers' names",
        ),
    ],
)
def test_what_an_unknown_layout_looks_like(
    keys: tuple[str, ...], words: str, refuse: Callable[..., str]
) -> None:
    state = {key: torch.ones(4, 3, 3, 3) for key in keys}
    for raw in (state, {"state_dict": state}):
        message = refuse(raw, f"unknown layout: .*{words}")
        assert "ResNets" in message and "docs/guides/converting.md" in message


def test_an_index_of_sharded_weights(refuse: Callable[..., str], tmp_path: Path) -> None:
    names = {"resnet.embedder.weight": "model-00001-of-00002.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 9}, "weight_map": names}, indent=2))
    refuse(index, "the index of sharded weights")
    with pytest.raises(DataError, match="the index of sharded weights"):
        inspect_file(index)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "renamed.pth"])
def test_a_part_of_sharded_weights(
    name: str, refuse: Callable[..., str], save: Callable[..., Path], tmp_path: Path
) -> None:
    """Its blocks would be those of a shorter, whole network."""
    state = {f"blocks.{i}.norm1.weight": torch.ones(4) for i in range(2)}
    if name.startswith("model"):
        refuse(save(state, name), "part 1 of 2; save the network as one file")
    listed = dict.fromkeys(state, name) | {"norm.weight": "model-00002-of-00002.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    refuse(save(state, name), r"2 of the 3 tensors .* model\.safetensors\.index\.json lists")
    whole = save(state | {"norm.weight": torch.ones(4)}, "whole.pth")
    assert len(read_file(whole)) == 3  # beside the same network in parts


def test_what_an_ambiguous_transformer_needs_is_said_at_once(refuse: Callable[..., str]) -> None:
    """I-JEPA's target encoder beside its encoder, whose heads are in no tensor either."""
    keys = ("patch_embed.proj.weight", "pos_embed", "blocks.0.norm1.weight")
    network = {f"module.{key}": torch.ones(4, 3, 2, 2) for key in keys}
    refuse(
        {"encoder": network, "target_encoder": network},
        "--encoder with one of encoder, target_encoder, and --num-heads",
    )


@pytest.mark.parametrize(
    "keys",
    [
        ("backbone.body.conv1.weight", "rpn.head.conv.0.0.weight", "roi_heads.box_head.fc6.weight"),
        ("backbone.body.conv1.weight", "head.classification_head.conv.0.0.weight"),
        ("backbone.0.body.conv1.weight", "class_embed.weight"),
        ("backbone.conv1.weight", "rpn_head.rpn_conv.weight"),
    ],
)
def test_detectors_of_others_are_not_sent_to_an_evaluation(
    keys: tuple[str, ...], refuse: Callable[..., str]
) -> None:
    start = keys[0].removesuffix("conv1.weight")
    state = wrapped(make_resnet(), start) | {key: torch.ones(2, 2, 3, 3) for key in keys[1:]}
    for raw in (state, {"model": state}, {"state_dict": state}):
        assert "--eval-only" not in refuse(raw, "a whole detector")
