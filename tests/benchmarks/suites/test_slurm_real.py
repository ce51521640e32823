"""Suites on the Slurm of this machine, if there is one; all jobs are short and use one CPU."""

import functools
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.suites.executors import slurm
from benchmarks.suites.executors.slurm import last_state, query_queue
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.runs import read_json
from moco.common.errors import UserError
from tests.benchmarks.suites.fake_trainer import MODULE
from tests.benchmarks.suites.lab import Lab, write_suite

pytestmark = [pytest.mark.slow, pytest.mark.race]
QUICK = {"LOOK_SECONDS": 0.1, "QUEUE_SECONDS": 0.5, "GONE_SECONDS": 1.0}
RUNNER = f"""
from benchmarks.suites import runner
from benchmarks.suites.executors import slurm
vars(slurm).update({QUICK})
runner.REMOTE_SHOW_SECONDS = 0.2
from {MODULE} import suite_main
from moco.common.errors import run_cli
run_cli(suite_main)
"""


@functools.cache
def why_not() -> str:
    if shutil.which("sinfo") is None:
        return "Slurm is not installed (no sinfo)"
    try:
        done = subprocess.run(["sinfo"], capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return "no Slurm is running (sinfo does not answer)"
    return "no Slurm is running (sinfo fails)" if done.returncode else ""


class SlurmLab(Lab):
    """Suite whose runs are Slurm jobs of one CPU each."""

    executor = ("--executor", "slurm", "--slurm", "gpus_per_node=0", "--slurm", "cpus_per_task=1")

    def argv(self, delay: float, *more: str) -> list[str]:
        argv = super().argv(delay, *more)
        return [argv[0], "-c", RUNNER, *argv[3:]]

    def jobs(self) -> dict[str, str]:
        """Return run → id of its job."""
        folder = SuiteFolder(self.out)
        paths = {spec.name: folder.run(spec).folder / "job.json" for spec in folder.read()[1]}
        return {name: read_json(path)["job"] for name, path in paths.items() if path.exists()}

    def state(self, id_: str) -> str:
        queue = query_queue([id_])
        return "unknown" if queue is None else queue.get(id_, "gone")

    def resume_now(self, id_: str) -> None:
        """Start a requeued job now, as Slurm would wait for two minutes."""
        self.wait_for(lambda: self.state(id_) == "PENDING", 120)
        time.sleep(3)  # slurmd revokes all credentials of the second in which it was requeued
        subprocess.run(["scontrol", "update", f"JobId={id_}", "StartTime=now"], check=True)


@pytest.fixture
def lab(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    if reason := why_not():
        pytest.skip(reason)
    for name, value in QUICK.items():
        monkeypatch.setattr(slurm, name, value)
    lab = SlurmLab(tmp_path, inits=("random",), trials=1)
    yield lab
    for id_ in lab.jobs().values() if (lab.out / "suite.json").exists() else ():
        subprocess.run(["scancel", id_])


def test_to_the_end_and_what_a_second_call_finds(lab, capsys):
    lab.with_tables = True
    lab.run("--slurm", "time=5")
    lab.assert_once(2)
    assert {"table.md", "table.html"} <= set(lab.tables())
    assert len(list((lab.out / "jobs").glob("*.sh"))) == 1, "one array"
    assert not lab.jobs()
    lab.run()
    lab.assert_once(2)


def test_preempted_cancelled_and_to_the_end(lab, capsys):
    """After SIGTERM a job is requeued without a runner; after scancel only the next call does."""
    runner = lab.start("--slurm", "time=5", delay=2.0)
    lab.wait_for(lambda: lab.count("iteration-2"), 300)
    runner.kill()
    runner.wait()
    jobs, preempted = lab.jobs(), next(iter(lab.count("iteration-2")))
    [cancelled] = set(jobs) - {preempted}
    lab.run("--status")
    shown = capsys.readouterr().out
    assert re.search(rf"running .* on \S+ since .* UTC, job {jobs[preempted]}", shown)
    # GraceTime of a partition sends SIGTERM while the job is running.
    subprocess.run(["scancel", "--signal=TERM", jobs[preempted]], check=True)
    lab.wait_for(lambda: lab.count("iteration-2")[cancelled], 300)
    subprocess.run(["scancel", jobs[cancelled]], check=True)
    lab.wait_for(lambda: len(lab.count("saved")) == 2, 60)
    lab.resume_now(jobs[preempted])
    lab.wait_for(lambda: lab.state(jobs[cancelled]) == "gone", 60)
    assert last_state(jobs[cancelled]) == "CANCELLED"
    lab.wait_for(lambda: lab.count("done")[preempted] == 1, 300)
    assert not lab.count("resume")[cancelled]
    lab.run("--slurm", "time=5")
    assert set(lab.count("resume").values()) == {1} and len(lab.count("resume")) == 2
    lab.assert_once(2)


def test_a_grid_without_a_runner(lab):
    """The grid, the choice of a point, and the tuned row are submitted at once."""
    own = {"values": {"SOLVER.BASE_LR": [0.1, 0.2]}}
    write_suite(lab.path, {"name": "a"}, name="small", trials=1, tune=own)
    lab.hold()
    runner = lab.start("--tune", "--slurm", "time=5")
    lab.wait_for(lambda: (lab.out / "suite.json").exists() and len(lab.jobs()) == 5, 60)
    runner.kill()
    runner.wait()
    scripts = [path.read_text() for path in (lab.out / "jobs").glob("*.sh")]
    assert len(scripts) == 3, "what comes after nothing is one array"
    assert sum("--dependency=afterok" in script for script in scripts) == 2
    assert not lab.count("done")
    lab.release()
    lab.wait_for(lambda: sum(lab.count("done").values()) == 4, 300)
    lab.assert_once(4)
    lab.run("--tune", "--slurm", "time=5")
    lab.assert_once(4)
    assert lab.states() == {"done": 5}


def test_a_signal_to_all_of_a_job(lab):
    """On `scancel --signal=TERM --full` srun kills the program, which resumes later."""
    runner = lab.start("--slurm", "time=5", delay=1.0)
    lab.wait_for(lambda: lab.count("iteration-2"), 300)
    signaled = next(iter(lab.count("iteration-2")))
    job = lab.jobs()[signaled]
    subprocess.run(["scancel", "--signal=TERM", "--full", job], check=True)
    lab.resume_now(job)
    assert runner.wait(300) == 0, lab.log()
    assert lab.count("resume") == {signaled: 1}
    lab.assert_once(2)


def test_preempted_without_grace_and_time_limit(lab):
    """Slurm requeues one job by itself, the other requeues itself before its time limit."""
    runner = lab.held_runner("--slurm", "time=2", "--slurm", "signal_delay_s=30", runs=1)
    jobs = lab.jobs()
    requeued = next(iter(lab.count("iteration-2")))
    subprocess.run(["scontrol", "requeue", jobs[requeued]], check=True)
    lab.wait_for(lambda: len(lab.count("saved")) == 2, 240)
    lab.release()
    for job in jobs.values():
        lab.resume_now(job)
    assert runner.wait(120) == 0, lab.log()
    assert set(lab.count("resume").values()) == {1} and len(lab.count("resume")) == 2
    lab.assert_once(2)
    assert len(list((lab.out / "jobs").glob("*.sh"))) == 1, "nothing was submitted again"


def test_stopping_leaves_the_jobs_and_scancel_ends_a_watched_one(lab):
    runner = lab.held_runner(runs=1)
    runner.send_signal(signal.SIGINT)
    assert runner.wait(60) == 85
    jobs, running = lab.jobs(), next(iter(lab.count("iteration-2")))
    arrays = {id_.partition("_")[0] for id_ in jobs.values()}
    assert len(jobs) == 2 and f"scancel {' '.join(arrays)}" in lab.log()
    assert lab.state(jobs[running]) == "RUNNING"
    assert {lab.state(id_) for id_ in jobs.values()} <= {"RUNNING", "PENDING"}
    shown = lab.log().count("0/2 done")
    runner = lab.start()
    lab.wait_for(lambda: lab.log().count("0/2 done") > shown)
    subprocess.run(["scancel", jobs[running]], check=True)
    lab.wait_for(lambda: lab.count("saved")[running], 60)
    lab.release()
    assert runner.wait(120) == 1, lab.log()
    assert f"job {jobs[running]} left the queue (CANCELLED)" in lab.log()
    assert lab.states() == {"done": 1, "interrupted": 1} and not lab.count("resume")


def test_gpus_on_a_cluster_that_has_none(lab):
    kinds = subprocess.run(["sinfo", "-h", "-o", "%G"], capture_output=True, text=True).stdout
    if "gpu" in kinds:
        pytest.skip("this Slurm has GPUs")
    for option, named in (("gpus_per_node=1", "gpus_per_node=0"), ("partion=x", "partion")):
        with pytest.raises(UserError, match=named):
            lab.run("--dry-run", "--slurm", option)
