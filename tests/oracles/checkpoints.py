"""Checkpoints in the layouts that most tests of the converter read, a few hundred KB each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models import resnet as tv

from tests.oracles.resnets import make_resnet


def _moco_state(query: nn.Module, key: nn.Module, dim: int = 16) -> dict[str, Tensor]:
    """facebookresearch/moco@7397dfe moco/builder.py, under DistributedDataParallel."""
    state = {}
    for name, net in (("encoder_q", query), ("encoder_k", key)):
        state.update({f"module.{name}.{k}": v.clone() for k, v in net.state_dict().items()})
    state["module.queue"] = nn.functional.normalize(torch.randn(dim, 32), dim=0)
    state["module.queue_ptr"] = torch.zeros(1, dtype=torch.long)
    return state


def official(version: int = 2, **kwargs: Any) -> dict[str, Any]:
    """facebookresearch/moco@7397dfe main_moco.py:381-386; v1 a linear head, v2 an MLP."""
    nets = [make_resnet(seed=seed, **kwargs) for seed in (0, 1)]
    for net in nets:
        if version == 2:
            width = net.fc.weight.shape[1]
            net.fc = nn.Sequential(nn.Linear(width, width), nn.ReLU(), net.fc)
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.03, momentum=0.9)
    for parameter in nets[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    before = _moco_state(*nets)
    optimizer.step()
    return {
        "epoch": 200,
        "arch": f"resnet{kwargs.get('depth', 18)}",
        "state_dict": before,
        "optimizer": optimizer.state_dict(),
    }


def own(**kwargs: Any) -> dict[str, Any]:
    """moco/engine/checkpoint.py: the official layout, and the encoder's and the input's record."""
    checkpoint = official(**kwargs)
    return {
        **checkpoint,
        "format": "moco-transfer/1",
        "encoder": {
            "arch": checkpoint["arch"],
            "stem": kwargs.get("stem", "imagenet"),
            "width": kwargs.get("base", 8) / 64,
            "dim": 16,
            "mlp": True,
        },
        "input": {"channel_order": "RGB", "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]},
        "step": 100,
        "seed": 0,
        "config": {"MOCO.DIM": 16},
        "rng": torch.get_rng_state(),
    }


def caffe2(net: tv.ResNet, *, folded: bool = False) -> dict[str, np.ndarray]:
    """MSRA's layout: the keys printed in detectron2#1688, or Detectron's with folded statistics.

    Folding: facebookresearch/Detectron tools/pickle_caffe_blobs.py, remove_spatial_bn_layers.
    """
    state = {key: value.numpy() for key, value in net.state_dict().items()}
    blobs = {
        "conv1_w": state["conv1.weight"],
        "conv1_b": np.full_like(state["bn1.bias"], 0.25),
        "fc1000_w": state["fc.weight"],
        "fc1000_b": state["fc.bias"],
    }
    norms = {"bn1": "res_conv1_bn"}
    parts = {"conv1": "2a", "conv2": "2b", "conv3": "2c", "downsample.0": "1"}
    for key in state:
        pieces = key.split(".", 2)
        if not key.startswith("layer") or pieces[2].removesuffix(".weight") not in parts:
            continue
        part = pieces[2].removesuffix(".weight")
        name = f"res{int(pieces[0][5]) + 1}_{pieces[1]}_branch{parts[part]}"
        blobs[f"{name}_w"] = state[key]
        norm = {"downsample.0": "downsample.1"}.get(part, part.replace("conv", "bn"))
        norms[f"{pieces[0]}.{pieces[1]}.{norm}"] = f"{name}_bn"
    for norm, name in norms.items():
        scale, bias, mean, var = (
            state[f"{norm}.{tensor}"]
            for tensor in ("weight", "bias", "running_mean", "running_var")
        )
        if folded:
            factor = scale / np.sqrt(var + 1e-5)
            blobs[f"{name}_s"], blobs[f"{name}_b"] = factor, bias - mean * factor
        else:
            blobs[f"{name}_gamma"], blobs[f"{name}_beta"] = scale, bias
            blobs[f"{name}_running_mean"], blobs[f"{name}_running_var"] = mean, var
    return blobs


def detectron2_layout(net: nn.Module, author: str = "torchvision") -> dict[str, Any]:
    """Return what tools/convert-torchvision-to-d2.py and the official MoCo converter write."""
    return {
        "model": {official_names(k): v.numpy() for k, v in net.state_dict().items()},
        "__author__": author,
        "matching_heuristics": True,
    }


def official_names(k: str) -> str:
    """Rename a tensor by the official converter's chain of replacements.

    It is the oracle of the table of names.

    facebookresearch/moco@7397dfe detection/convert-pretrain-to-detectron2.py:22-36.
    """
    if "layer" not in k:
        k = "stem." + k
    for t in [1, 2, 3, 4]:
        k = k.replace(f"layer{t}", f"res{t + 1}")
    for t in [1, 2, 3]:
        k = k.replace(f"bn{t}", f"conv{t}.norm")
    k = k.replace("downsample.0", "shortcut")
    return k.replace("downsample.1", "shortcut.norm")
