"""Slurm executor with a fake Slurm on PATH: its script, its options, and suites to their end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.run_suite import SuiteFailed
from benchmarks.suites import locks
from benchmarks.suites.executors import slurm
from benchmarks.suites.executors.slurm import SlurmExecutor, make_script, parse_options, query_queue
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import MAX_INTERRUPTIONS, Run, read_json
from moco.common.errors import LockedError, UserError
from tests.benchmarks.suites.fake_slurm import FakeSlurm
from tests.benchmarks.suites.fake_trainer import ITERATIONS, FakePrograms
from tests.benchmarks.suites.lab import ROOT, Lab, kept, write_suite
from tests.benchmarks.suites.run_code import command


class SlurmLab(Lab):
    """Suite whose runs are jobs of a fake Slurm."""

    executor = ("--executor", "slurm", "--slurm", "gpus_per_node=0")
    slurm: FakeSlurm

    def runs(self) -> tuple[Run, ...]:
        folder = SuiteFolder(self.out)
        return tuple(folder.run(spec) for spec in folder.read()[1])


@pytest.fixture
def lab(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> SlurmLab:
    """One task from random weights: one run."""
    for name in ("LOOK_SECONDS", "QUEUE_SECONDS", "GONE_SECONDS"):
        monkeypatch.setattr(slurm, name, 0.05)
    lab = SlurmLab(tmp_path, inits=("random",), trials=1)
    write_suite(tmp_path, {"name": "a"}, name="small", trials=1)
    lab.slurm = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(lab.slurm.bin), prepend=os.pathsep)
    return lab


def test_the_script_that_is_submitted():
    values = "partition=long time=1-02:30:01 gpus_per_node=4 cpus_per_gpu=6 mem_per_gpu=20G"
    values += " array_parallelism=3 signal_delay_s=120 exclusive=true sbatch.reservation=night"
    values += " srun_args=--mpi=none"
    lines_around = ["setup=module load x", "setup=ulimit -n 4096", "teardown=echo end"]
    options = parse_options([*values.split(), *lines_around])
    entries = Path("/suite/jobs/x.json")
    script = make_script(options, "moco-out", entries, 4, gpus=8, nodes=2)
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    expected = "partition=long time=1-02:30:01 mem-per-gpu=20G exclusive reservation=night"
    expected += " job-name=moco-out array=0-3%3 signal=TERM@120 requeue open-mode=append nodes=2"
    expected += " ntasks-per-node=1 cpus-per-task=24 gpus-per-node=4 output=/suite/jobs/%A_%a.log"
    found = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert found == set(expected.split())
    first = lines.index("module load x")
    assert lines[first + 1] == "ulimit -n 4096" and lines[first + 4] == "echo end"
    start = lines[first + 2]
    assert start.startswith("srun --nodes=2 ") and "--cpus-per-task=24" in start
    assert re.search(r" --mpi=none \S+ -u -m \S+\.slurm_job /suite/jobs/x\.json 100\.0 ", start)
    cpu = make_script(parse_options(["cpus_per_task=3"]), "n", entries, 1, 0, 1)
    assert "--cpus-per-task=3\n" in cpu and "gpus" not in cpu and "array=0-0%256" in cpu


@pytest.mark.parametrize("key", ["cpus_per_task", "cpus-per-task", "sbatch.cpus_per_task"])
def test_keys_of_the_suite_in_slurms_spelling(key):
    """Passed on to sbatch alone, they would contradict the options of srun."""
    options = parse_options([f"{key}=2"])
    assert options.cpus_per_task == 2 and options.sbatch.keys() == {"time"}


def test_options():
    options = parse_options(["time=90", "time=01:30:01", "qos=high"])
    assert options.sbatch == {"time": "01:30:01", "qos": "high"} and options.save_seconds == 70
    assert parse_options(["signal_delay_s=30"]).save_seconds == 15
    executor = SlurmExecutor(Path("out"), parse_options(["gpus_per_node=4"]), 2, "all")
    assert [executor.machines(gpus) for gpus in (0, 1, 4, 8, 16)] == [1, 1, 1, 2, 4]
    with pytest.raises(UserError, match=r"10 GPUs .* 3 nodes of 4"):
        executor.machines(10)
    # No more jobs in the queue at a time than --workers says.
    run = Run("r", "r", Path("r"), [])
    assert executor.parallel(8) == 2 and executor.reserve(8) is not None
    executor.jobs += [slurm.SlurmJob(executor, run) for _ in range(2)]
    assert executor.reserve(8) is None


def test_output_of_squeue(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program = tmp_path / "squeue"
    program.touch(0o755)
    for code, text, expected in (
        (0, "12_0|RUNNING\n12_3|PENDING\n\n", {"12_0": "RUNNING", "12_3": "PENDING"}),
        (1, "slurm_load_jobs error: Invalid job id specified", {}),
        (1, "slurm_load_jobs error: Unable to contact slurm controller", None),
    ):
        answer = f"echo '{text}' | tee /dev/stderr\nexit {code}\n"
        program.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/calls\n{answer}")
        assert query_queue(["12_0", "12_3", "14_1"]) == expected
    assert query_queue([]) == {}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3 and calls[0].endswith("--jobs=12,14")


def test_a_suite_to_its_end(lab, capsys):
    """All runs of one size are one array; no job.json is left; a second call submits nothing."""
    lab.inits += ["--init", f"mine={lab.path / 'random.pth'}"]
    lab.run("--trials", "2", "--keep", "final")
    lab.assert_once(4)
    assert list(lab.slurm.ended()) == [f"101_{index}" for index in range(4)]
    assert set(lab.slurm.ended().values()) == {"COMPLETED"}
    assert kept(lab) == {("model_0000008.pth",)}, "jobs delete their checkpoints"
    assert not any((run.folder / "job.json").exists() for run in lab.runs())
    assert "job 101_0 on node1: " in lab.runs()[0].log.read_text()
    lab.run("--trials", "2")
    lab.assert_once(4)
    assert len(lab.slurm.scripts()) == 1


def test_a_failure_is_recorded_by_its_job(lab, capsys):
    with pytest.raises(SuiteFailed):
        lab.run_command("print('error: nan'); raise SystemExit(4)")
    [run] = lab.runs()
    assert f"nan; its log is {run.log}" in capsys.readouterr().err
    assert run.failure()["exit_code"] == 4 and not (run.folder / "job.json").exists()
    assert lab.slurm.ended() == {"101_0": "FAILED"}


@pytest.mark.slow
def test_jobs_wait_for_their_dependencies(lab, capsys):
    """All jobs are submitted at once; those that depend on a failed one are not computed."""
    own = {"values": {"SOLVER.BASE_LR": [0.1, 0.2]}}
    write_suite(lab.path, {"name": "a"}, name="small", trials=1, tune=own)
    (lab.path / "bad.pth").touch()
    lab.inits += ["--init", f"bad={lab.path / 'bad.pth'}"]
    with pytest.raises(SuiteFailed):
        lab.run("--tune")
    arrays = {array: [] for array in ("101", "102", "103", "104", "105")}
    for id_, state in lab.slurm.ended().items():
        arrays[id_.partition("_")[0]].append(state)
    assert sorted(arrays["101"]) == ["COMPLETED"] * 3 + ["FAILED"] * 3
    assert [arrays[array] for array in ("102", "103", "104", "105")] == [
        ["COMPLETED"],  # the choice for random, that for bad, and the tuned runs
        ["CANCELLED"],
        ["COMPLETED"],
        ["CANCELLED"],
    ]
    first, second, *_ = lab.slurm.scripts()
    assert "--dependency" not in first and "kill-on-invalid-dep=yes" in second
    assert re.search(r"#SBATCH --dependency=afterok:101_\d:101_\d\n", second)
    assert "failed, which it depends on" in capsys.readouterr().err


def test_what_depends_on_a_cancelled_job_is_left(lab, capsys):
    """Slurm cancels the jobs that depend on it; the command ends and says how to go on."""
    own = {"values": {"SOLVER.BASE_LR": [0.1, 0.2]}}
    write_suite(lab.path, {"name": "a"}, name="small", trials=1, tune=own)

    def cancel() -> None:
        lab.wait_for(lambda: len(lab.count("iteration-2")) == 3)
        time.sleep(0.5)  # until the runner has seen it in the queue
        subprocess.run(["scancel", "101_1"], check=True)
        lab.release()

    lab.hold()
    with ThreadPoolExecutor() as pool, pytest.raises(SuiteFailed, match="jobs of 3 of 5 runs"):
        pool.submit(cancel)
        lab.run("--tune")
    done, cancelled = "COMPLETED", "CANCELLED"
    states = dict.fromkeys(["101_0", "101_2"], done)
    states |= dict.fromkeys(["101_1", "102_0", "103_0"], cancelled)
    assert lab.slurm.ended() == states, "none is submitted again"
    lab.run("--tune")
    assert list(lab.slurm.ended().values())[5:] == [done] * 3


def test_lost_again_and_again(lab, capsys):
    """Jobs that leave the queue without a result are submitted again, but not forever."""
    (lab.slurm.folder / "lose").write_text("NODE_FAIL")
    with pytest.raises(SuiteFailed):
        lab.run()
    assert list(lab.slurm.ended().values()) == ["NODE_FAIL"] * MAX_INTERRUPTIONS
    assert "NODE_FAIL" in capsys.readouterr().err


def test_preempted_again_and_again(lab, capsys):
    """A job is requeued without a runner as long as its run progresses, but not forever."""
    with pytest.raises(SuiteFailed):
        lab.run_command("raise SystemExit(85)")
    assert "interrupted 3 times without a new checkpoint" in capsys.readouterr().err
    [run] = lab.runs()
    assert run.log.read_text().count("---") == MAX_INTERRUPTIONS
    assert lab.slurm.ended() == {"101_0": "FAILED"}, "one job, which was requeued"


@pytest.mark.slow
def test_preempted_as_often_as_it_progresses(lab):
    lab.inits[:] = ["--init", f"often={lab.path / 'random.pth'}"]
    lab.run()
    lab.assert_once(1)
    assert lab.count("resume") == dict.fromkeys(lab.count("done"), ITERATIONS - 1)
    assert lab.slurm.ended() == {"101_0": "COMPLETED"}


def test_a_cancelled_job_is_not_submitted_again(lab, capsys):
    """The next call submits it again."""

    def cancel() -> None:
        lab.wait_for(lambda: lab.count("iteration-2"))
        time.sleep(0.5)  # until the runner has seen it in the queue
        subprocess.run(["scancel", "101_0"], check=True)

    lab.hold()
    with ThreadPoolExecutor() as pool, pytest.raises(SuiteFailed, match="jobs of 1 of 1 runs"):
        pool.submit(cancel)
        lab.run()
    assert "job 101_0 left the queue (CANCELLED)" in capsys.readouterr().err
    assert lab.states() == {"interrupted": 1}
    lab.release()
    lab.run()
    assert lab.slurm.ended() == {"101_0": "CANCELLED", "102_0": "COMPLETED"}
    assert len(lab.count("resume")) == 1


@pytest.mark.slow
def test_a_signal_to_all_of_a_job(lab):
    """On `scancel --signal=TERM --full` the script lives on, and requeues the job."""
    lab.executor = (*lab.executor, "--slurm", "teardown=echo ended")
    runner = lab.held_runner(runs=1)
    lab.slurm.signal("101_0", signal.SIGTERM)
    lab.wait_for(lambda: lab.count("resume"), 60)
    lab.release()
    assert runner.wait(60) == 0, lab.log()
    lab.assert_once(1)
    assert (lab.out / "jobs" / "101_0.log").read_text().count("ended") == 2
    assert lab.slurm.ended() == {"101_0": "COMPLETED"}


def test_machines_of_a_run_find_each_other(lab):
    """The program of each machine has its rank, the first machine and a port."""
    write_suite(lab.path, {"name": "a", "gpus": 4}, name="small", trials=1)
    lab.executor = ("--executor", "slurm", "--slurm", "gpus_per_node=2")
    programs = FakePrograms(lab.journal)
    seen = []

    def show(spec, folder, machines):
        seen.append(machines)
        # Machine 0 waits for machine 1, which does nothing once the run has failed. The log has the
        # code, too, so the text that is sought is in two pieces.
        code = f"""
import os, sys, time
os.write(1, (' '.join(sys.argv[2:]) + '\\n').encode())
while sys.argv[2] == "0" and "1 tcp:" + "//" not in open({str(folder / "suite.log")!r}).read():
    time.sleep(0.02)
"""
        return [*command(code), "<rank>", "tcp://<host>:<port>"]

    programs.command = show
    with pytest.raises(SuiteFailed, match="1 of 1 runs failed"):
        lab.main(programs)
    [run] = lab.runs()
    shown = set(re.findall(r"^\d tcp.*", run.log.read_text(), flags=re.M))
    [port] = {line.rpartition(":")[2] for line in shown}
    assert seen == [2] and 20000 <= int(port) < 30000
    assert shown == {f"{rank} tcp://node1:{port}" for rank in (0, 1)}


def test_sbatch_refuses(lab, capsys):
    (lab.slurm.folder / "refuse").write_text("sbatch: error: Invalid partition specified\n")
    with pytest.raises(UserError, match=r"sbatch would refuse .*Invalid partition.*check --slurm"):
        lab.run()
    with pytest.raises(UserError, match=r"\(gpus_per_node=0 on a cluster without GPUs\)"):
        lab.run("--slurm", "gpus_per_node=8")
    assert not lab.slurm.ended()


def job(lab: SlurmLab) -> int:
    """Run the program of the first job again, as a job that starts too late."""
    [entries] = lab.out.glob("jobs/*.json")
    names = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0", "SLURM_NODEID": "0"}
    program = [sys.executable, "-m", "benchmarks.suites.executors.slurm_job", entries, "0.5", "n"]
    return subprocess.run(program, cwd=ROOT, env={**os.environ, **names}).returncode


@pytest.mark.slow
def test_a_job_that_starts_too_late(lab):
    """The lock and the record decide, however often a run was submitted."""
    with pytest.raises(SuiteFailed):
        lab.run_command("raise SystemExit(7)")
    assert job(lab) == 1, "a failed run is for --retry-failed"
    [run] = lab.runs()
    run.forget_failure()
    assert job(lab) == 7, "nobody computes it any more"
    assert locks.read_holder(run.lock)["job"] == read_json(run.folder / "job.json")["job"] == "12_0"
    assert not locks.is_held(run.lock)
    run.forget_failure()
    lock = Lock.acquire(run.lock)
    assert lock is not None
    started = time.monotonic()
    assert job(lab) == LockedError.exit_code
    assert time.monotonic() - started >= 10
    lock.release()


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.parametrize("answer", ["sys.exit(3)", "None"])
def test_a_program_that_is_asked_to_end(lab, answer):
    """It gets SIGTERM, whatever Slurm sent, and is killed if it does not save in time."""
    began = lab.path / "began"
    code = (
        "import os, pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: {answer})\n"
        f"pathlib.Path({str(began)!r}).touch()\ntime.sleep(0.5)\n"
        "os.kill(os.getppid(), signal.SIGUSR2)\nwhile True: time.sleep(0.1)"
    )
    with pytest.raises(SuiteFailed):
        lab.run_command("raise SystemExit(7)")
    [entries] = lab.out.glob("jobs/*.json")
    [entry] = json.loads(entries.read_text())
    entries.write_text(json.dumps([entry | {"argv": command(code)}]))
    lab.runs()[0].forget_failure()
    assert job(lab) == 85 and began.exists()
