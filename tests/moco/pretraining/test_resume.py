"""Resuming from older states, the same lines of metrics, longer runs; in all trainings here."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moco import finetune, linear, pretrain
from moco.common.errors import Preempted, UserError
from moco.common.files import sha256_state
from moco.common.run import read_record
from moco.engine.checkpoint import CLASSIFIER_FORMAT, FORMAT, list_checkpoints, load_checkpoint
from tests.moco.classification import classify_runs

TRAININGS = ("pretrain", "linear", "finetune")


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    counts = {"train": (7, 7, 8), "val": (3, 2, 2)}
    return classify_runs.write_labeled(tmp_path_factory.mktemp("labeled"), counts, 60)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return classify_runs.write_pretrained(tmp_path_factory.mktemp("weights") / "moco.pth.tar")


@pytest.fixture(params=TRAININGS)
def train(request, images, tiny, labeled, pretrained) -> Callable[..., None]:
    """`train(folder, *flags, KEY=value)`: a run of 8 or 6 steps, in epochs of 3 or 2."""

    def go(folder: Path, *flags: str, **changes: object) -> None:
        if request.param == "pretrain":
            pretrain.main([*tiny(DATA__ROOT=images, OUTPUT_DIR=folder, **changes), *flags])
            return
        command = linear if request.param == "linear" else finetune
        changes = {"SOLVER__BASE_LR": 0.1, **changes}
        words = classify_runs.words(folder, labeled, pretrained, **changes)
        command.main([*words, *flags])

    go.form = FORMAT if request.param == "pretrain" else CLASSIFIER_FORMAT  # type: ignore[attr-defined]
    return go


def lines(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in found]


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def newest(folder: Path, train: Callable[..., None]) -> dict:
    return load_checkpoint(list_checkpoints(folder)[-1], train.form)


def weights(folder: Path, train: Callable[..., None]) -> str:
    return sha256_state(newest(folder, train)["state_dict"])


def stopped(train: Callable[..., None], folder: Path, step: int, *flags: str, **changes) -> None:
    with pytest.raises(Preempted, match=f"after step {step} of"):
        train(folder, *flags, SOLVER__STOP_AT_ITERS=step, **changes)


def test_an_older_checkpoint_replaces_what_came_after_it(train, tmp_path, capsys):
    run = tmp_path / "run"
    stopped(train, run, 3)
    older = list_checkpoints(run)[-1]
    kept = shutil.copy(older, tmp_path / "kept")
    train(run, "--resume", CHECKPOINT__EVERY_ITERS=1)
    end = names(run)
    shutil.copy(kept, older)
    capsys.readouterr()
    stopped(train, run, 5, "--resume", str(older))
    out = capsys.readouterr().out
    assert "note: " in out and str(run / "superseded_1") in out
    assert all(name in out for name in end)
    assert {p.name for p in (run / "superseded_1").iterdir()} == {*end, "earlier_run.json"}
    assert newest(run, train)["step"] == 5 and len(names(run)) == 2
    assert not (run / "run.json").exists()
    assert (run / "last_checkpoint").read_text() == names(run)[-1]
    train(run, "--resume")
    assert "after step 5 of" in capsys.readouterr().out
    assert names(run)[-1] == end[-1] and (run / "run.json").exists()


def test_damaged_newer_files_are_moved_aside(train, tmp_path, capsys):
    run = tmp_path / "run"
    stopped(train, run, 4)
    (run / "checkpoint_0007.pth.tar").write_bytes(b"PK\x03\x04 half")
    (run / "last_checkpoint").write_text("checkpoint_0007.pth.tar")
    stopped(train, run, 5, "--resume")
    assert "warning: skipped a checkpoint" in capsys.readouterr().out
    assert newest(run, train)["step"] == 5
    assert (run / "last_checkpoint").read_text() == names(run)[-1]
    assert (run / "superseded_1/checkpoint_0007.pth.tar").read_bytes() == b"PK\x03\x04 half"


def test_a_copy_with_another_steps_name(train, tmp_path):
    run = tmp_path / "run"
    stopped(train, run, 3)
    list_checkpoints(run)[-1].rename(run / "checkpoint_0009.pth.tar")
    stopped(train, run, 4, "--resume", str(run / "checkpoint_0009.pth.tar"))
    assert newest(run, train)["step"] == 4
    assert "checkpoint_0009.pth.tar" not in names(run)


def test_overwriting_leaves_no_pointer_to_a_deleted_file(train, tmp_path, monkeypatch):
    stopped(train, tmp_path / "run", 2)
    assert (tmp_path / "run/last_checkpoint").exists()

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moco.engine.training.autocast", killed)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", "--overwrite")
    assert not names(tmp_path / "run") and not (tmp_path / "run/last_checkpoint").exists()


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_lines_of_metrics_are_those_of_an_uninterrupted_run(train, tmp_path, stop):
    """Means over three steps, also where two of them were before the stop; every evaluation."""
    train(tmp_path / "straight", LOG__EVERY_ITERS=3)
    stopped(train, tmp_path / "run", stop, LOG__EVERY_ITERS=3)
    train(tmp_path / "run", "--resume", LOG__EVERY_ITERS=3)
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")


def test_a_checkpoint_of_an_earlier_version_can_be_resumed(train, tmp_path):
    run = tmp_path / "run"
    train(tmp_path / "straight")
    stopped(train, run, 4)
    state = newest(run, train)
    for key in ("step_log", "loss_range", "total_steps", "extensions", "start"):
        state.pop(key, None)
    for key in ("MODEL.WEIGHTS", "SOLVER.OPTIMIZER"):
        state["config"].pop(key, None)
    torch.save(state, list_checkpoints(run)[-1])
    train(run, "--resume")
    assert weights(run, train) == weights(tmp_path / "straight", train)


@pytest.mark.parametrize("key", ["step_log", "loss_range", "start"])
def test_a_checkpoint_with_malformed_values_is_named(train, tmp_path, key):
    stopped(train, tmp_path / "run", 4)
    state = newest(tmp_path / "run", train)
    if key not in state:
        return
    path = list_checkpoints(tmp_path / "run")[-1]
    torch.save({**state, key: {"values": 3, "seconds": "x"}}, path)
    with pytest.raises(UserError, match=rf"{path.name}: a malformed '{key}'"):
        train(tmp_path / "run", "--resume")


@pytest.fixture
def length(request) -> Callable[[int], dict[str, int]]:
    """So many steps as a key: of pre-training in steps, else in epochs of two."""
    pretraining = "pretrain" in request.node.callspec.params.values()
    return lambda steps: (
        {"SOLVER__MAX_ITERS": steps} if pretraining else {"SOLVER__MAX_EPOCHS": steps // 2}
    )


def test_an_extended_run_equals_the_longer_one(train, length, tmp_path, capsys):
    """With a schedule in steps; the end of the shorter run is inside an epoch of the longer one."""
    step = {"SOLVER__SCHEDULE": "step", "SOLVER__MILESTONES_EPOCHS": "(1,)"}
    run, straight = tmp_path / "run", tmp_path / "straight"
    train(straight, **step, **length(12))
    train(run, **step, **length(8))
    with pytest.raises(UserError, match=r"SOLVER\.MAX_(ITERS|EPOCHS) .*--extend"):
        train(run, "--resume", **step, **length(12))
    for steps in (8, 6):
        with pytest.raises(UserError, match=r"--extend: .* 8 steps"):
            train(run, "--extend", **step, **length(steps))
    assert (run / "run.json").exists()
    capsys.readouterr()
    stopped(train, run, 9, "--extend", **step, **length(12))
    assert "note: extended from 8 to 12 steps" in capsys.readouterr().out
    assert not (run / "run.json").exists()
    train(run, "--extend", **step, **length(12))  # the same command
    assert weights(run, train) == weights(straight, train)
    record = read_record(run / "run.json")
    assert record.iterations == 12
    said = [note for note in record.notes if note.startswith("extended from 8 to 12 steps")]
    assert len(said) == 1 and "not equivalent" not in said[0]


def test_extending_a_cosine_says_what_is_not_equivalent(train, length, tmp_path):
    run = tmp_path / "run"
    cosine = {"SOLVER__SCHEDULE": "cosine", "SOLVER__LR_UPDATE": "iter"}
    train(run, **cosine, **length(8))
    train(run, "--extend", **cosine, **length(12))
    rates = {line["iteration"]: line["lr"] for line in lines(run) if "lr" in line}
    (note,) = [n for n in read_record(run / "run.json").notes if n.startswith("extended from 8")]
    assert "not equivalent" in note and f"{rates[8]:g}" in note
    assert rates[10] > rates[8] > rates[12]


def test_nothing_to_extend(train, tmp_path):
    with pytest.raises(UserError, match=r"--extend: .*run holds no checkpoint"):
        train(tmp_path / "run", "--extend")
