"""The command that ranks frozen backbones: the task of an architecture, and a whole run."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import rank
from benchmarks.suites.synthetic import write_scenes
from convert.families.convnext import ConvNeXtArchitecture
from convert.families.resnet import ResNetArchitecture
from convert.families.swin import SwinArchitecture
from convert.families.timm import TimmArchitecture
from convert.families.vit import ViTArchitecture
from detection.config.task import load_task
from detection.datasets import find_custom
from detection.embedded.model import build_model
from moco.common.errors import UserError
from moco.common.run import read_record
from moco.common.shipped import resolve
from tests.oracles.resnets import make_resnet

SMALL = [
    *("INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MAX_SIZE_TRAIN", "64"),
    *("INPUT.MIN_SIZE_TEST", "64", "INPUT.MAX_SIZE_TEST", "64"),
    *("SOLVER.MAX_ITER", "6", "SOLVER.IMS_PER_BATCH", "2", "SOLVER.STEPS", "()"),
    *("SOLVER.WARMUP_ITERS", "1", "TEST.EVAL_PERIOD", "3", "MODEL.DEVICE", "cpu"),
    *("SOLVER.PRECISION", "fp32"),
]
ARCHITECTURES = {
    "ConvNeXt": ConvNeXtArchitecture((1, 1, 2, 1), (8, 16, 32, 64), True, False, 1e-6),
    "ResNet-18": ResNetArchitecture(False, 18, "imagenet", 64, 64, 1, 64),
    "ResNet-50": ResNetArchitecture(False, 50, "imagenet", 64, 256, 1, 64),
    "Swin": SwinArchitecture(8, (1, 1, 2, 1), (1, 2, 4, 8), 7, True),
    "ViT": ViTArchitecture(48, 4, 3, 96, 16, 224, True, False, True, 1e-6, tokens=1),
    "timm, four maps": TimmArchitecture("mobilenetv2_035", ""),
    "timm, one map": TimmArchitecture("test_vit", ""),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[int, Path]:
    """Write ResNet-18s and a ResNet-34 of random weights."""
    folder, found = tmp_path_factory.mktemp("weights"), {}
    for depth in (18, 34):
        found[depth] = folder / f"r{depth}.pth"
        torch.save(make_resnet(depth, base=64).state_dict(), found[depth])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_only_a_small_detector_is_trained(name, tmp_path):
    write_scenes(tmp_path / "scenes", 4, 2, seed=0)
    keys = {**find_custom(tmp_path / "scenes"), **rank.frozen_keys(ARCHITECTURES[name])}
    keys |= {"MODEL.WEIGHTS": "random", "OUTPUT_DIR": tmp_path / "run"}
    pairs = [str(word) for pair in keys.items() for word in pair]
    task = load_task(resolve(rank.TASK), pairs, "embedded")
    model = build_model(task.cfg)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    norms = tuple(f"backbone.bottom_up.norm{i}" for i in (1, 2, 3))  # of ConvNeXt and Swin
    inside = ("backbone.bottom_up.", "backbone.net.")
    assert not [n for n in trained if n.startswith(inside) and not n.startswith(norms)]
    assert model.backbone.strides == {"p3": 8, "p4": 16, "p5": 32, "p6": 64}
    assert set(model.backbone.stage_channels.values()) == {64}
    assert sum(p.numel() for p in trained.values()) < 2e6


def test_several_architectures_are_refused(tmp_path, files):
    write_scenes(tmp_path / "scenes", 4, 2, seed=0)
    inits = [f"a={files[18]}", f"b={files[34]}", "random"]
    with pytest.raises(UserError, match="--init a is a ResNet-18, b a ResNet-34"):
        rank.ranked_suite(tmp_path / "scenes", inits, SMALL, 2)
    suite = rank.ranked_suite(tmp_path / "scenes", [inits[1], f"c={files[34]}"], SMALL, 2)
    (task,) = suite.tasks
    assert dict(task.overrides)["MODEL.RESNETS.DEPTH"] == "34" and task.trials == 2
    other = rank.ranked_suite(tmp_path / "scenes", inits[:1], SMALL, 2).tasks[0]
    # Tables that contain both, and other datasets, tell them apart.
    assert (task.name, other.name) == ("scenes_frozen_ResNet-34", "scenes_frozen_ResNet-18")


def test_overrides_name_the_network_of_tensors_alone(tmp_path):
    timm = pytest.importorskip("timm")
    write_scenes(tmp_path / "scenes", 4, 2, seed=0)
    torch.save(timm.create_model("test_efficientnet").state_dict(), tmp_path / "mine.pth")
    opts = [*SMALL, "MODEL.TIMM.NAME", "test_efficientnet"]
    (task,) = rank.ranked_suite(tmp_path / "scenes", [f"mine={tmp_path}/mine.pth"], opts).tasks
    assert task.name == "scenes_frozen_timm_test_efficientnet"


def test_random_weights_alone_choose_no_task(tmp_path):
    with pytest.raises(UserError, match="give the weights to rank"):
        rank.main(["--data", str(tmp_path), "--init", "random"])


@pytest.mark.slow
def test_from_a_folder_to_a_table(tmp_path, files, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_scenes(tmp_path / "scenes", 6, 2, seed=0)
    argv = ["--data", "scenes", "--init", f"mine={files[18]}", "--init", "random"]
    argv += ["--trials", "2", "--seconds-per-iteration", "1", "--output", "out"]
    argv += ["--engine", "embedded", "--opts", *SMALL]
    rank.main(argv)
    shown = capsys.readouterr().out
    assert "LogME" in shown and shown.rstrip().endswith("`evaluate`")
    records = [read_record(path) for path in sorted(Path("out/runs").glob("*/*/*/run.json"))]
    assert len(records) == 4 and not Path("out/features").exists()
    by_init: dict[str, set[float]] = {}
    for record in records:
        by_init.setdefault(record.init, set()).add(record.metrics["logme"])
        assert record.config["MODEL.BACKBONE.CACHE_DIR"].endswith("features")
    # The score is of the weights; random ones differ with the seed.
    assert len(by_init["mine"]) == 1 and len(by_init["random"]) == 2
    logs = [path.read_text() for path in sorted(Path("out/runs").glob("*/mine/*/log.txt"))]
    used = {name for text in logs for name in re.findall("feature cache: (.*), forecast", text)}
    assert len(logs) == 2 and len(used) == 1 and used.pop().startswith("out/features/")
    rank.main(argv)
    assert "0 to do" in capsys.readouterr().out


def test_the_plan_has_the_shared_cache(tmp_path, files, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_scenes(tmp_path / "scenes", 4, 2, seed=0)
    argv = ["--data", "scenes", "--init", f"mine={files[18]}", "--trials", "1", "--plan", "plan"]
    rank.main([*argv, "--seconds-per-iteration", "1", "--output", "out", "--opts", *SMALL])
    (run,) = json.loads(Path("plan").read_text(encoding="utf-8"))["runs"]
    assert run["command"][-2:] == ["MODEL.BACKBONE.CACHE_DIR", "out/features"]
