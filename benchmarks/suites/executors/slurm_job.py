"""Program of a job of the Slurm executor, which computes one run until it is done or interrupted.

The script's process takes the run's lock, starts the run's program on all machines of the job
through srun, and handles its end. A program that was asked to save ends with the exit code of
`Preempted`. If the job is then still in state RUNNING, it requeues itself under its id, and resumes
later; a job in state COMPLETING was cancelled, or is requeued by Slurm.

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
from benchmarks.suites.checkpoints import KEEP_SECONDS, remove_checkpoints
from benchmarks.suites.children import ONE_THREAD
from benchmarks.suites.executors.base import HOST, PORT, RANK, VISIBLE
from benchmarks.suites.executors.slurm import note_job, query_queue
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import (
    CHECKPOINT,
    DONE,
    MAX_INTERRUPTIONS,
    STARTS,
    Run,
    interrupted_error,
    why_failed,
)
from moco.common.errors import LockedError, Preempted, run_cli
from moco.common.files import open_file, read_text
from moco.engine.stop import signals_by_name

POLL_SECONDS = 0.2
LOCK_SECONDS = 10.0  # timeout of the run's lock, which other processes test for a moment
STOP_SIGNALS = signals_by_name("SIGTERM", "SIGUSR1", "SIGUSR2")


def main(argv: Sequence[str] | None = None) -> int:
    """Run as the process of the batch script, or with --task as that of one machine."""
    mode, seconds, _, *command = sys.argv[1:] if argv is None else argv
    if mode == "--task":
        return task(command, float(seconds))
    array, index = os.environ["SLURM_ARRAY_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
    entry, id_ = json.loads(read_text(mode))[int(index)], f"{array}_{index}"
    keep, product = entry.pop("keep"), entry["product"]
    entry |= {"argv": [fill(argument, id_) for argument in entry["argv"]]}
    run = Run(**entry | {"folder": Path(entry["folder"]), "product": product and Path(product)})
    wrapper = [sys.executable, "-m", "benchmarks.suites.executors.slurm_job", "--task", seconds]
    code = lead(run, keep, id_, [*command, *wrapper, "--"])
    if code == Preempted.exit_code and (query_queue([id_]) or {}).get(id_) == "RUNNING":
        # Slurm kills scontrol together with the job. If requeuing fails, a runner submits another.
        subprocess.run(["scontrol", "requeue", id_])
    return code


def lead(run: Run, keep: str, id_: str, launcher: Sequence[str]) -> int:
    """Compute a run, unless it is settled or another process computes it.

    Args:
        run: Run of the job.
        keep: Policy of the checkpoints, see benchmarks/suites/checkpoints.py.
        id_: Id of the job.
        launcher: Prefix that starts a command on all machines of the job.

    Returns:
        0 if the run is done, for the jobs that depend on it; else the exit code of its program, or
        1.
    """
    signals: list[int] = []
    for number in STOP_SIGNALS:  # the program gets them, too; this process waits for its end
        signal.signal(number, lambda number, frame: signals.append(number))
    lock, started = Lock.take(run.lock), time.monotonic()
    while lock is None and time.monotonic() - started < LOCK_SECONDS:
        time.sleep(POLL_SECONDS)
        lock = Lock.take(run.lock)
    if lock is None:
        return LockedError.exit_code
    try:
        state = run.state(locked=True)
        if state.settled:
            return int(state.kind != DONE)  # another job settled it
        before = locks.read(run.lock)
        same = before.get(CHECKPOINT) == run.checkpoint()
        starts = int(before.get(STARTS, 0)) + 1 if same else 1
        run.note_holder(lock, job=id_, **{STARTS: starts})
        note_job(run.folder, id_)
        if starts > MAX_INTERRUPTIONS:
            run.fail(interrupted_error(f"the last one is job {id_}"), Preempted.exit_code)
            return 1
        log_start = run.note_start(f", job {id_} on {os.environ.get('SLURMD_NODENAME')}")
        code = _compute(run, keep, lock, [*launcher, *run.argv])
        # The signal came before the program had its handler, or srun has killed it with the job.
        if code - 128 in STOP_SIGNALS or (code and signals):
            code = Preempted.exit_code
        if run.state(locked=True).kind == DONE:
            remove_checkpoints(run.folder, keep, done=True)
            return 0
        if code == Preempted.exit_code:
            if starts == MAX_INTERRUPTIONS and not run.has_progressed():
                run.fail(interrupted_error(f"the last one is job {id_}"), code)
                return 1
        elif code != LockedError.exit_code:
            run.fail(why_failed(run, code, log_start), code)
        return code
    finally:
        lock.release()


def _compute(run: Run, keep: str, lock: Lock, command: Sequence[str]) -> int:
    cpu = {VISIBLE: "", **ONE_THREAD} if run.gpus == 0 else {}
    with open_file(run.log, "ab") as log:
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
    """Run the program on one machine of the job, and pass on Slurm's signals as SIGTERM.

    Args:
        command: Command with placeholders.
        save_seconds: Time between SIGTERM and SIGKILL.

    Returns:
        The exit code of the program, or that of `Preempted` if it was stopped by a signal.
    """
    rank = os.environ.get("SLURM_NODEID", "0")
    deadlines: list[float] = []

    def terminate(number: int, frame: object) -> None:
        deadlines.append(time.monotonic() + save_seconds)
        process.terminate()

    argv = [argument.replace(RANK, rank) for argument in command]
    process = subprocess.Popen(argv, start_new_session=True)
    for number in STOP_SIGNALS:
        signal.signal(number, terminate)
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        if deadlines and time.monotonic() > deadlines[0]:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Preempted.exit_code if code and deadlines else code


def fill(argument: str, id_: str) -> str:
    """Fill in the rendezvous address of a job's machines: the first machine, and a port.

    The port follows from the job's id, and is below the ephemeral ports of Linux.
    """
    port = 20000 + zlib.crc32(id_.encode()) % 10000
    first = os.environ.get("SLURMD_NODENAME", "localhost")
    return argument.replace(HOST, first).replace(PORT, str(port))


if __name__ == "__main__":
    run_cli(main)
