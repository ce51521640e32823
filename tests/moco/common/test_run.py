"""Run folders: one owner, nothing overwritten by accident, records that validate."""

import json
import sys
from pathlib import Path

import pytest

from moco.common.errors import UserError, run_cli
from moco.common.run import RunFolder, RunRecord, provenance, read_record, write_record


def record(**changes):
    fields = {
        "kind": "detection",
        "status": "done",
        "task": "faster_rcnn_R_50_C4_24k",
        "engine": "embedded",
        "init": "random",
        "weights_sha256": None,
        "weights_source": None,
        "seed": 3,
        "config_sha256": "0" * 64,
        "config": {"SOLVER.MAX_ITER": 10},
        "provenance": {},
        "iterations": 10,
        "seconds": 1.5,
        "metrics": {"bbox/AP": 12.5, "bbox/AP75": None},
    }
    return RunRecord(**{**fields, **changes})


def test_a_folder_with_files_needs_resume_or_overwrite(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.log({"iteration": 1, "loss": 2.0})
        write_record(tmp_path, record())
        (tmp_path / "events.out.tfevents.1.host.2.0").touch()
    with pytest.raises(UserError, match="add --resume"), RunFolder(tmp_path):
        pass
    with RunFolder(tmp_path, resume=True) as folder:
        folder.log({"iteration": 2, "loss": float("nan")})
        assert list(tmp_path.glob("events.out.tfevents.*"))
    lines = (tmp_path / "metrics.json").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [2.0, None]
    with RunFolder(tmp_path, overwrite=True):
        assert not (tmp_path / "run.json").exists() and not (tmp_path / "metrics.json").exists()
        assert not list(tmp_path.glob("events.out.tfevents.*"))
    with pytest.raises(UserError, match="exclude each other"):
        RunFolder(tmp_path, resume=True, overwrite=True)


def test_records_round_trip(tmp_path):
    path = write_record(tmp_path, record(notes=["one"]))
    assert read_record(path) == record(notes=["one"])


def test_a_metric_that_is_not_finite_is_null(tmp_path):
    path = write_record(tmp_path, record(metrics={"bbox/AP": float("nan")}))
    assert read_record(path).metrics == {"bbox/AP": None}


def test_provenance_names_versions_hardware_and_command():
    found = provenance()
    assert found["versions"]["torch"] and found["hardware"]["cpu"]
    assert found["utc"].endswith("+00:00") and found["command"]
    json.dumps(found)


def test_errors_are_one_line_with_their_exit_code(monkeypatch, capsys):
    def fail(argv):
        raise UserError("a key\nis wrong")

    monkeypatch.setattr(sys, "argv", ["prog"])
    with pytest.raises(SystemExit) as caught:
        run_cli(fail)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: a key is wrong\n"
    monkeypatch.setattr(sys, "argv", ["prog", "--debug"])
    with pytest.raises(SystemExit):
        run_cli(fail)
    assert "Traceback" in capsys.readouterr().err


def test_a_path_that_the_system_refuses_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prog"])
    with pytest.raises(SystemExit) as caught:
        run_cli(lambda argv: len(Path("a" * 300).read_bytes()))
    assert caught.value.code == 3
    assert capsys.readouterr().err == f"error: {'a' * 300}: File name too long\n"


def test_an_unexpected_error_is_one_line_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prog"])
    with pytest.raises(SystemExit) as caught:
        run_cli(lambda argv: 1 // 0)
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error and "--debug" in error and error.count("\n") == 1
