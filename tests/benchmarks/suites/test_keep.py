"""Retention of checkpoints: which ones stay on disk, and their bytes."""

from pathlib import Path

import pytest
import torchvision

from benchmarks.suites.checkpoints import remove_checkpoints
from benchmarks.suites.checks import check
from benchmarks.suites.suite_file import load_suite
from moco.engine.checkpoint import list_checkpoints
from tests.benchmarks.suites.lab import classes, from_random, write_suite

DETECTION = ["model_0000499.pth", "model_0000999.pth", "model_0001499.pth", "model_final.pth"]
CLASSIFIER = ["checkpoint_0001.pth.tar", "checkpoint_0002_step00000300.pth.tar"]
CLASSIFIER += ["checkpoint_0002_step00000400.pth.tar", "checkpoint_0002.pth.tar"]
OTHERS = {"last_checkpoint", "model_best.pth", "weights.pth", "run.json"}


def fill(folder: Path, names: list[str], newest: str) -> None:
    for name in (*names, *OTHERS):
        (folder / name).write_text("")
    (folder / "last_checkpoint").write_text(newest)


@pytest.mark.parametrize("names", [DETECTION, CLASSIFIER])
@pytest.mark.parametrize(
    ("keep", "done", "number"),
    [("final", True, 1), ("final", False, 2), ("last", True, 2), ("all", True, 4)],
)
def test_what_stays(names, keep, done, number, tmp_path):
    fill(tmp_path, names, names[-1])
    assert [path.name for path in list_checkpoints(tmp_path, "*.pth*")] == names
    remove_checkpoints(tmp_path, keep, done=done)
    assert {path.name for path in tmp_path.iterdir()} == {*names[-number:], *OTHERS}


def test_the_one_to_resume_from_stays(tmp_path):
    """A run may have been resumed from a checkpoint older than the last number."""
    fill(tmp_path, DETECTION[:3], DETECTION[0])
    remove_checkpoints(tmp_path, "final", done=False)
    left = [path.name for path in list_checkpoints(tmp_path, "model_*.pth")]
    assert left == [DETECTION[2], DETECTION[0]]


def test_the_size_is_what_a_run_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    classes(tmp_path / "data")
    keys = {"DATA.ROOT": str(tmp_path / "data"), "MODEL.ARCH": "resnet18"}
    task = "SOLVER: {BATCH_SIZE: 2, MAX_EPOCHS: 90}"
    path = write_suite(tmp_path, {"program": "linear", "overrides": keys}, task=task)
    findings = check(from_random(load_suite(path)), False)
    assert not findings.problems
    [found] = findings.checkpoints.values()
    assert found.number == 2
    network = torchvision.models.resnet18(num_classes=2)
    size = sum(tensor.nbytes for tensor in network.state_dict().values())
    momentum = sum(tensor.nbytes for tensor in network.fc.parameters())
    assert found.num_bytes == size + momentum
