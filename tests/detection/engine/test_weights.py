"""Loading of weights into a detector: every tensor is loaded or refused."""

import io
import pickle
import tarfile

import pytest
import torch
from torch import Tensor, nn

from convert import write
from detection.config.engines import find_engine
from detection.config.task import load_task
from detection.embedded.model import build_model
from detection.engine.weights import (
    check_coverage,
    load_converted,
    load_trained,
    read_trained,
    target_names,
)
from detection.modeling.backbones import backbone_type
from moco.common.errors import DataError, UserError

C4 = backbone_type("build_resnet_backbone")


@pytest.fixture
def detector(task_cfg) -> nn.Module:
    torch.manual_seed(0)
    return build_model(task_cfg)


@pytest.mark.parametrize("suffix", [".pth", ".pkl", ".safetensors"])
def test_every_format_that_the_converter_writes_trains_in_both_engines(
    engine, suffix, converted, small_config, small_options, tmp_path
):
    path = tmp_path / f"weights{suffix}"
    write.write(path, converted, "detectron2")
    task = load_task(small_config, [*small_options, "MODEL.WEIGHTS", str(path)], engine)
    assert task.init == "weights"
    assert task.weights.contract == converted.contract
    model = find_engine(engine).build_model(task.cfg)
    assert load_converted(model, task.weights.model, C4).loaded == 100
    state = model.state_dict()
    for key, value in converted.model.items():
        place = "roi_heads." if key.startswith("res5") else "backbone."
        assert torch.equal(state[place + key], value), key


def test_every_tensor_is_loaded(detector, converted):
    before = {key: value.clone() for key, value in detector.state_dict().items()}
    coverage = load_converted(detector, converted.model, C4)
    state = detector.state_dict()
    assert coverage.loaded == len(converted.model)
    for key, value in converted.model.items():
        name = f"roi_heads.{key}" if key.startswith("res5") else f"backbone.{key}"
        assert torch.equal(state[name], value), key
        assert name not in coverage.left_at_init
    for name in coverage.left_at_init:
        assert torch.equal(state[name], before[name]), name
        assert name.startswith(
            ("proposal_generator.rpn_head.", "roi_heads.box_predictor.", "roi_heads.res5.norm.")
        )
    assert "roi_heads.res5.norm.weight" in coverage.left_at_init
    loaded = set(target_names(state, converted.model, C4).values())
    untracked = {name for name in state if "num_batches_tracked" in name}
    assert loaded | set(coverage.left_at_init) | untracked == set(state)


def change(tensors: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    result = {**tensors, **{k: v for k, v in changes.items() if v is not None}}
    return {key: value for key, value in result.items() if changes.get(key, 1) is not None}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("res4.1.conv2.weight", None, r"at random: backbone\.res4\.1\.conv2\.weight"),
        ("res5.0.conv1.norm.bias", None, r"at random: roi_heads\.res5\.0\.conv1\.norm\.bias"),
        ("stem.fc.weight", torch.ones(2, 2), r"no tensors for stem\.fc\.weight"),
        ("res4.1.conv2.weight", torch.ones(2, 2), r"res4\.1\.conv2\.weight: .*\[2, 2\]"),
    ],
)
def test_partial_and_foreign_files_are_refused(detector, converted, key, value, message):
    with pytest.raises(UserError, match=message):
        load_converted(detector, change(converted.model, **{key: value}), C4)


def test_coverage_is_of_values_and_not_of_names(detector, converted):
    load_converted(detector, converted.model, C4)
    with torch.no_grad():
        detector.state_dict()["backbone.res3.0.conv1.weight"][0, 0, 0, 0] += 1e-6
    with pytest.raises(UserError, match=r"these tensors differ: backbone\.res3\.0\.conv1\.weight"):
        check_coverage(detector.state_dict(), converted.model, C4)


def test_trained_models_round_trip_and_must_fit(detector, tmp_path):
    path = tmp_path / "model_final.pth"
    torch.save({"model": detector.state_dict(), "iteration": 2}, path)
    tensors = read_trained(path)
    fresh = {key: torch.zeros_like(value) for key, value in detector.state_dict().items()}
    detector.load_state_dict(fresh)
    load_trained(detector, tensors, path)
    for key, value in detector.state_dict().items():
        if "num_batches_tracked" not in key:
            assert torch.equal(value, tensors[key])
    name = "roi_heads.box_predictor.cls_score.bias"
    with pytest.raises(UserError, match=rf"{name} is missing"):
        load_trained(detector, change(tensors, **{name: None}), path)
    with pytest.raises(UserError, match="extra is unknown"):
        load_trained(detector, change(tensors, extra=torch.ones(1)), path)
    with pytest.raises(UserError, match=rf"{name}: .*\[21\].*\[4\]"):
        load_trained(detector, change(tensors, **{name: torch.ones(21)}), path)


def test_a_file_of_two_formats_runs_nothing(converted, tmp_path, monkeypatch):
    """The file is a tar archive, and from its first member's name on also a pickle."""
    content = {
        "model": {key: value.numpy() for key, value in converted.model.items()},
        "__author__": "x",
        "matching_heuristics": True,
        "contract": converted.contract.to_dict(),
    }
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "m"
    name = f"cos\nsystem\n(S'touch {marker.name}'\ntR."
    path = tmp_path / "w.pkl"
    none = pickle.dumps(0, 2)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for member, data in (
            (name, b""),
            ("storages", none + pickle.dumps([], 2)),
            ("tensors", none),
            ("pickle", pickle.dumps(content, 2)),
        ):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with pytest.raises(DataError, match=r"w\.pkl: damaged or made to mislead"):
        read_trained(path)
    assert not marker.exists()
    with open(path, "rb") as file:
        pickle.load(file)
    assert marker.exists(), "to Python it is a program"
