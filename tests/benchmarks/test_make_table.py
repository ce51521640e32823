"""The command line: what it prints, writes and refuses."""

import os
import re
import subprocess
import sys

import pytest

from benchmarks.make_table import main
from moco.errors import UserError
from tests.benchmarks.fake_runs import write_pair, write_run

FILES = ["table.md", "table.csv", "runs.csv", "table.tex", "table.html"]
FIGURES = ["loss-t.png", "ap-t.png"]


def test_prints_and_writes_everything(tmp_path, capsys):
    write_pair(tmp_path / "runs", {"random": [10.0, 12.0], "moco": [20.0, 21.0]}, task="t")
    main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "moco − random: AP +9.5" in printed
    for name in FILES + FIGURES:
        assert (tmp_path / "out" / name).stat().st_size > 0
        assert f"wrote {tmp_path / 'out' / name}" in printed
    assert "data:image/png;base64," in (tmp_path / "out" / "table.html").read_text()


def test_only_the_formats_asked_for(tmp_path, capsys):
    write_pair(tmp_path / "runs", {"random": [10.0]}, task="t")
    main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--format", "tex, csv"])
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == sorted(["table.tex", "table.csv", "runs.csv", *FIGURES])
    with pytest.raises(UserError, match="got 'pdf', choices are md, csv, tex, html"):
        main([str(tmp_path / "runs"), "--format", "pdf"])


def test_engines_are_kept_apart(tmp_path, capsys):
    write_pair(tmp_path / "a", {"random": [10.0]}, task="t")
    write_pair(tmp_path / "b", {"random": [30.0]}, task="t", engine="detectron2")
    with pytest.raises(UserError, match="different engines"):
        main([str(tmp_path)])
    main([str(tmp_path), "--engine", "detectron2"])
    assert "30.0" in (out := capsys.readouterr().out) and "10.0" not in out
    main([str(tmp_path), "--engine", "each", "--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert "t: embedded engine" in out and "t: detectron2 engine" in out
    assert (tmp_path / "out" / "ap-t-detectron2.png").exists()
    with pytest.raises(UserError, match="choices are detectron2, embedded, each"):
        main([str(tmp_path), "--engine", "tensorflow"])


def test_no_finished_run_is_an_error(tmp_path):
    write_run(tmp_path / "x", status="failed", notes=["nan"])
    with pytest.raises(UserError, match=r"no finished run.*failed: nan"):
        main([str(tmp_path)])


def test_help_imports_nothing_heavy(request):
    code = (
        "import sys\nfrom benchmarks.make_table import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=request.config.rootpath,
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "--baseline" in done.stdout


def test_an_error_is_one_line(tmp_path, request):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.make_table", str(tmp_path / "nowhere")],
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'nowhere'}: no such run folder\n"


def test_every_kind_of_task_has_its_columns_and_figure(tmp_path, capsys):
    kinds = {"a": ["bbox", "segm"], "b": ["sem_seg"], "c": ["keypoints"]}
    for task, of_task in kinds.items():
        names = [f"{k}/{n}" for k in of_task for n in (["mIoU"] if k == "sem_seg" else ["AP"])]
        write_run(tmp_path / task, task=task, losses=[2, 1], metrics=dict.fromkeys(names, 50.0))
    main([str(tmp_path), "--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert all(head in out for head in ("AP75^bb", "AP50^mk", "mIoU", "AP50^kp"))
    assert {f"ap-{task}.png" for task in kinds} <= {p.name for p in (tmp_path / "out").iterdir()}


def test_classifications_stand_beside_the_papers_numbers(tmp_path, capsys):
    """Mean ± std over seeds, gap to random, the paper's rows, and what is not comparable."""
    for init, accuracies in {"random": [10.0, 12.0], "moco": [60.0, 61.0]}.items():
        for seed, top1 in enumerate(accuracies):
            write_run(
                tmp_path / "runs" / f"{init}{seed}",
                losses=[3.0, 2.0, 1.0],
                kind="linear",
                engine="moco",
                task="imagenet_linear_resnet50",
                init=init,
                seed=seed,
                weights_sha256=None if init == "random" else "a" * 64,
                config={"SOLVER.MAX_EPOCHS": 2},
                metrics={"linear/top1": top1, "linear/top5": top1 + 20},
            )
    main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "imagenet_linear_resnet50: moco engine, 300 iterations (2 epochs)\n" in printed
    assert re.search(r"pre-train +n +top1 +top5", printed)
    assert re.search(r"moco +2† +60\.5 ± 0\.7 \(\+49\.5\) +80\.5 ± 0\.7", printed)
    assert "the paper, Table 1, MoCo (tab:results_imgnet)" in printed
    assert re.search(r"R50w4x +68\.6 +–", printed)
    assert re.search(r"m 0\.999 +59\.0", printed) and re.search(r"m 0 +– +–", printed)
    assert (
        "not comparable with Sec. 4.1, momentum of the paper: 2 epochs here, 100 there" in printed
    )
    for name in FILES:
        text = (tmp_path / "out" / name).read_text()
        assert ("68.6" in text) == (not name.endswith("csv"))  # the paper's number is none of ours


def test_networks_are_not_mixed(tmp_path):
    common = {"kind": "linear", "engine": "moco", "metrics": {"linear/top1": 50.0}, "task": "t"}
    for arch in ("resnet18", "resnet50"):
        config = {"MODEL.ARCH": arch, "DATA.ROOT": arch, "SEED": 0}
        write_run(tmp_path / arch, init=arch, config=config, config_sha256=arch, **common)
    with pytest.raises(UserError, match=r"they differ in MODEL\.ARCH \('resnet18' / 'resnet50'\)$"):
        main([str(tmp_path)])
