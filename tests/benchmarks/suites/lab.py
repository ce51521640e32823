"""Suite of two tasks of fake runs in a folder, and ways to run it, for the tests."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from PIL import Image

from benchmarks import run_suite
from benchmarks.suites import runner
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.runs import Programs
from benchmarks.suites.suite import Init, RunSpec, Suite, expand
from benchmarks.suites.suite_file import with_options
from benchmarks.suites.tables import TablesSoFar
from moco.common.command import RANDOM
from tests.benchmarks.suites.fake_trainer import HOLD, MODULE, FakePrograms
from tests.benchmarks.suites.run_code import command

ROOT = Path(__file__).resolve().parents[3]


class Runner(subprocess.Popen):
    """Process of a suite, which is killed if the test fails."""

    def __exit__(self, kind, *rest) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


class Lab:
    """Folder of a suite of fake runs.

    Attributes:
        with_tables: Make the tables at the end, which takes longer than all the runs.
    """

    executor: Sequence[str] = ("--executor", "cpu", "--workers", "2")

    def __init__(self, path: Path, inits: Sequence[str] = ("random", "mine"), trials: int = 2):
        self.with_tables = False
        self.path, self.out, self.journal = path, path / "out", path / "journal"
        path.mkdir(exist_ok=True)
        write_suite(
            path, {"name": "a"}, {"name": "b"}, name="small", title="Two tasks", trials=trials
        )
        (path / "runner.log").touch()
        self.inits = []
        for name in inits:
            (path / f"{name}.pth").write_text(f"weights of {name}")
            given = name if name == "random" else f"{name}={path / name}.pth"
            self.inits += ["--init", given]

    def arguments(self, *more: str) -> list[str]:
        output = ["--output", str(self.out), *self.executor]
        return [str(self.path / "suite.yaml"), *self.inits, *output, *more]

    def run(self, *more: str, delay: float = 0.0, problems: Sequence[str] = ()) -> None:
        """Run the suite in this process."""
        self.main(FakePrograms(self.journal, delay, problems), *more)

    def main(self, programs: Programs, *more: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not self.with_tables:
                patch.setattr(run_suite, "write_tables", lambda *arguments: [])
                patch.setattr(TablesSoFar, "update", lambda *seen: None)
            run_suite.main(self.arguments(*more), programs)

    def run_command(self, code: str, *more: str) -> None:
        """Run the suite with Python code as the program of every run."""
        programs = FakePrograms(self.journal)
        programs.command = lambda *arguments: command(code)
        self.main(programs, *more)

    def start(self, *more: str, delay: float = 0.02, host: str = "", **keys) -> subprocess.Popen:
        """Run the suite in a process of its own, with output to `runner.log`."""
        env = {**os.environ, "MOCO_PROGRESS": "on", "FAKE_HOST": host}
        argv = self.argv(delay, *more)
        with open(self.path / "runner.log", "ab") as log:
            return Runner(argv, cwd=ROOT, stdout=log, stderr=log, env=env, **keys)

    def argv(self, delay: float, *more: str) -> list[str]:
        mode = "--suite" if self.with_tables else "--suite-without-tables"
        program = ["-m", MODULE, mode, str(self.journal), str(delay)]
        return [sys.executable, *program, *self.arguments(*more)]

    def log(self) -> str:
        return (self.path / "runner.log").read_text()

    def events(self) -> list[tuple[str, str, int]]:
        """Return (event, run, process id) in the order in which they happened."""
        if not self.journal.exists():
            return []
        lines = [line.split() for line in self.journal.read_text().splitlines()]
        return [(event, name, int(pid)) for event, name, pid in lines]

    def count(self, event: str) -> Counter:
        return Counter(name for each, name, _ in self.events() if each == event)

    def assert_once(self, runs: int | None = None) -> None:
        """Check that every run was completed, and no iteration done twice."""
        assert runs in (None, len(self.count("done"))) and set(self.count("done").values()) == {1}
        done = Counter(event[:2] for event in self.events() if event[0].startswith("iteration"))
        assert set(done.values()) == {1}, "an iteration was done again"
        assert not self.count("locked"), "a run had two processes"

    def tables(self) -> dict[str, bytes]:
        files = (self.out / "tables").rglob("*")
        return {path.name: path.read_bytes() for path in files if path.is_file()}

    def hold(self) -> None:
        """Make runs wait after their second iteration, until `release` or SIGTERM."""
        (self.path / HOLD).touch()

    def release(self) -> None:
        (self.path / HOLD).unlink(missing_ok=True)

    def wait_for(self, condition: Callable[[], object], seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.log()
            time.sleep(0.01)

    def held_runner(self, *more: str, runs: int = 2, **keys) -> subprocess.Popen[bytes]:
        """Start a runner, and wait until its first runs wait after their second iteration."""
        self.hold()
        runner = self.start(*more, **keys)
        self.wait_for(lambda: len(self.count("iteration-2")) >= runs)
        return runner

    def states(self) -> Counter:
        folder = SuiteFolder(self.out)
        return Counter(folder.run(spec).state().kind for spec in folder.read()[1])


def write_suite(folder: Path, *tasks: dict, task: str = "SOLVER: {MAX_ITER: 8}", **keys) -> Path:
    """Write a suite of tasks that all have the file `task`."""
    (folder / "task.yaml").write_text(task)
    content = {"name": "s", **keys, "tasks": [{"config": "task.yaml", **each} for each in tasks]}
    (folder / "suite.yaml").write_text(yaml.safe_dump(content))
    return folder / "suite.yaml"


def from_random(suite: Suite, **keys) -> tuple[RunSpec, ...]:
    """Expand one trial of each task from random weights."""
    suite = with_options(suite, {}, {}, trials=1)
    return expand(suite, {"random": Init(RANDOM, None)}, ["embedded"], version="1", **keys)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def kept(lab: Lab) -> set[tuple[str, ...]]:
    """Return the sets of checkpoints in the folders of the runs."""
    folders = lab.out.glob("runs/*/*/*")
    return {tuple(sorted(path.name for path in run.glob("model_*"))) for run in folders}


def classes(root: Path) -> None:
    """Write two images of two classes, for training and for validation."""
    for folder in (root / split / name for split in ("train", "val") for name in "ab"):
        folder.mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (8, 8)).save(folder / f"{index}.png")


def after(patch: pytest.MonkeyPatch, method: str, hook: Callable[[], object]) -> None:
    """Call `hook` after each call of a method of the runner."""
    before = getattr(runner.Runner, method)

    def both(self) -> None:
        before(self)
        hook()

    patch.setattr(runner.Runner, method, both)
