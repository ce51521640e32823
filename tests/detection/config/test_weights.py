"""MODEL.WEIGHTS: files, names, and the keys that a trained model sets."""

import hashlib
import pickle
from pathlib import Path

import pytest
import torch

from convert import write
from detection.config.trained import apply_trained_config
from detection.config.weights import convert_once, read_weights, weights_sha256
from detection.engine import launch
from detection.train_net import main as train
from moco.common import pretrained
from moco.common.errors import DataError, NumericError, UserError
from moco.common.pretrained import find_remote, init_name
from moco.common.run import read_record
from tests.oracles.file_server import file_server


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_torchvision_file_that_the_converter_writes_is_one_more_source(
    suffix, converted, tmp_path
):
    path = tmp_path / f"weights{suffix}"
    write.write(path, converted, "torchvision")
    back = read_weights(str(path)).model
    assert back.keys() == converted.model.keys()
    assert all(torch.equal(back[key], value) for key, value in converted.model.items())


def write_d2_layout(converted, path: Path, author: str = "torchvision") -> Path:
    """Write converted weights without a contract, as Detectron2's own converter does."""
    model = {key: value.numpy() for key, value in converted.model.items()}
    content = {"model": model, "__author__": author, "matching_heuristics": True}
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def test_a_checkpoint_is_converted_in_memory(r18_file, converted):
    raw = r18_file.with_name("resnet18.pth")
    assert read_weights("random") is None
    result = read_weights(str(raw))
    assert result.contract == converted.contract
    assert result.model.keys() == converted.model.keys()
    for key, value in converted.model.items():
        assert torch.equal(result.model[key], value)
    assert "converted: torchvision checkpoint, ResNet-18, 100 tensors" in result.notes[0]
    assert read_weights(str(r18_file)).notes == ()


def test_a_conversion_is_kept_for_many_runs(r18_file, tmp_path):
    """Runs from the file report what those from the checkpoint do: its hash, origin and notes."""
    raw = r18_file.with_name("resnet18.pth")
    sha256 = hashlib.sha256(raw.read_bytes()).hexdigest()
    kept = convert_once(str(raw), tmp_path, sha256)
    alone, once = read_weights(str(raw)), read_weights(kept)
    assert (once.contract, once.notes, once.origin) == (alone.contract, alone.notes, alone.origin)
    assert all(torch.equal(once.model[key], value) for key, value in alone.model.items())
    assert weights_sha256(once) == sha256
    assert init_name(kept) == "resnet18" and Path(kept).is_relative_to(tmp_path)
    written = Path(kept).stat().st_mtime_ns
    assert (
        convert_once(str(raw), tmp_path, sha256) == kept
        and Path(kept).stat().st_mtime_ns == written
    )
    assert convert_once(str(raw), tmp_path, sha256, stem="imagenet") != kept
    assert convert_once("random", tmp_path, None) == "random"
    own = hashlib.sha256(r18_file.read_bytes()).hexdigest()
    assert convert_once(str(r18_file), tmp_path, own) == str(r18_file)


@pytest.mark.parametrize(
    "conversion",
    [
        None,
        {"sha256": "../x", "origin": [], "notes": []},
        {"sha256": "a" * 64, "origin": [1], "notes": []},
    ],
)
def test_a_conversion_of_another_shape_is_refused(conversion, r18_file, tmp_path):
    content = torch.load(r18_file, weights_only=True)
    torch.save(content | {"conversion": conversion}, tmp_path / "bad.pth")
    with pytest.raises(DataError, match=r"bad\.pth: conversion: "):
        read_weights(str(tmp_path / "bad.pth"))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("detectron2://ImageNetPretrained/torchvision/R-18.pkl", "detectron2"),
        ("catalog://ImageNetPretrained/torchvision/R-18", "detectron"),
    ],
)
def test_what_detectron2_has_downloaded_is_taken(name, prefix, converted, monkeypatch, tmp_path):
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    folder = tmp_path / prefix / "ImageNetPretrained" / "torchvision"
    folder.mkdir(parents=True)
    file = write_d2_layout(converted, folder / "R-18.pkl")
    result = read_weights(name)
    assert result.contract.source == "detectron2/torchvision"
    assert result.path == file
    assert result.notes[0].startswith("weights torchvision_R-18: from https://")
    assert f"/{prefix}/ImageNetPretrained/torchvision/R-18.pkl" in result.notes[0]
    for key, value in converted.model.items():
        assert torch.equal(result.model[key], value)


@pytest.mark.detectron2
def test_detectron2_has_its_files_where_they_are_looked_for(detectron2, monkeypatch, tmp_path):
    from detectron2.checkpoint.catalog import ModelCatalog
    from detectron2.utils.file_io import PathManager
    from iopath.common import file_io

    fetched = []

    def download(url: str, folder: str, *, filename: str) -> str:
        fetched.append(url)
        file = Path(folder, filename)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"weights")
        return str(file)

    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    monkeypatch.setattr(file_io, "download", download)
    names = [f"catalog://ImageNetPretrained/{name}" for name in ModelCatalog.C2_IMAGENET_MODELS]
    for name in (*names, "detectron2://ImageNetPretrained/MSRA/R-50.pkl"):
        theirs = PathManager.get_local_path(name)
        assert str(find_remote(name).cached()) == theirs
        assert find_remote(name).address == fetched[-1]
    assert len(fetched) == 8


def test_weights_by_name(
    r18_file, small_config, small_options, engine, monkeypatch, tmp_path, capsys
):
    """`--check-only` names what a run would download; the run records the source."""

    def stopped(*_):
        raise NumericError("iteration 1: loss_cls is nan")

    monkeypatch.setenv("MOCO_TRANSFER_CACHE", str(tmp_path))
    content = r18_file.read_bytes()
    with file_server({"/r18.pth": content}) as served:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        entry = {"weights": f"{served.url}/r18.pth", "hash": digest}
        monkeypatch.setattr(pretrained, "inits", lambda: {"mine": entry})
        opts = [*small_options, "MODEL.WEIGHTS", "mine", "OUTPUT_DIR", str(tmp_path / "out")]
        argv = ["--config-file", small_config, "--engine", engine, *opts]
        assert train(["--check-only", *argv]) == 0
        shown = capsys.readouterr().out
        assert f"note: mine: would download {entry['weights']}" in shown
        assert shown.splitlines()[-1].startswith("checked with random weights instead of mine")
        with (
            monkeypatch.context() as patch,
            pytest.raises(UserError, match="MOCO_TRANSFER_OFFLINE"),
        ):
            patch.setenv("MOCO_TRANSFER_OFFLINE", "1")
            train(["--check-only", *argv])
        assert not served.requests
        monkeypatch.setattr(launch, "run", stopped)
        with pytest.raises(NumericError):
            train(argv)
        assert len(served.requests) == 1
    record = read_record(tmp_path / "out" / "run.json")
    assert (record.init, f"sha256:{record.weights_sha256}") == ("mine", digest)
    assert record.status == "failed" and record.diverged
    assert entry["weights"] in record.notes[0] and digest in record.notes[0]


def test_what_a_result_calls_its_initialization():
    for value, name in {
        "random": "random",
        "detectron2://ImageNetPretrained/MSRA/R-50.pkl": "MSRA_R-50",
        "detectron2://ImageNetPretrained/torchvision/R-50.pkl": "torchvision_R-50",
        "catalog://ImageNetPretrained/MSRA/R-50": "MSRA_R-50",
        "runs/moco/checkpoint_0199.pth.tar": "checkpoint_0199",
        "some/moco.v2.pkl": "moco.v2",
        "moco_v2_r50_800ep": "moco_v2_r50_800ep",
        "https://host/a/r50.pth.tar?download=1#sha256=0123abcd": "r50",
        "hf://user/repo/sub/model.safetensors@v1.0": "sub_model",
        "hf://user/repo.v1/model.safetensors": "repo.v1_model",
        "timm://resnet50.tv_in1k": "resnet50.tv_in1k",
        "r50.pth": "r50",
        "weights/moco_r50.safetensors": "moco_r50",
    }.items():
        assert init_name(value) == name


def test_the_normalization_of_a_trained_model_is_read_from_its_folder(task_cfg, tmp_path):
    def written(input_format):
        other = task_cfg.clone()
        other.defrost()
        other.INPUT.FORMAT = input_format
        (tmp_path / "config.yaml").write_text(other.dump())

    cfg = task_cfg.clone()
    cfg.defrost()
    cfg.MODEL.WEIGHTS = str(tmp_path / "model_final.pth")
    cfg.INPUT.FORMAT, cfg.MODEL.PIXEL_STD, cfg.DATASETS.VOC_CLASSES = "BGR", [1.0, 1.0, 1.0], []
    written("RGB")
    apply_trained_config(cfg, explicit=())
    assert cfg.INPUT.FORMAT == "RGB"
    assert list(cfg.MODEL.PIXEL_STD) == [58.395, 57.12, 57.375]
    assert cfg.DATASETS.VOC_CLASSES == ["blue", "green", "red"]
    written("BGR")
    with pytest.raises(UserError, match=r"INPUT\.FORMAT"):
        apply_trained_config(cfg, explicit={"INPUT.FORMAT"})
    (tmp_path / "config.yaml").unlink()
    keys = ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "MODEL.RESNETS.STRIDE_IN_1X1")
    apply_trained_config(cfg, explicit={"INPUT.FORMAT", *keys})
