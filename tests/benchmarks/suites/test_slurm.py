"""The Slurm executor without a Slurm: its script, its options, and what a job does on its node."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.suites import locks
from benchmarks.suites.executors import slurm, slurm_job
from benchmarks.suites.executors.base import HOST, PORT, RANK
from benchmarks.suites.executors.slurm import SlurmExecutor
from benchmarks.suites.executors.slurm_job import fill, lead
from benchmarks.suites.executors.slurm_script import make_script, parse_options
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import MAX_FRUITLESS, Run
from benchmarks.suites.scheduler import Scheduler
from moco.common.errors import LockedError, UserError
from tests.benchmarks.suites.fake_trainer import ITERATIONS
from tests.benchmarks.suites.lab import Lab, kept


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job, "STOP_SIGNALS", ())  # the job is this process here


def test_the_script_that_is_submitted():
    options = parse_options(
        [
            "partition=long",
            "time=1-02:30:01",
            "gpus_per_node=4",
            "cpus_per_gpu=6",
            "mem_per_gpu=20G",
            "array_parallelism=3",
            "signal_delay_s=120",
            "exclusive=true",
            "setup=module load x",
            "sbatch.reservation=night",
            "setup=ulimit -n 4096",
            "teardown=echo end",
            "srun_args=--mpi=none",
        ]
    )
    jobs = Path("/suite/jobs")
    script = make_script(options, "moco-out", jobs, jobs / "x.json", 4, gpus=8, nodes=2)
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")} == {
        "partition=long",
        "time=1-02:30:01",
        "mem-per-gpu=20G",
        "exclusive",
        "reservation=night",
        "job-name=moco-out",
        "array=0-3%3",
        "signal=TERM@120",
        "requeue",
        "open-mode=append",
        "nodes=2",
        "ntasks-per-node=1",
        "cpus-per-task=24",
        "gpus-per-node=4",
        "output=/suite/jobs/%A_%a.log",
    }
    *_, first, second, start, last = lines
    assert (first, second, last) == ("module load x", "ulimit -n 4096", "echo end")
    assert re.search(r"-m \S+\.slurm_job /suite/jobs/x\.json 100\.0 -- srun --nodes=2 ", start)
    assert "--cpus-per-task=24" in start and start.endswith(" --mpi=none")
    cpu = make_script(parse_options(["cpus_per_task=3"]), "n", jobs, jobs / "x.json", 1, 0, 1)
    assert "--cpus-per-task=3\n" in cpu and "gpus" not in cpu and "array=0-0%256" in cpu


def test_the_script_outlives_a_signal_to_all_of_the_job(tmp_path):
    """`scancel --signal=TERM --full`: what runs in it saves, and the lines after it are done."""
    (tmp_path / "waits.py").write_text(
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [15])\nprint('ready')\n"
        "signal.sigwait([15])\nprint('saved')\n"
    )
    setup = f"setup={sys.executable} -u {tmp_path / 'waits.py'}"
    options = parse_options([setup, "teardown=echo ended"])
    script = make_script(options, "n", tmp_path, tmp_path / "none.json", 1, gpus=0, nodes=1)
    (tmp_path / "job.sh").write_text(script)
    job = subprocess.Popen(
        ["bash", str(tmp_path / "job.sh")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    os.killpg(job.pid, signal.SIGTERM)
    said, _ = job.communicate(timeout=60)
    assert (said.splitlines(), job.returncode) == (["saved", "ended"], 0)


def test_options():
    options = parse_options(["time=90", "time=01:30:01", "qos=high"])
    assert options.sbatch == {"time": "01:30:01", "qos": "high"} and options.save_seconds == 70
    assert parse_options(["signal_delay_s=30"]).save_seconds == 15
    executor = SlurmExecutor(Path("out"), parse_options(["gpus_per_node=4"]), 0, "all")
    assert [executor.machines(gpus) for gpus in (0, 1, 4, 8, 16)] == [1, 1, 1, 2, 4]
    with pytest.raises(UserError, match=r"10 GPUs .* 3 nodes of 4"):
        executor.machines(10)


def test_what_squeue_says(monkeypatch):
    answers = [
        (0, "12_0|RUNNING\n12_3|PENDING\n\n", {"12_0": "RUNNING", "12_3": "PENDING"}),
        (1, "slurm_load_jobs error: Invalid job id specified", {}),
        (1, "slurm_load_jobs error: Unable to contact slurm controller", None),
    ]
    calls = []

    def run(command, **keys):
        calls.append(command)
        code, text, _ = answers[len(calls) - 1]
        return subprocess.CompletedProcess(command, code, text, text)

    monkeypatch.setattr(slurm.subprocess, "run", run)
    for _, _, expected in answers:
        assert slurm.ask_queue(["12_0", "12_3", "14_1"]) == expected
    assert calls[0][-1] == "--jobs=12,14" and slurm.ask_queue([]) == {} and len(calls) == 3


def test_where_machines_meet(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    ports = {fill(PORT, f"12_{index}") for index in range(4)}
    assert len(ports) == 4 and all(20000 <= int(port) < 30000 for port in ports)
    assert fill(f"tcp://{HOST}:x", "12_0") == "tcp://node1:x" and fill(RANK, "12_0") == RANK


class Cluster:
    """The queue in the place of Slurm's programs: jobs begin when a test says so."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.scripts, self.states = path, list[str](), dict[str, str]()
        self.refuses, self.patch = "", monkeypatch
        monkeypatch.setattr(slurm, "sbatch", self.sbatch)
        monkeypatch.setattr(slurm, "ask_queue", self.ask_queue)
        monkeypatch.setattr(slurm, "last_state", lambda id_: self.states[id_])
        for name in ("LOOK_SECONDS", "QUEUE_SECONDS", "GONE_SECONDS"):
            monkeypatch.setattr(slurm, name, 0.05)

    def sbatch(self, arguments, script):
        if self.refuses:
            return subprocess.CompletedProcess([], 1, "", self.refuses)
        self.scripts.append(script)
        [(last,)] = [match.groups() for match in re.finditer(r"--array=0-(\d+)", script)]
        array = 100 + len(self.scripts)
        self.states |= {f"{array}_{index}": "PENDING" for index in range(int(last) + 1)}
        return subprocess.CompletedProcess([], 0, f"{array};here\n", "")

    def ask_queue(self, ids) -> dict[str, str]:
        queued = ("PENDING", "RUNNING")
        return {id_: self.states[id_] for id_ in ids if self.states[id_] in queued}

    def pending(self) -> list[str]:
        return [id_ for id_, state in self.states.items() if state == "PENDING"]

    def begin(self, id_: str) -> int:
        """The job's own program, with `env` in the place of srun; its exit code."""
        array, index = id_.split("_")
        [entries] = re.findall(r"slurm_job (\S+) ", self.scripts[int(array) - 101])
        self.states[id_] = "RUNNING"
        self.patch.setenv("SLURM_ARRAY_JOB_ID", array)
        self.patch.setenv("SLURM_ARRAY_TASK_ID", index)
        return slurm_job.main([entries, "1", "--", "env"])


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def runs_of(lab: Lab) -> tuple[Run, ...]:
    """The runs of a folder whose suite was begun on this machine, with code to run."""
    folder = SuiteFolder(lab.out)
    return tuple(folder.run(spec) for spec in folder.read()[1])


def code_run(folder: Path, code: str, name: str = "r") -> Run:
    return Run(name, name, folder / name, lambda: [sys.executable, "-c", code])


def schedule(cluster: Cluster, runs, act: Callable[[], None], **keys) -> dict:
    """The scheduler to its end, while `act` is called between two looks."""
    executor = SlurmExecutor(cluster.path, parse_options(["gpus_per_node=0"]), 0, "all")
    scheduler = Scheduler(runs, executor, **keys)
    reap = scheduler._reap
    scheduler._reap = lambda: (act(), reap())  # type: ignore[method-assign]
    return scheduler.run()


def test_a_failure_is_noted_by_its_job(cluster, tmp_path, quick):
    """And the array is one of all runs of a size; nothing is left to watch."""
    runs = [code_run(tmp_path, "print('error: nan'); raise SystemExit(4)", n) for n in "ab"]

    def act() -> None:
        for id_ in cluster.pending():
            assert cluster.begin(id_) == 4
            cluster.states[id_] = "FAILED"

    states = schedule(cluster, runs, act)
    assert list(cluster.states) == ["101_0", "101_1"]
    for run in runs:
        assert states[run.name].text == f"nan; its log is {run.log}"
        assert run.failure()["exit_code"] == 4 and not (run.folder / "job.json").exists()


def test_lost_again_and_again(cluster, tmp_path, quick):
    """Jobs that leave the queue without a word are submitted again, and not for ever."""

    def act() -> None:
        for id_ in cluster.pending():
            cluster.states[id_] = "NODE_FAIL"

    states = schedule(cluster, [code_run(tmp_path, "pass")], act)
    assert len(cluster.states) == MAX_FRUITLESS
    assert states["r"].kind == "failed" and "NODE_FAIL" in states["r"].text


def test_a_cancelled_job_stays_out(cluster, tmp_path, quick):
    seen = []

    def act() -> None:
        if cluster.states and len(seen) > 3:  # it was in the queue while this runner looked
            cluster.states["101_0"] = "CANCELLED"
        seen.extend(cluster.states)
        time.sleep(0.1)

    states = schedule(cluster, [code_run(tmp_path, "pass")], act)
    assert len(cluster.states) == 1 and states["r"].kind == "waiting"
    assert "job 101_0 left the queue (CANCELLED)" in states["r"].text


def test_sbatch_refuses(cluster, tmp_path, quick):
    cluster.refuses = "sbatch: error: Invalid partition specified\n"
    executor = SlurmExecutor(tmp_path, parse_options([]), 2, "all")
    [problem] = executor.problems({8})
    assert "Invalid partition" in problem and "gpus_per_node=0" in problem
    run = code_run(tmp_path, "pass")
    with pytest.raises(UserError, match=r"sbatch refused 1 job: .*Invalid partition"):
        schedule(cluster, [run], lambda: None)
    assert not (run.folder / "job.json").exists() and not run.failure()
    # No more jobs in the queue at a time than --workers says.
    assert executor.parallel(8) == 2 and executor.reserve(8) is not None
    executor.jobs += [slurm.SlurmJob(executor, run) for _ in range(2)]
    assert executor.reserve(8) is None


def test_what_a_job_does_that_comes_too_late(lab, monkeypatch):
    """Whoever submitted it, and however often: the lock and the record decide."""
    monkeypatch.setattr(slurm_job, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(slurm_job, "SUBMIT_SECONDS", 1.0)
    lab.run("--trials", "1")
    run = replace(runs_of(lab)[0], argv=lambda: [sys.executable, "-c", "raise SystemExit(7)"])
    assert lead(run, "all", "12_3", []) == 0, "the run is done"
    (run.folder / "run.json").unlink()
    for content, seconds in (({"job": "9"}, 0.2), ({"runner": 9}, 1.0)):
        lock = Lock.take(run.lock)
        assert lock is not None
        lock.write(content)
        begun = time.monotonic()
        assert lead(run, "all", "12_3", []) == LockedError.exit_code
        assert time.monotonic() - begun >= seconds
        lock.release()
    assert lead(run, "all", "12_3", []) == 7, "nobody computes it any more"
    assert locks.read(run.lock)["job"] == "12_3" and not locks.held(run.lock)
    assert json.loads((run.folder / "job.json").read_text())["job"] == "12_3"
    assert lead(run, "all", "12_4", []) == 0, "a failed run is for --retry-failed"
    assert run.failure()["exit_code"] == 7


def test_preempted_again_and_again(tmp_path):
    """A job is put back as long as its run progresses, and not for ever."""
    run = code_run(tmp_path, "raise SystemExit(85)")
    codes = [lead(run, "all", "12_0", []) for _ in range(MAX_FRUITLESS)]
    assert codes == [85] * (MAX_FRUITLESS - 1) + [0] and "interrupted" in run.failure()["error"]
    run.forget_failure()
    (run.folder / "last_checkpoint").write_text("model_0000001.pth")
    assert lead(run, "all", "12_0", []) == 85 and not run.failure()


def test_jobs_delete_checkpoints_that_nobody_needs(lab):
    """Without a runner that would do it."""
    lab.run("--trials", "1", "--keep", "all")
    assert {len(names) for names in kept(lab)} == {ITERATIONS}
    for run in runs_of(lab):
        record = (run.folder / "run.json").rename(run.folder / "aside")
        copy = f"import shutil; shutil.copy({str(record)!r}, {str(run.folder / 'run.json')!r})"
        again = replace(run, argv=lambda code=copy: [sys.executable, "-c", code])
        assert lead(again, "final", "12_0", []) == 0
    assert kept(lab) == {("model_0000008.pth",)}


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.parametrize("answer", ["sys.exit(3)", "None"])
def test_a_task_that_is_asked_to_end(tmp_path, answer):
    """Its program gets SIGTERM, whatever Slurm sent, and is ended if it does not save in time."""
    began = tmp_path / "began"
    program = (
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: {answer})\n"
        f"open({str(began)!r}, 'w')\nwhile True: time.sleep(0.1)"
    )
    task = [sys.executable, "-m", slurm_job.__name__, "--task", "0.5", "--"]
    process = subprocess.Popen([*task, sys.executable, "-c", program])
    while not began.exists():
        time.sleep(0.02)
    time.sleep(0.5)  # until the task listens
    process.send_signal(slurm_job.signal.SIGUSR2)
    assert process.wait(30) == 85


def test_a_task_passes_its_rank_and_its_programs_exit_code(monkeypatch):
    monkeypatch.setenv("SLURM_NODEID", "3")
    code = "import sys; raise SystemExit(int(sys.argv[1]))"
    assert slurm_job.task([sys.executable, "-c", code, RANK], 1.0) == 3
