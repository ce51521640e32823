"""Run folders: one owner, nothing overwritten by accident, records that validate."""

import json
import re
import sys
from pathlib import Path

import pytest

from moco.common.errors import UserError, run_cli
from moco.common.run import RunFolder, RunRecord, provenance, read_record, write_record

TEXTS = {"kind": "detection", "status": "done", "task": "voc", "engine": "embedded", "init": "x"}
FILES = {"weights_sha256": None, "weights_source": None, "config_sha256": "0" * 64}
MAPPINGS = {"config": {"SOLVER.MAX_ITER": 10}, "provenance": {}, "metrics": {"bbox/AP": 12.5}}


def record(**changes):
    numbers = {"seed": 3, "iterations": 10, "seconds": 1.5}
    return RunRecord(**{**TEXTS, **FILES, **MAPPINGS, **numbers, **changes})


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
    metrics = {"bbox/AP": 12.5, "bbox/AP75": None}
    path = write_record(tmp_path, record(metrics=metrics | {"bbox/AP75": float("nan")}))
    assert read_record(path) == record(metrics=metrics)


def test_provenance_names_versions_hardware_and_command():
    found = provenance()
    assert found["versions"]["torch"] and found["hardware"]["cpu"]
    assert found["utc"].endswith("+00:00") and found["command"]
    json.dumps(found)


def wrong_key(argv):
    raise UserError("a key\nis wrong")


@pytest.mark.parametrize(
    ("main", "code", "line"),
    [
        (wrong_key, 2, "error: a key is wrong"),
        (lambda argv: Path("a" * 300).read_bytes(), 3, f"error: {'a' * 300}: File name too long"),
        (lambda argv: 1 // 0, 1, "unexpected ZeroDivisionError: .*--debug.*"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(monkeypatch, capsys, main, code, line):
    monkeypatch.setattr(sys, "argv", ["prog"])
    with pytest.raises(SystemExit) as caught:
        run_cli(main)
    assert caught.value.code == code
    assert re.fullmatch(f"{line}\n", capsys.readouterr().err)
    monkeypatch.setattr(sys, "argv", ["prog", "--debug"])
    with pytest.raises(SystemExit):
        run_cli(main)
    assert "Traceback" in capsys.readouterr().err
