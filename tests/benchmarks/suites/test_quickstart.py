"""The quickstart: what it plans, what it refuses, and the real chain at a tiny size."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import quickstart
from benchmarks.quickstart import (
    make_plan,
    next_commands,
    open_folder,
    verdict,
)
from benchmarks.report.aggregate import aggregate
from benchmarks.report.records import collect
from benchmarks.suites import chain
from benchmarks.suites.chain import Plan, make_runs, queue_length
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import Run
from moco.common.cfgnode import read_yaml
from moco.common.errors import LockedError, UserError
from tests.benchmarks.report.fake_runs import write_pair, write_run


def plan(out: Path, *arguments: str) -> Plan:
    return make_plan(quickstart.build_parser().parse_args(["--out", str(out), *arguments]))


def flags(argv: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Module and KEY VALUE pairs of a command line."""
    pairs = argv[argv.index("--config-file") + 2 :]
    return argv[2], dict(zip(pairs[::2], pairs[1::2], strict=True))


def by_name(plan: Plan) -> dict[str, Run]:
    return {run.name: run for run in make_runs(plan)}


def test_runs_in_the_order_of_starting(tmp_path):
    runs = by_name(plan(tmp_path, "--seeds", "2"))
    assert list(runs) == [
        "images",
        "scenes",
        "pre-train",
        "random-0",
        "random-1",
        "convert",
        "moco-0",
        "moco-1",
    ]
    after = {name: set(run.after) for name, run in runs.items()}
    assert after["pre-train"] == {"images"} and after["convert"] == {"pre-train"}
    assert after["random-1"] == {"scenes"} and after["moco-0"] == {"scenes", "convert"}
    assert len({run.log for run in runs.values()}) == len(runs)
    assert "scenes" not in by_name(plan(tmp_path, "--voc", "mine"))


def test_rows_differ_in_nothing_but_weights_and_trials_in_nothing_but_the_seed(tmp_path):
    runs = by_name(plan(tmp_path, "--seeds", "3"))
    keys = {}
    for name in ("random-1", "random-2", "moco-1"):
        argv = runs[name].argv()
        module, keys[name] = flags(argv)
        assert module == "detection.train_net" and "--engine embedded" in " ".join(argv)

    def different(a: str, b: str) -> set[str]:
        return {key for key in keys[a] | keys[b] if keys[a].get(key) != keys[b].get(key)}

    assert different("random-1", "moco-1") == {"MODEL.WEIGHTS", "OUTPUT_DIR"}
    assert different("random-1", "random-2") == {"SEED", "OUTPUT_DIR"}
    assert keys["random-1"]["MODEL.WEIGHTS"] == "random"
    assert keys["moco-1"]["MODEL.WEIGHTS"] == str(tmp_path / "moco.pth")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--smoke", "--seeds", "2"),
        ("--voc", "my scenes", "--smoke"),
        ("--voc", "scenes", "--images", "my images"),
        ("--arch", "vit"),
    ],
)
def test_the_command_for_more_seeds_is_for_the_same_table(tmp_path, arguments):
    made = plan(tmp_path / "a b", *arguments)
    argv = shlex.split(next_commands(made).splitlines()[-1])
    assert argv[:3] == ["python", "-m", "benchmarks.quickstart"]
    again = make_plan(quickstart.build_parser().parse_args(argv[3:]))
    assert again.seeds == made.seeds + 3
    assert (again.out, again.settings()) == (made.out, made.settings())


def test_iterations_follow_the_yaml_files(tmp_path):
    runs = by_name(plan(tmp_path, "--seeds", "1"))
    own, detection = read_yaml(chain.PRETRAIN_CONFIG), read_yaml(chain.DETECTION_CONFIG)
    assert runs["pre-train"].iterations == own["SOLVER"]["MAX_ITERS"] > 100
    assert runs["moco-0"].iterations == detection["SOLVER"]["MAX_ITER"] > 100
    assert (chain.BATCH, chain.QUEUE) == (own["SOLVER"]["BATCH_SIZE"], own["MOCO"]["K"])


def test_what_is_done_is_not_repeated(tmp_path):
    made = plan(tmp_path, "--seeds", "2")
    write_run(made.pretrain, kind="pretrain", engine="moco", metrics={})
    made.pretrain_images.mkdir(parents=True)
    made.weights.touch()
    write_run(tmp_path / "runs" / "random-0")
    write_run(tmp_path / "runs" / "moco-1", init="moco", status="failed", seed=1)
    kinds = {name: run.state().kind for name, run in by_name(made).items()}
    done = ("images", "pre-train", "convert", "random-0")
    assert {name for name, kind in kinds.items() if kind == "done"} == set(done)
    assert kinds["moco-1"] == "failed" and kinds["scenes"] == kinds["moco-0"] == "waiting"


def test_custom_folders_are_used(tmp_path):
    images, voc = tmp_path / "photos", tmp_path / "mine"
    runs = by_name(plan(tmp_path / "o", "--images", str(images)))
    assert runs["images"].argv()[2:5] == ["benchmarks.suites.prepare", "images", str(images)]
    copies = tmp_path / "o" / "data" / "images"
    copies.mkdir(parents=True)
    for i in range(300):
        (copies / str(i)).touch()
    _, keys = flags(runs["pre-train"].argv())
    assert keys["AUG.CROP_PX"] == "64" and keys["MOCO.K"] == "128"
    assert "DATA.KNN_ROOT" not in keys
    runs = by_name(plan(tmp_path / "p", "--voc", str(voc)))
    assert runs["images"].argv()[2:5] == ["benchmarks.suites.prepare", "voc-images", str(voc)]
    _, keys = flags(runs["random-1"].argv())
    assert keys["DATASETS.VOC_DIR"] == str(tmp_path / "p" / "data" / "mine")
    assert "INPUT.MIN_SIZE_TRAIN" in keys


@pytest.mark.parametrize(("images", "length"), [(64, 64), (300, 128), (1000, 448), (9000, 512)])
def test_queue_is_whole_batches_of_at_most_half_the_data(images, length):
    assert queue_length(images) == length


def test_default_seeds(tmp_path):
    assert plan(tmp_path).seeds == 5
    assert plan(tmp_path, "--voc", "mine").seeds == 3
    assert plan(tmp_path, "--voc", "mine", "--seeds", "1").seeds == 1
    assert plan(tmp_path, "--arch", "vit").seeds == 3


def test_a_folder_belongs_to_one_setting(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    open_folder(plan(out), overwrite=False)
    open_folder(plan(out, "--seeds", "2"), overwrite=False)  # seeds may change
    other = plan(out, "--images", str(tmp_path))
    with pytest.raises(UserError, match="--images"):
        open_folder(other, overwrite=False)
    (out / "data").mkdir()
    for name in ("table.md", "mine.txt", "loss-a.svg", "ap-a.svg", "ap-a.png"):
        (out / name).touch()
    lock = Lock.take(by_name(other)["moco-0"].lock)
    assert lock is not None
    with pytest.raises(LockedError, match="moco-0"):
        open_folder(other, overwrite=True)
    lock.release()
    open_folder(other, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["mine.txt", "quickstart.json"]
    assert json.loads((out / "quickstart.json").read_text())["images"] == str(tmp_path)


def test_a_first_try_does_not_take_the_folder(tmp_path, monkeypatch):
    """--smoke, as the installation guide has it, and then the README's command."""
    monkeypatch.chdir(tmp_path)
    for arguments in (["--smoke"], []):
        made = make_plan(quickstart.build_parser().parse_args(arguments))
        made.out.mkdir()
        open_folder(made, overwrite=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "quickstart_out",
        "quickstart_out_smoke",
    ]


@pytest.mark.parametrize(
    ("moco", "text"),
    [
        ([20.0, 21.0, 25.0], r"helped: \+11.0 AP over random"),
        ([3.0, 3.5, 4.0], "hurt: −7.5 AP"),
        ([10.0, 13.0, 12.0], "No clear gain: .*within what chance"),
        ([11.96], r"\+1\.0 AP .*may be chance"),
    ],
)
def test_verdict_is_what_the_numbers_say(tmp_path, moco, text):
    write_pair(tmp_path, {"random": [10.0, 11.0, 12.0], "moco": moco})
    [table] = aggregate(collect([tmp_path]).transfer)
    assert re.search(text, verdict(table))
    assert "fine-tuning seed" in verdict(table)


def call(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "benchmarks.quickstart", *arguments]
    env = {**os.environ, "MOCO_PROGRESS": "off"}
    return subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_whole_chain_and_a_second_call_that_repeats_nothing(tmp_path, request):
    root, out = request.config.rootpath, tmp_path / "out"
    arguments = ("--smoke", "--seeds", "1", "--out", str(out))
    first = call(root, *arguments)
    assert first.returncode == 0, first.stderr
    assert "quickstart_R_10_C4: embedded engine, 4 iterations" in first.stdout
    assert "6 steps to do" in first.stdout
    for name in ("table.md", "table.csv", "runs.csv", "table.tex", "table.html", "moco.pth"):
        assert (out / name).stat().st_size > 0 and str(out / name) in first.stdout
    assert str(out / "samples.png") in first.stdout
    with Image.open(out / "samples.png") as samples:  # three scenes, ground truth and two inits
        assert samples.size == (1430, 1064)
    results = collect([out / "runs"])
    assert {run.record.init for run in results.transfer} == {"random", "moco"}
    assert {run.record.status for run in results.transfer} == {"done"}
    assert len({run.record.config_sha256 for run in results.transfer}) == 1
    moco_run = next(run.record for run in results.transfer if run.record.init == "moco")
    assert moco_run.coverage is not None and moco_run.coverage["loaded"] > 40
    records = {path: path.stat().st_mtime_ns for path in out.rglob("run.json")}

    again = call(root, *arguments)
    assert again.returncode == 0, again.stderr
    assert "0 steps to do" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in out.rglob("run.json")} == records

    # A failing child: one line, its log, its exit code, and no number.
    (out / "runs" / "moco-0" / "run.json").unlink()
    (out / "moco.pth").write_bytes(b"no weights")
    broken = call(root, *arguments)
    assert broken.returncode == 3
    [line] = broken.stderr.strip().splitlines()
    assert line.startswith("error: moco seed 0 failed: ") and "moco.pth" in line
    assert line.endswith(f"its log is {out / 'runs' / 'moco-0' / 'suite.log'}")
    assert "embedded engine" not in broken.stdout


@pytest.mark.slow
def test_the_chain_of_a_vision_transformer(tmp_path, request):
    out = tmp_path / "out"
    done = call(
        request.config.rootpath, "--smoke", "--seeds", "1", "--arch", "vit", "--out", str(out)
    )
    assert done.returncode == 0, done.stderr
    assert "quickstart_ViT: embedded engine, 4 iterations" in done.stdout
    records = {run.record.init: run.record for run in collect([out / "runs"]).transfer}
    assert set(records) == {"random", "moco"}
    assert records["random"].config_sha256 == records["moco"].config_sha256
    coverage = records["moco"].coverage
    assert coverage is not None and coverage["loaded"] == 3 + 4 * 12
    left = [name for name in coverage["left_at_init"] if name.startswith("backbone.net.")]
    assert not left


def test_a_vision_transformer_has_no_queue_to_fit(tmp_path):
    photos = ("--arch", "vit", "--images", str(tmp_path / "photos"))
    _, keys = flags(by_name(plan(tmp_path / "o", *photos))["pre-train"].argv())
    assert "MOCO.K" not in keys and keys["AUG.CROP_PX"] == "96"
