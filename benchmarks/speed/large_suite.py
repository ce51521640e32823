"""A suite of many runs, done or not, and what its scheduler takes; imports no torch."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report.progress import PAGE_NAME
from benchmarks.run_suite import refresh_tables
from benchmarks.speed.memory import peak_bytes
from benchmarks.suites.executors.base import Executor, Process, Slots
from benchmarks.suites.folder import SuiteFolder, requested
from benchmarks.suites.live import Live, rest
from benchmarks.suites.scheduler import Scheduler
from benchmarks.suites.suite import Init, RunSpec, expand
from benchmarks.suites.suite_file import load_suite
from detection.config.keys import protocol_sha256
from detection.config.task import default_task
from moco.common.cfgnode import flatten
from moco.common.command import RANDOM
from moco.common.errors import Preempted
from moco.common.run import METRICS_NAME, RunRecord, provenance, write_record

TASKS, INITS, ITERATIONS = 10, 10, 1000


def large_suite(root: Path, trials: int, done: float) -> SuiteFolder:
    """A suite's folder with `trials` x 10 inits x 10 tasks, or one task where trials are few."""
    root.mkdir(parents=True)
    (root / "task.yaml").write_text("SOLVER: {MAX_ITER: 1000}\n", encoding="utf-8")
    names = [f"t{number}" for number in range(TASKS if trials > 9 else 1)]
    tasks = "".join(f"  - {{config: task.yaml, name: {name}}}\n" for name in names)
    (root / "suite.yaml").write_text(
        f"name: large\ntrials: {trials}\ntasks:\n{tasks}", encoding="utf-8"
    )
    suite = load_suite(root / "suite.yaml")
    inits = {f"i{k}": Init(f"i{k}.pth", f"{k:064d}") for k in range(1, INITS)}
    inits = {RANDOM: Init(RANDOM, None), **inits}
    specs = [
        replace(s, iterations=ITERATIONS) for s in expand(suite, inits, ["embedded"], version="1")
    ]
    folder, config, facts = SuiteFolder(root / "out"), flatten(default_task()), provenance()
    folder.path.mkdir()
    folder.agree(requested(suite, inits, ["embedded"], version="1"), specs)
    lines = "".join(f'{{"iteration": {i}, "total_loss": 1.0}}\n' for i in range(0, ITERATIONS, 20))
    for number, spec in enumerate(specs[: int(done * len(specs))]):
        run = folder.run(spec).folder
        run.mkdir(parents=True)
        (run / METRICS_NAME).write_text(lines, encoding="utf-8")
        ap = 30 + number * 7919 % 1000 / 500
        metrics: dict[str, float | None] = {"bbox/AP": ap, "bbox/AP50": ap + 20, "bbox/AP75": ap}
        write_record(run, _record(spec, config, facts, metrics))
    return folder


def _record(
    spec: RunSpec, config: dict[str, Any], facts: dict[str, Any], metrics: dict[str, Any]
) -> RunRecord:
    own = {**config, "DATASETS.TEST": [spec.task]}
    return RunRecord(
        kind="detection",
        status="done",
        task=spec.task,
        engine=spec.engine,
        init=spec.init,
        weights_sha256=spec.weights_sha256,
        weights_source=None,
        seed=spec.seed,
        config_sha256=protocol_sha256(own),
        config=own,
        provenance=facts,
        iterations=ITERATIONS,
        seconds=100.0,
        metrics=metrics,
    )


class _Endless(Process):
    stopped = False

    def poll(self) -> int | None:
        return Preempted.exit_code if self.stopped else None

    def terminate(self) -> None:
        self.stopped = True


class _Busy(Executor):
    """Eight runs at a time that never end by themselves."""

    free = 8

    def parallel(self, gpus: int) -> int:
        return 8

    def reserve(self, gpus: int) -> Slots | None:
        self.free -= 1
        return Slots() if self.free >= 0 else None

    def start(self, *arguments: object) -> Process:
        return _Endless()

    def where(self) -> str:
        return "nowhere"


def watch(path: str, wanted_seconds: str) -> None:
    """Run a scheduler; print what it takes and what its report takes.

    That is: its CPU seconds once there is a report, of how many, and its peak MiB; then the CPU
    seconds of the process that made the report, of how many until the next one, and its peak MiB.
    """
    import resource  # POSIX only, and so not above

    folder = SuiteFolder(Path(path))
    content, specs = folder.read()
    runs = [folder.run(spec) for spec in specs]
    refresh = partial(refresh_tables, folder.tables, runs, None, lock=folder.lock)

    def stop() -> None:
        while not (folder.tables / PAGE_NAME).exists():
            time.sleep(0.5)
        used, start = time.process_time(), time.monotonic()
        time.sleep(float(wanted_seconds))
        report = resource.getrusage(resource.RUSAGE_CHILDREN)
        took = report.ru_utime + report.ru_stime
        print(
            json.dumps([time.process_time() - used, time.monotonic() - start, peak_bytes() / 2**20])
        )
        print(json.dumps([took, took + rest(took), report.ru_maxrss / 1024]), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with suppress(Preempted), Live(content["suite"], runs, refresh, 0) as live:
        Scheduler(runs, _Busy(), watch=live.update).run()
