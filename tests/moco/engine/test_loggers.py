"""Loggers: values, resuming, errors, custom ones; with the real packages, offline."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from moco.common.errors import Preempted, UserError
from moco.common.run import LOGGERS_NAME
from moco.engine.loggers import LOGGERS, Logger, Loggers
from tests.moco.commands import pretrain as main

NAMES = ("wandb", "mlflow")
BLOCK = 1 << 15


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path) -> None:
    """Send nothing over the network, and write nothing outside the test's folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.fixture
def opts(tiny, images, tmp_path):
    """Arguments of a pre-training of 8 steps into `tmp_path / "run"`."""

    def arguments(*loggers: str, **changes: object) -> list[str]:
        keys = {"DATA__ROOT": images, "OUTPUT_DIR": tmp_path / "run", "LOG__LOGGERS": loggers}
        return tiny(**keys, **changes)

    return arguments


def lines(tmp_path: Path) -> list[dict[str, float]]:
    """Return the lines of metrics.json without the epoch, which only it has."""
    text = (tmp_path / "run" / "metrics.json").read_text()
    return [
        {name: value for name, value in json.loads(line).items() if name != "epoch"}
        for line in text.splitlines()
    ]


def in_mlflow(tmp_path: Path) -> dict[int, dict[str, float]]:
    """Read the values of the run from MLflow, by iteration."""
    from mlflow.tracking import MlflowClient

    run_id = json.loads((tmp_path / "run" / LOGGERS_NAME).read_text())["mlflow"]
    client, found = MlflowClient(), {}
    for name in client.get_run(run_id).data.metrics:
        for metric in client.get_metric_history(run_id, name):
            found.setdefault(metric.step, {"iteration": metric.step})[name] = metric.value
    return found


def in_wandb(tmp_path: Path) -> list[dict[int, dict[str, float]]]:
    """Read the values from each file to be synchronized (one per process), by iteration."""
    from wandb.proto.wandb_internal_pb2 import Record

    run_id = json.loads((tmp_path / "run" / LOGGERS_NAME).read_text())["wandb"]
    opened = []
    for path in sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb")):
        opened.append(found := {})
        for content in records(path.read_bytes()):
            history = Record.FromString(content).history
            values = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in history.item}
            if step := history.step.num:
                own = {name: value for name, value in values.items() if name[0] != "_"}
                found[step] = {"iteration": step, **own}
    return opened


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, which W&B's files have from byte 7 on."""
    at, whole = 7, b""
    while at + 7 < len(data):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""


@pytest.mark.slow
def test_wandb_and_mlflow_receive_the_numbers_of_metrics_json(opts, tmp_path):
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    with pytest.raises(Preempted):
        main(opts(*NAMES, SOLVER__STOP_AT_ITERS=4))
    ids = json.loads((tmp_path / "run" / LOGGERS_NAME).read_text())
    client = MlflowClient()
    assert client.get_run(ids["mlflow"]).info.status == "KILLED"
    main([*opts(*NAMES), "--resume"])
    assert json.loads((tmp_path / "run" / LOGGERS_NAME).read_text()) == ids
    expected = {line["iteration"]: line for line in lines(tmp_path)}
    assert list(expected) == [2, 4, 6, 8]
    assert in_mlflow(tmp_path) == {step: pytest.approx(line) for step, line in expected.items()}
    run = client.get_run(ids["mlflow"])
    assert run.info.status == "FINISHED"
    assert run.data.params["SOLVER.BASE_LR"] == "0.1"
    first, second = in_wandb(tmp_path)
    assert (list(first), list(second)) == ([2, 4], [6, 8])
    assert first | second == {step: pytest.approx(line) for step, line in expected.items()}


def test_a_logger_from_outside(opts, register, tmp_path):
    calls = []

    def outside(folder, config, run_id):
        calls.append((folder, config["SOLVER.MAX_ITERS"], run_id))
        return Logger(
            lambda values, iteration: calls.append({"iteration": iteration, **values}),
            lambda done: calls.append(done),
            "an-id",
        )

    register(LOGGERS, outside)
    with pytest.raises(Preempted):
        main(opts("outside", SOLVER__STOP_AT_ITERS=5))
    main([*opts("outside"), "--resume"])
    folder = tmp_path / "run"
    two, four, six, eight = lines(tmp_path)
    started, *at_first, stopped, resumed = (*calls[:5],)
    assert started == (folder, 8, "") and resumed == (folder, 8, "an-id")
    assert at_first == [two, four] and stopped is False
    assert calls[5:] == [six, eight, True]
    main([*opts(), "--overwrite"])
    assert not (folder / LOGGERS_NAME).exists()


def test_a_logger_that_fails_is_dropped_with_one_warning(opts, register, tmp_path, capsys):
    def failing(folder, config, run_id):
        return Logger(lambda values, iteration: 1 / 0, lambda done: 1 / 0)

    register(LOGGERS, failing)
    main(opts("failing"))
    assert len(lines(tmp_path)) == 4
    out = capsys.readouterr().out
    assert out.count("failing") == 1 and "division by zero" in out


def test_a_logger_that_cannot_be_opened(opts, register, tmp_path):
    def broken(folder, config, run_id):
        raise OSError("no\nserver")

    register(LOGGERS, broken)
    with pytest.raises(UserError, match=r"^LOG\.LOGGERS.*broken.*$"):
        main(opts("broken"))
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_invalid_ids_are_ignored(register, tmp_path):
    seen = []

    def outside(folder, config, run_id):
        seen.append(run_id)
        return Logger(lambda values, iteration: None, lambda done: None)

    register(LOGGERS, outside)
    for content in ('{"outside": "../../x"}', "[]", '{"outside": 3}', "{", '{"outside": "a-1"}'):
        (tmp_path / LOGGERS_NAME).write_text(content)
        Loggers(["outside"], tmp_path, {})
    assert seen == ["", "", "", "", "a-1"]
