"""MODEL.WEIGHTS: what it takes, Detectron2's names, and what a trained model brings."""

import pickle
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from convert import targets
from convert.verify import read_converted
from detection.config.task import load_task
from detection.config.trained import apply_trained
from detection.config.weights import init_name, read_weights
from moco.common.errors import DataError, UserError


@pytest.fixture(scope="module")
def converted(r18_file):
    return read_converted(r18_file)


@pytest.fixture(scope="module")
def task_cfg(r18_file, small_config, small_options):
    return load_task(small_config, [*small_options, "MODEL.WEIGHTS", str(r18_file)], "embedded").cfg


def test_random_and_a_file(r18_file):
    assert read_weights("random") is None
    assert len(read_weights(str(r18_file)).model) == 100


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_torchvision_file_that_the_converter_writes_is_one_more_source(
    suffix, converted, tmp_path
):
    path = tmp_path / f"weights{suffix}"
    targets.write(path, converted, "torchvision")
    back = read_weights(str(path)).model
    assert back.keys() == converted.model.keys()
    assert all(torch.equal(back[key], value) for key, value in converted.model.items())


@pytest.mark.parametrize("weights", ["", "Random", "none.pth"])
def test_random_is_a_word_and_never_an_accident(weights):
    with pytest.raises(UserError, match="random"):
        read_weights(weights)


def write_d2_layout(converted, path: Path, author: str = "torchvision") -> Path:
    """A converted file without its contract, as Detectron2's own converter would write it."""
    model = {key: value.numpy() for key, value in converted.model.items()}
    content = {"model": model, "__author__": author, "matching_heuristics": True}
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def test_a_checkpoint_is_converted_in_memory(r18_file, converted):
    raw = r18_file.with_name("resnet18.pth")
    result = read_weights(str(raw))
    assert result.contract == converted.contract
    assert result.model.keys() == converted.model.keys()
    for key, value in converted.model.items():
        assert torch.equal(result.model[key], value)
    assert "converted in memory: torchvision checkpoint, ResNet-18, 100 tensors" in result.notes[0]
    assert read_weights(str(r18_file)).notes == ()


def test_a_checkpoint_that_nobody_knows_is_refused_and_not_guessed(tmp_path, r18_file):
    path = tmp_path / "x.pth"
    torch.save({"state_dict": {"net.conv1.weight": torch.ones(1)}}, path)
    with pytest.raises(DataError, match=r"unknown layout .*'net\.conv1\.weight'"):
        read_weights(str(path))
    torch.save({"model": {"backbone.bottom_up.stem.conv1.weight": torch.ones(1)}}, path)
    with pytest.raises(DataError, match="a detection model, not a pre-trained backbone"):
        read_weights(str(path))
    path.write_bytes(pickle.dumps({"conv1.weight": np.random.default_rng}))
    with pytest.raises(DataError, match=r"unknown layout .*'conv1\.weight'"):
        read_weights(str(path))
    with pytest.raises(DataError, match=r"no such file; give a file .*random"):
        read_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("detectron2://COCO-Detection/faster_rcnn_R_50_C4_1x/137257644/m.pkl", "a whole detector"),
        ("catalog://Caffe2Detectron/COCO/35857197/e2e_faster_rcnn_R-50-C4_1x", "a whole detector"),
        ("https://download.pytorch.org/models/resnet50-0676ba61.pth", "download the file and give"),
        ("torchvision://R-50", "this address is not read; download .*detectron2://ImageNetPre"),
    ],
)
def test_names_that_are_no_backbone_are_refused_without_a_network(name, reason, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: pytest.fail("a lookup"))
    with pytest.raises(UserError, match=reason) as caught:
        read_weights(name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        (
            "detectron2://ImageNetPretrained/MSRA/R-50.pkl",
            "detectron2/ImageNetPretrained/MSRA/R-50",
        ),
        ("catalog://ImageNetPretrained/MSRA/R-50", "detectron/ImageNetPretrained/MSRA/R-50"),
    ],
)
def test_without_detectron2_its_names_say_what_to_download(name, url, monkeypatch):
    for module in [key for key in sys.modules if key.split(".")[0] == "detectron2"]:
        monkeypatch.delitem(sys.modules, module)
    for module in [key for key in sys.modules if key.startswith("detection.d2")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "detectron2", None)
    with pytest.raises(UserError, match=rf"not installed; download https://.*/{url}\.pkl and give"):
        read_weights(name)


def test_a_bug_in_the_plugin_is_not_taken_for_a_missing_detectron2(monkeypatch):
    monkeypatch.setitem(sys.modules, "detection.d2.model_zoo", None)
    with pytest.raises(ModuleNotFoundError, match=r"detection\.d2\.model_zoo"):
        read_weights("detectron2://ImageNetPretrained/MSRA/R-50.pkl")


@pytest.mark.detectron2
def test_detectron2s_names_resolve_through_its_own_path_manager(
    detectron2, converted, monkeypatch, tmp_path
):
    from detection.d2 import model_zoo

    asked = []

    def get_local_path(name: str) -> str:
        asked.append((name, socket.getdefaulttimeout()))
        return str(write_d2_layout(converted, tmp_path / "R-18.pkl"))

    monkeypatch.setattr(model_zoo.PathManager, "get_local_path", get_local_path)
    result = read_weights("detectron2://ImageNetPretrained/torchvision/R-18.pkl")
    assert asked == [("detectron2://ImageNetPretrained/torchvision/R-18.pkl", 10.0)]
    assert socket.getdefaulttimeout() is None
    assert result.contract.source == "detectron2/torchvision"
    for key, value in converted.model.items():
        assert torch.equal(result.model[key], value)


@pytest.mark.detectron2
def test_a_failed_download_is_one_line_within_seconds(detectron2, monkeypatch, tmp_path, capfd):
    from iopath.common import file_io

    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    monkeypatch.setattr(file_io, "get_cache_dir", lambda cache_dir=None: str(tmp_path))

    def no_network(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    start = time.process_time()
    for name, end in (
        ("detectron2://ImageNetPretrained/MSRA/R-50.pkl", "detectron2/ImageNetPretrained/MSRA"),
        ("catalog://ImageNetPretrained/MSRA/R-50", "detectron/ImageNetPretrained/MSRA"),
        ("catalog://ImageNetPretrained/MSRA/R-51", "detectron/ImageNetPretrained/MSRA"),
    ):
        with pytest.raises(UserError, match=rf"cannot be fetched .*; download https://.*/{end}"):
            read_weights(name)
    assert time.process_time() - start < 5
    assert "it/s" not in capfd.readouterr().err
    assert not list(tmp_path.rglob("R-50.pkl"))


@pytest.mark.detectron2
def test_a_server_that_does_not_answer_is_given_up(detectron2, monkeypatch, tmp_path):
    from iopath.common import file_io

    from detection.d2 import model_zoo

    monkeypatch.setattr(file_io, "get_cache_dir", lambda cache_dir=None: str(tmp_path))
    monkeypatch.setattr(model_zoo, "TIMEOUT_SECONDS", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)  # accepts, and never says a word
        address = f"http://127.0.0.1:{server.getsockname()[1]}/R-50.pkl"
        with pytest.raises(UserError, match=r"cannot be fetched \(.*timed out"):
            monkeypatch.setattr(model_zoo, "model_zoo_url", lambda name: name)
            model_zoo.resolve_detectron2_name(address)


def test_what_a_result_calls_its_initialization():
    for value, name in {
        "random": "random",
        "detectron2://ImageNetPretrained/MSRA/R-50.pkl": "MSRA_R-50",
        "detectron2://ImageNetPretrained/torchvision/R-50.pkl": "torchvision_R-50",
        "catalog://ImageNetPretrained/MSRA/R-50": "MSRA_R-50",
        "runs/moco/checkpoint_0199.pth.tar": "checkpoint_0199",
        "some/moco.v2.pkl": "moco.v2",
        "r50.pth": "r50",
        "weights/moco_r50.safetensors": "moco_r50",
    }.items():
        assert init_name(value) == name


def test_a_trained_model_brings_its_pixels_from_the_folder(task_cfg, tmp_path):
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
    apply_trained(cfg, explicit=())
    assert cfg.INPUT.FORMAT == "RGB"
    assert list(cfg.MODEL.PIXEL_STD) == [58.395, 57.12, 57.375]
    assert cfg.DATASETS.VOC_CLASSES == ["blue", "green", "red"]
    written("BGR")
    with pytest.raises(UserError, match=r"INPUT\.FORMAT"):
        apply_trained(cfg, explicit={"INPUT.FORMAT"})


def test_nobody_guesses_how_a_trained_models_pixels_were_normalized(task_cfg, tmp_path):
    cfg = task_cfg.clone()
    cfg.defrost()
    cfg.MODEL.WEIGHTS = str(tmp_path / "model_final.pth")
    with pytest.raises(UserError, match=r"INPUT\.FORMAT, MODEL\.PIXEL_MEAN"):
        apply_trained(cfg, explicit={"MODEL.PIXEL_STD"})
    keys = ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "MODEL.RESNETS.STRIDE_IN_1X1")
    apply_trained(cfg, explicit={"INPUT.FORMAT", *keys})
