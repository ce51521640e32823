"""The command line of make_table: what it prints and writes."""

import os
import re
import subprocess
import sys

import pytest

from benchmarks.make_table import main
from moco.common.shipped import ROOT
from tests.benchmarks.report.fake_runs import write_pair, write_run

FILES = ["table.md", "table.runs.md", "table.csv", "runs.csv", "table.tex", "table.html"]
FIGURES = [f"{name}-t.{ending}" for name in ("loss", "ap") for ending in ("png", "svg")]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.mark.slow
def test_prints_and_writes_everything(tmp_path, out, capsys):
    write_pair(tmp_path / "runs", {"random": [10.0, 12.0], "moco": [20.0, 21.0]}, task="t")
    main([str(tmp_path / "runs"), "--out", str(out), "--margin", "0.3"])
    printed = capsys.readouterr().out
    *_, row, empty, different, sure, page = printed.splitlines()
    assert row.startswith("moco ") and "(+9.5)" in row and not empty
    assert different.startswith("different from random: ") and "within ±0.3" in different
    assert sure.startswith("how sure: Welch's test, ")
    assert page == f"page: {out / 'table.html'}"
    assert {path.name for path in out.iterdir()} == {*FILES, *FIGURES, "compare-t-moco.html"}
    for name in FILES + FIGURES:
        assert (out / name).stat().st_size > 0
    assert "data:image/svg+xml," in (out / "table.html").read_text()
    main([str(tmp_path / "runs"), "--out", str(tmp_path / "two"), "--format", "tex, csv"])
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert names == {"table.tex", "table.csv", "runs.csv", *FIGURES}
    without_page = capsys.readouterr().out.splitlines()[-1]
    assert without_page == (
        f"page: none, without the format html; other files are in {tmp_path / 'two'}"
    )
    main([str(tmp_path / "runs")])
    assert capsys.readouterr().out.endswith("\npage: none; --out DIR writes it\n")
    main([str(tmp_path / "runs"), "--bundle", str(tmp_path / "b.zip")])
    assert capsys.readouterr().out.endswith(f"\npage: table.html in {tmp_path / 'b.zip'}\n")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_a_sign_replaces_it(tmp_path, out, encoding):
    write_pair(tmp_path / "runs", {"random": [10.0, 12.0], "m\u014dco": [20.0, 21.0]}, task="t")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "table", str(tmp_path / "runs"), "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    sign = {"ascii": b"?", "latin-1": b"\xb1"}[encoding]
    assert b"\nm?co " in done.stdout and b" 20.5 " + sign + b" 0.7" in done.stdout
    assert "20.5 ± 0.7" in (out / "table.md").read_text(encoding="utf-8")


def test_engines_are_kept_apart(tmp_path, out, capsys):
    write_pair(tmp_path / "a", {"random": [10.0]}, task="t")
    write_pair(tmp_path / "b", {"random": [30.0]}, task="t", engine="detectron2")
    main([str(tmp_path), "--engine", "detectron2"])
    assert "30.0" in (printed := capsys.readouterr().out) and "10.0" not in printed
    main([str(tmp_path), "--engine", "each", "--out", str(out), "--format", "md"])
    printed = capsys.readouterr().out
    assert "t: embedded engine" in printed and "t: detectron2 engine" in printed
    text = (out / "table.md").read_text()
    assert "## t, embedded engine\n" in text and "## t, detectron2 engine\n" in text
    assert (out / "ap-t-detectron2.png").exists()


def test_results_of_other_machines_are_read_together(tmp_path, out, capsys):
    """Two folders, copied from elsewhere: the paths within their records lead nowhere here."""
    for machine, init in (("one", "random"), ("two", "moco")):
        for seed in range(2):
            away = f"/nowhere/{machine}"
            folder = write_run(
                tmp_path / machine / f"seed{seed}",
                losses=[2.0, 1.0],
                **{"task": "t", "init": init, "seed": seed, "weights_source": f"{away}/x.pth"},
                weights_sha256=None if init == "random" else "a" * 64,
                config={
                    "DATASETS.TEST": ["mine_test"],
                    "DATASETS.VOC_DIR": f"{away}/data",
                    "MODEL.WEIGHTS": f"{away}/weights.pth",
                    "OUTPUT_DIR": f"{away}/out",
                },
                provenance={"hardware": {"gpus": [machine]}, "command": f"{away}/train.py"},
            )
            (folder / "inference").mkdir()
            predictions = folder / "inference" / "mine_test.json"
            predictions.write_text('{"classes": ["a"], "predictions": []}')
    main([str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(out)])
    assert re.search(r"random +2 .*\nmoco +2 ", capsys.readouterr().out)
    page = (out / "table.html").read_text()
    assert "1 x one" in page and "1 x two" in page and "/nowhere/two/x.pth" in page
    assert "Precision and recall of boxes, IoU 0.5, first seed: DATASETS.VOC_DIR /nowhere" in page
    moved, again = tmp_path / "moved", tmp_path / "again"
    (tmp_path / "one").rename(moved)
    main([str(moved), str(tmp_path / "two"), "--out", str(again), "--format", "md,csv,tex"])
    for name in ("table.md", "table.csv", "table.tex"):
        assert (out / name).read_bytes() == (again / name).read_bytes()
