"""Miniature Slurm for tests: the programs `sbatch`, `srun`, `squeue`, `scontrol` and `scancel`.

The queue is a folder with a file per job: its state and the pid of its script's session. Jobs
start at once. A file `refuse` has the error of sbatch, and a file `lose` the state with which jobs
leave the queue before they start.
"""

import fcntl
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
QUEUED = ("PENDING", "RUNNING", "COMPLETING")


class FakeSlurm:
    """Queue of jobs in a folder, and the programs that a suite calls, for PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        for name in PROGRAMS:
            program = self.bin / name
            program.write_text(
                f'#!/bin/sh\nexec {sys.executable} -S -E {__file__} {folder} {name} "$@"\n'
            )
            program.chmod(0o755)

    def states(self) -> dict[str, str]:
        """Return job → its state, in the order of submission."""
        return {name: job["state"] for name, job in jobs(self.folder).items()}

    def ended(self) -> dict[str, str]:
        """Wait until no job is in the queue, and return job → its last state."""
        end = time.monotonic() + 60
        while set(QUEUED) & {*self.states().values()}:
            assert time.monotonic() < end, self.states()
            time.sleep(0.02)
        return self.states()

    def scripts(self) -> list[str]:
        """Return the submitted scripts."""
        return [path.read_text() for path in sorted(self.folder.glob("*.sh"))]

    def signal(self, id_: str, number: int) -> None:
        """Send a signal to all processes of a job, as `scancel --full` does."""
        os.killpg(jobs(self.folder)[id_]["pid"], number)


def jobs(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*_*.json"))}


def update(folder: Path, id_: str, **fields: object) -> None:
    """Change a job's file in one step, while no other process does."""
    path = folder / f"{id_}.json"
    with open(folder / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = json.loads(path.read_text()) if path.exists() else {}
        path.with_suffix(".new").write_text(json.dumps({**before, **fields}))
        path.with_suffix(".new").replace(path)


def sbatch(folder: Path, *options: str) -> int:
    script = sys.stdin.read()
    if (refuse := folder / "refuse").exists():
        print(refuse.read_text(), file=sys.stderr)
        return 1
    if "--test-only" in options:
        return 0
    array = str(101 + len(list(folder.glob("*.sh"))))
    (folder / f"{array}.sh").write_text(script)
    last = int(re.search(r"--array=0-(\d+)", script)[1])
    for index in range(last + 1):
        update(folder, f"{array}_{index}", state="PENDING", pid=0, after=after(script))
    for index in range(last + 1):
        argv = [sys.executable, "-S", "-E", __file__, str(folder), "job", array, str(index)]
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.Popen(argv, start_new_session=True, **quiet)
    print(f"{array};here")
    return 0


def after(script: str) -> list[str]:
    found = re.search(r"--dependency=afterok:(\S+)", script)
    return found[1].strip("'").split(":") if found else []


def job(folder: Path, array: str, index: str) -> int:
    """Wait for the dependencies of a job, and run its script, again as long as it is requeued."""
    id_ = f"{array}_{index}"
    script = (folder / f"{array}.sh").read_text()
    output = re.search(r"--output=(\S+)", script)[1].replace("%A_%a", id_)
    names = {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": index, "SLURMD_NODENAME": "node1"}
    while True:
        states = [jobs(folder)[name]["state"] for name in after(script)]
        if jobs(folder)[id_]["state"] == "CANCELLED":
            return 0
        if any(state not in (*QUEUED, "COMPLETED") for state in states):
            update(folder, id_, state="CANCELLED")
            return 0
        if set(states) - {"COMPLETED"}:
            time.sleep(0.02)
            continue
        if (lose := folder / "lose").exists():
            update(folder, id_, state=lose.read_text())
            return 0
        with open(output, "ab") as log:
            own = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(
                ["bash", str(folder / f"{array}.sh")],
                env={**os.environ, **names},
                start_new_session=True,
                **own,
            )
        update(folder, id_, state="RUNNING", pid=process.pid)
        code = process.wait()
        if jobs(folder)[id_]["state"] == "RUNNING":
            update(folder, id_, state="FAILED" if code else "COMPLETED")
        elif jobs(folder)[id_]["state"] == "COMPLETING":
            update(folder, id_, state="CANCELLED")
        if jobs(folder)[id_]["state"] != "PENDING":
            return 0


def srun(folder: Path, *arguments: str) -> int:
    """Start a command on each node: its processes have the number of their node.

    On SIGTERM, which its group has received as a whole, it waits for them, as srun does.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    options = list(itertools.takewhile(lambda each: each.startswith("--"), arguments))
    command = list(arguments[len(options) :])
    [nodes] = [int(each.partition("=")[2]) for each in options if each.startswith("--nodes=")]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "SLURM_NODEID": str(node), "SLURMD_NODENAME": f"node{node + 1}"},
        )
        for node in range(nodes)
    ]
    codes = [process.wait() for process in processes]
    return max(code if code >= 0 else 128 - code for code in codes)


def squeue(folder: Path, *options: str) -> int:
    wanted = next(each for each in (*options, *options[1:]) if re.search(r"\d", each))
    wanted = wanted.partition("=")[2] or wanted
    arrays = wanted.split(",")
    for id_, each in jobs(folder).items():
        if each["state"] in QUEUED:
            if id_ in arrays:
                print(each["state"])
            elif id_.partition("_")[0] in arrays:
                print(f"{id_}|{each['state']}")
    return 0


def scontrol(folder: Path, *words: str) -> int:
    if words[0] == "requeue":
        update(folder, words[1], state="PENDING")
    else:
        print(f"JobId={words[-1]} JobState={jobs(folder)[words[-1]]['state']} Reason=None")
    return 0


def scancel(folder: Path, id_: str) -> int:
    pid = jobs(folder)[id_]["pid"]
    update(folder, id_, state="COMPLETING" if pid else "CANCELLED")
    if pid:
        os.killpg(pid, signal.SIGTERM)
    return 0


if __name__ == "__main__":
    place, program, *rest = sys.argv[1:]
    sys.exit(globals()[program](Path(place), *rest))
