"""CPU time of commands that check or read, and of a suite of ten thousand runs."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.speed.convert import TORCHVISION, checkpoint
from benchmarks.speed.large_suite import INITS, TASKS, large_suite
from benchmarks.speed.measure import Setting, children_seconds, every_round, run_python
from benchmarks.speed.results import Result, Run
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.synthetic import write_scenes
from convert.detectron2_backbone import installed
from moco.common.command import RANDOM
from moco.common.run import METRICS_NAME

RUNS = 10_000
WATCHED_SECONDS = 120.0


def reading(setting: Setting) -> Iterator[tuple[str, list[str]]]:
    """Commands that read what is installed, or what they are given."""
    for name in ("quickstart", "pretrain", "convert", "train", "suite", "datasets", "plot"):
        yield f"{name} --help", [name, "--help"]
    for line in ("configs", "weights list", "datasets list", "completion bash"):
        yield line, line.split()
    run, scenes = setting.scratch / "run", _scenes(setting)
    run.mkdir(exist_ok=True)
    lines = [{"iteration": i, "epoch": i / 20, "loss": 9 - i / 50, "lr": 0.03} for i in range(200)]
    (run / METRICS_NAME).write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8"
    )
    yield "plot", ["plot", str(run), "--output", str(setting.scratch / "curves.png")]
    yield "doctor --voc-dir, 40 images", ["doctor", "--voc-dir", str(scenes)]
    folder = large_suite(setting.scratch / "small", 4, 1.0)
    yield "table of 40 runs", ["table", str(folder.runs)]
    yield "suite --status of 40 runs", _status(folder)
    yield "inspect, ResNet-50 of torchvision", ["inspect", str(checkpoint(setting, TORCHVISION))]


def checking(setting: Setting) -> Iterator[tuple[str, list[str]]]:
    """Commands that check a configuration, data and weights with the engine."""
    keys = ["DATASETS.VOC_DIR", str(_scenes(setting)), "MODEL.DEVICE", "cpu"]
    keys += ["MODEL.WEIGHTS", RANDOM]
    suite = setting.scratch / "checked.yaml"
    tasks = "tasks: [{config: voc/quickstart_R_10_C4}]"
    suite.write_text(f"name: checked\n{tasks}\n", encoding="utf-8")
    for engine in ("embedded", *["detectron2"] * installed()):
        config = "voc/quickstart_R_10_C4" if engine == "embedded" else "voc/faster_rcnn_R_50_C4_9k"
        check = ["train", "--check-only", "--engine", engine, "--config-file", config]
        classes = ["MODEL.ROI_HEADS.NUM_CLASSES", "8"]
        yield f"train --check-only, {engine}", [*check, *keys, *classes]
    dry = ["suite", str(suite), "--dry-run", "--engine", "embedded", "--init", RANDOM]
    yield (
        "suite --dry-run of a task",
        [*dry, "--output", str(setting.scratch / "dry"), "--opts", *keys[:4]],
    )


def seconds(setting: Setting, goal: str) -> list[Result]:
    """Each command in turn with importing torch: the smallest, and the median as noise."""
    commands = dict(reading(setting) if goal == "reading" else checking(setting))
    programs = {name: ["-m", "benchmarks", *argv] for name, argv in commands.items()}
    programs["torch"] = ["-c", "import torch"]
    contenders = {name: partial(run_python, *argv) for name, argv in programs.items()}
    found = every_round(contenders, setting.rounds, children_seconds)
    scale = min(found.pop("torch"))
    return [
        Result(goal, min(each), scale, name, sorted(each)[len(each) // 2] / min(each) - 1)
        for name, each in found.items()
    ]


def suite(setting: Setting) -> list[Result]:
    """The scheduler's share of a core and memory; `--status` and a table of all records."""
    trials, watched = (1, 1.0) if setting.quick else (RUNS // TASKS // INITS, WATCHED_SECONDS)
    half = large_suite(setting.scratch / "half", trials, 0.5)
    code = f"from benchmarks.speed.large_suite import watch; watch({str(half.path)!r}, '{watched}')"
    printed = run_python("-c", code).splitlines()[-2:]
    (used, passed, mib), (took, every, report_mib) = map(json.loads, printed)
    full = large_suite(setting.scratch / "full", trials, 1.0)
    count = f"{len(full.read()[1])} runs"
    rows = [
        Result("suite scheduler", used, passed, f"{count}, half of them done"),
        Result("suite memory", mib, mib, count),
        Result("suite report", took, every, count),
        Result("suite report memory", report_mib, report_mib, count),
    ]
    commands = {"suite status": _status(full), "suite table": ["table", str(full.runs)]}
    contenders = {
        name: partial(run_python, "-m", "benchmarks", *argv) for name, argv in commands.items()
    }
    contenders["torch"] = partial(run_python, "-c", "import torch")
    found = every_round(contenders, setting.rounds, children_seconds)
    scale = min(found.pop("torch"))
    return rows + [Result(name, min(each), scale, count) for name, each in found.items()]


def _status(folder: SuiteFolder) -> list[str]:
    file = folder.path.parent / "suite.yaml"
    return ["suite", str(file), "--status", "--output", str(folder.path)]


def _scenes(setting: Setting) -> Path:
    path = setting.scratch / "scenes"
    if not path.exists():
        write_scenes(path, 30, 10, seed=0)
    return path


GOALS: dict[str, Run | None] = {
    "reading": partial(seconds, goal="reading"),
    "checking": partial(seconds, goal="checking"),
    "suite": suite,
}
