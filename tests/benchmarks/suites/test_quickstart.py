"""Quickstart: its plan, its verdict, and the real chain at a tiny size."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import quickstart
from benchmarks.quickstart import build_parser, make_suite, next_commands, queue_length
from benchmarks.report.records import collect
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.plan import expand
from benchmarks.suites.programs import Programs
from benchmarks.suites.suite import Init, RunSpec
from moco.common.cfgnode import read_yaml
from moco.common.command import parse_options
from moco.common.errors import LockedError
from moco.common.shipped import CONFIGS
from tests.oracles.commands import run

INITS = {"random": Init("random", None), "moco": Init("${convert}", None)}


def parsed(arguments: Sequence[str]) -> quickstart.Options:
    return parse_options(build_parser(), arguments, quickstart.Options)


def planned(*arguments: str) -> list[RunSpec]:
    suite = make_suite(parsed(arguments))
    return list(expand(suite, INITS, ["embedded"], version="1"))


def commands(out: Path, *arguments: str) -> dict[str, list[str]]:
    """Return title → command, in the order of the plan."""
    folder, specs = SuiteFolder(out), planned(*arguments)
    products = folder.products(specs)
    return {
        spec.title: Programs().command(folder.resolve(spec, products), folder.product_path(spec))
        for spec in specs
    }


def flags(argv: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return module and KEY VALUE pairs of a command line."""
    pairs = [part for part in argv[argv.index("--config-file") + 2 :] if part != "--resume"]
    return argv[2], dict(zip(pairs[::2], pairs[1::2], strict=True))


def of(init: str, seed: int) -> str:
    return f"quickstart_R_10_C4 {init} seed {seed} (embedded)"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for index in range(300):
        Image.new("RGB", (8, 8)).save(folder / f"{index}.png")
    return folder


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    """Write seventy images to train on and one to test on."""
    root = tmp_path / "mine"
    for name in ("ImageSets/Main", "JPEGImages", "Annotations"):
        (root / name).mkdir(parents=True)
    for index in range(71):
        Image.new("RGB", (8, 8)).save(root / "JPEGImages" / f"{index}.jpg")
    lists = root / "ImageSets" / "Main"
    (lists / "trainval.txt").write_text("".join(f"{i}\n" for i in range(70)))
    (lists / "test.txt").write_text("70\n")
    return root


def test_steps_before_what_reads_them():
    specs = planned("--seeds", "2")
    assert [spec.title for spec in specs] == [
        *("images", "scenes", "knn", "pretrain", "convert"),
        *(of(init, seed) for seed in range(2) for init in ("random", "moco")),
    ]
    names = {spec.name: spec.title for spec in specs}
    after = {spec.title: {names[name] for name in spec.after} for spec in specs}
    assert after["pretrain"] == {"images", "knn"} and after["convert"] == {"pretrain"}
    assert after[of("random", 1)] == {"scenes"}
    assert after[of("moco", 0)] == {"scenes", "convert"}


def test_rows_differ_in_nothing_but_weights_and_trials_in_nothing_but_the_seed(tmp_path):
    argv = commands(tmp_path, "--seeds", "3")
    keys = {}
    for which in (("random", 1), ("random", 2), ("moco", 1)):
        module, keys[which] = flags(argv[of(*which)])
        assert module == "detection.train_net" and "--engine embedded" in " ".join(argv[of(*which)])

    def different(a, b) -> set[str]:
        return {key for key in keys[a] | keys[b] if keys[a].get(key) != keys[b].get(key)}

    assert different(("random", 1), ("moco", 1)) == {"MODEL.WEIGHTS", "OUTPUT_DIR"}
    assert different(("random", 1), ("random", 2)) == {"SEED", "OUTPUT_DIR"}
    assert keys["random", 1]["MODEL.WEIGHTS"] == "random"
    assert keys["moco", 1]["MODEL.WEIGHTS"] == str(tmp_path / "moco.pth")
    made = [flags(argv["pretrain"])[1]["OUTPUT_DIR"], str(tmp_path / "moco.pth")]
    assert argv["convert"][-2:] == made


def test_what_makes_the_weights_is_in_the_id_of_what_reads_them():
    """Another pre-training changes the ids of the runs from it, not of those from random."""
    suite = make_suite(quickstart.Options())
    ids = {spec.title: spec.id for spec in planned()}
    steps = [
        quickstart.replace(step, overrides=(*step.overrides, ("SOLVER.BASE_LR", "1")))
        if step.name == "pretrain"
        else step
        for step in suite.steps
    ]
    other = quickstart.replace(suite, steps=tuple(steps))
    new = {s.title: s.id for s in expand(other, INITS, ["embedded"], version="1")}
    changed = {title for title, digits in new.items() if ids[title] != digits}
    assert changed == {"pretrain", "convert", *(of("moco", seed) for seed in range(5))}


@pytest.mark.parametrize("arguments", [("--smoke", "--seeds", "2"), ("--arch", "vit")])
def test_the_command_for_more_seeds_is_for_the_same_table(tmp_path, arguments):
    args = parsed(arguments)
    suite, out = make_suite(args), tmp_path / "a b"
    trials = suite.tasks[0].trials
    argv = shlex.split(next_commands(out, args, trials).splitlines()[-1])
    assert argv[:3] == ["python", "-m", "benchmarks.quickstart"]
    again = parsed(argv[3:])
    assert again.output == out and make_suite(again).tasks[0].trials == trials + 3
    assert make_suite(quickstart.replace(again, seeds=args.seeds)) == suite


def test_custom_folders_are_used(tmp_path, photos, voc):
    argv = commands(tmp_path / "o", "--images", str(photos))
    assert argv["images"][2:4] == ["benchmarks.suites.prepare", "images"]
    assert argv["images"][-2:] == [str(photos), str(tmp_path / "o" / "data" / "images")]
    _, keys = flags(argv["pretrain"])
    assert keys["AUG.CROP_PX"] == "64" and keys["MOCO.K"] == "128"
    assert "DATA.KNN_ROOT" not in keys and "knn" not in argv
    argv = commands(tmp_path / "p", "--voc", str(voc))
    assert argv["images"][3:5] == ["voc-images", str(voc)]
    _, keys = flags(argv[of("random", 1)])
    assert keys["DATASETS.VOC_DIR"] == argv["scenes"][-1] == str(tmp_path / "p" / "data" / "mine")
    assert "INPUT.MIN_SIZE_TRAIN" in keys
    assert {spec.seed for spec in planned("--voc", str(voc))} == {0, 1, 2}
    both = commands(tmp_path / "q", "--voc", str(voc), "--images", str(photos))
    assert both["images"][3] == "images" and both["scenes"][3] == "voc"
    argv = commands(tmp_path / "v", "--arch", "vit", "--images", str(photos))
    _, keys = flags(argv["pretrain"])
    assert "MOCO.K" not in keys and keys["AUG.CROP_PX"] == "96"


def test_queue_is_whole_batches_of_at_most_half_the_data():
    own = read_yaml(CONFIGS / "pretrain" / "quickstart.yaml")
    assert own["SOLVER"]["BATCH_SIZE"] == quickstart.BATCH
    assert own["MOCO"]["K"] == quickstart.QUEUE
    for images, length in ((64, 64), (300, 128), (1000, 448), (9000, 512)):
        assert queue_length(images) == length


def test_overwrite_removes_what_a_quickstart_made(tmp_path, monkeypatch):
    made: list[str] = []
    monkeypatch.setattr(quickstart.run_suite, "run", lambda *a, **k: made.append("run"))
    out = tmp_path / "out"
    for name in ("runs/x", "data/images", "tables", "mine"):
        (out / name).mkdir(parents=True)
    (out / "suite.json").write_text("{}")
    (out / "mine.txt").touch()
    with SuiteFolder(out).lock(), pytest.raises(LockedError, match="has computed it since"):
        quickstart.main(["--output", str(out), "--overwrite"])
    assert (out / "runs").exists() and not made
    quickstart.main(["--output", str(out), "--overwrite"])
    assert made == ["run"]
    left = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    assert left == ["mine", "mine.txt"]


@pytest.mark.slow
def test_the_whole_chain_and_a_second_call_that_repeats_nothing(tmp_path):
    out = tmp_path / "out"
    words = ("benchmarks.quickstart", "--smoke", "--seeds", "1", "--out", out)
    first = run(words, tmp_path)
    assert first.code == 0, first.err
    assert "quickstart_R_10_C4: embedded engine, 4 iterations" in first.out
    assert "7 to do, about " in first.out
    for name in ("table.md", "table.csv", "runs.csv", "table.tex", "table.html", "moco.pth"):
        path = out / ("" if name == "moco.pth" else "tables") / name
        assert path.stat().st_size > 0 and str(path) in first.out
    assert str(out / "tables" / "samples.png") in first.out
    # Three scenes, each with ground truth and two inits.
    with Image.open(out / "tables" / "samples.png") as samples:
        assert samples.size == (1430, 1064)
    results = collect([out / "runs"])
    assert {run.record.init for run in results.transfer} == {"random", "moco"}
    assert {run.record.status for run in results.transfer} == {"done"}
    assert len({run.record.config_sha256 for run in results.transfer}) == 1
    moco_run = next(run.record for run in results.transfer if run.record.init == "moco")
    assert moco_run.coverage is not None and moco_run.coverage["loaded"] > 40
    records = {path: path.stat().st_mtime_ns for path in out.rglob("run.json")}

    again = run(words, tmp_path)
    assert again.code == 0, again.err
    assert "\n0 to do\n" in again.out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("run.json")} == records

    # A run that fails: one line with its log, its exit code, and no number.
    [folder] = out.glob("runs/quickstart_R_10_C4/moco/*")
    (folder / "run.json").unlink()
    (out / "moco.pth").write_bytes(b"no weights")
    broken = run(words, tmp_path)
    assert broken.code == 3
    [line] = broken.err.strip().splitlines()
    assert line.startswith(f"error: {of('moco', 0)} failed: ") and "moco.pth" in line
    assert line.endswith(f"its log is {folder / 'suite.log'}")
    assert "embedded engine" not in broken.out
