"""Runs of a suite as jobs of a Slurm cluster, submitted through submitit.

The queue keeps the jobs, not the runner: one that is stopped or killed leaves them there, and the
next one watches them. Between the two stands, in each run's folder,

job.json    which job is in charge of the run; written once it is submitted, removed when its end
            has been judged, of no account once the run is done

A job takes its run's claim itself when it begins, on whatever machine that is, and looks at the
run's record first: whatever was submitted twice is computed once. (The file system must have locks
that all machines see, as NFS and Lustre do unless they were mounted without.) On the signal that
Slurm sends before it takes the machine away, whichever that is, the run saves. While the job still
counts as running it then puts itself back into the queue under its old number and resumes there;
one that is completing was cancelled, or is put back by Slurm itself.

submitit's own files are below `jobs/` in the suite's folder. A job unpickles there what submitit
has written for it; the runner unpickles nothing.
"""

import difflib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from benchmarks.suites import locks as claims
from benchmarks.suites.executors.local import HOST, PORT, RANK, VISIBLE, Launch, Process, Room
from benchmarks.suites.folder import (
    CHECKPOINT,
    DONE,
    FAILED,
    RUNNING,
    State,
    SuiteFolder,
    read_json,
)
from benchmarks.suites.jobs import ONE_THREAD, last_line
from benchmarks.suites.keep import ALL, remove_checkpoints
from benchmarks.suites.locks import Claim
from benchmarks.suites.runner import (
    KEEP_SECONDS,
    LOG_START,
    MAX_FRUITLESS,
    QUEUED,
    STARTS,
    note_start,
)
from benchmarks.suites.suite import RunSpec
from moco.common.errors import LockedError, Preempted, UserError
from moco.common.files import atomic_write_json

if TYPE_CHECKING:
    from submitit import AutoExecutor, JobEnvironment
    from submitit.helpers import DelayedSubmission

CLUSTER = "slurm"  # "local" is submitit's executor for tests
JOBS, JOB_NAME = "jobs", "job.json"
PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
MAX_NODES = 1024  # of one run
MAX_ARRAY = 500  # runs submitted together; Slurm's own limit is 1001 unless it was changed
MAX_TIMEOUTS = 1 << 30  # submitit's limit; ours is MAX_FRUITLESS
LOOK_SECONDS = 5.0  # between two looks for results
QUEUE_SECONDS = 30.0  # between two calls of squeue
GONE_SECONDS = 20.0  # a shared file system may show a result so much later than the queue
RETRY_SECONDS = 60.0  # before sbatch is tried again, where it has worked before
POLL_SECONDS = 0.2  # in a job
CLAIM_SECONDS = 10.0  # a job waits for its run's claim, which others may be looking at
SUBMIT_SECONDS = 120.0  # or holding while they submit
START_SECONDS = 300.0  # for the first of several machines to begin
PARTNER_SECONDS = 60.0  # for a process to end by itself after one on another machine has failed
MIN_SIGNAL_SECONDS = 30
# What follows from a run's size, from this project, or from another key.
_OURS = {
    "time": "",
    "job_name": "jobs are called after the suite",
    "nodes": "it follows from the GPUs of a run and gpus_per_node",
    "ntasks_per_node": "a job has one task per machine",
    "num_gpus": "give gpus_per_node",
    "gpus_per_task": "give gpus_per_node",
    "use_srun": "jobs are started by srun",
    "stderr_to_stdout": "the logs of runs are in their folders",
    "additional_parameters": "give sbatch.OPTION=VALUE",
}
_WHOLE = ("gpus_per_node", "cpus_per_gpu", "cpus_per_task", "signal_delay_s", "array_parallelism")
_LISTS = ("setup", "teardown", "srun_args")


@dataclass(frozen=True)
class Options:
    """What the words of `--slurm` say.

    Attributes:
        minutes: of one job; a run that needs more goes on in the next.
        gpus_per_node: how many a node has; a run of more is spread over several. 0: no GPUs.
        cpus_per_gpu: a process and its four readers.
        signal_delay_s: so long before the end of its time a job is asked to save.
        parameters: others of submitit's Slurm executor, by its names.
        sbatch: options of sbatch that submitit does not know.
    """

    minutes: int = 24 * 60
    gpus_per_node: int = 8
    cpus_per_gpu: int = 5
    cpus_per_task: int | None = None
    signal_delay_s: int = 90
    array_parallelism: int = 256
    parameters: Mapping[str, Any] = field(default_factory=dict)
    sbatch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def save_seconds(self) -> float:
        """How long a run may take to save; the rest of the delay is for getting back in line."""
        return max(self.signal_delay_s - 20.0, self.signal_delay_s / 2)


def parse_options(words: Sequence[str]) -> Options:
    """`KEY=VALUE` words of `--slurm`; the last of a key counts, but setup lines add up.

    Raises:
        UserError: a key that submitit's Slurm executor does not have, or a value that cannot be.
    """
    known = {*_parameter_names(), "time"}
    values: dict[str, Any] = {}
    sbatch: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        where = f"--slurm {word}"
        if not equals or not text:
            raise UserError(f"{where}: expected KEY=VALUE, e.g. partition=gpu")
        if key.startswith("sbatch."):
            sbatch[key.removeprefix("sbatch.").replace("_", "-")] = _flag(text)
        elif _OURS.get(key):
            raise UserError(f"{where}: cannot be set; {_OURS[key]}")
        elif key not in known:
            near = difflib.get_close_matches(key, known, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            choices = ", ".join(sorted(known - {name for name in _OURS if _OURS[name]}))
            raise UserError(f"{where}: no such key; {meant}choices are {choices}, sbatch.OPTION")
        elif key == "time":
            values["minutes"] = parse_minutes(where, text)
        elif key in _LISTS:
            values.setdefault(key, []).append(text)
        else:
            values[key] = _whole(where, key, text) if key in _WHOLE else _flag(text)
    own = {name: values.pop(name) for name in list(values) if name in Options.__annotations__}
    return Options(**own, parameters=values, sbatch=sbatch)


def parse_minutes(where: str, text: str) -> int:
    """Minutes, or `[D-]HH:MM:SS` as sbatch takes it, rounded up.

    Raises:
        UserError: neither, or no time at all.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if match:
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = (days * 24 + hours) * 60 + minutes + math.ceil(seconds / 60)
    else:
        total = int(text) if text.isdecimal() else 0
    if total < 1:
        raise UserError(f"{where}: expected minutes or [D-]HH:MM:SS, e.g. time=1-00:00:00")
    return total


def _whole(where: str, key: str, text: str) -> int:
    least = {"gpus_per_node": 0, "signal_delay_s": MIN_SIGNAL_SECONDS}.get(key, 1)
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{where}: expected a whole number of at least {least}")
    return int(text)


def _flag(text: str) -> Any:
    return True if text.lower() == "true" else text


def _parameter_names() -> set[str]:
    _import_submitit()
    from submitit import SlurmExecutor as Submitter

    return set(Submitter._valid_parameters())


def _import_submitit() -> None:
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise UserError(
            "--executor slurm: submitit is not installed; pip install -e '.[slurm]'"
        ) from error


def make_slurm_executor(folder: Path, words: Sequence[str], jobs: int = 0) -> "SlurmExecutor":
    """The executor of `--executor slurm`; nothing is submitted or written yet.

    Args:
        folder: of the suite.
        words: of `--slurm`.
        jobs: in the queue at a time; 0: any number.

    Raises:
        UserError: submitit or Slurm's programs are missing, or an option that cannot be.
    """
    options = parse_options(words)
    missing = [name for name in PROGRAMS if CLUSTER == "slurm" and shutil.which(name) is None]
    if missing:
        raise UserError(
            f"--executor slurm: {', '.join(missing)} not found on PATH; run this where jobs are "
            "submitted (a login node), or use --executor local"
        )
    if jobs < 0:
        raise UserError(f"--workers: got {jobs}, expected at least 1")
    return SlurmExecutor(folder, options, jobs)


@dataclass(frozen=True)
class QueueRoom:
    """Room for one job; the cluster's scheduler finds the devices."""

    gpus: int

    def release(self) -> None:
        pass


@dataclass
class _Look:
    """What was seen last: names of files in `jobs/`, and job → its state in the queue."""

    files: frozenset[str] = frozenset()
    queue: dict[str, tuple[str, str]] | None = None  # None: not known
    files_at: float = -math.inf
    queue_at: float = -math.inf


class SlurmProcess:
    """A job, submitted or about to be.

    Attributes:
        id: as Slurm writes it, `12` or `12_3`; empty until it is submitted.
    """

    def __init__(self, executor: "SlurmExecutor", note: Path, id_: str = "") -> None:
        self.id = id_
        self._executor, self._note = executor, note
        self._since = time.monotonic()
        self._gone_since: float | None = None
        self._code: int | None = None
        self._why = ""
        self._was_queued = bool(not id_)
        self._cancelled = False

    def accept(self, id_: str) -> None:
        """It was submitted."""
        self.id, self._since = id_, time.monotonic()

    def refuse(self) -> None:
        """It was not: nobody is in charge of its run."""
        self._code = -signal.SIGTERM
        self._executor.let_go(self)

    def poll(self) -> int | None:
        """As for a process; one that has left the queue without a result was interrupted."""
        if self._code is not None or not self.id:
            return self._code
        look, now = self._executor.look(), time.monotonic()
        result = f"{self.id}_0_result.pkl"
        if result in look.files:
            self._code = self._read()
        elif look.queue is None or look.queue_at <= self._since or self.id in look.queue:
            self._gone_since = None
            self._was_queued |= look.queue is not None and self.id in look.queue
        elif self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since >= GONE_SECONDS:
            self._code = -signal.SIGTERM
            state = last_state(self.id)
            self._why = f"job {self.id} left the queue ({state}), see {self._log()}"
            self._cancelled = self._was_queued and state.startswith("CANCELLED")
        if self._code is not None:
            self._executor.let_go(self)
        return self._code

    def _read(self) -> int:
        """The exit code that the job has left; without one, submitit could not run it."""
        code = read_json(exit_path(self._executor.jobs_folder, self.id)).get("code")
        if code is not None:
            return int(code)
        log = self._log()
        said = last_line(log) if log.is_file() else "no reason given"
        self._why = f"job {self.id}: {said}, see {log}"
        return 1

    def _log(self) -> Path:
        return self._executor.jobs_folder / f"{self.id}_0_log.err"

    def terminate(self) -> None:
        """Nothing: a job belongs to the queue; see `SlurmExecutor.farewell`."""

    def kill(self) -> None:
        """Nothing, as `terminate`."""

    def waits(self) -> bool:
        queue = self._executor.look().queue
        if queue is None:
            return False  # not known; its claim says it
        return queue.get(self.id, ("PENDING", ""))[0] not in ("RUNNING", "COMPLETING")

    def why(self) -> str:
        return self._why

    def cancelled(self) -> bool:
        return self._cancelled

    def in_charge(self) -> bool:
        return str(read_json(self._note).get("job")) == self.id

    def forget(self) -> None:
        if self.in_charge():
            self._note.unlink(missing_ok=True)


class SlurmExecutor:
    """Runs as jobs, one job each; what starts in one turn is submitted as an array.

    Args:
        folder: of the suite, on a file system that all machines see.
        jobs: in the queue at a time; 0: any number.
    """

    remote = True

    def __init__(self, folder: Path, options: Options, jobs: int = 0) -> None:
        self.gpus = options.gpus_per_node * MAX_NODES
        self.places = jobs or options.array_parallelism
        self.jobs_folder = (folder / JOBS).absolute()
        self._folder, self._options, self._jobs = SuiteFolder(folder), options, jobs
        self._pending: list[tuple[SlurmProcess, RunJob]] = []
        self._watched: list[SlurmProcess] = []
        self._local: dict[str, Any] = {}  # of submitit's local executor: id → its job
        self._look = _Look()
        self._has_sent, self._not_before = False, -math.inf

    def where(self) -> str:
        number = self._options.gpus_per_node
        nodes = f"nodes of {number} GPU{'s' if number > 1 else ''}" if number else "CPU nodes"
        return f"as Slurm jobs of {_shown_minutes(self._options.minutes)} on {nodes}"

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

    def reserve(self, gpus: int) -> QueueRoom | None:
        full = self._jobs and len(self._watched) >= self._jobs
        full = full or len(self._pending) >= MAX_ARRAY or time.monotonic() < self._not_before
        return None if full else QueueRoom(gpus)

    def start(self, launch: Launch, room: Room) -> SlurmProcess:
        """Put a run on the list for `submit`."""
        assert isinstance(room, QueueRoom) and launch.run is not None
        run = launch.run
        process = SlurmProcess(self, self._note(run))
        machines, save = self.machines(run.gpus), self._options.save_seconds
        job = RunJob(self._folder.path, run, launch.command, machines, save, launch.keep)
        self._pending.append((process, job))
        self._watched.append(process)
        return process

    def submit(self) -> None:
        """Submit the runs on the list, those of one size as one array.

        Raises:
            UserError: Slurm refuses them. Once it has not, they are tried again after a while: a
                runner lives for days, and a cluster's controller is away now and then.
        """
        pending, self._pending = self._pending, []
        for size in dict.fromkeys(job.spec.gpus for _, job in pending):
            group = [pair for pair in pending if pair[1].spec.gpus == size]
            try:
                ids = self._send(group, size)
            except UserError as error:
                if not self._has_sent:
                    raise
                print(f"note: {error}; trying again in {RETRY_SECONDS:g} s", file=sys.stderr)
                self._not_before = time.monotonic() + RETRY_SECONDS
                for process, _ in group:
                    process.refuse()
                continue
            for (process, job), id_ in zip(group, ids, strict=True):
                process.accept(id_)
                note_job(self._note(job.spec), id_)
        self._has_sent = self._has_sent or bool(pending)

    def _send(self, group: "Sequence[tuple[SlurmProcess, RunJob]]", gpus: int) -> list[str]:
        submitter = self._submitter(gpus)
        try:
            with _own_environment(), submitter.batch():
                jobs = [submitter.submit(job) for _, job in group]
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise UserError(
                f"sbatch refused {len(group)} job{'s'[: len(group) > 1]}: "
                f"{_said(str(error)) or type(error).__name__}; {_advice(gpus)}"
            ) from error
        if CLUSTER == "local":
            self._local |= {job.job_id: job for job in jobs}
        return [job.job_id for job in jobs]

    def problems(self, sizes: Collection[int]) -> list[str]:
        """What sbatch says about jobs of these sizes: partition, account, limits."""
        found: dict[str, None] = {}
        for gpus in sorted(sizes) if CLUSTER == "slurm" else ():
            submitter: Any = self._submitter(gpus)._executor
            script = submitter._make_submission_file_text("true", "")  # the one that will be sent
            command = ["sbatch", "--test-only"]
            try:
                with _own_environment():
                    done = subprocess.run(
                        command, input=script, capture_output=True, text=True, timeout=120
                    )
            except (OSError, subprocess.TimeoutExpired) as error:
                found[f"sbatch --test-only: {error}"] = None
                continue
            if done.returncode:
                said = _said(done.stderr) or f"exit code {done.returncode}"
                problem = f"sbatch would refuse jobs of {gpus} GPUs: {said}; {_advice(gpus)}"
                found[problem] = None
        return list(found)

    def _submitter(self, gpus: int) -> "AutoExecutor":
        from submitit import AutoExecutor

        options, nodes = self._options, self.machines(gpus)
        here = gpus // nodes
        cpus = options.cpus_per_task or max(here * options.cpus_per_gpu, 1)
        # Since Slurm 22.05 srun does not know by itself how many cores the job has.
        own = [f"--cpus-per-task={cpus}"]
        parameters = {
            **options.parameters,
            "srun_args": own + options.parameters.get("srun_args", []),
        }
        submitter = AutoExecutor(
            self.jobs_folder, cluster=CLUSTER, slurm_max_num_timeout=MAX_TIMEOUTS
        )
        submitter.update_parameters(
            name=f"moco-{self._folder.path.absolute().name}",
            timeout_min=options.minutes,
            nodes=nodes,
            tasks_per_node=1,
            cpus_per_task=cpus,
            **({"gpus_per_node": here} if here else {}),
            slurm_signal_delay_s=options.signal_delay_s,
            slurm_array_parallelism=options.array_parallelism,
            slurm_additional_parameters={"requeue": True, **options.sbatch},
            **{f"slurm_{name}": value for name, value in parameters.items()},
        )
        return submitter

    def adopt(self, run: RunSpec) -> SlurmProcess | None:
        note = self._note(run)
        id_ = read_json(note).get("job")
        if not id_:
            return None
        process = SlurmProcess(self, note, str(id_))
        self._watched.append(process)
        return process

    def let_go(self, process: SlurmProcess) -> None:
        """It has ended, and needs no watching any more."""
        self._watched = [other for other in self._watched if other is not process]

    def farewell(self, processes: Sequence[Process]) -> str:
        bases = _bases(p.id for p in processes if isinstance(p, SlurmProcess) and p.id)
        if not bases:
            return "the same command goes on from here"
        return (
            f"{len(processes)} job{'s'[: len(processes) > 1]} stay in Slurm's queue and go on "
            f"(scancel {' '.join(bases)} would end them); --status says how far they are, and the "
            "same command watches them again"
        )

    def look(self) -> _Look:
        """What was seen at most moments ago; not asked for each job."""
        look, now = self._look, time.monotonic()
        if now - look.files_at >= LOOK_SECONDS:
            try:
                look.files = frozenset(os.listdir(self.jobs_folder))
            except FileNotFoundError:
                look.files = frozenset()
            look.files_at = now
        if now - look.queue_at >= QUEUE_SECONDS:
            ids = [process.id for process in self._watched if process.id]
            queue = self._local_queue() if CLUSTER == "local" else ask_queue(ids)
            look.queue = queue
            look.queue_at = now
        return look

    def _local_queue(self) -> dict[str, tuple[str, str]]:
        return {id_: ("RUNNING", "") for id_, job in self._local.items() if not job.done()}

    def _note(self, run: RunSpec) -> Path:
        return self._folder.run(run) / JOB_NAME


def exit_path(jobs_folder: Path, id_: str) -> Path:
    """Where a job writes its exit code, before submitit says that it has ended."""
    return jobs_folder / f"{id_}_exit.json"


def note_job(path: Path, id_: str) -> None:
    """Write which job is in charge of a run."""
    submitted = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    atomic_write_json(path, {"cluster": CLUSTER, "job": id_, "submitted": submitted})


def ask_queue(ids: Sequence[str]) -> dict[str, tuple[str, str]] | None:
    """Job → (state, nodes) for those that are in the queue; None if it cannot be asked."""
    if not ids:
        return {}
    command = ["squeue", "--noheader", "--array", "--format=%i|%T|%N"]
    command.append(f"--jobs={','.join(_bases(ids))}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        # What squeue says about a single job that ended some minutes ago.
        return {} if "Invalid job id" in done.stderr else None
    rows = [line.strip().split("|") for line in done.stdout.splitlines() if line.strip()]
    return {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}


def _is_running(id_: str) -> bool:
    """Whether a job is neither cancelled, nor out of time, nor already put back by Slurm."""
    return (ask_queue([id_]) or {}).get(id_, ("",))[0] == "RUNNING"


def last_state(id_: str) -> str:
    """How a job that has left the queue ended, as Slurm says it.

    The controller knows that for some minutes; after that only accounting does, where there is any.
    """
    for command, pattern in (
        ("scontrol --oneliner show job", r"\bJobState=(\S+)"),
        ("sacct --noheader --parsable2 --allocations --format=State -j", r"(\S+)"),
    ):
        words = [*command.split(), id_]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and (match := re.search(pattern, done.stdout)):
            return match[1]
    return "nothing more is known"


def with_jobs(folder: SuiteFolder, states: Mapping[RunSpec, State]) -> dict[str, State]:
    """The states by name, with what the queue says about runs that wait in it; for `--status`."""
    noted = {
        spec.name: read_json(folder.run(spec) / JOB_NAME)
        for spec, state in states.items()
        if state.kind not in (DONE, RUNNING, FAILED)
    }
    noted = {name: note for name, note in noted.items() if note.get("job")}
    queue = ask_queue([str(note["job"]) for note in noted.values()]) if noted else {}
    result = {}
    for spec, state in states.items():
        if state.kind == RUNNING and (id_ := claims.read(folder.claim(spec)).get("job")):
            state = replace(state, text=f"{state.text}, job {id_}")
        note = noted.get(spec.name)
        if note is not None:
            id_ = str(note["job"])
            if queue is None:
                text = f"job {id_} since {note.get('submitted')}; squeue cannot be asked here"
                state = replace(state, kind=QUEUED, text=text)
            elif id_ in queue:
                text = f"job {id_} since {note.get('submitted')}, {queue[id_][0].lower()}"
                state = replace(state, kind=QUEUED, text=text)
            else:
                state = replace(state, text=f"job {id_} has left the queue")
        result[spec.name] = state
    return result


@dataclass
class RunJob:
    """What runs on the cluster: one run's process, on each machine of its job.

    The first machine's task is in charge: it has the claim, and its result is the run's exit code.
    The others begin when it says so, and end when it does. submitit calls `__call__` on all
    of them, and `checkpoint` on the first before it puts the job back into the queue.

    Attributes:
        folder: of the suite.
        words: of the process, with RANK, HOST and PORT to be filled in.
        save_seconds: how long it may take to save.
        keep: which checkpoints stay, see benchmarks/suites/keep.py.
    """

    folder: Path
    spec: RunSpec
    words: tuple[str, ...]
    machines: int
    save_seconds: float
    keep: str = ALL

    def __call__(self) -> int:
        from submitit import JobEnvironment

        here = JobEnvironment()
        asked: list[int] = []
        with _noted(asked, (_preemption(here), signal.SIGTERM)) as hand_over:
            if here.global_rank:
                return self._follow(here, asked)
            code = self._lead(here, asked)
            if code == 0 or not asked:
                return self._leave(here, code)
        if _is_running(here.job_id):
            if self._is_fruitless():
                return self._leave(here, code)
            try:
                hand_over(_preemption(here))  # submitit's: back into the queue, and out
            except (RuntimeError, OSError, subprocess.SubprocessError):
                # What puts a job back is ended together with the job, and seems to have failed.
                if _is_running(here.job_id):
                    return self._leave(here, Preempted.exit_code)  # not put back; the runner will
        # Cancelled, or out of time, or put back by Slurm. No result is left, so the queue counts.
        raise SystemExit(Preempted.exit_code)

    def checkpoint(self) -> "DelayedSubmission":
        """The run itself has saved all that is to be kept."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _leave(self, here: "JobEnvironment", code: int) -> int:
        """The exit code for the runner, which unpickles nothing."""
        atomic_write_json(exit_path(self.folder / JOBS, here.job_id), {"code": code})
        return code

    def _lead(self, here: "JobEnvironment", asked: list[int]) -> int:
        """Compute the run, if nobody else does and has; its exit code."""
        board = _Board(self.folder, here)
        claim = self._take_claim(asked)
        if claim is None:
            board.tell(here.global_rank, begins=False, code=LockedError.exit_code)
            return Preempted.exit_code if asked else LockedError.exit_code
        code = 1
        try:
            code = self._lead_claimed(claim, here, board, asked)
        finally:
            claim.release()
            board.tell(here.global_rank, begins=False, code=code)
        return code

    def _lead_claimed(
        self, claim: Claim, here: "JobEnvironment", board: "_Board", asked: list[int]
    ) -> int:
        folder, spec = SuiteFolder(self.folder), self.spec
        state = folder.state(spec, mine=True)
        if state.kind == DONE:
            return 0
        if state.foreign or folder.failure(spec):
            return 1  # of another job, and shown already
        starts = self._note_begin(claim, folder, here)
        if starts > MAX_FRUITLESS or asked:
            return Preempted.exit_code
        note_job(folder.run(spec) / JOB_NAME, here.job_id)
        log = folder.log(spec)
        words = self._words(here)
        where = f", on {here.hostname}, job {here.job_id}"
        start = note_start(log, words, where)
        claim.write({**claims.read(folder.claim(spec)), LOG_START: start})
        board.tell(here.global_rank, begins=True)
        with open(log, "ab") as file:
            process = self._start(words, file, claim)
            failed_since, tidied = math.inf, time.monotonic()
            while process.poll() is None and not asked:
                time.sleep(POLL_SECONDS)
                if time.monotonic() - tidied > KEEP_SECONDS:
                    tidied = time.monotonic()
                    remove_checkpoints(folder.run(spec), self.keep, done=False)
                if board.failed() and failed_since == math.inf:
                    failed_since = time.monotonic()
                if time.monotonic() - failed_since > PARTNER_SECONDS:
                    break
            _stop(process, self.save_seconds)
            code = process.wait()
            if code and not asked and board.failed():
                rank, code = board.failed()[0]
                text = f"error: the process on machine {rank} ended with exit code {code}"
                file.write(f"{text}; see {board.log(rank)}\n".encode())
        if folder.state(spec, mine=True).kind == DONE:
            remove_checkpoints(folder.run(spec), self.keep, done=True)
        return code

    def _follow(self, here: "JobEnvironment", asked: list[int]) -> int:
        """On the other machines of a job: what the first one does."""
        board, rank = _Board(self.folder, here), here.global_rank
        deadline = time.monotonic() + SUBMIT_SECONDS + START_SECONDS
        while not board.read(0):
            if asked or time.monotonic() > deadline:
                return Preempted.exit_code
            time.sleep(POLL_SECONDS)
        if not board.read(0).get("begins"):
            return 0
        process = self._start(self._words(here), None, None)  # into the log of this task
        while process.poll() is None and not asked and board.read(0).get("begins"):
            time.sleep(POLL_SECONDS)
        _stop(process, self.save_seconds)
        code = process.wait()
        board.tell(rank, begins=False, code=0 if asked else code)
        while board.read(0).get("begins") and not asked:
            time.sleep(POLL_SECONDS)  # srun may end the others of a job in which one has ended
        return code

    def _take_claim(self, asked: list[int]) -> Claim | None:
        """The run's claim; None if somebody else is at it, or on a signal."""
        path = SuiteFolder(self.folder).claim(self.spec)
        begun = time.monotonic()
        while not asked:
            claim = Claim.take(path)
            if claim is not None:
                return claim
            # Without a job's number it is a runner's that is submitting.
            seconds = CLAIM_SECONDS if "job" in claims.read(path) else SUBMIT_SECONDS
            if time.monotonic() - begun > seconds:
                return None
            time.sleep(POLL_SECONDS)
        return None

    def _note_begin(self, claim: Claim, folder: SuiteFolder, here: "JobEnvironment") -> int:
        """Say in the claim who is at the run; how often it has begun at the same checkpoint."""
        path = folder.claim(self.spec)
        before = claims.read(path)
        folder.note_claim(claim, self.spec)
        now = claims.read(path)
        same = before.get(CHECKPOINT) == now[CHECKPOINT]
        starts = int(before.get(STARTS, 0)) + 1 if same else 1
        claim.write({**now, STARTS: starts, "job": here.job_id})
        return starts

    def _is_fruitless(self) -> bool:
        """Whether to leave it to the runner what becomes of a run that does not get on."""
        folder = SuiteFolder(self.folder)
        noted = claims.read(folder.claim(self.spec))
        same = folder.checkpoint(self.spec) == noted.get(CHECKPOINT)
        return same and int(noted.get(STARTS, 0)) >= MAX_FRUITLESS

    def _words(self, here: "JobEnvironment") -> list[str]:
        if self.machines == 1:
            return list(self.words)
        values = {RANK: str(here.global_rank), HOST: here.hostnames[0], PORT: str(port(here))}
        return [fill(word, values) for word in self.words]

    def _start(self, words: Sequence[str], log: Any, claim: Claim | None) -> "subprocess.Popen":
        cpu = {VISIBLE: "", **ONE_THREAD} if self.spec.gpus == 0 else {}
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "MOCO_PROGRESS": "off", **cpu},
            pass_fds=[] if claim is None else [claim.fd],
            start_new_session=True,  # what Slurm signals is this process, which asks it to save
        )


class _Board:
    """What the tasks of one job tell each other, in files below `jobs/`."""

    def __init__(self, folder: Path, here: "JobEnvironment") -> None:
        self._folder, self._id, self._machines = folder / JOBS, here.job_id, here.num_nodes
        self._begin = os.environ.get("SLURM_RESTART_COUNT", "0")  # a job that is begun again

    def tell(self, rank: int, *, begins: bool, code: int = 0) -> None:
        if self._machines > 1:
            atomic_write_json(self._path(rank), {"begins": begins, "code": code})

    def read(self, rank: int) -> dict[str, Any]:
        return read_json(self._path(rank))

    def failed(self) -> list[tuple[int, int]]:
        """(machine, exit code) of those whose process has failed."""
        codes = [(rank, int(self.read(rank).get("code", 0))) for rank in range(1, self._machines)]
        return [(rank, code) for rank, code in codes if code]

    def log(self, rank: int) -> Path:
        return self._folder / f"{self._id}_{rank}_log.err"

    def _path(self, rank: int) -> Path:
        return self._folder / f"{self._id}.{self._begin}.rank{rank}.json"


def port(here: "JobEnvironment") -> int:
    """Where the machines of a job meet: below the ports that systems hand out by themselves."""
    return 20000 + zlib.crc32(here.job_id.encode()) % 10000


def fill(word: str, values: Mapping[str, str]) -> str:
    """A word of a command with what only the machine knows."""
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _stop(process: "subprocess.Popen", seconds: float) -> None:
    """Ask a process to save and end; after so many seconds, end it and all that it has started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _preemption(here: "JobEnvironment") -> signal.Signals:
    return signal.Signals[f"SIG{here.USR_SIG}"]


@contextmanager
def _noted(asked: list[int], numbers: Sequence[signal.Signals]) -> Iterator[Any]:
    """While open, signals are only noted; yields what calls the handler that was there before."""

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in numbers}

    def hand_over(number: signal.Signals) -> None:
        handler = before[number]
        assert callable(handler)
        handler(number, None)

    try:
        yield hand_over
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _own_environment() -> Iterator[None]:
    """Without what a job that submits another one would hand on, but with what the user has set."""
    from submitit.helpers import clean_env

    own = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or k.startswith("SBATCH_")}
    with clean_env():
        os.environ.update(own)
        yield


def _said(text: str) -> str:
    """The last line that is not empty: what a program of Slurm says in the end."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _advice(gpus: int) -> str:
    return "check --slurm" + (" (gpus_per_node=0 on a cluster without GPUs)" if gpus else "")


def _bases(ids: Any) -> list[str]:
    """`12` for each of `12_0`, `12_1`, ...: an array can be named as a whole."""
    return list(dict.fromkeys(id_.partition("_")[0] for id_ in ids))


def _shown_minutes(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02d} h"
