"""A cluster in miniature: sbatch, squeue, sacct, scancel, scontrol and srun in one program.

It keeps to what the suite relies on in the real ones: an array's tasks really run, in the
background, with Slurm's variables; a job has a number that it keeps when it is put back into the
queue; all of a job's processes end with it; who submitted it need not live. Its state is the folder
FAKE_SLURM:

    <id>.json      one job, or one task of an array
    <array>.sh     the script that was submitted
    hold           while it is there, no job starts
    refuse         sbatch answers with what it says; refuse-test: sbatch --test-only does;
                   refuse-requeue: scontrol requeue does; kill-requeue: it is ended with the job
    calls          one line for each call of a program

    python fake_slurm.py PROGRAM ARGUMENTS...        what a program on PATH calls, see install()
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "srun")
MARK = "FAKE_SLURM_JOB"  # in the environment of all processes of a job
IN_QUEUE = ("PENDING", "RUNNING")


def install(path: Path) -> dict[str, str]:
    """Write the programs below `path`; the variables that make them found."""
    (path / "state").mkdir(parents=True)
    for name in PROGRAMS:
        program = path / name
        # -I -S: a fast start, as a test calls them some hundred times.
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {name} "$@"\n')
        program.chmod(0o755)
    own = {"FAKE_SLURM": str(path / "state"), "SLURM_CONF": str(path / "slurm.conf")}
    return {"PATH": f"{path}:{os.environ['PATH']}", **own}


class Cluster:
    """What a test asks of the cluster, and does to it."""

    def __init__(self, path: Path) -> None:
        self.state = path / "state"

    def jobs(self) -> dict[str, dict]:
        """Id → its job, in the order of the numbers."""
        files = self.state.glob("*.json")
        jobs = [json.loads(file.read_text()) for file in files]
        return {job["id"]: job for job in sorted(jobs, key=lambda job: job["order"])}

    def scripts(self) -> dict[str, str]:
        return {path.stem: path.read_text() for path in sorted(self.state.glob("*.sh"))}

    def calls(self, program: str) -> list[str]:
        lines = (self.state / "calls").read_text().splitlines()
        return [line for line in lines if line.split()[0] == program]

    def hold(self) -> None:
        (self.state / "hold").touch()

    def go(self) -> None:
        (self.state / "hold").unlink()

    def signal_tasks(self, id_: str, number: int) -> None:
        """What Slurm sends to a job's tasks, and not to what they have started."""
        for pid in self.jobs()[id_]["tasks"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def lose(self, id_: str) -> None:
        """The node is gone with everything on it, and the job is not put back."""
        with change(self.state, id_) as job:
            job["state"] = "NODE_FAIL"
        kill_all(self.state, id_)

    def end(self) -> None:
        """After a test."""
        for id_ in self.jobs():
            with change(self.state, id_) as job:
                job["state"] = "CANCELLED"
            kill_all(self.state, id_)


@contextlib.contextmanager
def change(state: Path, id_: str):
    """A job's content, written back at the end, by one process at a time."""
    with open(state / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = state / f"{id_}.json"
        job = json.loads(path.read_text())
        yield job
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(job))
        os.replace(temporary, path)


def processes(state: Path, id_: str) -> list[int]:
    """All living processes of a job of this cluster: other tests may have others."""
    mark, found = f"{MARK}={state}:{id_}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            dead = (path / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            if not dead and mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def kill_all(state: Path, id_: str) -> None:
    while pids := processes(state, id_):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def options(script: str) -> dict[str, str]:
    """The #SBATCH lines of a script."""
    found = {}
    for line in script.splitlines():
        if match := re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.*))?", line):
            found[match[1]] = (match[2] or "true").strip("'\"")
    return found


def sbatch(state: Path, arguments: list[str]) -> int:
    if arguments == ["--test-only"]:
        script = sys.stdin.read()
        assert options(script)["time"].isdecimal(), script
        refused = (state / "refuse-test").exists()
        said = (state / "refuse-test").read_text() if refused else "sbatch: Job 7 to start at ..."
        print(said, file=sys.stderr)
        return int(refused)
    script = Path(arguments[-1]).read_text()
    if (state / "refuse").exists():
        print((state / "refuse").read_text(), file=sys.stderr)
        return 1
    asked = options(script)
    with open(state / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        number = 100 + len(list(state.glob("*.sh")))
        (state / f"{number}.sh").write_text(script)
        tasks: list[int | None] = [None]
        if "array" in asked:
            first, last = asked["array"].split("%")[0].split("-")
            tasks = list(range(int(first), int(last) + 1))
        ids = []
        for task in tasks:
            ids.append(str(number) if task is None else f"{number}_{task}")
            job = {"id": ids[-1], "array": number, "task": task, "state": "PENDING", "restarts": 0}
            job |= {"order": number * 1000 + (task or 0), "tasks": [], "cwd": os.getcwd()}
            (state / f"{ids[-1]}.json").write_text(json.dumps(job))
    with open(state / "control.log", "a") as log:
        for id_ in ids:  # what controls it: a process that outlives all others
            words = [sys.executable, "-I", "-S", __file__, "control", id_]
            subprocess.Popen(words, stdin=-3, stdout=-3, stderr=log, start_new_session=True)
    print(f"Submitted batch job {number}")
    return 0


def control(state: Path, arguments: list[str]) -> int:
    """One job, until it is not in the queue any more."""
    [id_] = arguments
    while True:
        job = json.loads((state / f"{id_}.json").read_text())
        if job["state"] not in IN_QUEUE:
            return 0
        if (state / "hold").exists():
            time.sleep(0.02)
            continue
        script = state / f"{job['array']}.sh"
        asked = options(script.read_text())
        nodes = int(asked.get("nodes", 1))
        environment = {
            **os.environ,
            MARK: f"{state}:{id_}",
            "SLURM_JOB_ID": str(job["order"]),
            "SLURM_NTASKS": str(nodes * int(asked.get("ntasks-per-node", 1))),
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": f"node[1-{nodes}]" if nodes > 1 else "node1",
            "SLURM_RESTART_COUNT": str(job["restarts"]),
        }
        if job["task"] is None:
            environment["SLURM_JOB_ID"] = id_
        else:
            environment["SLURM_ARRAY_JOB_ID"] = str(job["array"])
            environment["SLURM_ARRAY_TASK_ID"] = str(job["task"])
        with change(state, id_) as now:
            if now["state"] != "PENDING":
                continue
            now["state"], now["requeue"] = "RUNNING", False
        code = subprocess.run(["bash", script], env=environment, cwd=job["cwd"]).returncode
        kill_all(state, id_)
        with change(state, id_) as now:
            now["tasks"] = []
            if now["requeue"]:
                now["state"], now["restarts"] = "PENDING", now["restarts"] + 1
                now["requeue"] = False
            elif now["state"] in IN_QUEUE:
                now["state"] = "COMPLETED" if code == 0 else "FAILED"


def srun(state: Path, arguments: list[str]) -> int:
    """Start the tasks, each with its number and its logs; the greatest of their exit codes."""
    values, words = {}, list(arguments)
    while words[0].startswith("--"):
        name = words.pop(0)
        if name in ("--output", "--error"):
            values[name] = words.pop(0)
    id_, nodes = os.environ[MARK].rpartition(":")[2], int(os.environ["SLURM_JOB_NUM_NODES"])
    tasks = []
    for rank in range(nodes):
        names = {
            "%t": str(rank),
            "%j": os.environ["SLURM_JOB_ID"],
            "%A": id_.split("_")[0],
            "%a": id_.split("_")[-1],
        }
        logs = [values["--output"], values["--error"]]
        for pattern, value in names.items():
            logs = [name.replace(pattern, value) for name in logs]
        own = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}
        environment = {**os.environ, **own}
        with open(logs[0], "a") as out, open(logs[1], "a") as err:
            tasks.append(subprocess.Popen(words, stdout=out, stderr=err, env=environment))
    with change(state, id_) as job:
        job["tasks"] = [task.pid for task in tasks]
    return max(task.wait() & 0xFF for task in tasks)


def squeue(state: Path, arguments: list[str]) -> int:
    values = dict(word.removeprefix("--").partition("=")[::2] for word in arguments)
    assert values.keys() == {"noheader", "array", "format", "jobs"}, values
    wanted = values["jobs"].split(",")
    known = [job for job in Cluster(state.parent).jobs().values() if str(job["array"]) in wanted]
    known = [job for job in known if job["state"] in IN_QUEUE]
    if not known and len(wanted) == 1:
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    for job in known:
        node = "node1" if job["state"] == "RUNNING" else ""
        shown = "COMPLETING" if job.get("requeue") else job["state"]
        line = values["format"].replace("%i", job["id"])
        print(line.replace("%T", shown).replace("%N", node))
    return 0


def sacct(state: Path, arguments: list[str]) -> int:
    """As where there is no accounting."""
    print("Slurm accounting storage is disabled", file=sys.stderr)
    return 1


def scancel(state: Path, arguments: list[str]) -> int:
    """SIGTERM to the tasks, and the end of everything a while later."""
    cluster = Cluster(state.parent)
    for id_, job in cluster.jobs().items():
        if {id_, str(job["array"])} & set(arguments) and job["state"] in IN_QUEUE:
            with change(state, id_) as now:
                now["state"] = "CANCELLED"
            cluster.signal_tasks(id_, signal.SIGTERM)
    return 0


def scontrol(state: Path, arguments: list[str]) -> int:
    if arguments[:3] == ["--oneliner", "show", "job"]:
        job = Cluster(state.parent).jobs()[arguments[3]]
        print(f"JobId={job['order']} JobState={job['state']} Reason=None")
        return 0
    assert arguments[0] == "requeue", arguments
    if (state / "refuse-requeue").exists():
        return 1
    with change(state, arguments[1]) as job:
        job["requeue"] = True
    Cluster(state.parent).signal_tasks(arguments[1], signal.SIGTERM)
    return 143 if (state / "kill-requeue").exists() else 0


def main() -> int:
    name, *arguments = sys.argv[1:]
    state = Path(os.environ["FAKE_SLURM"])
    assert os.environ.get("SLURM_CONF") == str(state.parent / "slurm.conf"), "is the cluster known?"
    with open(state / "calls", "a") as calls:
        calls.write(f"{' '.join([name, *arguments])}\n")
    programs = {"control": control, "sbatch": sbatch, "srun": srun, "squeue": squeue}
    programs |= {"sacct": sacct, "scancel": scancel, "scontrol": scontrol}
    return programs[name](state, arguments)


if __name__ == "__main__":
    sys.exit(main())
