"""A folder of the Hugging Face Hub: one file of weights, or the index of several."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.suites.folder import identify
from convert.convert_to_d2 import convert_file, convert_in_memory
from convert.initial_weights import read_initial_weights
from convert.inspect_file import inspect_file
from convert.read import digest, read_file
from moco.common.errors import DataError, UserError
from moco.common.pretrained import LocalWeights
from tests.oracles.resnets import make_resnet

INDEX = "model.safetensors.index.json"
PARTS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def state() -> dict[str, torch.Tensor]:
    return {key: value.contiguous() for key, value in make_resnet().state_dict().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A network in three parts, as save_pretrained writes it."""
    parts: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for i, (key, value) in enumerate(state().items()):
        parts[i % 3][key] = value
    (tmp_path / "hub").mkdir()
    for name, part in zip(PARTS, parts, strict=True):
        save_file(part, tmp_path / "hub" / name)
    listed = {key: name for name, part in zip(PARTS, parts, strict=True) for key in part}
    write_index(tmp_path / "hub", listed)
    return tmp_path / "hub"


def write_index(folder: Path, weight_map: Any) -> None:
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content))


@pytest.mark.parametrize("given", ["", INDEX])
def test_parts_are_the_network_that_they_were(given: str, folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    save_file(state(), whole)
    expected = convert_file(whole, tmp_path / "a.pth")
    report = convert_file(folder / given, tmp_path / "b.pth")
    a, b = (torch.load(tmp_path / f"{name}.pth", weights_only=True) for name in "ab")
    assert a["model"].keys() == b["model"].keys()
    assert all(torch.equal(value, b["model"][key]) for key, value in a["model"].items())
    assert (report.mapped, report.dropped) == (expected.mapped, expected.dropped)
    # What sha256sum prints of the index and its parts, in the order of their names.
    lines = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in (INDEX, *PARTS)
    )
    assert report.contract.source_sha256 == hashlib.sha256(lines.encode()).hexdigest()
    assert "ResNet-18" in inspect_file(folder / given)


def test_everything_that_takes_weights_takes_an_index(folder: Path) -> None:
    index = folder / INDEX
    assert len(convert_in_memory(index).model) == 100
    weights = read_initial_weights(str(index))
    assert weights.sha256 == digest(index) and weights.spec.arch == "resnet18"


def test_a_folder_of_one_file(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "pytorch_model.bin")
    assert convert_file(tmp_path, tmp_path / "out" / "a.pth").mapped == 100
    save_file(
        state() | {"conv1.weight": 2 * state()["conv1.weight"]}, tmp_path / "model.safetensors"
    )
    convert_file(tmp_path, tmp_path / "out" / "b.pth")  # safetensors come first
    model = torch.load(tmp_path / "out" / "b.pth", weights_only=True)["model"]
    assert torch.equal(model["stem.conv1.weight"], 2 * state()["conv1.weight"])


def test_an_incomplete_download(folder: Path) -> None:
    (folder / PARTS[1]).unlink()
    with pytest.raises(DataError, match=rf"{PARTS[1]} is not beside it; download the whole"):
        read_file(folder / INDEX)


def test_a_part_of_another_network(folder: Path) -> None:
    save_file({"conv1.weight": torch.ones(1), "other": torch.ones(1)}, folder / PARTS[0])
    with pytest.raises(DataError, match=rf"{PARTS[0]}: holds other tensors than {INDEX} lists"):
        read_file(folder / INDEX)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hosts", "a/b.bin", ".hidden", 3])
def test_an_index_names_no_file_elsewhere(name: Any, folder: Path) -> None:
    write_index(folder, {"conv1.weight": name})
    with pytest.raises(DataError, match=re.escape(f"names {name!r}, expected files in its own")):
        read_file(folder / INDEX)


@pytest.mark.parametrize("weight_map", [{}, [], "text", None])
def test_an_index_of_nothing(weight_map: Any, folder: Path) -> None:
    write_index(folder, weight_map)
    with pytest.raises(DataError, match="names no tensors"):
        read_file(folder / INDEX)


def test_a_damaged_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": ')
    with pytest.raises(DataError, match="not JSON"):
        read_file(folder / INDEX)


def test_a_suite_would_copy_the_index_alone(folder: Path) -> None:
    weights = {"mine": LocalWeights(folder / INDEX, "", "")}
    with pytest.raises(UserError, match=r"mine=.*a network in parts.*convert it first"):
        identify(weights)
