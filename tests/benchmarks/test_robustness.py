"""Robustness: computed by hand, and after the model has changed."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.report.analysis import robustness
from benchmarks.report.records import collect
from benchmarks.robustness import main
from detection.data.corruptions import NAMES
from detection.evaluation.metrics import ROBUSTNESS_NAME
from moco.common.errors import DataError
from moco.common.files import sha256_file
from tests.benchmarks.report.fake_runs import write_run


def content(without=(), severity=3):
    """Return P 40 on clean images, 10 under noise, 20 under other corruptions."""
    corrupted = {n: {"bbox/AP": 10.0 if "noise" in n else 20.0} for n in NAMES if n not in without}
    return {"severity": severity, "clean": {"bbox/AP": 40.0}, "corrupted": corrupted, "failing": {}}


def test_robustness_by_hand(tmp_path):
    path = write_run(tmp_path / "run") / ROBUSTNESS_NAME
    [run] = collect([tmp_path]).transfer
    path.write_text(json.dumps({**content(), "run": run.digest}))
    found = robustness(run, "bbox/AP")
    groups = {"noise": 10, "blur": 20, "weather": 20, "digital": 20}
    assert found == {"P": 40, "mPC": 18, "rPC": 45, **groups}  # (3 x 10 + 12 x 20) / 15
    path.write_text(json.dumps({**content(without=["fog"]), "run": run.digest}))
    assert robustness(run, "bbox/AP") == {"P": 40, "noise": 10, "blur": 20, "digital": 20}
    assert robustness(run, "segm/AP") == {}
    path.write_text(json.dumps({"clean": [3], "run": run.digest}))
    with pytest.raises(DataError, match=ROBUSTNESS_NAME):
        robustness(run, "bbox/AP")


def test_evaluations_of_an_earlier_model_are_made_again(tmp_path, monkeypatch):
    """An --overwrite that failed, or a copied model, leaves evaluations of another one."""
    if find_spec("imagecorruptions") is None:
        pytest.skip("imagecorruptions is not installed")
    write_run(tmp_path / "run", metrics={"bbox/AP": 40.0})
    model, evaluated = tmp_path / "run" / "model_final.pth", []
    model.write_bytes(b"weights")

    def evaluate(argv):
        out = Path(argv[argv.index("OUTPUT_DIR") + 1])
        shutil.rmtree(out, ignore_errors=True)
        write_run(out / "inference", weights_sha256=sha256_file(model), metrics={"bbox/AP": 20.0})
        evaluated.append(out.name)

    monkeypatch.setattr("detection.train_net.main", evaluate)
    for content, number in ((b"weights", 15), (b"weights", 0), (b"others", 15)):
        model.write_bytes(content)
        main([str(tmp_path / "run")])
        assert len(evaluated) == number, content
        evaluated.clear()
