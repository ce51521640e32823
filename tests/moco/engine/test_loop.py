"""The loop in all trainings: stops, resuming, extension, used folders, refused checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moco.common.errors import DataError, LockedError, NumericError, Preempted, UserError
from moco.common.run import RunFolder, read_record
from moco.engine.checkpoint import list_checkpoints
from tests.oracles.training import metrics, newest, weights


def lines(folder: Path) -> list[dict[str, float]]:
    return [{**line, "images_per_second": None} for line in metrics(folder)]


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def stopped(train: Callable[..., None], folder: Path, step: int, *flags: str, **changes) -> None:
    with pytest.raises(Preempted, match=f"after step {step} of .*--resume"):
        train(folder, *flags, SOLVER__STOP_AT_ITERS=step, **changes)


def test_a_copy_with_another_steps_name(train, tmp_path):
    run = tmp_path / "run"
    stopped(train, run, 3)
    list_checkpoints(run)[-1].rename(run / "checkpoint_0009.pth.tar")
    stopped(train, run, 4, "--resume", str(run / "checkpoint_0009.pth.tar"))
    assert newest(run, train.form)["step"] == 4
    assert "checkpoint_0009.pth.tar" not in names(run)


def test_used_folders(train, tmp_path, monkeypatch):
    run = tmp_path / "run"
    train(run)
    with pytest.raises(UserError, match=r"not empty .*--resume"):
        train(run)
    with RunFolder(run, resume=True), pytest.raises(LockedError):
        train(run, "--resume")
    # --resume must not find the earlier run's checkpoints, which are of later steps.
    stopped(train, run, 1, "--overwrite")
    assert names(run) == ["checkpoint_0000_step00000001.pth.tar"]
    assert not (run / "run.json").exists()

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moco.engine.training.autocast", killed)
    with pytest.raises(KeyboardInterrupt):
        train(run, "--overwrite")
    assert not names(run) and not (run / "last_checkpoint").exists()


@pytest.mark.parametrize("key", ["step_log", "loss_range", "start"])
def test_a_checkpoint_with_malformed_values_is_named(train, tmp_path, key):
    if key == "start" and train.name != "pretrain":
        pytest.skip("classifiers have none")
    stopped(train, tmp_path / "run", 4)
    path = list_checkpoints(tmp_path / "run")[-1]
    torch.save({**newest(tmp_path / "run", train.form), key: {"values": 3, "seconds": "x"}}, path)
    with pytest.raises(DataError, match=rf"{path.name}: a malformed '{key}'"):
        train(tmp_path / "run", "--resume")


def test_resuming_without_a_checkpoint(train, tmp_path, capsys):
    stopped(train, tmp_path / "run", 1, "--resume")
    assert "starting from scratch" in capsys.readouterr().out


def test_a_run_killed_before_its_first_checkpoint_logs_each_line_once(train, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.json").write_text('{"iteration": 1, "loss": 9.0}\n')
    train(run, "--resume", LOG__EVERY_ITERS=1)
    logged = [line["iteration"] for line in metrics(run) if "loss" in line]
    assert logged == sorted(set(logged))


def test_a_nan_loss_stops_the_run_before_anything_is_saved(train, tmp_path, monkeypatch):
    from moco.engine import loop

    over_processes, calls = loop._over_processes, iter(range(100))

    def poisoned(step, received):
        report = over_processes(step, received)
        return report.index_fill(0, torch.tensor([0] if next(calls) == 4 else []).long(), torch.nan)

    monkeypatch.setattr(loop, "_over_processes", poisoned)
    with pytest.raises(NumericError, match=r"loss is nan at step 4; .*checkpoint_000[01].pth"):
        train(tmp_path / "run")
    state = newest(tmp_path / "run", train.form)
    assert state["step"] in (3, 4)
    assert all(value.isfinite().all() for value in state["state_dict"].values())
    assert not (tmp_path / "run/run.json").exists()


@pytest.fixture
def length(train) -> Callable[[int], dict[str, int]]:
    """Return a function from steps to a key: in steps for pre-training, else in epochs of 2."""
    key, unit = ("MAX_ITERS", 1) if train.name == "pretrain" else ("MAX_EPOCHS", 2)
    return lambda steps: {f"SOLVER__{key}": steps // unit}


@pytest.mark.slow
def test_an_extended_run_equals_the_longer_one(train, length, tmp_path, capsys):
    """The shorter run ends within an epoch of the longer one."""
    step = {"SOLVER__SCHEDULE": "step", "SOLVER__MILESTONES_EPOCHS": "(1,)"}
    run, longer = tmp_path / "run", tmp_path / "longer"
    train(longer, **step, **length(12))
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
    assert weights(run, train.form) == weights(longer, train.form)
    record = read_record(run / "run.json")
    assert record.iterations == 12
    (note,) = [note for note in record.notes if note.startswith("extended from 8 to 12 steps")]
    assert "not equivalent" not in note


@pytest.mark.slow
def test_the_note_on_an_extended_cosine_says_that_it_is_not_equivalent(train, length, tmp_path):
    run = tmp_path / "run"
    cosine = {"SOLVER__SCHEDULE": "cosine", "SOLVER__LR_UPDATE": "iter"}
    train(run, **cosine, **length(8))
    train(run, "--extend", **cosine, **length(12))
    rates = {line["iteration"]: line["lr"] for line in lines(run) if "lr" in line}
    (note,) = [n for n in read_record(run / "run.json").notes if n.startswith("extended from 8")]
    assert "not equivalent" in note and f"{rates[8]:g}" in note
    assert rates[10] > rates[8] > rates[12]
