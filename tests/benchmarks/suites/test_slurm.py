"""Suites on a cluster: the real submitit, a Slurm in miniature, a training program in miniature.

What the jobs do is in the journal that the training programs write.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import submitit
from tests.benchmarks.fake_slurm import Cluster, install
from tests.benchmarks.fake_trainer import ITERATIONS, backend
from tests.benchmarks.test_run_suite import ROOT, Lab, is_alive, kept
from torch.distributed.run import get_args_parser

from benchmarks import run_suite
from benchmarks.suites import locks as claims
from benchmarks.suites import runner as suite_runner
from benchmarks.suites import suite
from benchmarks.suites.executors import slurm
from benchmarks.suites.executors.local import HOST, PORT, RANK
from benchmarks.suites.executors.slurm import RunJob, parse_options
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.locks import Claim
from benchmarks.suites.suite import Init, RunSpec, expand
from detection import train_net
from moco.common.errors import LockedError, Preempted, UserError

pytestmark = pytest.mark.race
QUICK = {"LOOK_SECONDS": 0.1, "QUEUE_SECONDS": 0.5, "GONE_SECONDS": 0.5}
RUNNER = f"""
from benchmarks.suites.executors import slurm
from benchmarks.suites import runner as suite_runner
vars(slurm).update({QUICK})
suite_runner.REMOTE_SHOW_SECONDS = 0.2
from tests.benchmarks.fake_trainer import suite_main
from moco.common.errors import run_cli
run_cli(suite_main)
"""


class SlurmLab(Lab):
    """Runs go through Slurm, on nodes without GPUs unless something else is asked for."""

    cluster: Cluster

    def tables(self) -> dict[str, bytes]:
        return without_place(super().tables(), self.path)

    def arguments(self, *more: str) -> list[str]:
        output = ["--output", str(self.out), "--executor", "slurm", "--slurm", "gpus_per_node=0"]
        return [str(self.path / "suite.yaml"), *self.inits, *output, *more]

    def words(self, delay: float, *more: str) -> list[str]:
        words = super().words(delay, *more)
        return [words[0], "-c", RUNNER, *words[3:]]

    def notes(self) -> dict[str, str]:
        """Run → the job in charge of it."""
        paths = self.out.glob("runs/*/*/*/job.json")
        return {
            str(p.parent.relative_to(self.out / "runs")): json.loads(p.read_text())["job"]
            for p in paths
        }

    def assert_once(self, runs: int) -> None:
        """Every run to its end, and no iteration of any done twice."""
        assert len(self.count("done")) == runs and set(self.count("done").values()) == {1}
        done = Counter(event[:2] for event in self.events() if event[0].startswith("iteration"))
        assert len(done) == runs * ITERATIONS and set(done.values()) == {1}
        assert not self.count("locked"), "a process was started beside another one of its run"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICK.items():
        monkeypatch.setattr(slurm, name, value)
    monkeypatch.setattr(suite_runner, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(suite_runner, "SURVEY_SECONDS", 0.05)
    monkeypatch.setattr(suite_runner, "AGAIN_SECONDS", 0.2)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    monkeypatch.chdir(ROOT)
    for name, value in install(tmp_path / "slurm").items():
        monkeypatch.setenv(name, value)
    lab = SlurmLab(tmp_path)
    (tmp_path / "runner.log").touch()
    lab.cluster = Cluster(tmp_path / "slurm")
    yield lab
    lab.cluster.end()


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Of the same suite on this machine, two trials from two inits of two tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(suite_runner, "POLL_SECONDS", 0.02)
        lab = Lab(tmp_path_factory.mktemp("here"))
        lab.with_tables = True
        lab.run()
    return without_place(lab.tables(), lab.path)


def without_place(tables: dict[str, bytes], path: Path) -> dict[str, bytes]:
    """Tables lead to their runs, so the suite's place is in them."""
    return {name: data.replace(str(path).encode(), b"PLACE") for name, data in tables.items()}


def test_a_suite_through_slurm(lab, tables, capsys):
    lab.with_tables = True
    lab.run()
    lab.assert_once(8)
    assert lab.tables() == tables
    assert list(lab.cluster.scripts()) == ["100"], "one array"
    assert not lab.notes()


class Stop:
    """Called between two looks of the runner in this process: asks it to stop if it says so."""

    def __init__(self, patch: pytest.MonkeyPatch, condition: Callable[[], bool]) -> None:
        reap = suite_runner.Runner._reap

        def both(runner: suite_runner.Runner) -> None:
            reap(runner)
            if condition():
                os.kill(os.getpid(), signal.SIGINT)

        patch.setattr(suite_runner.Runner, "_reap", both)


def sized(sizes: dict[str, int]) -> Callable:
    """`expand` with other numbers of GPUs per task."""

    def resized(*arguments, **keys):
        specs = expand(*arguments, **keys)
        return tuple(run_suite.replace(spec, gpus=sizes[spec.task]) for spec in specs)

    return resized


def test_the_script_that_is_submitted(lab, monkeypatch):
    lab.cluster.hold()
    words = ["partition=long", "time=1-02:30:01", "gpus_per_node=4", "cpus_per_gpu=6"]
    words += ["mem_per_gpu=20G", "array_parallelism=3", "signal_delay_s=120", "setup=module load x"]
    words += ["sbatch.reservation=night", "account=lab", "setup=ulimit -n 4096"]
    monkeypatch.setattr(suite, "expand", sized({"a": 8, "b": 1}))
    Stop(monkeypatch, lambda: len(lab.notes()) == 8)
    own = run_suite.replace(backend(lab.journal), command=lambda *arguments: ["true"])
    with pytest.raises(Preempted):
        lab.main(own, *[word for pair in words for word in ("--slurm", pair)])
    first, second = lab.cluster.scripts().values()
    for script in (first, second):
        for line in (
            *("partition=long", "time=1591", "mem-per-gpu=20G", "account=lab", "array=0-3%3"),
            *("signal=USR2@120", "requeue", "reservation=night", "job-name=moco-out"),
            "open-mode=append",
        ):
            assert f"\n#SBATCH --{line}\n" in script, line
        assert "\nmodule load x\nulimit -n 4096\n" in script
    for script, (gpus, nodes, cpus) in ((first, (4, 2, 24)), (second, (1, 1, 6))):
        for line in (f"gpus-per-node={gpus}", f"nodes={nodes}", f"cpus-per-task={cpus}"):
            assert f"\n#SBATCH --{line}\n" in script, line
        assert "\n#SBATCH --ntasks-per-node=1\n" in script
        assert re.search(rf"\nsrun .*--cpus-per-task={cpus} .* -m submitit\.core", script)
    ids = [f"{array}_{task}" for array in (100, 101) for task in range(4)]
    assert sorted(lab.notes().values()) == ids
    assert not lab.events()


def test_jobs_delete_checkpoints_that_nobody_needs(lab, monkeypatch):
    """Without a runner that would do it."""
    runner = lab.start("--trials", "1", delay=0.1)
    lab.wait_for(lambda: len(lab.notes()) == 4)
    runner.kill()
    lab.wait_for(lambda: len(lab.count("done")) == 4)
    jobs = lab.cluster.jobs
    lab.wait_for(lambda: {job["state"] for job in jobs().values()} == {"COMPLETED"})
    assert kept(lab) == {("model_0000008.pth",)}


def test_submitits_local_executor(lab, tables, monkeypatch):
    """The same jobs without any Slurm."""
    monkeypatch.setattr(slurm, "CLUSTER", "local")
    lab.with_tables = True
    lab.run()
    lab.assert_once(8)
    assert lab.tables() == tables and not lab.cluster.jobs()


def test_preemption_and_time_limit(lab):
    """The signal that comes before the end: saved, back in the queue, and on from there."""
    lab.hold()
    runner = lab.start("--trials", "1")
    lab.wait_for(lambda: len(lab.count("iteration-2")) == 4)
    [first, second] = list(lab.count("iteration-2"))[:2]
    jobs = lab.notes()
    # As some clusters do it, with SIGTERM before; nobody watches the second one.
    lab.cluster.signal_tasks(jobs[first], signal.SIGTERM)
    lab.cluster.signal_tasks(jobs[first], signal.SIGUSR2)
    lab.wait_for(lambda: lab.cluster.jobs()[jobs[first]]["restarts"] == 1)
    runner.kill()
    runner.wait()
    lab.cluster.signal_tasks(jobs[second], signal.SIGUSR2)
    lab.wait_for(lambda: lab.count("saved")[second])
    lab.go()
    lab.wait_for(lambda: len(lab.count("done")) == 4)
    assert set(lab.count("saved")) == set(lab.count("resume")) == {first, second}
    assert {lab.cluster.jobs()[jobs[name]]["restarts"] for name in (first, second)} == {1}
    assert lab.cluster.calls("scontrol") == [f"scontrol requeue {jobs[n]}" for n in (first, second)]
    lab.run("--trials", "1")
    lab.assert_once(4)
    assert list(lab.cluster.scripts()) == ["100"], "nothing was submitted again"


def run_with_one_preempted(lab, monkeypatch, number):
    """The suite to its end, one job of which gets a signal once; the names of such runs."""
    preempted: list[str] = []

    def preempt_one() -> bool:
        if not preempted and lab.count("iteration-2"):
            preempted.append(next(iter(lab.count("iteration-2"))))
            lab.cluster.signal_tasks(lab.notes()[preempted[0]], number)
        if lab.count("saved"):
            lab.go()
        return False

    Stop(monkeypatch, preempt_one)
    lab.hold()
    lab.run("--trials", "1")
    return preempted


def test_put_back_once(lab, monkeypatch):
    """Slurm ends all of a job that is put back, also the program that has asked for it."""
    (lab.cluster.state / "kill-requeue").touch()
    preempted = run_with_one_preempted(lab, monkeypatch, signal.SIGTERM)
    assert list(lab.count("resume")) == preempted and len(lab.cluster.jobs()) == 4
    lab.assert_once(4)


def test_preempted_by_sigterm_alone(lab):
    """A grace time sends nothing else, and nobody watches: the job puts itself back."""
    lab.hold()
    runner = lab.start("--trials", "1")
    lab.wait_for(lambda: len(lab.count("iteration-2")) == 4)
    preempted = next(iter(lab.count("iteration-2")))
    job = lab.notes()[preempted]
    runner.kill()
    runner.wait()
    lab.cluster.signal_tasks(job, signal.SIGTERM)
    lab.wait_for(lambda: lab.count("saved"))
    lab.go()
    lab.wait_for(lambda: len(lab.count("done")) == 4)
    assert list(lab.count("saved")) == list(lab.count("resume")) == [preempted]
    assert lab.cluster.calls("scontrol") == [f"scontrol requeue {job}"]
    assert lab.cluster.jobs()[job]["restarts"] == 1
    lab.assert_once(4)


def test_runner_killed_while_jobs_run(lab, tables, capsys):
    """Two others watch its jobs: some that have not begun, some that run, some that are over."""
    lab.with_tables = True
    lab.cluster.hold()
    runner = lab.start(delay=0.2)
    lab.wait_for(lambda: len(lab.notes()) == 8)
    runner.kill()
    runner.wait()
    lab.run("--status")
    shown = capsys.readouterr().out
    assert "small: 8 queued of 8\n" in shown
    assert re.search(r"job 100_7 since .* UTC, pending", shown)
    log = lab.path / "runner.log"
    before = log.read_text().count("8 queued")
    runners = [lab.start(delay=0.2)]
    lab.wait_for(lambda: log.read_text().count("8 queued") == before + 1)
    lab.hold()
    lab.cluster.go()
    lab.wait_for(lambda: lab.count("iteration-1"))
    lab.run("--status")
    assert re.search(r"running .* on \S+ since .* UTC, job 100_\d", capsys.readouterr().out)
    lab.go()
    runners.append(lab.start(delay=0.2))
    assert [runner.wait(300) for runner in runners] == [0, 0], log.read_text()
    lab.assert_once(8)
    assert list(lab.cluster.scripts()) == ["100"], "nothing was submitted again"
    assert lab.tables() == tables and not lab.count("resume")


@pytest.mark.parametrize("begun", [False, True])
def test_killed_before_it_could_note_its_jobs(lab, begun):
    """Jobs that have begun say so themselves; others are submitted twice, and computed once."""
    lab.cluster.hold()
    killed = "import os; slurm.note_job = lambda *_: os.kill(os.getpid(), 9)\n"
    words = lab.words(0.05)
    words[2] = RUNNER.replace("run_cli(", f"{killed}run_cli(")
    assert subprocess.run(words, cwd=ROOT).returncode == -9
    assert len(lab.cluster.jobs()) == 8 and not lab.notes()
    if begun:
        lab.cluster.go()
        lab.wait_for(lambda: len(lab.notes()) == 8)
    runner = lab.start(delay=0.05)
    lab.wait_for(lambda: begun or len(lab.notes()) == 8)
    assert begun or len(lab.cluster.jobs()) == 16
    if not begun:
        lab.cluster.go()
    assert runner.wait(300) == 0, (lab.path / "runner.log").read_text()
    lab.wait_for(lambda: {j["state"] for j in lab.cluster.jobs().values()} == {"COMPLETED"})
    lab.assert_once(8)
    assert not lab.count("resume") and len(lab.cluster.jobs()) == (8 if begun else 16)


def test_stopping_leaves_the_jobs_in_the_queue(lab):
    lab.cluster.hold()
    runner = lab.start(delay=0.05)
    lab.wait_for(lambda: len(lab.notes()) == 8)
    runner.send_signal(signal.SIGINT)
    assert runner.wait(300) == 85
    said = (lab.path / "runner.log").read_text()
    assert "error: stopped by SIGINT; 8 jobs stay in Slurm's queue and go on (scancel 100 " in said
    assert "--status says how far they are, and the same command watches them again" in said
    assert not lab.cluster.calls("scancel") and len(lab.cluster.jobs()) == 8
    lab.cluster.go()
    lab.run()
    lab.assert_once(8)
    assert list(lab.cluster.scripts()) == ["100"]


def test_a_failure_is_shown(tmp_path, lab, capsys):
    lab = SlurmLab(tmp_path, inits=("bad", "mine"), trials=1)
    with pytest.raises(run_suite.SuiteFailed, match="2 of 4 runs failed and are in no number"):
        lab.run()
    [log] = lab.out.glob("runs/a/bad/*/suite.log")
    line = f"failed: a bad seed 0 (embedded): the loss is nan at iteration 3; its log is {log}"
    assert line in capsys.readouterr().err
    assert lab.states() == {"done": 2, "failed": 2} and not lab.notes()
    before = lab.events()
    with pytest.raises(run_suite.SuiteFailed):
        lab.run()
    assert lab.events() == before, "a failed run is not tried again by itself"
    with pytest.raises(run_suite.SuiteFailed):
        lab.run("--retry-failed")
    assert sum(lab.count("resume").values()) == 2


def test_the_last_failure_is_the_one_that_is_shown(lab, capsys):
    for words, more in (("error: old", ()), ("something new", ("--retry-failed",))):
        code = [sys.executable, "-c", f"print({words!r}); raise SystemExit(4)"]
        own = run_suite.replace(backend(lab.journal), command=lambda *arguments, code=code: code)
        with pytest.raises(run_suite.SuiteFailed):
            lab.main(own, "--trials", "1", *more)
        assert words.removeprefix("error: ") in capsys.readouterr().err
    texts = [json.loads(p.read_text())["error"] for p in lab.out.glob("runs/*/*/*/failed.json")]
    assert texts == ["something new"] * 4


def test_only_the_job_in_charge_is_judged(tmp_path, lab, monkeypatch):
    """Another runner may have judged a job's end, and submitted the run again, in the meantime."""
    lab = SlurmLab(tmp_path, inits=("bad",), trials=1)
    poll, judged = slurm.SlurmProcess.poll, []

    def late(process: slurm.SlurmProcess) -> int | None:
        code = poll(process)
        if code == 4 and not judged:
            judged.append(process.id)
            slurm.note_job(process._note, "999")
        return code

    monkeypatch.setattr(slurm.SlurmProcess, "poll", late)
    with pytest.raises(run_suite.SuiteFailed, match="2 of 2 runs failed"):
        lab.run()
    assert sum(lab.count("resume").values()) == 1, "the run of the other job goes on"


def test_a_job_that_submitit_cannot_run(lab, capsys, monkeypatch):
    """An error before the run's process: from the job's own log."""
    monkeypatch.setattr(slurm.RunJob, "__reduce__", lambda job: (int, ("not a job",)))
    with pytest.raises(run_suite.SuiteFailed):
        lab.run("--trials", "1")
    said = capsys.readouterr().err
    assert said.count("ValueError: invalid literal for int() with base 10: 'not a job', see ") == 4
    assert not lab.events()


def test_a_job_that_cannot_be_put_back(lab, monkeypatch):
    """Where the cluster does not allow it, the runner submits another."""
    (lab.cluster.state / "refuse-requeue").touch()
    preempted = run_with_one_preempted(lab, monkeypatch, signal.SIGUSR2)
    assert list(lab.count("resume")) == preempted == list(lab.count("saved"))
    assert len(lab.cluster.calls("scontrol")) == 1 and len(lab.cluster.jobs()) == 5
    lab.assert_once(4)


def test_a_lost_job_goes_on_and_a_cancelled_one_with_the_next_call(lab):
    """Both from what they had saved; who cancels a job does not want it back at once."""
    lab.hold()
    runner = lab.start("--trials", "1")
    lab.wait_for(lambda: len(lab.count("iteration-2")) == 4)
    [cancelled, lost] = list(lab.count("iteration-2"))[:2]
    jobs = lab.notes()
    subprocess.run(["scancel", jobs[cancelled]], check=True)
    lab.cluster.lose(jobs[lost])
    lab.wait_for(lambda: lab.count("saved"))
    lab.go()
    log = lab.path / "runner.log"
    assert runner.wait(300) == 1, log.read_text()
    assert f"job {jobs[cancelled]} left the queue (CANCELLED), see " in log.read_text()
    assert "sacct" not in log.read_text() and "accounting" not in log.read_text()
    requeued = [call for call in lab.cluster.calls("scontrol") if "requeue" in call]
    assert not requeued, "a cancelled job has put itself back into the queue"
    assert list(lab.count("saved")) == [cancelled] and list(lab.count("resume")) == [lost]
    assert lab.states() == {"done": 3, "interrupted": 1} and len(lab.cluster.jobs()) == 5
    lab.run("--trials", "1")
    assert set(lab.count("resume")) == {cancelled, lost} and len(lab.cluster.jobs()) == 6
    lab.assert_once(4)


def test_lost_again_and_again(lab, capsys):
    lab.cluster.hold()
    lost = []

    def lose_all() -> bool:
        for id_, job in lab.cluster.jobs().items():
            if job["state"] == "PENDING" and id_ in lab.notes().values():
                lab.cluster.lose(id_)
                lost.append(id_)
        return False

    with pytest.MonkeyPatch.context() as patch, pytest.raises(run_suite.SuiteFailed):
        Stop(patch, lose_all)
        lab.run("--trials", "1")
    assert len(lost) == 4 * suite_runner.MAX_FRUITLESS
    said = capsys.readouterr().err
    text = r"it was interrupted 3 times without a new checkpoint in between; job \d+(_\d)? left "
    assert len(re.findall(text + r"the queue \(NODE_FAIL\), see \S+_0_log\.err", said)) == 4
    assert not lab.notes() and not lab.events()


def test_preempted_again_and_again(lab, capsys):
    """Put back into the queue as long as it gets on, and not for ever."""

    def leaving(spec: RunSpec, folder: Path) -> list[str]:
        code = (
            "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: os._exit(85));"
            f"open({str(lab.journal)!r}, 'a').write('start {spec.name} 0\\n'); time.sleep(60)"
        )
        return [sys.executable, "-c", code]

    signalled: list[str] = []

    def preempt() -> bool:
        for _, name, _ in lab.events()[len(signalled) :]:
            lab.cluster.signal_tasks(lab.notes()[name], signal.SIGUSR2)
            signalled.append(name)
        return False

    with pytest.MonkeyPatch.context() as patch, pytest.raises(run_suite.SuiteFailed):
        Stop(patch, preempt)
        lab.main(run_suite.replace(backend(lab.journal), command=leaving), "--trials", "1")
    assert Counter(signalled) == dict.fromkeys(signalled, suite_runner.MAX_FRUITLESS)
    assert len(lab.cluster.calls("scontrol")) == 4 * (suite_runner.MAX_FRUITLESS - 1)
    assert list(lab.cluster.scripts()) == ["100"] and len(set(signalled)) == 4
    said = capsys.readouterr().err
    assert said.count("it was interrupted 3 times without a new checkpoint in between") == 4


def test_preempted_more_often_than_it_logs(tmp_path, lab):
    """Its jobs end each time from a new checkpoint, so others are submitted until it is done."""
    lab = SlurmLab(tmp_path, inits=("often",), trials=1)
    lab.run()
    assert set(lab.count("resume").values()) == {ITERATIONS - 1}
    assert lab.states() == {"done": 2}


class Here:
    """What a job is told about itself."""

    USR_SIG = "USR2"
    job_id, hostname, hostnames = "12_3", "node1", ("node1", "node2")

    def __init__(self, rank: int = 0, nodes: int = 1) -> None:
        self.global_rank, self.num_nodes = rank, nodes


def test_what_a_job_does_that_comes_too_late(lab, monkeypatch):
    """Whoever submitted it, and however often: the claim and the record decide."""
    monkeypatch.setattr(slurm, "CLAIM_SECONDS", 0.2)
    monkeypatch.setattr(slurm, "SUBMIT_SECONDS", 1.0)
    lab.run("--trials", "1")
    monkeypatch.setattr(submitit, "JobEnvironment", Here)
    folder = SuiteFolder(lab.out)
    spec = folder.asked()[1][0]
    job = RunJob(lab.out, spec, (sys.executable, "-c", "raise SystemExit(7)"), 1, 1.0)
    assert job() == 0, "the run is done"
    (folder.run(spec) / "run.json").unlink()
    for content, seconds in (({"job": "9"}, 0.2), ({"runner": 9}, 1.0)):
        claim = Claim.take(folder.claim(spec))
        assert claim is not None
        claim.write(content)
        begun = time.monotonic()
        assert job() == LockedError.exit_code
        assert time.monotonic() - begun >= seconds
        claim.release()
    assert job() == 7, "nobody is at it any more"
    noted = claims.read(folder.claim(spec))
    assert (noted["job"], noted["host"]) == ("12_3", socket.gethostname())
    assert not claims.held(folder.claim(spec))
    folder.fail(spec, "the loss is nan", 4)
    job.words = (sys.executable, "-c", "raise SystemExit(8)")
    assert job() == 1, "a failed run is for --retry-failed"


def test_words_of_several_machines(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", "/data")
    content = suite.load_suite(ROOT / "configs" / "suites" / "paper.yaml")
    inits = {"mine": Init("/w/mine.pth", "a" * 64)}
    specs = expand(content, inits, 1, ["detectron2"], version="1", gpus=16, available=16)
    assert {spec.program for spec in specs} == {"detection", "linear", "finetune"}
    for spec in specs:
        words = tuple(run_suite.command(spec, tmp_path, 2))
        job = RunJob(tmp_path, spec, words, 2, 1.0)
        for rank in (0, 1):
            own = job._words(Here(rank, 2))
            assert not any("<" in word for word in own)
            host, port = "node1", slurm.port(Here())
            if spec.program == "detection":
                args = train_net.build_parser().parse_args(own[3:])
                assert (args.num_gpus, args.num_machines, args.machine_rank) == (8, 2, rank)
                assert args.dist_url == f"tcp://{host}:{port}"
                continue
            args = get_args_parser().parse_args(own[3:])
            assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("8", "2", rank)
            assert (args.master_addr, args.master_port, args.standalone) == (host, port, False)
            assert own[own.index("-m", 3) + 1] == f"moco.{spec.program}"
    assert 20000 <= slurm.port(Here()) < 30000


def two_machines(journal: Path, delay: float) -> run_suite.Backend:
    """The first process of a run trains; the second one only waits, until it is ended."""
    own = backend(journal, delay)

    def command(spec: RunSpec, folder: Path, machines: int = 1) -> list[str]:
        code = (
            "import os, sys, time; rank = sys.argv[1]\n"
            f"line = f'machine-{{rank}}@{{sys.argv[2]}} {spec.name} {{os.getpid()}}\\n'\n"
            f"open({str(journal)!r}, 'a').write(line)\n"
            "if rank == '0': os.execv(sys.argv[3], sys.argv[3:])\n"
            "time.sleep(600)"
        )
        assert machines == 2
        start = [sys.executable, "-c", code, RANK, f"{HOST}:{PORT}"]
        return [*start, *own.command(spec, folder)]

    return run_suite.replace(own, command=command)


def test_runs_on_two_machines(lab, monkeypatch):
    """Both begin together, also after a preemption, and the second ends with the first."""
    monkeypatch.setattr(suite, "expand", sized({"a": 2, "b": 2}))
    preempted: list[str] = []

    def preempt() -> bool:
        for name in set(lab.count("iteration-2")) - set(preempted):
            preempted.append(name)
            lab.cluster.signal_tasks(lab.notes()[name], signal.SIGUSR2)
        if len(lab.count("saved")) == 4:
            lab.go()
        return False

    Stop(monkeypatch, preempt)
    lab.hold()
    options = ["--trials", "1", "--slurm", "gpus_per_node=1"]
    lab.main(two_machines(lab.journal, 0.0), *options)
    lab.assert_once(4)
    assert len(preempted) == 4 and set(lab.count("saved")) == set(preempted)
    began = Counter(what for what, _, _ in lab.events() if what.startswith("machine"))
    ports = {re.sub(r"machine-[01]@node1:(2\d{4})", r"\1", what) for what in began}
    assert len(ports) == 4 and all(map(str.isdecimal, ports)), "four jobs, four places to meet"
    assert set(began.values()) == {2} and len(began) == 8
    seconds = [pid for what, _, pid in lab.events() if what.startswith("machine-1")]
    lab.wait_for(lambda: not any(map(is_alive, seconds)))
    assert {job["restarts"] for job in lab.cluster.jobs().values()} == {1}


def test_a_machine_of_several_fails(lab, monkeypatch):
    """The first one does not wait for it for ever, and the log says which it was."""
    monkeypatch.setattr(slurm, "PARTNER_SECONDS", 0.3)
    lab.run("--trials", "1")
    monkeypatch.setattr(submitit, "JobEnvironment", lambda: Here(0, 2))
    folder = SuiteFolder(lab.out)
    spec = folder.asked()[1][0]
    (folder.run(spec) / "run.json").unlink()
    job = RunJob(lab.out, spec, (sys.executable, "-c", "import time; time.sleep(600)"), 2, 1.0)
    (lab.out / "jobs" / "12_3.0.rank1.json").write_text('{"begins": false, "code": 9}')
    assert job() == 9
    last = folder.log(spec).read_text().splitlines()[-1]
    assert last.startswith("error: the process on machine 1 ended with exit code 9; see ")
    assert last.endswith("jobs/12_3_1_log.err")


def test_options():
    options = parse_options(["time=90", "time=01:30:01", "qos=high", "exclusive=true", "mem=64G"])
    assert (options.minutes, options.parameters["exclusive"]) == (91, True)
    assert options.parameters["qos"] == "high" and options.save_seconds == 70
    assert parse_options(["signal_delay_s=30"]).save_seconds == 15
    executor = slurm.SlurmExecutor(Path("out"), parse_options(["gpus_per_node=4"]))
    assert [executor.machines(gpus) for gpus in (0, 1, 4, 8, 16)] == [1, 1, 1, 2, 4]
    with pytest.raises(UserError, match="a run of 10 GPUs cannot be divided among 3 nodes of 4"):
        executor.machines(10)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("partion=x", r"no such key; did you mean partition\? choices are account, .*sbatch.OPT"),
        ("partition", "expected KEY=VALUE, e.g. partition=gpu"),
        ("nodes=2", "cannot be set; it follows from the GPUs of a run and gpus_per_node"),
        ("time=1d", r"expected minutes or \[D-\]HH:MM:SS, e.g. time=1-00:00:00"),
        ("time=0", "expected minutes or"),
        ("gpus_per_node=x", "expected a whole number of at least 0"),
        ("signal_delay_s=5", "expected a whole number of at least 30"),
    ],
)
def test_options_that_cannot_be(word, message, lab):
    with pytest.raises(UserError, match=f"^--slurm {re.escape(word)}: {message}") as error:
        lab.run("--dry-run", "--slurm", word)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)
    assert not lab.out.exists()


def test_dry_run_submits_nothing(lab, capsys):
    options = ["--dry-run", "--seconds-per-iteration", "450", "--slurm", "array_parallelism=2"]
    lab.run(*options)
    shown = capsys.readouterr().out
    assert "as Slurm jobs of 24:00 h on CPU nodes" in shown
    assert "8 to do: 8.00 CPU hours, about 4:00:00 without the time in the queue" in shown
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "expand", sized({"a": 8, "b": 2}))
        lab.run(*options, "--slurm", "gpus_per_node=4")
    # 4 runs of an hour on 8 GPUs, 4 on 2; two at a time, of whatever size.
    shown = capsys.readouterr().out
    assert "8 to do: 40.00 GPU hours, about 4:00:00 without" in shown
    assert "on nodes of 4 GPUs" in shown and not lab.out.exists() and not lab.cluster.jobs()


def test_what_is_missing(lab, monkeypatch):
    with pytest.raises(UserError, match=r"^--slurm \S+: is for --executor slurm; got --exec"):
        lab.run("--executor", "cpu")
    # Whatever else is installed on the machine of the test.
    monkeypatch.setenv("PATH", str(lab.path / "slurm"))
    (lab.path / "slurm" / "sbatch").unlink()
    with pytest.raises(UserError, match="--executor slurm: sbatch not found on PATH; run this w"):
        lab.run("--dry-run")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError) as error:
        lab.run("--dry-run")
    message = "--executor slurm: submitit is not installed; pip install -e '.[slurm]'"
    assert str(error.value) == message and error.value.exit_code == 2
    assert not lab.out.exists()
    # for --status
    code = "import sys; sys.modules['submitit'] = None; import benchmarks.suites.executors.slurm"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_sbatch_refuses(lab, capfd, monkeypatch):
    refuse = "sbatch: error: Batch job submission failed: Invalid partition specified"
    (lab.cluster.state / "refuse-test").write_text(refuse)
    with pytest.raises(UserError, match=f"nothing was started: sbatch would refuse .*: {refuse}"):
        lab.run("--dry-run")
    assert not lab.out.exists()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="gpus_per_node=0"):
        patch.setattr(suite, "expand", sized({"a": 1, "b": 1}))
        lab.run("--dry-run", "--slurm", "gpus_per_node=1")
    (lab.cluster.state / "refuse-test").rename(lab.cluster.state / "refuse")
    with pytest.raises(UserError, match=f"sbatch refused 8 jobs: {refuse}; check --slurm"):
        lab.run()
    assert not lab.notes() and not list(lab.out.glob("runs/*/*/*/failed.json"))
    # Later, when it has worked before, it is tried again.
    (lab.cluster.state / "refuse").unlink()
    monkeypatch.setattr(slurm, "RETRY_SECONDS", 0.5)
    refused = []

    def refuse_twice() -> bool:
        refused[:] = re.findall("note: sbatch refused 4 jobs", "".join(said))
        said.append(capfd.readouterr().err)
        if lab.count("done") and not refused:
            (lab.cluster.state / "refuse").write_text(refuse)
        elif len(refused) == 2:
            (lab.cluster.state / "refuse").unlink(missing_ok=True)
        return False

    said: list[str] = []
    Stop(monkeypatch, refuse_twice)
    lab.run("--workers", "4")
    assert "specified; check --slurm; trying again in 0.5 s\n" in "".join(said)
    lab.assert_once(8)


def test_so_many_jobs_at_a_time(lab):
    lab.run("--workers", "3")
    lab.assert_once(8)
    working: set[str] = set()
    for what, name, _ in lab.events():
        working |= {name}
        assert len(working) <= 3
        working -= {name} if what == "done" else set()
    assert len(lab.cluster.scripts()) >= 3


def test_help_is_fast():
    words = [sys.executable, "-X", "importtime", "-m", "benchmarks.run_suite", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert "--slurm KEY=VALUE" in done.stdout
    for name in ("submitit", "torch", "numpy", "yaml", "benchmarks.suites.executors.slurm"):
        assert f" {name}\n" not in done.stderr, f"--help imports {name}"
