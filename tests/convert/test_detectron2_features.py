"""Detectron2's own backbone as a reference: the command, the process, and what it must find."""

import io
import json
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from convert import detectron2_backbone, targets
from convert.convert_to_d2 import convert_file, convert_in_memory
from convert.detectron2_backbone import Detectron2Backbone
from convert.families.resnet_network import FEATURES
from convert.verify import Converted, build_backbone, check_features, fixed_image
from detection.backbone_features import main
from moco.common.errors import DataError, UserError
from moco.common.files import load_torch
from tests.oracles.resnets import make_resnet


@pytest.fixture(autouse=True)
def detectron2_backbone_is_not_asked() -> None:
    """Here it is compared."""


@pytest.fixture(scope="module")
def source() -> dict[str, torch.Tensor]:
    """A narrow ResNet-18 with a 3x3 stem, which Detectron2's own builder does not have."""
    state: dict[str, torch.Tensor] = make_resnet(18, stem="cifar").state_dict()
    return state


@pytest.fixture(scope="module")
def converted(source: dict[str, torch.Tensor], tmp_path_factory: Any) -> Converted:
    path = tmp_path_factory.mktemp("source") / "weights"
    torch.save(source, path)
    return convert_in_memory(path)


def source_network(source: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    counters = "num_batches_tracked"
    return {k: v for k, v in source.items() if not k.startswith("fc") and counters not in k}


def write(converted: Converted, path: Path, **changed: torch.Tensor) -> Path:
    """A converted file, with some tensors replaced."""
    model = {**converted.model, **changed}
    targets.write(path, Converted(model, converted.contract), "detectron2")
    return path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the process be another program, and Detectron2 be there."""

    def use(program: str) -> None:
        (tmp_path / "fake_features.py").write_text("import sys, time\n" + program)
        monkeypatch.setattr(detectron2_backbone, "COMMAND", "fake_features")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(detectron2_backbone, "installed", lambda: True)

    return use


@pytest.mark.usefixtures("detectron2")
def test_a_conversion_shows_its_file_to_detectron2(
    source: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way, with a process of its own."""
    seen: list[Any] = []
    features_of = Detectron2Backbone.features
    monkeypatch.setattr(
        Detectron2Backbone, "features", lambda self: seen.append(features_of(self)) or seen[-1]
    )
    torch.save(source, tmp_path / "weights")
    report = convert_file(tmp_path / "weights", tmp_path / "out.pth")
    assert report.not_checked == ""
    assert all(check.bitwise for check in report.features.values())
    assert [list(features) for features in seen] == [list(FEATURES)]


@pytest.mark.usefixtures("detectron2")
@pytest.mark.parametrize("suffix", [".pth", ".pkl", ".safetensors"])
def test_detectron2_gives_the_features_of_the_embedded_backbone(
    suffix: str, converted: Converted, tmp_path: Path
) -> None:
    """What the process does, in this one; its own checkpointer reads the first two."""
    path = write(converted, tmp_path / f"weights{suffix}")
    main([str(path), str(tmp_path / "features.pth")])
    features = load_torch(tmp_path / "features.pth")
    ours = build_backbone(converted.contract).eval()
    ours.load_state_dict(converted.model, strict=False)
    with torch.no_grad():
        expected = ours(fixed_image())
    assert list(features) == list(expected)
    for name, value in expected.items():
        assert torch.equal(features[name], value), name


@pytest.mark.usefixtures("detectron2")
def test_one_changed_weight_in_the_file_is_found(
    source: dict[str, torch.Tensor], converted: Converted, tmp_path: Path
) -> None:
    """Only Detectron2 reads the file here; the embedded backbone has the right tensors."""
    key = "res4.1.conv2.norm.running_mean"
    value = converted.model[key].clone()
    value[3] += 0.5
    from detection.d2.backbone_features import features

    theirs = features(write(converted, tmp_path / "weights.pth", **{key: value}))
    with pytest.raises(DataError, match=r"^x: .*failed at res4 of Detectron2's backbone"):
        check_features(
            source_network(source),
            converted.contract.architecture,
            converted,
            "x",
            detectron2=lambda: theirs,
        )


@pytest.mark.usefixtures("detectron2")
def test_a_file_of_two_formats_runs_nothing(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tar to one reader; a pickle, from the first member's name on, to another."""
    from detection.d2.checkpoint import SafeCheckpointer

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
    for read in (
        lambda: main([str(path), str(tmp_path / "out.pth")]),
        lambda: SafeCheckpointer(build_backbone(converted.contract)).load(str(path)),
    ):
        with pytest.raises(DataError, match=r"w\.pkl: damaged or made to mislead"):
            read()
    assert not marker.exists()
    with open(path, "rb") as file:
        pickle.load(file)
    assert marker.exists(), "to Python it is a program"


@pytest.mark.usefixtures("detectron2")
def test_what_the_command_refuses(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(b"PK\x03\x04 not at all")
    with pytest.raises(DataError, match=r"weights\.pth: not a torch checkpoint"):
        main([str(tmp_path / "weights.pth"), str(tmp_path / "out.pth")])
    with pytest.raises(UserError, match="output: missing"):
        main([str(tmp_path / "weights.pth")])


def test_both_backbones_are_in_the_result(
    source: dict[str, torch.Tensor], converted: Converted
) -> None:
    """A difference within rounding of Detectron2's is reported though the embedded one has none."""
    backbone = build_backbone(converted.contract).eval()
    backbone.load_state_dict(converted.model, strict=False)
    with torch.no_grad():
        theirs = backbone(fixed_image())
    theirs["res3"] = theirs["res3"] * (1 + 1e-7)
    checks = check_features(
        source_network(source),
        converted.contract.architecture,
        converted,
        "x",
        detectron2=lambda: theirs,
    )
    assert [name for name, check in checks.items() if not check.bitwise] == ["res3"]
    assert checks["res3"].max_abs_diff > 0


def test_without_detectron2_it_is_skipped_and_said(
    source: dict[str, torch.Tensor], converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "detectron2", None)
    with Detectron2Backbone() as real:
        real.show("weights.pth")
        checks = check_features(
            source_network(source),
            converted.contract.architecture,
            converted,
            "x",
            detectron2=real.features,
        )
    assert real.skipped == "Detectron2 is not installed"
    assert set(checks) == set(FEATURES)


def test_a_detectron2_that_does_not_import_is_skipped_and_said(fake: Any) -> None:
    fake("sys.exit('ImportError: libtorch.so: undefined symbol')")
    with Detectron2Backbone() as real:
        real.show("weights.pth")
        assert real.features() is None
    assert "cannot be imported (ImportError: libtorch.so: undefined symbol)" in real.skipped


def test_once_imported_it_may_not_fail(fake: Any) -> None:
    fake("print('ready', flush=True); sys.stdin.readline(); sys.exit('error: no such network')")
    with Detectron2Backbone() as real:
        real.show("weights.pth")
        with pytest.raises(DataError, match=r"weights\.pth: .*failed: error: no such network"):
            real.features()


def test_it_is_told_where_from_and_where_to(fake: Any, tmp_path: Path) -> None:
    fake("print('ready', flush=True); sys.exit(sys.stdin.readline())")
    with Detectron2Backbone() as real:
        real.show(tmp_path / "new\nline.pth")
        with pytest.raises(DataError) as error:
            real.features()
    weights, output = json.loads(str(error.value).split("failed: ")[1])
    assert weights == str(tmp_path / "new\nline.pth")
    assert not Path(output).parent.exists()  # cleaned up


def test_one_that_hangs_is_given_up_and_ended(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detectron2_backbone, "TIMEOUT_SECONDS", 0.2)
    fake("print('ready', flush=True); time.sleep(1000)")
    with Detectron2Backbone() as real:
        real.show("weights.pth")
        with pytest.raises(DataError, match=r"gave no features in 0\.2 seconds"):
            real.features()
    assert real._process is not None and real._process.poll() is not None


def test_an_error_of_ours_ends_it_at_once(fake: Any) -> None:
    fake("time.sleep(1000)")
    with pytest.raises(DataError, match="ours"), Detectron2Backbone() as real:
        raise DataError("ours")
    assert real._process is not None and real._process.poll() is not None
    assert not Path(real._folder.name).exists()
