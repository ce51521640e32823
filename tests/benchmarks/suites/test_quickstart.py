"""Quickstart: its plan, its verdict, and the real chain at a tiny size."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import quickstart
from benchmarks.quickstart import (
    build_parser,
    make_pretraining,
    make_suite,
    next_commands,
    queue_length,
)
from benchmarks.report.records import collect
from benchmarks.report.table import aggregate
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.runs import Programs
from benchmarks.suites.suite import Init, RunSpec, expand
from moco.common.cfgnode import read_yaml
from moco.common.command import parse_options
from moco.common.errors import LockedError, UserError
from moco.common.files import atomic_write_json
from moco.common.shipped import CONFIGS
from tests.oracles.commands import run

INITS = {"random": Init("random", None), "moco": Init("moco.pth", "a" * 64)}


def parsed(arguments: Sequence[str]) -> quickstart.Options:
    return parse_options(build_parser(), arguments, quickstart.Options)


def planned(*arguments: str, out: Path = Path("out")) -> list[RunSpec]:
    suite = make_suite(parsed(arguments), out)
    return list(expand(suite, INITS, ["embedded"], version="1"))


def commands(out: Path, *arguments: str) -> dict[str, list[str]]:
    """Return title → command of the pre-training and of the suite's runs."""
    args, specs = parsed(arguments), planned(*arguments, out=out)
    found = {
        spec.title: Programs().command(spec, SuiteFolder(out).folder_of(spec)) for spec in specs
    }
    return {
        "pretrain": list(make_pretraining(args, quickstart.own_images(args), out).argv),
        **found,
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
    assert keys["moco", 1]["MODEL.WEIGHTS"] == "moco.pth"


def test_a_folder_of_other_options_is_refused(tmp_path, photos, voc):
    """Its images, or its pre-training, would be those of the first call."""
    first = parsed(("--images", str(photos)))
    folder = tmp_path / "out"
    folder.mkdir()
    quickstart.check_options(first, folder)
    atomic_write_json(folder / "quickstart.json", quickstart._kept(first))
    quickstart.check_options(quickstart.replace(first, seeds=9, workers=1), folder)
    for other in ({"images": None}, {"arch": "vit"}, {"smoke": True}, {"voc": voc}):
        with pytest.raises(UserError, match=rf"by another command \(--{next(iter(other))}: "):
            quickstart.check_options(quickstart.replace(first, **other), folder)


@pytest.mark.parametrize("arguments", [("--smoke", "--seeds", "2"), ("--arch", "vit")])
def test_the_command_for_more_seeds_is_for_the_same_table(tmp_path, arguments):
    args = parsed(arguments)
    out = tmp_path / "a b"
    suite = make_suite(args, out)
    trials = suite.tasks[0].trials
    argv = shlex.split(next_commands(out, args, trials).splitlines()[-1])
    assert argv[:4] == ["python", "-m", "benchmarks", "quickstart"]
    again = parsed(argv[4:])
    assert again.output == out and make_suite(again, out).tasks[0].trials == trials + 3
    assert make_suite(quickstart.replace(again, seeds=args.seeds), out) == suite


def test_custom_folders_are_used(tmp_path, photos, voc):
    out = tmp_path / "o"
    _, keys = flags(commands(out, "--images", str(photos))["pretrain"])
    assert keys["DATA.ROOT"] == str(out / "data" / "images")
    assert keys["AUG.CROP_PX"] == "64" and keys["MOCO.K"] == "128"
    assert "DATA.KNN_ROOT" not in keys
    argv = commands(out, "--voc", str(voc))
    _, keys = flags(argv[of("random", 1)])
    assert keys["DATASETS.VOC_DIR"] == str(out / "data" / "mine")
    assert "INPUT.MIN_SIZE_TRAIN" in keys
    assert {spec.seed for spec in planned("--voc", str(voc))} == {0, 1, 2}
    _, keys = flags(commands(out, "--arch", "vit", "--images", str(photos))["pretrain"])
    assert "MOCO.K" not in keys and keys["AUG.CROP_PX"] == "96"
    for which, number in ((("--voc", str(voc)), 70), (("--images", str(photos)), 300)):
        made = tmp_path / which[0]
        args = parsed(which)
        quickstart.make_data(args, quickstart.own_images(args), made)
        assert len(list((made / "data" / "images").iterdir())) == number
        scenes = made / "data" / ("mine" if which[0] == "--voc" else "scenes")
        lists = scenes / "ImageSets" / "Main"
        sizes = [len((lists / f"{n}.txt").read_text().split()) for n in ("trainval", "test")]
        assert sizes == ([70, 1] if which[0] == "--voc" else [200, 200])
        assert not (made / "data" / "knn").exists()


def test_queue_is_whole_batches_of_at_most_half_the_data():
    own = read_yaml(CONFIGS / "pretrain" / "quickstart.yaml")
    assert own["SOLVER"]["BATCH_SIZE"] == quickstart.BATCH
    assert own["MOCO"]["K"] == quickstart.QUEUE
    for images, length in ((64, 64), (300, 128), (1000, 448), (9000, 512)):
        assert queue_length(images) == length


def test_overwrite_removes_what_a_quickstart_made(tmp_path, monkeypatch):
    made: list[str] = []

    def run(*args: object, **more: object) -> None:
        made.append("run")
        raise SystemExit

    monkeypatch.setattr(quickstart.run_suite, "run", run)
    out = tmp_path / "out"
    for name in ("runs/x", "data/images", "tables", "mine"):
        (out / name).mkdir(parents=True)
    (out / "suite.json").write_text("{}")
    (out / "quickstart.json").write_text("{}")
    monkeypatch.setattr(quickstart, "make_data", lambda *a: made.append("data"))
    (out / "mine.txt").touch()
    with SuiteFolder(out).lock(), pytest.raises(LockedError, match="has computed it since"):
        quickstart.main(["--output", str(out), "--overwrite"])
    assert (out / "runs").exists() and not made
    with pytest.raises(SystemExit):
        quickstart.main(["--output", str(out), "--overwrite"])
    assert made == ["data", "run"]
    left = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    assert left == ["mine", "mine.txt", "quickstart.json"]


@pytest.mark.slow
def test_the_whole_chain_and_a_second_call_that_repeats_nothing(tmp_path):
    out = tmp_path / "out"
    words = ("benchmarks.quickstart", "--smoke", "--seeds", "1", "--out", out)
    first = run(words, tmp_path)
    assert first.code == 0, first.err
    assert "quickstart_R_10_C4: embedded engine, 4 iterations" in first.out
    assert "2 to do, about " in first.out and "1 to do, about " in first.out
    assert f"converted: {out / 'moco.pth'}, features of one image " in first.out
    for name in ("table.md", "table.csv", "runs.csv", "table.tex", "table.html", "moco.pth"):
        path = out / ("" if name == "moco.pth" else "tables") / name
        assert path.stat().st_size > 0 and str(path) in first.out
    assert str(out / "tables" / "samples.png") in first.out
    # Three scenes, each with ground truth and two inits.
    with Image.open(out / "tables" / "samples.png") as samples:
        assert samples.size == (1430, 1076)
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
    (folder / "run.json").write_text("{")
    broken = run(words, tmp_path)
    assert broken.code == 1
    [line] = broken.err.strip().splitlines()
    assert line.startswith(f"error: {of('moco', 0)} failed: ") and "run.json" in line
    assert "embedded engine" not in broken.out


@pytest.mark.slow
def test_the_chain_of_a_vision_transformer_loads_every_weight(tmp_path):
    words = ("benchmarks.quickstart", "--smoke", "--seeds", "1", "--arch", "vit", "--output", "out")
    done = run(words, tmp_path)
    assert done.code == 0, done.err
    runs = collect([tmp_path / "out" / "runs"]).transfer
    records = {run.record.init: run.record for run in runs}
    assert len(runs) == 2 and {record.status for record in records.values()} == {"done"}
    assert records["random"].config_sha256 == records["moco"].config_sha256
    assert aggregate(runs)[0].title == "quickstart_ViT"
    coverage = records["moco"].coverage
    assert coverage is not None and coverage["loaded"] == 3 + 4 * 12
    assert not [name for name in coverage["left_at_init"] if name.startswith("backbone.net.")]
