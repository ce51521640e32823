"""The scheduler, on a training program in miniature: each run once, whatever is killed when.

The tables are made by the real functions, and compared byte by byte.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.run_suite import SuiteFailed
from benchmarks.suites import scheduler
from benchmarks.suites.executors.base import Options
from benchmarks.suites.executors.local import LocalExecutor, cpu
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.forecast import Forecast, estimate, foresee, time_left
from benchmarks.suites.runs import MAX_FRUITLESS, Run, State
from benchmarks.suites.scheduler import RunFailed, Scheduler
from moco.common.errors import Preempted, UserError
from tests.benchmarks.suites.fake_trainer import ITERATIONS
from tests.benchmarks.suites.lab import Lab, after, is_alive, kept


def fake_run(folder: Path, name: str, code: str = "", **more) -> Run:
    """A step that runs Python code and then makes its product."""
    product = folder / f"{name}.made"
    argv = [sys.executable, "-c", f"{code}\nopen({str(product)!r}, 'w')"]
    return Run(name, name, folder / name, lambda: argv, product=product, **more)


def noted(folder: Path, name: str, **more) -> Run:
    path = str(folder / "order")
    code = f"import time; note = lambda text: open({path!r}, 'a').write(text)\n"
    code += f"note('+{name} '); time.sleep(0.1); note('-{name} ')"
    return fake_run(folder, name, code, **more)


@pytest.mark.usefixtures("quick")
class TestPlan:
    """Runs that come after others."""

    def test_order_and_environment(self, tmp_path):
        one = "assert (os.environ['OMP_NUM_THREADS'], os.environ['MOCO_PROGRESS']) == ('1', 'off')"
        runs = [fake_run(tmp_path, "environment", f"import os; {one}")]
        runs += [noted(tmp_path, "a"), noted(tmp_path, "c", after=("a", "b")), noted(tmp_path, "b")]
        states = Scheduler(runs, cpu(Options(tmp_path, 1))).run()
        assert (tmp_path / "order").read_text() == "+a -a +b -b +c -c "
        assert {state.kind for state in states.values()} == {"done"}

    def test_a_failure_fails_what_comes_after(self, tmp_path):
        bad = fake_run(tmp_path, "bad", "raise SystemExit(4)")
        runs = [bad, noted(tmp_path, "after", after=("bad",)), noted(tmp_path, "other")]
        states = Scheduler(runs, cpu(Options(tmp_path, 1))).run()
        assert [states[run.name].kind for run in runs] == ["failed", "failed", "done"]
        assert (tmp_path / "order").read_text() == "+other -other "

    def test_a_failure_stops_the_rest(self, tmp_path):
        pid = tmp_path / "pid"
        sleeper = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()))"
        wait = f"import os, time\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.02)\n"
        code = "print('error: loss is nan'); print('bye'); raise SystemExit(4)"
        runs = [fake_run(tmp_path, "long", f"{sleeper}; time.sleep(99)")]
        runs.append(fake_run(tmp_path, "bad", wait + code))
        runs.append(noted(tmp_path, "later", after=("bad",)))
        with pytest.raises(RunFailed, match="bad failed: loss is nan; its log is ") as error:
            Scheduler(runs, cpu(Options(tmp_path, 2)), fail_fast=True).run()
        assert error.value.exit_code == 4
        assert not (tmp_path / "order").exists() and not is_alive(int(pid.read_text()))


@pytest.mark.slow
@pytest.mark.race
class TestProcesses:
    """Runs in processes that are killed, stopped, or share their folder."""

    def test_processes_of_a_killed_runner_are_waited_for(self, lab, capsys):
        runner = lab.held_runner()
        runner.kill()
        runner.wait()
        orphans = {pid for _, _, pid in lab.events()}
        assert len(orphans) == 2 and all(map(is_alive, orphans))
        assert lab.states() == {"running": 2, "waiting": 6}
        # They keep their slots, so the next runner starts nothing beside them.
        assert cpu(Options(lab.out, 2)).reserve(0) is None
        capsys.readouterr()
        lab.release()
        lab.run()
        said = capsys.readouterr().err
        assert "note: a random seed 0 (embedded), a mine seed 0 (embedded): " in said
        lab.assert_once(8)
        assert lab.count("start") == lab.count("done") and not lab.count("resume")
        events = lab.events()
        for pid in orphans:
            assert [what for what, _, own in events if own == pid][-1] == "done"

    @pytest.mark.parametrize("hosts", [("one", "one"), ("one", "other")])
    def test_two_runners_share_a_folder(self, lab, hosts):
        """On one machine, whose two slots they have between them, and on two with a slot each."""
        more = ["--trials", "3", *(["--workers", "1"] if len(set(hosts)) == 2 else [])]
        lab.hold()  # so that the second one does not come too late
        runners = [lab.start(*more, host=host) for host in hosts]
        lab.wait_for(lambda: len(lab.count("iteration-2")) == 2)
        lab.release()
        assert [runner.wait(300) for runner in runners] == [0, 0], lab.log()
        lab.assert_once(12)
        assert lab.count("start") == lab.count("done") and not lab.count("resume")
        working: set[str] = set()
        for what, name, _ in lab.events():
            working |= {name}
            assert len(working) <= 2
            working -= {name} if what == "done" else set()
        if len(set(hosts)) == 2:
            holders = [json.loads(path.read_text()) for path in lab.out.glob("runs/*/*/*/.claim")]
            assert {holder["runner"] for holder in holders} == {runner.pid for runner in runners}

    def test_what_a_later_call_had_failed_is_not_tried_again(self, failing_lab):
        """With two runners and --retry-failed, each failed run is tried once, not in turns."""
        lab = failing_lab
        with pytest.raises(SuiteFailed):
            lab.run()
        runners = [lab.start("--retry-failed") for _ in range(2)]
        assert [runner.wait(300) for runner in runners] == [1, 1]
        assert set(lab.count("resume").values()) == {1} and len(lab.count("resume")) == 2

    def test_a_process_that_does_not_save_is_killed(self, lab, monkeypatch):
        deaf = (
            "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            f"open({str(lab.journal)!r}, 'a').write('start x %d\\n' % os.getpid()); time.sleep(1e6)"
        )

        def interrupt() -> None:
            if len(lab.events()) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        after(monkeypatch, "_survey", interrupt)
        with pytest.raises(Preempted):
            lab.run_command(deaf, "--stop-seconds", "0.3")
        assert not any(is_alive(pid) for _, _, pid in lab.events())
        assert not list(lab.out.glob("runs/*/*/*/failed.json"))  # stopped is not failed

    def test_a_folder_in_use_by_another_program_is_waited_for(self, lab):
        lab.run("--trials", "1")
        specs = SuiteFolder(lab.out).read()[1]
        [run] = [SuiteFolder(lab.out).run(s) for s in specs if (s.task, s.init) == ("b", "mine")]
        shutil.rmtree(run.folder)
        code = (
            "import sys; from moco.common.run import RunFolder\n"
            "with RunFolder(sys.argv[1], resume=True): print('held', flush=True); input()"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", code, str(run.folder)], stdin=-1, stdout=-1
        )
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"

        def release() -> None:
            lab.wait_for(lambda: sum(lab.count("locked").values()) == 2)
            holder.communicate(b"\n")

        thread = threading.Thread(target=release)
        thread.start()
        lab.run("--trials", "1")
        thread.join()
        assert lab.states() == {"done": 4} and not list(run.folder.glob("failed.json"))
        assert lab.count("start")[run.name] == 2  # once before its folder was removed

    def test_a_full_disk_is_one_line(self, lab, monkeypatch):
        """What had started is asked to save, and the same command continues."""
        note, noted = Run.note_holder, []

        def note_holder(run: Run, *arguments) -> None:
            noted.append(run)
            if len(noted) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            note(run, *arguments)

        monkeypatch.setattr(Run, "note_holder", note_holder)
        with pytest.raises(UserError, match=rf"^{lab.out}\S+: No space left on device"):
            lab.run(delay=0.1)
        assert not any(is_alive(pid) for _, _, pid in lab.events())
        lab.run()
        lab.assert_once(8)


@pytest.mark.slow
def test_a_run_that_another_runner_has_just_ended_is_not_started(lab, monkeypatch):
    """Between the look at a run and its lock: what counts is what is on disk under the lock."""
    ended = lab.path / "ended"
    lab.run("--trials", "1")
    shutil.copytree(lab.out / "runs", ended)
    for record in lab.out.glob("runs/*/*/*/run.json"):
        record.unlink()
    before = lab.events()
    ends = lambda: shutil.copytree(ended, lab.out / "runs", dirs_exist_ok=True)  # noqa: E731
    after(monkeypatch, "_survey", ends)
    lab.run("--trials", "1")
    assert lab.events() == before


def test_interrupted_again_and_again_without_progress(lab, capsys):
    journal = str(lab.journal)
    with pytest.raises(SuiteFailed):
        lab.run_command(
            f"open({journal!r}, 'a').write('start x 0\\n'); raise SystemExit(85)", "--trials", "1"
        )
    assert lab.count("start") == {"x": 4 * MAX_FRUITLESS}
    assert "interrupted 3 times" in capsys.readouterr().err


@pytest.mark.slow
def test_a_new_checkpoint_is_progress(tmp_path, quick):
    """metrics.json has a line every 20 iterations, and preemption may come more often."""
    lab = Lab(tmp_path, inits=("often",), trials=1)
    lab.run()
    assert set(lab.count("resume").values()) == {ITERATIONS - 1}
    assert lab.states() == {"done": 2}


@pytest.mark.slow
def test_of_a_run_that_continues_two_checkpoints_stay(lab, monkeypatch):
    monkeypatch.setattr(scheduler, "KEEP_SECONDS", 0.0)
    numbers: list[int] = []
    after(monkeypatch, "_tidy", lambda: numbers.extend(len(names) for names in kept(lab)))
    lab.run("--trials", "1", delay=0.2)
    assert max(numbers) <= 3  # one may come between the two looks
    assert set(lab.count("done").values()) == {1} and kept(lab) == {("model_0000008.pth",)}


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("pass", "it ended without a record"),
        ("import os; os.kill(os.getpid(), 9)", "it was killed by signal 9 (SIGKILL)"),
        ("print('error: old', 'more', '', sep='\\n'); raise SystemExit(4)", "old"),
        ("raise SystemExit(4)", "it printed nothing"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_why_a_process_failed(tmp_path, quick, code, error):
    run = Run("a", "a", tmp_path / "a", lambda: [sys.executable, "-c", code])
    [state] = Scheduler([run], cpu(Options(tmp_path, 1))).run().values()
    assert state == State("failed", text=f"{error}; its log is {run.log}")


def test_a_run_too_large_for_now_is_passed_over(tmp_path, quick):
    """Groups of 2 and 1 on 3 GPUs: the small one does not wait for the large ones."""
    sizes = {"first": 2, "second": 2, "small": 1}
    runs = [noted(tmp_path, name, gpus=gpus) for name, gpus in sizes.items()]
    Scheduler(runs, LocalExecutor(tmp_path, ["0", "1", "2"])).run()
    order = (tmp_path / "order").read_text().split()
    assert order.index("+small") < order.index("+second") > order.index("-first")


def named(name: str, *after: str, **more) -> Run:
    return Run(name, name, Path(name), tuple, (name[0], "embedded", 0), after=after, **more)


def test_time_left_by_hand():
    runs = [named("p"), named("r0"), named("r1"), named("m0", "p"), named("m1", "p")]
    left = {"p": 10.0, "r0": 4.0, "r1": 4.0, "m0": 5.0, "m1": 5.0}
    # slot 1: p 0-10, m0 10-15; slot 2: r0 0-4, r1 4-8, idle until p is done, m1 10-15
    assert time_left(runs, left, (), 2) == 15.0
    assert time_left(runs, left, (), 1) == 28.0
    # r1 runs beside p already: r0 waits for a slot
    assert time_left(runs, {**left, "r1": 1.0}, ("p", "r1"), 2) == 15.0
    # p is done: m0 and m1 follow r0
    assert time_left(runs, {"r0": 2.0, "m0": 5.0, "m1": 5.0}, ("r0",), 2) == 7.0
    assert time_left(runs, {}, (), 2) == 0.0


def test_forecast_by_hand():
    runs = [named(name, iterations=100) for name in ("a0", "a1", "b0", "b1")]
    states = {"a0": State("done", 100, seconds=50.0), "a1": State("running", 40)}
    of_a, of_b = {("a", "embedded", 0): [0.5]}, {("b", "embedded", 0): [1.0]}
    found = foresee(runs, states, of_a | of_b, 2)
    # a takes 50 s, b 100 s: 30 s of a are left beside 100 s of b; the other b starts at 30 s.
    assert found.seconds_left == pytest.approx(130.0)
    assert found.done == pytest.approx((50 + 20) / 300)
    # A running process tells its speed: 40 iterations in 60 s, but of 100 it began at 20.
    going = {"b1": State("running", 60, seconds=60.0, began_at=20)}
    assert foresee(runs[2:], going, {}, 1).seconds_left == pytest.approx(150 + 60)
    assert foresee(runs[2:], going, of_b, 1).seconds_left == pytest.approx(100 + 40)
    # Of b nothing is known: it is taken to last as long as a.
    assert foresee(runs, states, of_a, 2).seconds_left == pytest.approx(30 + 50)
    assert foresee(runs, {}, {}, 2).seconds_left == float("inf")
    assert foresee(runs, {run.name: State("failed") for run in runs}, {}, 2) == Forecast(1.0, 0.0)


def test_estimates_by_hand():
    run = Run("r", "r", Path("r"), tuple, ("task", "embedded", 2), gpus=2, iterations=1000)
    other, own = {("task", "detectron2", 2): [9.0]}, {run.speed_key: [1.0, 2.0]}
    stated = replace(run, seconds_per_iteration=0.36)
    assert estimate(run, other) == (None, "unknown")
    assert estimate(stated, other) == (360.0, "stated")
    for each in (run, stated):  # what was measured is better
        assert estimate(each, other | own) == (1500.0, "measured, 2 runs")
    assert estimate(replace(stated, iterations=0), own).seconds is None


def test_progress_is_the_last_whole_line(tmp_path):
    run = Run("r", "r", tmp_path, tuple, iterations=200)
    assert run.iteration() == 0.0
    lines = [json.dumps({"iteration": i, "padding": "x" * 100}) for i in range(0, 100, 20)]
    (tmp_path / "metrics.json").write_text("\n".join(lines) + '\n{"iterat')
    assert run.fraction(run.state()) == 0.4
    (tmp_path / "metrics.json").write_text('{"iteration": 500}\n')
    assert run.fraction(run.state()) == 1.0
