"""Networks and checkpoints in exactly the layouts that convert/ reads, a few hundred KB each."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet as tv

from convert.convert_to_d2 import convert_file
from moco.common.errors import DataError, UserError
from tests.oracles.resnets import make_resnet


@pytest.fixture(scope="session", name="make_resnet")
def make_resnet_fixture() -> Callable[..., tv.ResNet]:
    return make_resnet


def _moco_state(query: nn.Module, key: nn.Module, dim: int = 16) -> dict[str, Tensor]:
    """facebookresearch/moco@7397dfe moco/builder.py, under DistributedDataParallel."""
    state = {}
    for name, net in (("encoder_q", query), ("encoder_k", key)):
        state.update({f"module.{name}.{k}": v.clone() for k, v in net.state_dict().items()})
    state["module.queue"] = nn.functional.normalize(torch.randn(dim, 32), dim=0)
    state["module.queue_ptr"] = torch.zeros(1, dtype=torch.long)
    return state


def _official(version: int = 2, **kwargs: Any) -> dict[str, Any]:
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


def _own(**kwargs: Any) -> dict[str, Any]:
    """moco/engine/checkpoint.py: the official layout, and the encoder's and the input's record."""
    checkpoint = _official(**kwargs)
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


def _caffe2(net: tv.ResNet, *, folded: bool = False) -> dict[str, np.ndarray]:
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


def _detectron2_layout(net: nn.Module, author: str = "torchvision") -> dict[str, Any]:
    """What tools/convert-torchvision-to-d2.py and the official MoCo converter write."""
    return {
        "model": {_official_names(k): v.numpy() for k, v in net.state_dict().items()},
        "__author__": author,
        "matching_heuristics": True,
    }


@pytest.fixture(scope="session")
def caffe2() -> Callable[..., dict[str, np.ndarray]]:
    return _caffe2


@pytest.fixture(scope="session")
def detectron2_layout() -> Callable[..., dict[str, Any]]:
    return _detectron2_layout


@pytest.fixture
def save_pickle(tmp_path: Path) -> Callable[..., Path]:
    """Write a pickle under a name that says nothing about it; protocol 2 as Python 2 wrote it."""

    def write(value: Any, name: str = "weights.file", protocol: int = 2) -> Path:
        (tmp_path / name).write_bytes(pickle.dumps(value, protocol=protocol))
        return tmp_path / name

    return write


@pytest.fixture(scope="session")
def official() -> Callable[..., dict[str, Any]]:
    return _official


@pytest.fixture(scope="session")
def own() -> Callable[..., dict[str, Any]]:
    return _own


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a checkpoint under a name that says nothing about it."""

    def write(value: Any, name: str = "some.file") -> Path:
        torch.save(value, tmp_path / name)
        return tmp_path / name

    return write


def _official_names(k: str) -> str:
    """The official converter's chain of replacements, as the oracle of the table.

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


@pytest.fixture
def official_names() -> Callable[[str], str]:
    return _official_names


@pytest.fixture
def refuse(tmp_path: Path, save: Any) -> Callable[..., str]:
    """Convert a checkpoint (or file), expect one line of error and no output; return the line."""

    def check(
        checkpoint: Any, reason: str, error: type[UserError] = DataError, **kwargs: Any
    ) -> str:
        src = checkpoint if isinstance(checkpoint, Path) else save(checkpoint)
        before = set(tmp_path.rglob("*"))
        with pytest.raises(error, match=reason) as caught:
            convert_file(src, tmp_path / "out.pth", **kwargs)
        assert set(tmp_path.rglob("*")) == before, "something was left behind"
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        assert str(src) in message, "the line names the file"
        return message

    return check
