"""Networks and layers that nobody trained are said aloud or refused; half precision is widened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from convert.convert_to_d2 import convert_file
from convert.verify import read_converted
from tests.oracles.resnets import make_resnet

Save = Callable[..., Path]


def reset(net: nn.Module, name: str, *, statistics: bool, affine: bool) -> None:
    norm = net.get_submodule(name)
    if statistics:
        norm.reset_running_stats()
    if affine:
        nn.init.ones_(norm.weight)
        nn.init.zeros_(norm.bias)


def norms(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize(
    ("statistics", "affine", "words"),
    [(True, False, "had never seen an image"), (False, True, "had been frozen")],
)
def test_one_layer_is_a_warning_with_its_name(
    statistics: bool, affine: bool, words: str, save: Save, tmp_path: Path
) -> None:
    net = make_resnet()
    reset(net, "layer2.1.bn2", statistics=statistics, affine=affine)
    report = convert_file(save(net.state_dict()), tmp_path / "out.pth")
    (warning,) = report.warnings
    assert warning.startswith("1 of 20 batch norms") and words in warning
    assert warning.endswith("'layer2.1.bn2'")
    assert f"warning       {warning}" in report.text()


def test_a_trained_network_has_no_warnings(save: Save, tmp_path: Path) -> None:
    assert convert_file(save(make_resnet().state_dict()), tmp_path / "out.pth").warnings == []


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        (torch.float16, "widened"),
        (torch.bfloat16, "widened"),
        (torch.float64, "rounded"),
    ],
)
def test_other_floats_become_float32(
    dtype: torch.dtype, how: str, save: Save, tmp_path: Path
) -> None:
    state = {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in make_resnet().state_dict().items()
    }
    report = convert_file(save(state), tmp_path / "out.pth")
    (warning,) = report.warnings
    assert warning.startswith(f"100 of 100 tensors are {dtype}") and how in warning
    assert "'conv1.weight'" in warning
    model = read_converted(tmp_path / "out.pth").model
    assert torch.equal(model["stem.conv1.weight"], state["conv1.weight"].float())
