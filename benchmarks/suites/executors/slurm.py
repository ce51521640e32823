"""`--executor slurm`: runs as jobs of a Slurm cluster, submitted as arrays.

The queue keeps the jobs, not the runner: one that is stopped or killed leaves them there, and the
next one watches them. What a job does is in benchmarks/suites/executors/slurm_job.py: it takes its
run's lock itself when it begins, on whatever machine that is, and looks at the run's record first,
so whatever was submitted twice is computed once. (The file system must have locks that all machines
see, as NFS and Lustre do unless they were mounted without.) Shared between runner and job:

    <run>/job.json            which job is in charge of the run; removed when its end was judged
    jobs/<token>.{sh,json}    the script of an array, and the runs of its jobs
    jobs/<array>_<index>.log  what a job prints beside its run's log
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.suites import locks
from benchmarks.suites.executors.base import EXECUTORS, Executor, Options, Process, Slots
from benchmarks.suites.executors.slurm_script import JobOptions, make_script, parse_options
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import DONE, FAILED, QUEUED, RUNNING, Run, State, read_json
from moco.common.errors import UserError, plural
from moco.common.files import atomic_write_json, atomic_write_text

NOTE_NAME = "job.json"
MAX_NODES = 1024  # of one run
MAX_ARRAY = 500  # runs submitted together; Slurm's own limit is 1001 unless it was changed
LOOK_SECONDS = 5.0  # between two looks at a run's files
QUEUE_SECONDS = 30.0  # between two calls of squeue
GONE_SECONDS = 20.0  # a shared file system may show a result so much later than the queue


@EXECUTORS.register()
def slurm(options: Options) -> "SlurmExecutor":
    """Nothing is submitted or written yet.

    Raises:
        UserError: Slurm is missing, or an option that cannot be.
    """
    own = parse_options(options.slurm)
    if shutil.which("sbatch") is None:
        raise UserError(
            "--executor slurm: sbatch is not found on PATH; run this where jobs are submitted (a "
            "login node), or use --executor local"
        )
    return SlurmExecutor(options.folder, own, options.workers, options.keep)


class SlurmJob(Process):
    """A job, submitted or about to be.

    Attributes:
        id: as Slurm writes it, `12_3`; empty until it is submitted.
    """

    def __init__(self, executor: "SlurmExecutor", run: Run, id_: str = "") -> None:
        self.id, self.run = id_, run
        self._executor = executor
        self._since = time.monotonic()
        self._next_look = 0.0
        self._gone_since: float | None = None
        self._code: int | None = None
        self._was_queued = not id_

    def accept(self, id_: str) -> None:
        """It was submitted."""
        self.id, self._since = id_, time.monotonic()
        note_job(self.run.folder, id_)

    def poll(self) -> int | None:
        """0 when its run is settled; one that has left the queue before that was interrupted."""
        now = time.monotonic()
        if self._code is not None or not self.id or now < self._next_look:
            return self._code
        self._next_look = now + LOOK_SECONDS
        asked_at, queue = self._executor.queue()
        if self.run.state().settled and not locks.held(self.run.lock):
            self._code = 0
        elif queue is None or asked_at <= self._since or self.id in queue:
            self._gone_since = None
            self._was_queued |= queue is not None and self.id in queue
        elif self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since >= GONE_SECONDS:
            self._code, state = -signal.SIGTERM, last_state(self.id)
            log = self._executor.jobs_folder / f"{self.id}.log"
            self.why = f"job {self.id} left the queue ({state}), see {log}"
            self.cancelled = self._was_queued and state.startswith("CANCELLED")
        if self._code is not None:
            self._executor.jobs.remove(self)
        return self._code

    def is_queued(self) -> bool:
        _, queue = self._executor.queue()
        if queue is None:
            return False  # not known; the run's lock says it
        return queue.get(self.id, "PENDING") not in ("RUNNING", "COMPLETING")

    def in_charge(self) -> bool:
        return read_json(self.run.folder / NOTE_NAME).get("job") == self.id

    def forget(self) -> None:
        (self.run.folder / NOTE_NAME).unlink(missing_ok=True)


class SlurmExecutor(Executor):
    """Runs as jobs, one job each; what starts in one turn is submitted as an array.

    Args:
        folder: of the suite, on a file system that all machines see.
        workers: jobs in the queue at a time; 0: any number.
        keep: which checkpoints the jobs leave.
    """

    remote = True

    def __init__(self, folder: Path, options: JobOptions, workers: int, keep: str) -> None:
        self.gpus = options.gpus_per_node * MAX_NODES
        self.name, self.jobs_folder = f"moco-{folder.absolute().name}", folder.absolute() / "jobs"
        self.jobs: list[SlurmJob] = []
        self._options, self._workers, self._keep = options, workers, keep
        self._pending: list[tuple[SlurmJob, Sequence[str]]] = []
        self._queue: tuple[float, dict[str, str] | None] = (-math.inf, None)

    def parallel(self, gpus: int) -> int:
        return self._workers or self._options.array_parallelism

    def where(self) -> str:
        number, time_ = self._options.gpus_per_node, self._options.sbatch["time"]
        nodes = f"nodes of {number} GPU{'s' if number > 1 else ''}" if number else "CPU nodes"
        return f"as Slurm jobs (time {time_}) on {nodes}"

    def machines(self, gpus: int) -> int:
        """Nodes of a run.

        Raises:
            UserError: its GPUs cannot be the same number on each.
        """
        number = math.ceil(gpus / self._options.gpus_per_node) if gpus else 1
        if gpus % number:
            raise UserError(
                f"a run of {gpus} GPUs cannot be divided among {number} nodes of "
                f"{self._options.gpus_per_node}; change --gpus-per-run or --slurm gpus_per_node"
            )
        return number

    def reserve(self, gpus: int) -> Slots | None:
        full = self._workers and len(self.jobs) >= self._workers
        return None if full or len(self._pending) >= MAX_ARRAY else Slots()

    def start(self, run: Run, argv: Sequence[str], lock: Lock, slots: Slots) -> SlurmJob:
        """Put a run on the list for `submit`."""
        job = SlurmJob(self, run)
        self._pending.append((job, argv))
        self.jobs.append(job)
        return job

    def submit(self) -> None:
        """Submit the runs on the list, those of one size as one array.

        Raises:
            UserError: Slurm refuses them.
        """
        pending, self._pending = self._pending, []
        for gpus in dict.fromkeys(job.run.gpus for job, _ in pending):
            group = [(job, argv) for job, argv in pending if job.run.gpus == gpus]
            entries = self.jobs_folder / f"{uuid.uuid4().hex[:12]}.json"
            self.jobs_folder.mkdir(parents=True, exist_ok=True)
            fields = ("name", "title", "gpus", "expected")
            runs = [
                {field: getattr(job.run, field) for field in fields}
                | {"folder": str(job.run.folder.absolute()), "argv": argv, "keep": self._keep}
                for job, argv in group
            ]
            atomic_write_text(entries, json.dumps(runs))
            script = self._script(entries, len(group), gpus)
            atomic_write_text(entries.with_suffix(".sh"), script)
            done = sbatch(["--parsable"], script)
            if done.returncode:
                number = plural(len(group), "job")
                raise UserError(f"sbatch refused {number}: {_refusal(done, gpus)}")
            array = done.stdout.strip().partition(";")[0]
            for index, (job, _) in enumerate(group):
                job.accept(f"{array}_{index}")

    def _script(self, entries: Path, number: int, gpus: int) -> str:
        jobs, nodes = self.jobs_folder, self.machines(gpus)
        return make_script(self._options, self.name, jobs, entries, number, gpus, nodes)

    def problems(self, sizes: Collection[int]) -> list[str]:
        """What sbatch says about jobs of these sizes: partition, account, limits."""
        tried = {
            gpus: sbatch(["--test-only"], self._script(Path("none.json"), 1, gpus))
            for gpus in sorted(sizes)
        }
        return [
            f"sbatch would refuse jobs of {gpus} GPUs: {_refusal(done, gpus)}"
            for gpus, done in tried.items()
            if done.returncode
        ]

    def adopt(self, run: Run) -> SlurmJob | None:
        id_ = read_json(run.folder / NOTE_NAME).get("job")
        if not id_:
            return None
        self.jobs.append(SlurmJob(self, run, str(id_)))
        return self.jobs[-1]

    def shutdown_message(self) -> str:
        if not self.jobs:
            return super().shutdown_message()
        arrays = _arrays(job.id for job in self.jobs if job.id)
        return (
            f"{plural(len(self.jobs), 'job')} stay in Slurm's queue and continue "
            f"(scancel {' '.join(arrays)} would end them); --status says how far they are, and the "
            "same command watches them again"
        )

    def queue(self) -> tuple[float, dict[str, str] | None]:
        """When squeue was asked last, at most `QUEUE_SECONDS` ago, and what it said."""
        if time.monotonic() - self._queue[0] >= QUEUE_SECONDS:
            self._queue = (time.monotonic(), ask_queue([job.id for job in self.jobs if job.id]))
        return self._queue


def note_job(folder: Path, id_: str) -> None:
    """Write which job is in charge of the run in a folder."""
    submitted = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    atomic_write_json(folder / NOTE_NAME, {"job": id_, "submitted": submitted})


def sbatch(arguments: Sequence[str], script: str) -> "subprocess.CompletedProcess[str]":
    """Submit a script, without what a job that submits another one would hand on."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key == "SLURM_CONF" or not key.startswith(("SLURM_", "SLURMD_"))
    }
    return _call(["sbatch", *arguments], input=script, env=environment, timeout=120)


def ask_queue(ids: Sequence[str]) -> dict[str, str] | None:
    """Job → state for those that are in the queue; None if it cannot be asked."""
    if not ids:
        return {}
    command = ["squeue", "--noheader", "--array", "--format=%i|%T"]
    done = _call([*command, f"--jobs={','.join(_arrays(ids))}"])
    if done.returncode:
        # What squeue says about a single job that ended some minutes ago.
        return {} if "Invalid job id" in done.stderr else None
    rows = [line.strip().split("|") for line in done.stdout.splitlines() if "|" in line]
    return {row[0]: row[1] for row in rows}


def last_state(id_: str) -> str:
    """How a job that has left the queue ended, as the controller knows for some minutes."""
    done = _call(["scontrol", "--oneliner", "show", "job", id_])
    match = re.search(r"\bJobState=(\S+)", done.stdout)
    return match[1] if match else "nothing more is known"


def with_jobs(runs: Sequence[Run], states: Mapping[str, State]) -> dict[str, State]:
    """The states by name, with what the queue says about runs that wait in it; for `--status`."""
    waiting = [run for run in runs if states[run.name].kind not in (DONE, RUNNING, FAILED)]
    notes = {run.name: read_json(run.folder / NOTE_NAME) for run in waiting}
    queue = ask_queue([str(note["job"]) for note in notes.values() if note.get("job")])
    result = {}
    for run in runs:
        state, note = states[run.name], notes.get(run.name) or {}
        if state.kind == RUNNING and (id_ := locks.read(run.lock).get("job")):
            state = replace(state, text=f"{state.text}, job {id_}")
        elif id_ := note.get("job"):
            since = f"job {id_} since {note.get('submitted')}"
            if queue is None:
                state = replace(state, kind=QUEUED, text=f"{since}; squeue cannot be asked here")
            elif id_ in queue:
                state = replace(state, kind=QUEUED, text=f"{since}, {queue[id_].lower()}")
            else:
                state = replace(state, text=f"job {id_} has left the queue")
        result[run.name] = state
    return result


def _call(command: Sequence[str], timeout: float = 60.0, **more: Any) -> Any:
    """A program of Slurm, whose absence or silence is one more way to fail."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **more)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(command), 1, "", str(error))


def _refusal(done: "subprocess.CompletedProcess[str]", gpus: int) -> str:
    """What sbatch says about a refusal, on one line."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = " ".join(lines)[-300:] or f"exit code {done.returncode}"
    hint = " (gpus_per_node=0 on a cluster without GPUs)" if gpus else ""
    return f"{reason}; check --slurm{hint}"


def _arrays(ids: Iterable[str]) -> list[str]:
    """`12` for each of `12_0`, `12_1`, ...: an array can be named as a whole."""
    return list(dict.fromkeys(id_.partition("_")[0] for id_ in ids))
