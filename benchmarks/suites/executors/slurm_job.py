"""What runs in a job of the Slurm executor: one run of a suite, until it is done or interrupted.

The script's process takes the run's lock, starts the run's program on all machines of the job
through srun, and says what its end means. A program that was asked to save has ended with
`Preempted`'s exit code; if the job then still counts as running, it puts itself back into the queue
under its number, and resumes there. One that is completing was cancelled, or is put back by Slurm.

    python -m benchmarks.suites.executors.slurm_job RUNS.json SECONDS -- srun ARGUMENTS
    python -m benchmarks.suites.executors.slurm_job --task SECONDS -- COMMAND    (started by srun)
"""

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suites import locks
from benchmarks.suites.executors.base import HOST, ONE_THREAD, PORT, RANK, VISIBLE
from benchmarks.suites.executors.slurm import ask_queue, note_job
from benchmarks.suites.keep import KEEP_SECONDS, remove_checkpoints
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import (
    CHECKPOINT,
    DONE,
    MAX_FRUITLESS,
    STARTS,
    Run,
    fruitless_error,
    why_failed,
)
from moco.common.errors import LockedError, Preempted, run_cli
from moco.engine.stop import signals_by_name

POLL_SECONDS = 0.2
LOCK_SECONDS = 10.0  # a job waits for its run's lock, which others may be looking at
SUBMIT_SECONDS = 120.0  # or holding while they submit
STOP_SIGNALS = signals_by_name("SIGTERM", "SIGUSR1", "SIGUSR2")


def main(argv: Sequence[str] | None = None) -> int:
    mode, seconds, _, *command = sys.argv[1:] if argv is None else argv
    if mode == "--task":
        return task(command, float(seconds))
    array, index = os.environ["SLURM_ARRAY_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
    entry, id_ = json.loads(Path(mode).read_text(encoding="utf-8"))[int(index)], f"{array}_{index}"
    keep, program = entry.pop("keep"), entry.pop("argv")
    run = Run(**entry | {"folder": Path(entry["folder"]), "argv": lambda: program})
    wrapper = [sys.executable, "-m", "benchmarks.suites.executors.slurm_job", "--task", seconds]
    code = lead(run, keep, id_, [*command, *wrapper, "--"])
    if code == Preempted.exit_code and (ask_queue([id_]) or {}).get(id_) == "RUNNING":
        # What puts a job back is ended together with it. Where that fails a runner submits another.
        subprocess.run(["scontrol", "requeue", id_])
    return code


def lead(run: Run, keep: str, id_: str, launcher: Sequence[str]) -> int:
    """Compute a run, if nobody else does or has; the exit code of its program.

    Args:
        keep: which checkpoints stay, see benchmarks/suites/keep.py.
        id_: of the job. launcher: starts a command on all machines of the job.
    """
    for number in STOP_SIGNALS:  # the program gets them, too, and its end is what counts
        signal.signal(number, lambda number, frame: None)
    lock, begun = Lock.take(run.lock), time.monotonic()
    while lock is None:
        # Without a job's number it is a runner's that is submitting.
        seconds = LOCK_SECONDS if "job" in locks.read(run.lock) else SUBMIT_SECONDS
        if time.monotonic() - begun > seconds:
            break
        time.sleep(POLL_SECONDS)
        lock = Lock.take(run.lock)
    if lock is None:
        return LockedError.exit_code
    try:
        if run.state(locked=True).settled:
            return 0  # by another job, and shown already
        before = locks.read(run.lock)
        same = before.get(CHECKPOINT) == run.checkpoint()
        starts = int(before.get(STARTS, 0)) + 1 if same else 1
        run.note_holder(lock, job=id_, **{STARTS: starts})
        note_job(run.folder, id_)
        argv = [fill(argument, id_) for argument in run.argv()]
        if starts > MAX_FRUITLESS:
            run.fail(fruitless_error(f"the last one is job {id_}"), Preempted.exit_code)
            return 0
        log_start = run.note_start(argv, f", job {id_} on {os.environ.get('SLURMD_NODENAME')}")
        code = _compute(run, keep, lock, [*launcher, *argv])
        if code - 128 in STOP_SIGNALS:  # asked to end before it could answer
            code = Preempted.exit_code
        if run.state(locked=True).kind == DONE:
            remove_checkpoints(run.folder, keep, done=True)
        elif code == Preempted.exit_code:
            if starts == MAX_FRUITLESS and not run.has_progressed():
                run.fail(fruitless_error(f"the last one is job {id_}"), code)
                return 0
        elif code != LockedError.exit_code:
            run.fail(why_failed(run, code, log_start), code)
        return code
    finally:
        lock.release()


def _compute(run: Run, keep: str, lock: Lock, command: Sequence[str]) -> int:
    cpu = {VISIBLE: "", **ONE_THREAD} if run.gpus == 0 else {}
    with open(run.log, "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "MOCO_PROGRESS": "off", **cpu},
            pass_fds=[lock.fd],
        )
        while True:
            try:
                return process.wait(KEEP_SECONDS)
            except subprocess.TimeoutExpired:
                remove_checkpoints(run.folder, keep, done=False)


def task(command: Sequence[str], save_seconds: float) -> int:
    """On each machine: the program, which a signal of Slurm's asks to save and end.

    Returns:
        Its exit code; `Preempted`'s if it was asked to end and has not come to its end.
    """
    rank = os.environ.get("SLURM_NODEID", "0")
    deadlines: list[float] = []

    def ask(number: int, frame: object) -> None:
        deadlines.append(time.monotonic() + save_seconds)
        process.terminate()

    argv = [argument.replace(RANK, rank) for argument in command]
    process = subprocess.Popen(argv, start_new_session=True)
    for number in STOP_SIGNALS:
        signal.signal(number, ask)
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        if deadlines and time.monotonic() > deadlines[0]:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Preempted.exit_code if code and deadlines else code


def fill(argument: str, id_: str) -> str:
    """An argument with where the machines of a job meet: the first of them, and a port below those
    that systems hand out by themselves."""
    port = 20000 + zlib.crc32(id_.encode()) % 10000
    first = os.environ.get("SLURMD_NODENAME", "localhost")
    return argument.replace(HOST, first).replace(PORT, str(port))


if __name__ == "__main__":
    run_cli(main)
