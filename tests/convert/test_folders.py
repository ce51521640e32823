"""Folders of the Hugging Face Hub and of trainings: one file of weights, or several."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from benchmarks.suites.folder import hash_inits
from convert.convert_to_d2 import convert_file, convert_in_memory
from convert.initial_weights import read_initial_weights
from convert.inspect_file import inspect_file
from convert.read import digests, read_file, source_file
from convert.verify import read_converted
from detection.config.weights import read_weights
from moco.common.errors import DataError, UserError
from moco.common.pretrained import LocalWeights
from tests.oracles.payloads import Payload
from tests.oracles.resnets import make_resnet

INDEX = "model.safetensors.index.json"
PARTS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def state() -> dict[str, torch.Tensor]:
    return {key: value.contiguous() for key, value in make_resnet().state_dict().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a network in three parts, as save_pretrained does."""
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
    parts = report.contract.source_parts
    assert "".join(f"{parts[name]}  {name}\n" for name in (INDEX, *PARTS)) == lines
    assert read_converted(tmp_path / "b.pth").contract == report.contract
    assert "ResNet-18" in inspect_file(folder / given)


def test_everything_that_takes_weights_takes_an_index(folder: Path) -> None:
    index = folder / INDEX
    assert len(convert_in_memory(index).model) == 100
    weights = read_initial_weights(str(index))
    assert weights.sha256 == digests(index)[0] and weights.spec.arch == "resnet18"


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
    with pytest.raises(DataError, match=rf"its part {PARTS[1]} is missing; download the whole"):
        read_file(folder / INDEX)


def test_a_part_of_another_network(folder: Path) -> None:
    save_file({"conv1.weight": torch.ones(1), "other": torch.ones(1)}, folder / PARTS[0])
    with pytest.raises(DataError, match=rf"{PARTS[0]}: holds other tensors than {INDEX} lists"):
        read_file(folder / INDEX)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hosts", "a/b.bin", ".hidden", 3])
def test_an_index_names_no_file_elsewhere(name: Any, folder: Path) -> None:
    write_index(folder, {"conv1.weight": name})
    with pytest.raises(
        DataError, match=re.escape(f"names file {name!r}, expected files in its own")
    ):
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
    with pytest.raises(UserError, match=r"mine=.*a checkpoint in parts.*convert it first"):
        hash_inits(weights)


# Folders of training frameworks.


def trained() -> dict[str, Any]:
    """Return what trainings save: weights, and others."""
    return {"model": state(), "optimizer": {"state": {"conv1.weight": torch.ones(3)}}, "epoch": 3}


def lightning(folder: Path) -> Path:
    content = {"state_dict": {f"net.{key}": value for key, value in state().items()}}
    for name in ("epoch=1.ckpt", "last.ckpt"):
        torch.save({**content, "pytorch-lightning_version": "2.6"}, folder / name)
    return folder / "last.ckpt"


def lightning_best(folder: Path) -> Path:
    lightning(folder)
    (folder / "last.ckpt").unlink()
    return folder / "epoch=1.ckpt"


def accelerate(folder: Path) -> Path:
    save_file(state(), folder / "model.safetensors")
    torch.save({"state": {}}, folder / "optimizer.bin")
    return folder / "model.safetensors"


def distributed(folder: Path) -> Path:
    dcp.save(trained(), checkpoint_id=folder, no_dist=True)
    return folder / ".metadata"


def fsdp_of_accelerate(folder: Path) -> Path:
    torch.save({}, folder / "scheduler.bin")
    return distributed(folder / "pytorch_model_fsdp_0")


def deepspeed(folder: Path) -> Path:
    content = {
        "module": {f"module.{key}": value for key, value in state().items()},
        "optimizer": None,
        "param_shapes": [{"conv1.weight": torch.Size((8, 3, 7, 7))}],
        "ds_config": {"zero_optimization": {"stage": 1}},
        "global_steps": 10,
    }
    (folder / "global_step10").mkdir()
    (folder / "latest").write_text("global_step10\n")
    torch.save(content, folder / "global_step10" / "mp_rank_00_model_states.pt")
    return folder / "global_step10" / "mp_rank_00_model_states.pt"


FOLDERS = (lightning, lightning_best, accelerate, distributed, fsdp_of_accelerate, deepspeed)


@pytest.mark.parametrize("write", FOLDERS)
def test_a_training_folder_is_the_network_in_it(write: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = write(tmp_path / "run")
    report = convert_file(tmp_path / "run", tmp_path / "out.pth")
    model = torch.load(tmp_path / "out.pth", weights_only=True)["model"]
    assert torch.equal(model["stem.conv1.weight"], state()["conv1.weight"])
    assert (report.source_path, report.mapped) == (file, 100)
    assert "skipped objects" not in report.text()
    assert set(report.contract.source_parts) == (
        {".metadata", "__0_0.distcp"} if file.name == ".metadata" else set()
    )


def zero_3(folder: Path) -> None:
    file = deepspeed(folder)
    file.rename(file.with_name("zero_pp_rank_0_mp_rank_00_model_states.pt"))


def zero_shards(folder: Path) -> None:
    deepspeed(folder).unlink()
    torch.save({}, folder / "global_step10" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def two_models(folder: Path) -> None:
    for name in ("model", "model_1"):
        save_file(state(), folder / f"{name}.safetensors")


def checkpoints(folder: Path) -> None:
    for name in ("checkpoint-500", "checkpoint-1000"):
        (folder / name).mkdir()
        accelerate(folder / name)


def several(folder: Path) -> None:
    lightning_best(folder)
    torch.save({}, folder / "epoch=2.ckpt")


JOIN = r"python -m deepspeed\.utils\.zero_to_fp32 {folder} out"


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (zero_3, JOIN),
        (zero_shards, f"{JOIN}; then give out"),
        (two_models, r"give .*model\.safetensors or .*model_1\.safetensors"),
        (checkpoints, "give one, such as .*checkpoint-1000, .*checkpoint-500"),
        (several, r"give one, such as .*epoch=1\.ckpt"),
        (lambda folder: None, "without weights"),
        (lambda folder: (folder / "latest").write_text("../other"), "without weights"),
    ],
)
def test_a_folder_without_one_network_says_what_to_do(
    write: Any, words: str, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    write(tmp_path / "run")
    with pytest.raises(DataError, match=words.format(folder=re.escape(str(tmp_path / "run")))) as e:
        convert_file(tmp_path / "run", tmp_path / "out.pth")
    assert "\n" not in str(e.value)


def test_one_step_of_deepspeed(tmp_path: Path) -> None:
    file = deepspeed(tmp_path)
    assert source_file(file.parent) == file
    file.rename(file.with_name("mp_rank_01_model_states.pt"))
    with pytest.raises(DataError, match=rf"zero_to_fp32 {tmp_path} --tag global_step10 out"):
        source_file(file.parent)


def test_a_part_alone(tmp_path: Path) -> None:
    distributed(tmp_path)
    with pytest.raises(DataError, match=rf"a part .* give {tmp_path}"):
        read_file(tmp_path / "__0_0.distcp")


@pytest.mark.parametrize("write", [distributed, deepspeed, lightning])
def test_nothing_in_a_training_folder_runs(write: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file, marker = write(tmp_path / "run"), tmp_path / "marker"
    payload = Payload(marker, "reduce")
    if file.name == ".metadata":
        metadata = pickle.loads(file.read_bytes())
        metadata.storage_meta = payload
        file.write_bytes(pickle.dumps(metadata))
    else:
        torch.save(torch.load(file, weights_only=False) | {"callbacks": payload}, file)
    report = convert_file(tmp_path / "run", tmp_path / "out.pth")
    assert any(".open" in warning for warning in report.warnings)
    assert re.search(r"\nwarning  .*\.open", inspect_file(tmp_path / "run"))
    assert not marker.exists()


def test_everything_that_takes_weights_takes_a_folder(folder: Path) -> None:
    assert read_initial_weights(str(folder)).spec.arch == "resnet18"
    weights = read_weights(str(folder))
    assert weights is not None and len(weights.model) == 100
    assert weights.path == folder / INDEX
