"""Miniature training program for tests of the runner, and suites of it.

It keeps the contract of the real ones: its folder is locked, progress is logged line by line and
saved, SIGTERM saves and ends with 85, the record comes last. All processes append their events to a
journal, one per line. The numbers depend on task, init and seed alone.

    python fake_trainer.py FOLDER JOURNAL SPEC.json      (started by `FakePrograms`)
"""

import json
import os
import re
import signal
import socket
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import run_suite, watch
from benchmarks.suites import forkserver
from benchmarks.suites.checkpoints import Checkpoints
from benchmarks.suites.checks import Findings
from benchmarks.suites.runs import Programs
from benchmarks.suites.suite import DETECTION, GRID_POINT, RunSpec
from benchmarks.suites.tables import TablesSoFar
from moco.common.cfgnode import flatten, read_yaml
from moco.common.errors import LockedError, Preempted, run_cli
from moco.common.files import atomic_write_text
from moco.common.run import RunFolder, RunRecord, write_record

MODULE = "tests.benchmarks.suites.fake_trainer"
ITERATIONS = 8
HOLD, HELD = "hold", 2  # file next to the journal, at which runs wait after their second iteration
HARDWARE = {"cpu": "a processor", "gpus": []}


class FakePrograms(Programs):
    """Programs of `ITERATIONS` iterations of `delay` seconds.

    The AP of an init `strong*` is 20 higher, that of an init `same*` close to random's. Runs of an
    init `bad*` fail. Runs of an init `often*` are preempted after each iteration, and
    log nothing before the last one.
    """

    def __init__(self, journal: Path, delay: float = 0.02, problems: Sequence[str] = ()) -> None:
        self.journal, self.delay, self.problems = journal, delay, problems

    def unreadable(self, files: Sequence[Path]) -> dict[Path, str]:
        bad = [path for path in files if path.read_text().startswith("broken")]
        return {path: f"{path}: not a torch checkpoint or damaged" for path in bad}

    def check(self, specs: Sequence[RunSpec], on_gpus: bool, scored: Sequence[str]) -> Findings:
        lengths = {(spec.task, spec.engine, spec.init): ITERATIONS for spec in specs}
        sizes = {key: Checkpoints(10**9, ITERATIONS) for key in lengths}
        return Findings(tuple(self.problems), (), lengths, HARDWARE, sizes)

    def command(self, spec: RunSpec, folder: Path, machines: int = 1) -> list[str]:
        if spec.program not in (DETECTION, GRID_POINT):
            return super().command(spec, folder, machines)
        fields = asdict(spec) | {"config": str(spec.config), "delay": self.delay}
        return [sys.executable, "-m", MODULE, str(folder), str(self.journal), json.dumps(fields)]

    def convert(self, specs: Sequence[RunSpec], folder: Path) -> list[str]:
        return [spec.weights for spec in specs]

    def choose_engines(self, wanted: str) -> tuple[str, ...]:
        return ("embedded",)


def train(argv: Sequence[str] | None) -> int:
    """Train until the end, a signal, or the failure that the init's name asks for."""
    folder, journal, spec = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))

    def note(event: str) -> None:
        line = f"{event} {spec['name']} {os.getpid()}\n".encode()
        handle = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, line)
        os.close(handle)

    try:
        with RunFolder(folder, resume=True) as run:
            saved = folder / "last_checkpoint"
            start = int(re.sub(r"\D", "", saved.read_text())) if saved.exists() else 0
            often = spec["init"].startswith("often")
            note("start" if start == 0 else "resume")
            for iteration in range(start + 1, spec["iterations"] + 1):
                while iteration > HELD and journal.with_name(HOLD).exists() and not stops:
                    time.sleep(0.01)
                time.sleep(spec["delay"])
                if spec["init"].startswith("bad") and iteration == 3:
                    print("error: the loss is nan at iteration 3", file=sys.stderr, flush=True)
                    return 4
                if learning_rate(spec) > 1 and "tune" in dict(spec["overrides"]).values():
                    error = f"NumericError: iteration {iteration}: total_loss is nan"
                    failed = replace(record(spec), status="failed", metrics={}, notes=[error])
                    failed = replace(failed, diverged=True)
                    write_record(folder, failed)
                    return 0
                if iteration == spec["iterations"] or not often:
                    run.log({"iteration": iteration, "total_loss": 1.0 / iteration})
                atomic_write_text(folder / f"model_{iteration:07d}.pth", "weights")
                atomic_write_text(saved, f"model_{iteration:07d}.pth")
                note(f"iteration-{iteration}")
                if stops or (often and iteration < spec["iterations"]):
                    note("saved")
                    raise Preempted("stopped by SIGTERM")
            write_record(folder, record(spec))
            note("done")
    except LockedError:
        note("locked")
        raise
    return 0


def learning_rate(spec: dict) -> float:
    """Return the learning rate of the last override, or of the file; 0 if there is none."""
    chosen = flatten(read_yaml(spec["config"])).get("SOLVER.BASE_LR", 0)
    return float(dict(spec["overrides"]).get("SOLVER.BASE_LR", chosen))


def record(spec: dict) -> RunRecord:
    digits = f"{spec['task']} {spec['init']} {spec['seed']} {spec['engine']}"
    ap = 30 + zlib.crc32(digits.encode()) % 1000 / 100
    if spec["init"].startswith("strong"):
        ap += 20
    if spec["init"].startswith("same"):
        ap = record(spec | {"init": "random"}).metrics["bbox/AP"] + (ap - 35) / 100
    if lr := learning_rate(spec):  # every init has its own best learning rate
        ap = 40 - 100 * abs(lr - {"random": 0.2}.get(spec["init"], 0.1))
    return RunRecord(
        kind="detection",
        status="done",
        task=spec["task"],
        engine=spec["engine"],
        init=spec["init"],
        weights_sha256=spec["weights_sha256"],
        weights_source=None if spec["weights_sha256"] is None else "torchvision",
        seed=spec["seed"],
        config_sha256="c" * 64,
        config={"DATASETS.TEST": [f"{spec['task']}_test"], "SOLVER.MAX_ITER": spec["iterations"]},
        provenance={"hardware": HARDWARE},
        iterations=spec["iterations"],
        seconds=4.0,
        metrics={"bbox/AP": ap, "bbox/AP50": ap + 20, "bbox/AP75": ap - 5},
    )


def suite_main(argv: Sequence[str] | None) -> int | None:
    """Run a suite of these programs, or watch: `--suite JOURNAL DELAY ARGUMENTS...`.

    Its processes do not need torch, which takes most of the time of a start.
    """
    forkserver.PRELOADED = (MODULE,)
    forkserver.ONE_THREAD.clear()
    os.environ.pop("OMP_NUM_THREADS", None)
    if sys.argv[1].endswith("-without-tables"):
        run_suite.write_tables = lambda *arguments: []  # type: ignore[assignment]
        TablesSoFar.update = lambda *seen: None  # type: ignore[method-assign]
    if host := os.environ.get("FAKE_HOST"):
        socket.gethostname = lambda: host
    journal, delay, *arguments = sys.argv[2:]
    command = watch if sys.argv[1].startswith("--watch") else run_suite
    return command.main(arguments, FakePrograms(Path(journal), float(delay)))


def main(argv: Sequence[str] | None = None) -> int | None:
    """Train, run a suite, or watch."""
    return suite_main(argv) if sys.argv[1].startswith("--") else train(argv)


if __name__ == "__main__":
    run_cli(main)
