"""Parity of metrics.json with Detectron2's storage and writer."""

import json
from pathlib import Path

import numpy as np
import pytest

from detection.engine.log import continue_log, is_kept, log_step, open_log, recent_values
from moco.common.run import drop_metrics
from moco.engine.loggers import StepLog

MAX_ITER = 47
NAMES = ("loss", "now_and_then", "rare", "latest")


def logged(iteration: int) -> dict[str, tuple[float, bool]]:
    """Return the scalars that a model logs in an iteration, and whether they are smoothed."""
    rng = np.random.RandomState(iteration)
    values = {"loss": (float(rng.rand()), True), "latest": (float(rng.rand()), False)}
    if iteration % 6 == 2:
        values["now_and_then"] = (float(rng.rand()), True)
    if iteration in (3, 30):
        values["rare"] = (float(rng.rand()), True)
    return values


def lines(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    kept = [{key: line[key] for key in ("iteration", *NAMES) if key in line} for line in found]
    return [line for line in kept if len(line) > 1]


def train(log: StepLog, start: int, stop: int) -> None:
    for iteration in range(start, stop):
        log_step(log, iteration, MAX_ITER, {"time": 1.0}, logged(iteration), lr=0.1)


@pytest.mark.detectron2
def test_lines_are_detectron2s(tmp_path, detectron2):
    from detectron2.utils.events import EventStorage, JSONWriter

    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    writer = JSONWriter(str(tmp_path / "theirs" / "metrics.json"))
    with EventStorage(0) as storage:
        for iteration in range(MAX_ITER):
            storage.iter = iteration
            for name, (value, is_smoothed) in logged(iteration).items():
                storage.put_scalar(name, value, smoothing_hint=is_smoothed)
            if (iteration + 1) % 20 == 0 or iteration == MAX_ITER - 1:
                writer.write()
    train(open_log(tmp_path / "ours"), 0, MAX_ITER)
    theirs = sorted(lines(tmp_path / "theirs"), key=lambda line: line["iteration"])
    assert lines(tmp_path / "ours") == theirs  # Detectron2 sorts them by name.
    assert {"now_and_then", "rare"} <= set().union(*lines(tmp_path / "ours"))


@pytest.mark.parametrize(("stop", "killed"), [(25, 43), (20, 41), (31, 31), (39, 40)])
def test_a_resumed_run_writes_each_line_once(stop, killed, tmp_path):
    """A run that is stopped and later killed writes some lines again, but none twice."""
    for name in ("straight", "resumed"):
        (tmp_path / name).mkdir()
    train(open_log(tmp_path / "straight"), 0, MAX_ITER)
    log = open_log(tmp_path / "resumed")
    train(log, 0, stop)
    saved = recent_values(log)
    train(log, stop, killed)
    drop_metrics(tmp_path / "resumed", lambda line: is_kept(line, stop, MAX_ITER))
    log = open_log(tmp_path / "resumed")
    continue_log(log, saved, stop)
    train(log, stop, MAX_ITER)
    assert lines(tmp_path / "resumed") == lines(tmp_path / "straight")
