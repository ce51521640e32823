"""Suites on the Slurm of this machine, where there is one: what the one in miniature is believed.

Nothing is started here but jobs of one CPU and some seconds.
"""

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.benchmarks.test_run_suite import ROOT
from tests.benchmarks.test_slurm import QUICK, SlurmLab, sized

from benchmarks.suites import suite
from benchmarks.suites.executors import slurm
from benchmarks.suites.executors.slurm import ask_queue, last_state
from moco.common.errors import UserError

OPTIONS = ("--slurm", "cpus_per_task=1", "--slurm", "time=5")


@functools.cache
def why_not() -> str:
    if shutil.which("sinfo") is None:
        return "Slurm is not installed (no sinfo)"
    try:
        done = subprocess.run(["sinfo"], capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return "no Slurm is running (sinfo does not answer)"
    return "no Slurm is running (sinfo fails)" if done.returncode else ""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    if reason := why_not():
        pytest.skip(reason)
    pytest.importorskip("submitit")
    monkeypatch.chdir(ROOT)
    for name, value in QUICK.items():
        monkeypatch.setattr(slurm, name, value)
    lab = SlurmLab(tmp_path, inits=("random",), trials=1)
    (tmp_path / "runner.log").touch()
    yield lab
    for id_ in lab.notes().values():
        subprocess.run(["scancel", id_])


def test_preempted_cancelled_and_to_the_end(lab):
    """By SIGTERM alone and with nobody watching: put back. By scancel: not, until asked for."""
    runner = lab.start(*OPTIONS, delay=2.0)
    lab.wait_for(lambda: lab.count("iteration-2"), 300)
    runner.kill()
    runner.wait()
    jobs, preempted = lab.notes(), next(iter(lab.count("iteration-2")))
    [cancelled] = set(jobs) - {preempted}
    # What a partition's GraceTime sends, and the job is still running.
    subprocess.run(["scancel", "--signal=TERM", jobs[preempted]], check=True)
    lab.wait_for(lambda: lab.count("iteration-2")[cancelled], 300)
    subprocess.run(["scancel", jobs[cancelled]], check=True)
    lab.wait_for(lambda: len(lab.count("saved")) == 2, 60)

    def state(name: str) -> str:
        queue = ask_queue([jobs[name]])
        return "unknown" if queue is None else queue.get(jobs[name], ("gone", ""))[0]

    lab.wait_for(lambda: state(preempted) == "PENDING" and state(cancelled) == "gone", 60)
    assert last_state(jobs[cancelled]) == "CANCELLED"
    # Slurm waits for two minutes before it starts a job again.
    subprocess.run(["scontrol", "update", f"JobId={jobs[preempted]}", "StartTime=now"], check=True)
    lab.wait_for(lambda: lab.count("done")[preempted] == 1, 300)
    assert state(cancelled) == "gone" and not lab.count("resume")[cancelled]
    lab.run(*OPTIONS)
    assert set(lab.count("resume").values()) == {1} and len(lab.count("resume")) == 2
    lab.assert_once(2)


def test_gpus_on_a_cluster_that_has_none(lab, monkeypatch):
    kinds = subprocess.run(["sinfo", "-h", "-o", "%G"], capture_output=True, text=True).stdout
    if re.search("gpu", kinds):
        pytest.skip("this Slurm has GPUs")
    monkeypatch.setattr(suite, "expand", sized({"a": 1, "b": 1}))
    with pytest.raises(UserError, match="gpus_per_node=0"):
        lab.run("--dry-run", "--slurm", "gpus_per_node=1")
