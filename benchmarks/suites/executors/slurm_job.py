"""Program of a job of the Slurm executor, which the batch script starts on each machine of the job.

It computes one run until that is done or interrupted. On the first machine it holds the lock of the
run, and records a failure. If the run's program was asked to save, it ends with the exit code of
`Preempted`, and the script (`make_script`) requeues the job.

    python -m benchmarks.suites.executors.slurm_job RUNS.json SECONDS FIRST_NODE
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
from benchmarks.suites.checkpoints import ALL, KEEP_SECONDS, remove_checkpoints
from benchmarks.suites.executors.base import VISIBLE
from benchmarks.suites.executors.slurm import STOP_SIGNALS, note_job
from benchmarks.suites.forkserver import ONE_THREAD
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import (
    CHECKPOINT,
    DONE,
    HOST,
    MAX_INTERRUPTIONS,
    PORT,
    RANK,
    STARTS,
    Run,
    interrupted_error,
    why_failed,
)
from moco.common.errors import LockedError, Preempted, run_cli
from moco.common.files import open_file, read_text

POLL_SECONDS = 0.2
LOCK_SECONDS = 10.0  # timeout of the run's lock, which other processes hold briefly to test it


def main(argv: Sequence[str] | None = None) -> int:
    """Compute the run of this job, unless it is settled or another process computes it.

    Returns:
        0 if the run is done, for the jobs that depend on it; else the exit code of its program, or
        1.
    """
    entries, seconds, first_node = sys.argv[1:] if argv is None else argv
    array, index = os.environ["SLURM_ARRAY_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
    job, rank = f"{array}_{index}", os.environ["SLURM_NODEID"]
    entry = json.loads(read_text(Path(entries)))[int(index)]
    keep, product = entry.pop("keep"), entry["product"]
    run = Run(**entry | {"folder": Path(entry["folder"]), "product": product and Path(product)})
    # The port follows from the job's id, and is below the ephemeral ports of Linux.
    port = str(20000 + zlib.crc32(job.encode()) % 10000)
    command = [
        argument.replace(RANK, rank).replace(HOST, first_node).replace(PORT, port)
        for argument in run.argv
    ]
    if rank != "0":
        return 0 if run.state().settled else run_program(command, run, float(seconds))
    lock, deadline = Lock.acquire(run.lock), time.monotonic() + LOCK_SECONDS
    while lock is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        lock = Lock.acquire(run.lock)
    if lock is None:
        return LockedError.exit_code
    try:
        state = run.state(locked=True)
        if state.settled:  # by another job
            return int(state.kind != DONE)
        return compute(command, run, keep, job, lock, float(seconds))
    finally:
        lock.release()


def compute(
    command: Sequence[str], run: Run, keep: str, job: str, lock: Lock, save_seconds: float
) -> int:
    """Compute a run whose lock this process holds, and return the exit code of the job.

    Args:
        command: Command of the run on this machine.
        run: Run of the job.
        keep: Policy of the checkpoints, see benchmarks/suites/checkpoints.py.
        job: Id of the job.
        lock: Lock of the run.
        save_seconds: Time between SIGTERM and SIGKILL.
    """
    before = locks.read_holder(run.lock)
    same = before.get(CHECKPOINT) == run.checkpoint()
    starts = int(before.get(STARTS, 0)) + 1 if same else 1
    run.note_holder(lock, job=job, **{STARTS: starts})
    note_job(run.folder, job)
    if starts > MAX_INTERRUPTIONS:
        run.fail(interrupted_error(f"the last one is job {job}"), Preempted.exit_code)
        return 1
    log_start = run.note_start(f", job {job} on {os.environ.get('SLURMD_NODENAME')}")
    code = run_program(command, run, save_seconds, keep=keep, lock=lock)
    if run.state(locked=True).kind == DONE:
        remove_checkpoints(run.folder, keep, done=True)
        return 0
    if code not in (Preempted.exit_code, LockedError.exit_code):
        run.fail(why_failed(run, code, log_start), code)
    return code


def run_program(
    command: Sequence[str],
    run: Run,
    save_seconds: float,
    *,
    keep: str = ALL,
    lock: Lock | None = None,
) -> int:
    """Run the program of a run on this machine, and pass on Slurm's signals as SIGTERM.

    Args:
        command: Command of the run on this machine.
        run: Run, whose log the output is appended to.
        save_seconds: Time between SIGTERM and SIGKILL.
        keep: Policy of the checkpoints, which are deleted meanwhile.
        lock: Lock of the run, which is held as long as the program lives.

    Returns:
        The exit code of the program, or that of `Preempted` if it was stopped by a signal.
    """
    deadlines: list[float] = []

    def terminate(number: int, frame: object) -> None:
        deadlines.append(time.monotonic() + save_seconds)
        process.terminate()

    cpu = {VISIBLE: "", **ONE_THREAD} if run.gpus == 0 else {}
    with open_file(run.log, "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "MOCO_PROGRESS": "off", **cpu},
            pass_fds=[lock.fd] if lock else [],
            start_new_session=True,  # Slurm signals the group of this process
        )
    for number in STOP_SIGNALS:
        signal.signal(number, terminate)
    next_removal = time.monotonic() + KEEP_SECONDS
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        if deadlines and time.monotonic() > deadlines[0]:
            os.killpg(process.pid, signal.SIGKILL)
        if time.monotonic() > next_removal:
            remove_checkpoints(run.folder, keep, done=False)
            next_removal = time.monotonic() + KEEP_SECONDS
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Preempted.exit_code if code and deadlines else code


if __name__ == "__main__":
    run_cli(main)
