"""Slurm executor without a Slurm: its script, its options, and the program of a job."""

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
from benchmarks.suites.runner import Runner
from benchmarks.suites.runs import MAX_INTERRUPTIONS, Run
from moco.common.errors import LockedError, UserError
from tests.benchmarks.suites.fake_trainer import ITERATIONS
from tests.benchmarks.suites.lab import Lab, kept
from tests.benchmarks.suites.run_code import command


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job, "STOP_SIGNALS", ())  # the job is this process here


def test_the_script_that_is_submitted():
    values = "partition=long time=1-02:30:01 gpus_per_node=4 cpus_per_gpu=6 mem_per_gpu=20G"
    values += " array_parallelism=3 signal_delay_s=120 exclusive=true sbatch.reservation=night"
    values += " srun_args=--mpi=none"
    lines_around = ["setup=module load x", "setup=ulimit -n 4096", "teardown=echo end"]
    options = parse_options([*values.split(), *lines_around])
    jobs = Path("/suite/jobs")
    script = make_script(options, "moco-out", jobs, jobs / "x.json", 4, gpus=8, nodes=2)
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    expected = "partition=long time=1-02:30:01 mem-per-gpu=20G exclusive reservation=night"
    expected += " job-name=moco-out array=0-3%3 signal=TERM@120 requeue open-mode=append nodes=2"
    expected += " ntasks-per-node=1 cpus-per-task=24 gpus-per-node=4 output=/suite/jobs/%A_%a.log"
    found = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert found == set(expected.split())
    *_, first, second, start, last = lines
    assert (first, second, last) == ("module load x", "ulimit -n 4096", "echo end")
    assert re.search(r"-m \S+\.slurm_job /suite/jobs/x\.json 100\.0 -- srun --nodes=2 ", start)
    assert "--cpus-per-task=24" in start and start.endswith(" --mpi=none")
    cpu = make_script(parse_options(["cpus_per_task=3"]), "n", jobs, jobs / "x.json", 1, 0, 1)
    assert "--cpus-per-task=3\n" in cpu and "gpus" not in cpu and "array=0-0%256" in cpu


def test_the_script_outlives_a_signal_to_all_of_the_job(tmp_path):
    """On `scancel --signal=TERM --full` the program saves, and the lines after it are executed."""
    (tmp_path / "waits.py").write_text(
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [15])\nprint('ready')\n"
        "signal.sigwait([15])\nprint('saved')\n"
    )
    setup = f"setup={sys.executable} -u {tmp_path / 'waits.py'}"
    options = parse_options([setup, "teardown=echo ended"])
    script = make_script(options, "n", tmp_path, tmp_path / "none.json", 1, gpus=0, nodes=1)
    (tmp_path / "job.sh").write_text(script)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    job = subprocess.Popen(["bash", str(tmp_path / "job.sh")], **pipes, start_new_session=True)
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    os.killpg(job.pid, signal.SIGTERM)
    printed, _ = job.communicate(timeout=60)
    assert (printed.splitlines(), job.returncode) == (["saved", "ended"], 0)


def test_options():
    options = parse_options(["time=90", "time=01:30:01", "qos=high"])
    assert options.sbatch == {"time": "01:30:01", "qos": "high"} and options.save_seconds == 70
    assert parse_options(["signal_delay_s=30"]).save_seconds == 15
    executor = SlurmExecutor(Path("out"), parse_options(["gpus_per_node=4"]), 0, "all")
    assert [executor.machines(gpus) for gpus in (0, 1, 4, 8, 16)] == [1, 1, 1, 2, 4]
    with pytest.raises(UserError, match=r"10 GPUs .* 3 nodes of 4"):
        executor.machines(10)


def test_output_of_squeue(monkeypatch):
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
        assert slurm.query_queue(["12_0", "12_3", "14_1"]) == expected
    assert calls[0][-1] == "--jobs=12,14" and slurm.query_queue([]) == {} and len(calls) == 3


def test_rendezvous_of_the_machines(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    ports = {fill(PORT, f"12_{index}") for index in range(4)}
    assert len(ports) == 4 and all(20000 <= int(port) < 30000 for port in ports)
    assert fill(f"tcp://{HOST}:x", "12_0") == "tcp://node1:x" and fill(RANK, "12_0") == RANK


class Cluster:
    """Fake queue that replaces Slurm's programs; a test starts its jobs."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.scripts, self.states = path, list[str](), dict[str, str]()
        self.refuses, self.patch = "", monkeypatch
        monkeypatch.setattr(slurm, "sbatch", self.sbatch)
        monkeypatch.setattr(slurm, "query_queue", self.query_queue)
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

    def query_queue(self, ids) -> dict[str, str]:
        queued = ("PENDING", "RUNNING")
        return {id_: self.states[id_] for id_ in ids if self.states[id_] in queued}

    def pending(self) -> list[str]:
        return [id_ for id_, state in self.states.items() if state == "PENDING"]

    def start(self, id_: str) -> int:
        """Run the job's own program with `env` instead of srun, and return its exit code."""
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
    """Return the runs of a folder whose suite was computed on this machine."""
    folder = SuiteFolder(lab.out)
    return tuple(folder.run(spec) for spec in folder.read()[1])


def code_run(folder: Path, code: str, name: str = "r") -> Run:
    return Run(name, name, folder / name, command(code))


def schedule(cluster: Cluster, runs, act: Callable[[], None], **keys) -> dict:
    """Run the runner to its end, and call `act` before each of its steps."""
    executor = SlurmExecutor(cluster.path, parse_options(["gpus_per_node=0"]), 0, "all")
    runner = Runner(runs, executor, **keys)
    reap = runner._reap
    runner._reap = lambda: (act(), reap())  # type: ignore[method-assign]
    return runner.run()


def test_a_failure_is_recorded_by_its_job(cluster, tmp_path, quick):
    """All runs of one size are in one array, and no job.json is left."""
    runs = [code_run(tmp_path, "print('error: nan'); raise SystemExit(4)", n) for n in "ab"]

    def act() -> None:
        for id_ in cluster.pending():
            assert cluster.start(id_) == 4
            cluster.states[id_] = "FAILED"

    states = schedule(cluster, runs, act)
    assert list(cluster.states) == ["101_0", "101_1"]
    for run in runs:
        assert states[run.name].text == f"nan; its log is {run.log}"
        assert run.failure()["exit_code"] == 4 and not (run.folder / "job.json").exists()


def test_jobs_wait_for_their_dependencies(cluster, tmp_path, quick):
    """All jobs are submitted at once; those that depend on a failed one are not computed."""
    bad, good = code_run(tmp_path, "raise SystemExit(4)", "bad"), code_run(tmp_path, "pass", "good")
    good = replace(good, product=tmp_path)
    last = [
        replace(code_run(tmp_path, "pass", "after"), after=("good", "bad"), product=tmp_path / "x"),
        replace(code_run(tmp_path, "pass", "free"), after=("good",), product=tmp_path),
    ]
    submitted: list[str] = []

    def act() -> None:
        submitted[:] = submitted or cluster.pending()
        for id_ in cluster.pending():
            if id_ == submitted[0]:
                cluster.states[id_] = "FAILED" if cluster.start(id_) else "COMPLETED"
            else:
                cluster.states[id_] = "CANCELLED"  # by --kill-on-invalid-dep

    states = schedule(cluster, [good, bad, *last], act)
    assert submitted == ["101_0", "102_0"], "good is done: only bad, and what depends on it"
    first, second = cluster.scripts
    assert "--dependency" not in first
    assert "#SBATCH --dependency=afterok:101_0\n" in second and "kill-on-invalid-dep=yes" in second
    kinds = {name: state.kind for name, state in states.items()}
    assert kinds == {"good": "done", "bad": "failed", "after": "failed", "free": "done"}
    assert "bad failed, which it depends on" in states["after"].text


def test_lost_again_and_again(cluster, tmp_path, quick):
    """Jobs that leave the queue without a result are submitted again, but not forever."""

    def act() -> None:
        for id_ in cluster.pending():
            cluster.states[id_] = "NODE_FAIL"

    states = schedule(cluster, [code_run(tmp_path, "pass")], act)
    assert len(cluster.states) == MAX_INTERRUPTIONS
    assert states["r"].kind == "failed" and "NODE_FAIL" in states["r"].text


def test_a_cancelled_job_is_not_submitted_again(cluster, tmp_path, quick):
    seen = []

    def act() -> None:
        if cluster.states and len(seen) > 3:  # this runner has seen it in the queue
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


def test_a_job_that_starts_too_late(lab, monkeypatch):
    """The lock and the record decide, however often a run was submitted."""
    monkeypatch.setattr(slurm_job, "LOCK_SECONDS", 0.2)
    lab.run("--trials", "1")
    run = replace(runs_of(lab)[0], argv=command("raise SystemExit(7)"))
    assert lead(run, "all", "12_3", []) == 0, "the run is done"
    (run.folder / "run.json").unlink()
    lock = Lock.take(run.lock)
    assert lock is not None
    started = time.monotonic()
    assert lead(run, "all", "12_3", []) == LockedError.exit_code
    assert time.monotonic() - started >= 0.2
    lock.release()
    assert lead(run, "all", "12_3", []) == 7, "nobody computes it any more"
    assert locks.read(run.lock)["job"] == "12_3" and not locks.held(run.lock)
    assert json.loads((run.folder / "job.json").read_text())["job"] == "12_3"
    assert lead(run, "all", "12_4", []) == 1, "a failed run is for --retry-failed"
    assert run.failure()["exit_code"] == 7


def test_preempted_again_and_again(tmp_path):
    """A job is requeued as long as its run progresses, but not forever."""
    run = code_run(tmp_path, "raise SystemExit(85)")
    codes = [lead(run, "all", "12_0", []) for _ in range(MAX_INTERRUPTIONS)]
    assert codes == [85] * (MAX_INTERRUPTIONS - 1) + [1] and "interrupted" in run.failure()["error"]
    run.forget_failure()
    (run.folder / "last_checkpoint").write_text("model_0000001.pth")
    assert lead(run, "all", "12_0", []) == 85 and not run.failure()


def test_jobs_delete_checkpoints_that_nobody_needs(lab):
    """No runner is needed to delete them."""
    lab.run("--trials", "1", "--keep", "all")
    assert {len(names) for names in kept(lab)} == {ITERATIONS}
    for run in runs_of(lab):
        record = (run.folder / "run.json").rename(run.folder / "aside")
        copy = f"import shutil; shutil.copy({str(record)!r}, {str(run.folder / 'run.json')!r})"
        again = replace(run, argv=command(copy))
        assert lead(again, "final", "12_0", []) == 0
    assert kept(lab) == {("model_0000008.pth",)}


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.parametrize("answer", ["sys.exit(3)", "None"])
def test_a_task_that_is_asked_to_end(tmp_path, answer):
    """Its program gets SIGTERM, whatever Slurm sent, and is killed if it does not save in time."""
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
