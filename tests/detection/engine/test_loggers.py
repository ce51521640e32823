"""Loggers of fine-tuning on both engines receive the values of metrics.json."""

import json
import os
import signal

import pytest

from detection.engine.trainer import Trainer
from detection.train_net import main
from moco.common.errors import Preempted
from moco.engine.loggers import LOGGERS, Logger


@pytest.mark.slow
def test_loggers_get_the_numbers_of_metrics_json(
    engine, small_config, small_options, r18_file, tmp_path, monkeypatch, register
):
    calls = []

    def outside(folder, config, run_id):
        calls.append((folder, config["SOLVER.MAX_ITER"], run_id))
        return Logger(
            lambda values, iteration: calls.append({"iteration": iteration, **values}),
            lambda done: calls.append(done),
        )

    register(LOGGERS, outside)
    argv = ["--config-file", small_config, "--engine", engine, *small_options]
    argv += ["MODEL.WEIGHTS", str(r18_file), "DATALOADER.NUM_WORKERS", "0"]
    argv += ["OUTPUT_DIR", str(tmp_path / "run"), "LOG.LOGGERS", "('outside',)"]
    argv += ["TEST.EVAL_PERIOD", "1"]
    assert main(argv) == 0
    text = (tmp_path / "run" / "metrics.json").read_text()
    expected = [json.loads(line) for line in text.splitlines()]
    (folder, max_iter, run_id), *logged, done = calls
    assert (folder, max_iter, run_id, done) == (tmp_path / "run", 3, "", True)
    evaluated = [values["iteration"] for values in expected if "bbox/AP" in values]
    assert evaluated == [0, 1, 2]
    merged = {values["iteration"]: {} for values in expected}
    for values in expected:
        merged[values["iteration"]] |= values
    seen = {step: {} for step in merged}
    for values in logged:
        seen[values["iteration"]] |= values
    assert seen == merged and {"total_loss", "bbox/AP"} <= set().union(*merged.values())
    assert not list((tmp_path / "run").glob("events.out.tfevents.*"))  # It was not chosen.

    def stopped(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)

    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", stopped)
    with pytest.raises(Preempted):
        main([*argv, "OUTPUT_DIR", str(tmp_path / "stopped")])
    assert calls[-1] is False
