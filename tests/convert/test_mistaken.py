"""Files that hold something else than a network's weights, as their own libraries write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from convert.convert_to_d2 import convert_file
from moco.common.errors import DataError
from tests.oracles.resnets import make_resnet


def optimizer() -> Any:
    net = nn.Linear(2, 2)
    made = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    made.step()
    return made.state_dict()


def weight_norm() -> Any:
    net = make_resnet(18)
    net.conv1 = torch.nn.utils.weight_norm(net.conv1)
    return net.state_dict()


def parametrized() -> Any:
    net = make_resnet(18)
    net.conv1 = torch.nn.utils.parametrizations.weight_norm(net.conv1)
    return net.state_dict()


def quantized() -> Any:
    net = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
    return {key: value for key, value in net.state_dict().items() if "_packed" not in key}


def adapter() -> Any:
    """Return tensors by the names that peft's `get_peft_model_state_dict` gives them."""
    start = "base_model.model.encoder.layer.0.attention.attention.query."
    sizes = {"lora_A": (4, 24), "lora_B": (24, 4)}
    return {f"{start}{name}.weight": torch.ones(size) for name, size in sizes.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (optimizer, "the state of an optimizer alone, without a network"),
        (weight_norm, r"weight_norm or another parametrization \('conv1\.weight_g'\)"),
        (parametrized, r"weight_norm or another parametrization \('conv1\.parametrizations"),
        (quantized, "quantized weights"),
        (adapter, r"a LoRA adapter \('base_model"),
        (lambda: {"model": resnet18()}, r"a whole module in 'model', of the class torchvision"),
        (resnet18, r"a whole module, of the class torchvision\.models\.resnet\.ResNet"),
    ],
)
def test_each_has_its_sentence_and_way_out(
    make: Callable[[], Any], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.pth"
    torch.save(make(), file)
    with pytest.raises(DataError, match=words) as error:
        convert_file(file, tmp_path / "out.pth")
    message = str(error.value).removeprefix(f"{file}: ")
    assert len(message) <= 300 and "\n" not in message
    assert re.search(r"\bgive\b|torch\.save", message)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"GGUF\x03\x00\x00\x00" + bytes(64), "a GGUF file"),
        # onnx 1.23's SerializeToString of a model: ir_version 14, its producer or its graph
        (b'\x08\x0e\x12\x07pytorch:3\n\x0c\n\x01x\x12\x01y"\x04Relu' + bytes(64), "an ONNX file"),
        (b'\x08\x0e:3\n\x0c\n\x01x\x12\x01y"\x04Relu\x12\x01gZ\x0f\n' + bytes(64), "an ONNX file"),
    ],
)
def test_formats_by_their_first_bytes(start: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "a.pth"
    file.write_bytes(start)
    with pytest.raises(DataError, match=words):
        convert_file(file, tmp_path / "out.pth")
