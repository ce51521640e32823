"""Files that are something else than a network, or do not say which; and those made to harm."""

from __future__ import annotations

import functools
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn
from torchvision import models

from tests.oracles import layouts_vit
from tests.oracles.checkpoints import caffe2, detectron2_layout, official, own
from tests.oracles.convert_files import File, resnet, without
from tests.oracles.convert_transformers import transformers_vit, vit
from tests.oracles.layouts_projects import made
from tests.oracles.payloads import Payload, corpus, harmless
from tests.oracles.resnets import headless, make_resnet

Q = "module.encoder_q."
ONE = torch.ones(1)


def unclear() -> dict[str, File]:
    """Files and options that do not say which network is meant, or contradict each other."""
    two = {"left": headless(), "right": headless(seed=1)}
    linear = functools.partial(resnet, "backbone.", depth=50)
    style = "model = dict(backbone=dict(type='ResNet', depth=50, style='caffe'))"
    pixels = "dict(mean=[103.53, 116.28, 123.675], std=[1.0, 1.0, 1.0], to_rgb=False)"
    other = {"stage.0.conv.weight": torch.ones(8, 8, 3, 3), "stage.0.conv.bias": torch.ones(8)}
    given = {"mean": [103.53, 116.28, 123.675], "std": [1, 1, 1], "channel_order": "BGR"}
    files = {
        "two networks": File(
            lambda: {f"{n}.{k}": v for n, net in two.items() for k, v in net.state_dict().items()}
        ),
        "two networks in dicts": File(lambda: {"net": {"a": resnet(), "b": resnet(seed=1)}}),
        "a third one": File(lambda: {**official(), "state_dict_ema": resnet(seed=7)}),
        "a third one among the keys": File(lambda: {**official(), **resnet(seed=7)}),
        "unknown convolutions": File(lambda: {**official(), "generator": other}),
        "lightning's encoders": File(
            lambda: {
                "pytorch-lightning_version": "1.0",
                "state_dict": resnet("encoder_q.") | resnet("encoder_k.", seed=1),
            }
        ),
        "moco, the key encoder alone": File(
            lambda: {**official(), "state_dict": without(official()["state_dict"], Q)}
        ),
        "dino, the student alone": File(lambda: without(made("dino").checkpoint, "teacher")),
        "an encoder of nobody": File(official, {"encoder": "rabbit"}),
        "an encoder of one": File(resnet, {"encoder": "key"}),
        "another stem than 7x7": File(resnet, {"stem": "cifar"}),
        "another stem than 3x3": File(lambda: resnet(stem="cifar"), {"stem": "imagenet"}),
        "another stem than recorded": File(lambda: own(stem="stride2"), {"stem": "cifar"}),
        "another arch": File(lambda: {**official(), "arch": "resnet50"}),
        "pixels of 0..1": File(official, {"mean": [0.485, 0.456, 0.406]}),
        "solo-learn's CIFAR stem": File(
            lambda: {
                "pytorch-lightning_version": "2",
                "state_dict": resnet("backbone.", stem="cifar")
                | {"classifier.weight": torch.ones(2, 2), "projector.0.weight": torch.ones(2, 2)},
            }
        ),
        "mm's caffe style": File(lambda: {"meta": {"cfg": style}, "state_dict": linear()}),
        "mm's BGR": File(lambda: {"meta": {"cfg": pixels}, "state_dict": linear()}),
        "nobody's in Detectron2's names": File(
            lambda: detectron2_layout(make_resnet(50), author="ACME")
        ),
        "a ViT without heads": File(vit),
        "a ViT of 5 heads": File(vit, {"num_heads": 5}),
        "a ViT with a stem": File(vit, {"num_heads": 3, "stem": "cifar"}),
        "I-JEPA": File(
            lambda: {"encoder": vit("module."), "target_encoder": vit("module.", seed=1)}
        ),
        "solo-learn's small ViT": File(lambda: layouts_vit.solo_mae(384, 6)),
        "transformers' names without heads": File(transformers_vit),
    }
    for name in ("mean", "std", "channel_order"):
        rest = {key: value for key, value in given.items() if key != name}
        files[f"nobody's, without {name}"] = File(
            lambda: detectron2_layout(make_resnet(50), author="ACME"), rest
        )
    for name, options in {
        "size of no patches": {"image_size": 18},
        "a large size": {"image_size": 4096},
        "no patch": {"patch_size": 0},
        "a large patch": {"patch_size": 100},
        "a rule alone": {"patch_rule": "bicubic"},
        "an unknown rule": {"patch_rule": "best", "patch_size": 8},
        "no LayerScale to fold": {"fold_layer_scale": True},
    }.items():
        files[f"ViT, {name}"] = File(vit, {"num_heads": 3, **options})
    return files


def other_files() -> dict[str, File]:
    """Networks of other kinds, detectors, files of other programs, cut and empty ones."""
    files: dict[str, File] = {}
    for name in ("alexnet", "mobilenet_v3_small", "efficientnet_b0", "densenet121"):
        files[name] = File(functools.partial(_shapes, name))
    for keys in (
        ("downsample_layers.0.0.weight", "stages.0.0.depthwise_conv.weight"),
        ("stem.0.weight", "trunk_output.block1.block1-0.f.a.0.weight"),
        ("stem.conv.weight", "s1.b1.conv1.conv.weight"),
        ("patch_embed.proj.0.weight", "blocks.0.norm1.weight"),
        ("visual.conv1.weight", "visual.conv3.weight", "visual.attnpool.positional_embedding"),
        ("resnet.embedder.embedder.convolution.weight",),
    ):
        files[f"a network with {keys[-1]}"] = File(
            lambda keys=keys: {"state_dict": {key: torch.ones(4, 3, 3, 3) for key in keys}}
        )
    for start, *others in (
        ("backbone.body.", "rpn.head.conv.0.0.weight", "roi_heads.box_head.fc6.weight"),
        ("backbone.body.", "head.classification_head.conv.0.0.weight"),
        ("backbone.0.body.", "class_embed.weight"),
        ("backbone.", "rpn_head.rpn_conv.weight"),
        ("backbone.", "classifier.0.convs.0.0.weight"),
    ):
        files[f"a detector with {others[-1]}"] = File(
            lambda start=start, others=others: {
                "model": resnet(start) | {key: torch.ones(2, 2, 3, 3) for key in others}
            }
        )
    torch_file, legacy = io.BytesIO(), io.BytesIO()
    torch.save(official(), torch_file)
    torch.save(official(), legacy, _use_new_zipfile_serialization=False)
    whole = {
        "torch.save": torch_file.getvalue(),
        "a legacy torch.save": legacy.getvalue(),
        "a pickle": pickle.dumps(caffe2(make_resnet(50)), 2),
        "safetensors": save_safetensors(resnet()),
    }
    for name, content in whole.items():
        for part, end in (("half", len(content) // 2), ("all but one byte", len(content) - 1)):
            files[f"{part} of {name}"] = File(lambda content=content, end=end: content[:end])
    for name, value in {
        "a list": [],
        "a tensor": torch.ones(3),
        "a number": 7,
        "a text": "text",
        "an empty dict": {},
        "an empty state dict": {"state_dict": {}},
        "a whole module": make_resnet(),
        "names that a terminal acts on": {"\x1b[31mred\n": torch.ones(1)},
        "another prefix": {"state_dict": resnet("backbone/")},
        "a detector of Detectron2": {"model": {"backbone.stem.conv1.weight": ONE}, "iteration": 9},
        "LeNet": {"conv1.weight": torch.ones(6, 3, 5, 5), "conv1.bias": torch.ones(6)},
    }.items():
        files[name] = File(lambda value=value: value)
    blobs = {"conv1_w": np.ones(3), "res2_0_branch2a_w": np.ones(3)}
    index = {"metadata": {"total_size": 9}, "weight_map": {"a.weight": "model-00001-of-00002.st"}}
    end = (0xDB4775248B80FB57).to_bytes(8, "little")  # leveldb's table_format.md
    parts = {f"blocks.{i}.norm1.weight": torch.ones(4) for i in range(2)}
    return files | {
        "other blobs of Caffe2": File(lambda: blobs, pickled=2),
        "a detector of Detectron": File(lambda: {"blobs": blobs, "cfg": "x"}, pickled=2),
        "an empty file": File(lambda: b""),
        "a page": File(lambda: b"<!DOCTYPE html><html><body>404</body></html>"),
        "a pointer of Git LFS": File(
            lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
        ),
        "TensorFlow's index": File(lambda: bytes(40) + end, name="model.ckpt.index"),
        "the index of sharded weights": File(
            lambda: json.dumps(index).encode(), name="model.safetensors.index.json"
        ),
        "a part of sharded weights": File(lambda: parts, name="model-00001-of-00002.safetensors"),
    }


def networks_of_timm() -> dict[str, File]:
    """Networks that are not what their tensors or names say; some are refused by name alone."""
    files: dict[str, File] = {}
    for name in (
        "resnet50d",
        "resnet50c",
        "ecaresnet50t",
        "swinv2_tiny_window8_256",
        "mvitv2_tiny",
        "beit_base_patch16_224",
        "convnext_atto_ols",
    ):
        files[name] = File(functools.partial(_shapes_of_timm, name))
    for name in ("resnetblur18", "resnet18"):
        files[f"{name} by arch"] = File(
            lambda name=name: {
                "state_dict": resnet(base=64),
                "arch": name,
                "version": 2,
                "epoch": 1,
            },
        )
        files[f"{name} by its arguments"] = File(
            lambda name=name: {"state_dict": resnet(base=64), "args": {"model": name}}
        )
        files[f"{name} by its configuration"] = File(
            lambda: resnet(base=64),
            sidecars={"config.json": json.dumps({"architecture": name})},
        )
    return files


def payloads(marker: Path) -> dict[str, File]:
    """Files that would run code: `marker` would appear."""
    files = {name: File(lambda c=content: c) for name, content in corpus(marker).items()}
    files |= {
        f"harmless: {n}": File(lambda c=content: c) for n, content in harmless(marker).items()
    }
    good = {"in a good optimizer": official, "in our optimizer": own}
    for name, make in good.items():
        files[name] = File(lambda make=make: _with_payload(make(), marker))
    return files


def _shapes(name: str) -> dict[str, Tensor]:
    """Torchvision's network of a name, in tensors that take no memory."""
    with torch.device("meta"):
        net: nn.Module = models.get_model(name)
    return _of_ones(net)


def _shapes_of_timm(name: str) -> dict[str, Tensor]:
    import timm

    with torch.device("meta"):
        net: nn.Module = timm.create_model(name)
    return _of_ones(net)


def _of_ones(net: nn.Module) -> dict[str, Tensor]:
    return {key: torch.ones(()).expand(value.shape) for key, value in net.state_dict().items()}


def _with_payload(content: dict[str, Any], marker: Path) -> dict[str, Any]:
    content["optimizer"]["param_groups"][0]["lr"] = Payload(marker, "reduce")
    return content
