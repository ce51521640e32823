"""Executor `slurm`: runs are jobs of a Slurm cluster, submitted as arrays.

Jobs outlive the runner: a runner that is stopped or killed leaves them in the queue, and the next
runner watches them. The program of a job, benchmarks/suites/executors/slurm_job.py, first acquires
the lock of the run and reads the record, so that a run that was submitted twice is computed once.
The file system must support locks across machines, as NFS and Lustre do unless mounted without
locks. Files that runner and job share:

    <run>/job.json            job in charge of the run; removed when the end of the job was handled
    jobs/<token>.{sh,json}    script of an array, and the runs of its jobs
    jobs/<array>_<index>.log  output of a job that is not in the log of the run
"""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.suites import locks
from benchmarks.suites.executors.base import EXECUTORS, Executor, Options, Process
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import DONE, FAILED, QUEUED, RUNNING, Run, State, read_json
from moco.common.errors import Preempted, UserError, plural
from moco.common.files import atomic_write_json, atomic_write_text
from moco.common.shipped import own_modules
from moco.engine.stop import signals_by_name

NOTE_NAME = "job.json"
JOB = "benchmarks.suites.executors.slurm_job"  # program of a job
MAX_NODES = 1024  # of one run
MAX_ARRAY = 500  # runs submitted together; Slurm's default MaxArraySize is 1001
LOOK_SECONDS = 5.0  # interval of reading a run's files
QUEUE_SECONDS = 30.0  # interval of calling squeue
GONE_SECONDS = 20.0  # delay with which a shared file system may show a result
PARTNER_SECONDS = 60  # time for the other machines of a run after the process on one has ended
STOP_SIGNALS = signals_by_name("SIGTERM", "SIGUSR1", "SIGUSR2")
# Options of sbatch that the project sets: they follow from the size of a run or from requeuing.
OURS = (
    "array",
    "dependency",
    "error",
    "gpus-per-task",
    "job-name",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "requeue",
    "no-requeue",
    "signal",
    "test-only",
    "wait",
    "wrap",
)
TIME = "24:00:00"


@dataclass(frozen=True)
class JobOptions:
    """Options of `--slurm KEY=VALUE`.

    Attributes:
        gpus_per_node: GPUs of a node; a run of more GPUs gets several nodes. 0: no GPUs.
        cpus_per_gpu: CPUs for each GPU; the default is a process and four data-loader workers.
        cpus_per_task: CPUs of a node; 0: `cpus_per_gpu` times its GPUs.
        signal_delay_s: Seconds before the time limit at which a job is asked to save.
        array_parallelism: Jobs of an array that run at a time.
        setup: Lines of the script before the run.
        teardown: Lines of the script after the run.
        srun_args: Further arguments of srun.
        sbatch: Other options, by Slurm's names; an empty value is a flag. `time` is the limit of
            one job; a run that needs more continues in the next.
    """

    gpus_per_node: int = 8
    cpus_per_gpu: int = 5
    cpus_per_task: int = 0
    signal_delay_s: int = 90
    array_parallelism: int = 256
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    sbatch: Mapping[str, str] = field(default_factory=lambda: {"time": TIME})

    @property
    def save_seconds(self) -> float:
        """Time that a run has to save; the job needs the rest of the delay to requeue itself."""
        return max(self.signal_delay_s - 20.0, self.signal_delay_s / 2)


_LEAST = {"gpus_per_node": 0, "cpus_per_gpu": 1, "cpus_per_task": 1, "array_parallelism": 1}
_LEAST["signal_delay_s"] = 30


def parse_options(arguments: Sequence[str]) -> JobOptions:
    """Parse the `KEY=VALUE` items of `--slurm`; the last of a key counts, but lines add up.

    Any other key is passed on to sbatch, which reports the ones that it does not know.

    Raises:
        UserError: If a value is invalid, or the project sets the option.
    """
    values: dict[str, Any] = {}
    sbatch = {"time": TIME}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        where = f"--slurm {argument}"
        if not equals or not text:
            raise UserError(f"{where}: expected KEY=VALUE, e.g. partition=gpu")
        key = key.removeprefix("sbatch.").replace("-", "_")
        option = key.replace("_", "-")
        if key in ("setup", "teardown", "srun_args"):
            values[key] = (*values.get(key, ()), text)
        elif key in _LEAST:
            if not text.isdecimal() or int(text) < _LEAST[key]:
                raise UserError(f"{where}: expected an integer of at least {_LEAST[key]}")
            values[key] = int(text)
        elif option in OURS:
            raise UserError(f"{where}: the suite sets this option; leave it out")
        else:
            sbatch[option] = "" if text.lower() == "true" else text
    return JobOptions(**values, sbatch=sbatch)


def make_script(
    options: JobOptions,
    name: str,
    entries: Path,
    number: int,
    gpus: int,
    nodes: int,
    *,
    after: Sequence[str] = (),
) -> str:
    """Format the batch script of an array of jobs.

    A job starts slurm_job.py on each of its machines. If the program was asked to save, and the job
    is still in state RUNNING, the job requeues itself under its id. A job in state COMPLETING was
    cancelled, or is requeued by Slurm.

    Args:
        options: Options of `--slurm`.
        name: Name of the jobs.
        entries: File that describes their runs, in the folder of their logs.
        number: Number of jobs.
        gpus: GPUs of one run.
        nodes: Nodes of one run.
        after: Jobs that have to succeed before any of these starts.
    """
    cpus = options.cpus_per_task or max(gpus // nodes * options.cpus_per_gpu, 1)
    comes_after = {"dependency": f"afterok:{':'.join(after)}", "kill-on-invalid-dep": "yes"}
    own = {
        "job-name": name,
        "array": f"0-{number - 1}%{options.array_parallelism}",
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        **({"gpus-per-node": str(gpus // nodes)} if gpus else {}),
        **(comes_after if after else {}),
        "signal": f"TERM@{options.signal_delay_s}",
        "requeue": "",
        "open-mode": "append",
        "output": f"{entries.parent}/%A_%a.log",
    }
    directives = [
        f"#SBATCH --{key}{f'={shlex.quote(value)}' if value else ''}"
        for key, value in (own | dict(options.sbatch)).items()
    ]
    # Since Slurm 22.05 srun does not inherit --cpus-per-task from the job.
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", f"--cpus-per-task={cpus}"]
    srun += [f"--wait={PARTNER_SECONDS}", *options.srun_args, sys.executable, "-u", "-m", JOB]
    start = shlex.join([*srun, str(entries), str(options.save_seconds)])
    # A signal may end srun, or the program of the job before it has handlers.
    preempted = [Preempted.exit_code, *(128 + number for number in STOP_SIGNALS)]
    lines = [
        "#!/bin/bash",
        *directives,
        "",
        # `scancel --full` signals the shell as well, which by default would end, and the job.
        "trap signaled=1 TERM",
        shlex.join(["export", *(f"{key}={value}" for key, value in own_modules().items())]),
        *options.setup,
        f'{start} "$SLURMD_NODENAME"',
        "code=$?",
        *options.teardown,
        f"case $code in 0) signaled= ;; {'|'.join(map(str, preempted))}) signaled=1 ;; esac",
        "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        'if [ "$signaled" ] && [ "$(squeue -h -j "$job" -o %T)" = RUNNING ]; then',
        '    scontrol requeue "$job"',
        "fi",
        "exit $code",
    ]
    return "\n".join([*lines, ""])


@EXECUTORS.register()
def slurm(options: Options) -> "SlurmExecutor":
    """Build a Slurm executor; submit and write nothing.

    Raises:
        UserError: If sbatch is not installed, or an option is invalid.
    """
    own = parse_options(options.slurm)
    if shutil.which("sbatch") is None:
        raise UserError(
            "--executor slurm: sbatch is not found on PATH; run this where jobs are submitted (a "
            "login node), or use --executor local"
        )
    return SlurmExecutor(options.folder, own, options.workers, options.keep)


class SlurmJob(Process):
    """Job of one run, before or after its submission.

    Attributes:
        id: Slurm's id of the job, e.g. `12_3`; empty until it is submitted.
        run: Run that it computes.
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
        """Record the id of the submitted job."""
        self.id, self._since = id_, time.monotonic()
        note_job(self.run.folder, id_)

    def poll(self) -> int | None:
        """Return 0 when the run is settled, or -SIGTERM if the job left the queue before that."""
        now = time.monotonic()
        if self._code is not None or not self.id or now < self._next_look:
            return self._code
        self._next_look = now + LOOK_SECONDS
        queried_at, queue = self._executor.queue()
        if self.run.state().settled and not locks.is_held(self.run.lock):
            self._code = 0
        elif queue is None or queried_at <= self._since or self.id in queue:
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
            (self.run.folder / NOTE_NAME).unlink(missing_ok=True)
        return self._code

    def is_queued(self) -> bool:
        """Return whether squeue lists the job in a state other than running."""
        _, queue = self._executor.queue()
        if queue is None:
            return False  # unknown, but a run whose lock is free counts as queued anyway
        return queue.get(self.id, "PENDING") not in ("RUNNING", "COMPLETING")


class SlurmExecutor(Executor):
    """Executor of one Slurm job per run; runs that start together are submitted as an array.

    Args:
        folder: Folder of the suite, on a file system that all machines see.
        options: Options of `--slurm`.
        workers: Jobs in the queue at a time; 0: any number.
        keep: Policy of the checkpoints.
    """

    remote = True

    def __init__(self, folder: Path, options: JobOptions, workers: int, keep: str) -> None:
        self.gpus = options.gpus_per_node * MAX_NODES
        self.name, self.jobs_folder = f"moco-{folder.absolute().name}", folder.absolute() / "jobs"
        self.jobs: list[SlurmJob] = []
        self._options, self._workers, self._keep = options, workers, keep
        self._pending: list[SlurmJob] = []
        self._queue: tuple[float, dict[str, str] | None] = (-math.inf, None)

    def parallel(self, gpus: int) -> int:
        """Return the number of jobs at a time, which does not depend on `gpus`."""
        return self._workers or self._options.array_parallelism

    def where(self) -> str:
        """Return the time limit and the type of the nodes."""
        number, time_ = self._options.gpus_per_node, self._options.sbatch["time"]
        nodes = f"nodes of {plural(number, 'GPU')}" if number else "CPU nodes"
        return f"as Slurm jobs (time {time_}) on {nodes}"

    def machines(self, gpus: int) -> int:
        """Return the number of nodes of a run.

        Raises:
            UserError: If the GPUs cannot be divided evenly among the nodes.
        """
        number = math.ceil(gpus / self._options.gpus_per_node) if gpus else 1
        if gpus % number:
            raise UserError(
                f"a run of {gpus} GPUs cannot be divided among {number} nodes of "
                f"{self._options.gpus_per_node}; change --gpus-per-run or --slurm gpus_per_node"
            )
        return number

    def reserve(self, gpus: int) -> Sequence[str] | None:
        """Return an empty list, as Slurm assigns devices, or None if the queue is full."""
        full = self._workers and len(self.jobs) >= self._workers
        return None if full or len(self._pending) >= MAX_ARRAY else ()

    def start(self, run: Run, lock: Lock, devices: Sequence[str]) -> SlurmJob:
        """Add a run to the jobs of the next `submit`."""
        job = SlurmJob(self, run)
        self._pending.append(job)
        self.jobs.append(job)
        return job

    def submit(self) -> None:
        """Submit the pending jobs, one array per number of GPUs and set of dependencies.

        Raises:
            UserError: If sbatch refuses them.
        """
        while self._pending:
            ids = {job.run.name: job.id for job in self.jobs}
            groups: dict[tuple[int, tuple[str, ...]], list[SlurmJob]] = {}
            for job in self._pending:
                before = tuple(ids[name] for name in job.run.after if name in ids)
                if all(before):  # others wait for a round in which their dependencies have an id
                    groups.setdefault((job.run.gpus, before), []).append(job)
            for (gpus, before), group in groups.items():
                self._submit(gpus, before, group)

    def _submit(self, gpus: int, after: Sequence[str], group: Sequence[SlurmJob]) -> None:
        entries = self.jobs_folder / f"{uuid.uuid4().hex[:12]}.json"
        self.jobs_folder.mkdir(parents=True, exist_ok=True)
        fields = ("name", "title", "gpus", "expected", "in_grid")
        runs = [
            {field: getattr(job.run, field) for field in fields}
            | {
                "folder": str(job.run.folder.absolute()),
                "argv": job.run.argv,
                "product": job.run.product and str(job.run.product.absolute()),
                "keep": self._keep,
            }
            for job in group
        ]
        atomic_write_text(entries, json.dumps(runs))
        script = self._script(entries, len(group), gpus, after)
        atomic_write_text(entries.with_suffix(".sh"), script)
        done = sbatch(["--parsable"], script)
        if done.returncode:
            number = plural(len(group), "job")
            raise UserError(f"sbatch refused {number}: {_refusal(done, gpus)}")
        array = done.stdout.strip().partition(";")[0]
        for index, job in enumerate(group):
            job.accept(f"{array}_{index}")
            self._pending.remove(job)

    def _script(self, entries: Path, number: int, gpus: int, after: Sequence[str] = ()) -> str:
        nodes = self.machines(gpus)
        return make_script(self._options, self.name, entries, number, gpus, nodes, after=after)

    def problems(self, sizes: Collection[int]) -> list[str]:
        """Return why sbatch would refuse jobs of these sizes: partition, account, limits."""
        tests = {
            gpus: sbatch(["--test-only"], self._script(self.jobs_folder / "none.json", 1, gpus))
            for gpus in sorted(sizes)
        }
        return [
            f"sbatch would refuse jobs of {gpus} GPUs: {_refusal(done, gpus)}"
            for gpus, done in tests.items()
            if done.returncode
        ]

    def adopt(self, run: Run) -> SlurmJob | None:
        """Return the job of the run's job.json."""
        id_ = read_json(run.folder / NOTE_NAME).get("job")
        if not id_:
            return None
        self.jobs.append(SlurmJob(self, run, str(id_)))
        return self.jobs[-1]

    def shutdown_message(self) -> str:
        """Return how to continue, with the arrays that stay in the queue."""
        if not self.jobs:
            return super().shutdown_message()
        arrays = _arrays(job.id for job in self.jobs if job.id)
        return (
            f"{plural(len(self.jobs), 'job')} stay in Slurm's queue and continue "
            f"(scancel {' '.join(arrays)} would end them); --status shows their progress, and the "
            "same command watches them again"
        )

    def queue(self) -> tuple[float, dict[str, str] | None]:
        """Return the time and result of the last squeue, at most `QUEUE_SECONDS` ago."""
        if time.monotonic() - self._queue[0] >= QUEUE_SECONDS:
            self._queue = (time.monotonic(), query_queue([job.id for job in self.jobs if job.id]))
        return self._queue


def note_job(folder: Path, id_: str) -> None:
    """Write the id of the job that is in charge of a folder's run to job.json."""
    submitted = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    atomic_write_json(folder / NOTE_NAME, {"job": id_, "submitted": submitted})


def sbatch(arguments: Sequence[str], script: str) -> "subprocess.CompletedProcess[str]":
    """Submit a script without the variables of a job, which a submitted job would inherit."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key == "SLURM_CONF" or not key.startswith(("SLURM_", "SLURMD_"))
    }
    return _call(["sbatch", *arguments], input=script, env=environment, timeout=120)


def query_queue(ids: Sequence[str]) -> dict[str, str] | None:
    """Return job → state of the jobs that are in the queue, or None if squeue fails."""
    if not ids:
        return {}
    command = ["squeue", "--noheader", "--array", "--format=%i|%T"]
    done = _call([*command, f"--jobs={','.join(_arrays(ids))}"])
    if done.returncode:
        # squeue fails with this message for a single job that ended some minutes ago.
        return {} if "Invalid job id" in done.stderr else None
    rows = [line.strip().split("|") for line in done.stdout.splitlines() if "|" in line]
    return {row[0]: row[1] for row in rows}


def last_state(id_: str) -> str:
    """Return the final state of a job, which Slurm keeps for some minutes."""
    done = _call(["scontrol", "--oneliner", "show", "job", id_])
    match = re.search(r"\bJobState=(\S+)", done.stdout)
    return match[1] if match else "its final state is not known"


def with_jobs(runs: Sequence[Run], states: Mapping[str, State]) -> dict[str, State]:
    """Add the jobs in the queue to the states of runs, for `--status`."""
    waiting = [run for run in runs if states[run.name].kind not in (DONE, RUNNING, FAILED)]
    notes = {run.name: read_json(run.folder / NOTE_NAME) for run in waiting}
    queue = query_queue([str(note["job"]) for note in notes.values() if note.get("job")])
    result = {}
    for run in runs:
        state, note = states[run.name], notes.get(run.name) or {}
        if state.kind == RUNNING and (id_ := locks.read_holder(run.lock).get("job")):
            state = replace(state, text=f"{state.text}, job {id_}")
        elif id_ := note.get("job"):
            since = f"job {id_} since {note.get('submitted')}"
            if queue is None:
                state = replace(state, kind=QUEUED, text=f"{since}; squeue does not work here")
            elif id_ in queue:
                state = replace(state, kind=QUEUED, text=f"{since}, {queue[id_].lower()}")
            else:
                state = replace(state, text=f"job {id_} has left the queue")
        result[run.name] = state
    return result


def _call(command: Sequence[str], timeout: float = 60.0, **more: Any) -> Any:
    """Run a program of Slurm; if it is missing or times out, the result has exit code 1."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **more)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(command), 1, "", str(error))


def _refusal(done: "subprocess.CompletedProcess[str]", gpus: int) -> str:
    """Format the error of sbatch as one line."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = " ".join(lines)[-300:] or f"exit code {done.returncode}"
    hint = " (gpus_per_node=0 on a cluster without GPUs)" if gpus else ""
    return f"{reason}; check --slurm{hint}"


def _arrays(ids: Iterable[str]) -> list[str]:
    """Return the arrays of jobs: `12` for `12_0`, `12_1`, ..."""
    return list(dict.fromkeys(id_.partition("_")[0] for id_ in ids))
