"""Runner, on a miniature training program: every run is computed once, whatever is killed."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.run_suite import SuiteFailed
from benchmarks.suites import runner
from benchmarks.suites.executors.base import Options
from benchmarks.suites.executors.local import LocalExecutor, cpu
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.forecast import Forecast, estimate, make_forecast, time_left
from benchmarks.suites.runner import RunFailed, Runner
from benchmarks.suites.runs import MAX_INTERRUPTIONS, Run, State
from moco.common.errors import LockedError, Preempted, UserError
from tests.benchmarks.suites.fake_trainer import ITERATIONS
from tests.benchmarks.suites.lab import Lab, after, is_alive, kept
from tests.benchmarks.suites.run_code import command


def fake_run(folder: Path, name: str, code: str = "", **more) -> Run:
    """Return a step that runs Python code and then makes its product."""
    product = folder / f"{name}.made"
    argv = command(f"{code}\nopen({str(product)!r}, 'w')")
    return Run(name, name, folder / name, argv, product=product, **more)


def noted(folder: Path, name: str, **more) -> Run:
    path = str(folder / "order")
    code = f"import time; note = lambda text: open({path!r}, 'a').write(text)\n"
    code += f"note('+{name} '); time.sleep(0.1); note('-{name} ')"
    return fake_run(folder, name, code, **more)


@pytest.mark.usefixtures("quick")
class TestPlan:
    """Order, dependencies and failures of a plan."""

    def test_order_and_environment(self, tmp_path):
        one = "assert (os.environ['OMP_NUM_THREADS'], os.environ['MOCO_PROGRESS']) == ('1', 'off')"
        runs = [fake_run(tmp_path, "environment", f"import os; {one}")]
        runs += [noted(tmp_path, "a"), noted(tmp_path, "c", after=("a", "b")), noted(tmp_path, "b")]
        states = Runner(runs, cpu(Options(tmp_path, 1))).run()
        assert (tmp_path / "order").read_text() == "+a -a +b -b +c -c "
        assert {state.kind for state in states.values()} == {"done"}

    def test_a_failure_fails_what_comes_after(self, tmp_path):
        bad = fake_run(tmp_path, "bad", "raise SystemExit(4)")
        runs = [bad, noted(tmp_path, "after", after=("bad",)), noted(tmp_path, "other")]
        states = Runner(runs, cpu(Options(tmp_path, 1))).run()
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
            Runner(runs, cpu(Options(tmp_path, 2)), fail_fast=True).run()
        assert error.value.exit_code == 4
        assert not (tmp_path / "order").exists() and not is_alive(int(pid.read_text()))


@pytest.mark.slow
@pytest.mark.race
class TestProcesses:
    """Processes that are killed, stopped, or share their folder."""

    @pytest.mark.parametrize(
        ("victim", "when"),
        [("runner", "early"), ("child", "early"), ("child", "late"), ("all", "late")],
    )
    def test_killed_at_any_point(self, tmp_path, quick, victim, when):
        """Every run is computed once, and the page is complete."""
        lab = Lab(tmp_path)
        lab.with_tables = True
        lab.hold()
        if when == "late":
            lab.release()
        runner = lab.start(delay=0.05, start_new_session=True)
        at = 2 if when == "early" else 4 * ITERATIONS - 5  # in the middle of two runs
        lab.wait_for(lambda: sum(e[0].startswith("iteration") for e in lab.events()) >= at)
        children = {pid for _, _, pid in lab.events() if is_alive(pid)}
        if victim == "child":
            os.kill(next(iter(children)), signal.SIGKILL)
        else:
            if victim == "all":
                for pid in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            os.kill(runner.pid, signal.SIGKILL if victim == "runner" else signal.SIGTERM)
        lab.release()
        assert runner.wait(300) in (0, 1, 85, -9), lab.log()
        lab.wait_for(lambda: not any(map(is_alive, children)), 30)
        lab.run("--retry-failed")
        # A child may be killed between saving an iteration and writing the event.
        missing = int(victim == "child")
        assert len(lab.count("done")) >= 8 - missing
        assert set(lab.count("done").values()) == {1}
        done = Counter(event[:2] for event in lab.events() if event[0].startswith("iteration"))
        # Iterations of a killed child after its checkpoint are repeated.
        assert len(done) >= 8 * ITERATIONS - missing
        assert set(done.values()) <= ({1, 2} if victim == "child" else {1})
        assert sum(number - 1 for number in done.values()) <= 1
        assert not lab.count("locked") and lab.states() == {"done": 8}
        page = (lab.out / "tables" / "table.html").read_text()
        assert "<title>Transfer results</title>" in page and 'id="progress"' not in page

    def test_killed_at_six_points(self, tmp_path, quick):
        """After each kill of the whole group, the same command continues to the same table."""
        labs = [Lab(tmp_path / name, trials=1) for name in ("killed", "whole")]
        for lab in labs:
            lab.with_tables = True
        killed, whole = labs
        points = (
            lambda: "reading tasks and weights" in killed.log(),
            lambda: (killed.out / "suite.json").exists(),
            lambda: killed.count("start"),
            lambda: killed.count("iteration-4"),
            lambda: killed.count("done"),
            lambda: len(killed.count("done")) == 4 and killed.tables(),  # the page is written
        )
        for is_reached in points:
            runner = killed.start(delay=0.2, start_new_session=True)
            killed.wait_for(is_reached)
            os.killpg(runner.pid, signal.SIGKILL)
            assert runner.wait() == -signal.SIGKILL, killed.log()
        for lab in labs:
            lab.run()
        killed.assert_once(4)
        assert killed.states() == whole.states() == {"done": 4}
        tables = [lab.tables() for lab in labs]
        assert tables[0].keys() == tables[1].keys()
        assert tables[0]["table.csv"] == tables[1]["table.csv"] != b""

    def test_a_folder_has_one_runner(self, lab):
        """The error of the second one names the process and the host of the first."""
        with lab.held_runner() as first:
            with pytest.raises(
                LockedError, match=rf"out: process {first.pid} on \S+ has computed it si"
            ):
                lab.run()
            lab.release()
            assert first.wait(300) == 0
        lab.assert_once(8)

    def test_a_process_that_does_not_save_is_killed(self, lab, monkeypatch):
        deaf = (
            "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            f"open({str(lab.journal)!r}, 'a').write('start x %d\\n' % os.getpid()); time.sleep(1e6)"
        )

        def interrupt() -> None:
            if len(lab.events()) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        after(monkeypatch, "_reap", interrupt)
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
        """Runs that had started save, and the same command continues."""
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


def test_interrupted_again_and_again_without_progress(lab, capsys):
    journal = str(lab.journal)
    with pytest.raises(SuiteFailed):
        lab.run_command(
            f"open({journal!r}, 'a').write('start x 0\\n'); raise SystemExit(85)", "--trials", "1"
        )
    assert lab.count("start") == {"x": 4 * MAX_INTERRUPTIONS}
    assert "interrupted 3 times" in capsys.readouterr().err


@pytest.mark.slow
def test_a_new_checkpoint_is_progress(tmp_path, quick):
    """Preemption may come more often than a new line in metrics.json."""
    lab = Lab(tmp_path, inits=("often",), trials=1)
    lab.run()
    assert set(lab.count("resume").values()) == {ITERATIONS - 1}
    assert lab.states() == {"done": 2}


@pytest.mark.slow
def test_of_a_run_that_continues_two_checkpoints_stay(lab, monkeypatch):
    monkeypatch.setattr(runner, "KEEP_SECONDS", 0.0)
    numbers: list[int] = []
    after(
        monkeypatch,
        "_delete_checkpoints",
        lambda: numbers.extend(len(names) for names in kept(lab)),
    )
    lab.run("--trials", "1", delay=0.2)
    assert max(numbers) <= 3  # a run may write one before the test counts
    assert set(lab.count("done").values()) == {1} and kept(lab) == {("model_0000008.pth",)}


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("pass", "it ended without a record"),
        ("import os; os.kill(os.getpid(), 9)", "it was killed by signal 9 (SIGKILL)"),
        ("print('error: old', 'more', '', sep='\\n'); raise SystemExit(4)", "old"),
        ("raise SystemExit(4)", "it printed nothing"),
        ("1 / 0", "unexpected ZeroDivisionError: division by zero (run again with --debug for d"),
    ],
)
def test_why_a_process_failed(tmp_path, quick, code, error):
    run = Run("a", "a", tmp_path / "a", command(code))
    [state] = Runner([run], cpu(Options(tmp_path, 1))).run().values()
    assert state.kind == "failed" and state.text.startswith(error)
    assert state.text.endswith(f"; its log is {run.log}")


def test_a_run_too_large_for_now_is_passed_over(tmp_path, quick):
    """A run of one GPU does not wait for two runs of two GPUs on three."""
    sizes = {"first": 2, "second": 2, "small": 1}
    runs = [noted(tmp_path, name, gpus=gpus) for name, gpus in sizes.items()]
    Runner(runs, LocalExecutor(["0", "1", "2"])).run()
    order = (tmp_path / "order").read_text().split()
    assert order.index("+small") < order.index("+second") > order.index("-first")


def named(name: str, *after: str, **more) -> Run:
    return Run(name, name, Path(name), (), (name[0], "embedded", 0), after=after, **more)


def test_time_left_by_hand():
    runs = [named("p"), named("r0"), named("r1"), named("m0", "p"), named("m1", "p")]
    left = {"p": 10.0, "r0": 4.0, "r1": 4.0, "m0": 5.0, "m1": 5.0}
    # slot 1: p 0-10, m0 10-15; slot 2: r0 0-4, r1 4-8, idle until p is done, m1 10-15
    assert time_left(runs, left, (), 2) == 15.0
    assert time_left(runs, left, (), 1) == 28.0
    # r1 is running, as p is: r0 waits for a slot
    assert time_left(runs, {**left, "r1": 1.0}, ("p", "r1"), 2) == 15.0
    # p is done: m0 and m1 follow r0
    assert time_left(runs, {"r0": 2.0, "m0": 5.0, "m1": 5.0}, ("r0",), 2) == 7.0
    assert time_left(runs, {}, (), 2) == 0.0


def test_forecast_by_hand():
    runs = [named(name, iterations=100) for name in ("a0", "a1", "b0", "b1")]
    states = {"a0": State("done", 100, seconds=50.0), "a1": State("running", 40)}
    of_a, of_b = {("a", "embedded", 0): [0.5]}, {("b", "embedded", 0): [1.0]}
    found = make_forecast(runs, states, of_a | of_b, 2)
    # a takes 50 s, b 100 s: 30 s of a are left, during which one b runs; the other b starts then.
    assert found.seconds_left == pytest.approx(130.0)
    assert found.done == pytest.approx((50 + 20) / 300)
    # The speed of a running process: it did 40 iterations in 60 s, as it began at 20 of 100.
    going = {"b1": State("running", 60, seconds=60.0, began_at=20)}
    assert make_forecast(runs[2:], going, {}, 1).seconds_left == pytest.approx(150 + 60)
    assert make_forecast(runs[2:], going, of_b, 1).seconds_left == pytest.approx(100 + 40)
    # The speed of b is unknown: it is assumed to take as long as a.
    assert make_forecast(runs, states, of_a, 2).seconds_left == pytest.approx(30 + 50)
    assert make_forecast(runs, {}, {}, 2).seconds_left == float("inf")
    assert make_forecast(runs, {run.name: State("failed") for run in runs}, {}, 2) == Forecast(
        1.0, 0.0
    )


def test_estimates_by_hand():
    run = Run("r", "r", Path("r"), (), ("task", "embedded", 2), gpus=2, iterations=1000)
    other, own = {("task", "detectron2", 2): [9.0]}, {run.speed_key: [1.0, 2.0]}
    stated = replace(run, seconds_per_iteration=0.36)
    assert estimate(run, other) == (None, "unknown")
    assert estimate(stated, other) == (360.0, "stated")
    for each in (run, stated):  # a measured speed takes precedence
        assert estimate(each, other | own) == (1500.0, "measured, 2 runs")
    assert estimate(replace(stated, iterations=0), own).seconds is None


def test_progress_is_the_last_whole_line(tmp_path):
    run = Run("r", "r", tmp_path, (), iterations=200)
    assert run.iteration() == 0.0
    lines = [json.dumps({"iteration": i, "padding": "x" * 100}) for i in range(0, 100, 20)]
    (tmp_path / "metrics.json").write_text("\n".join(lines) + '\n{"iterat')
    assert run.fraction(run.state()) == 0.4
    (tmp_path / "metrics.json").write_text('{"iteration": 500}\n')
    assert run.fraction(run.state()) == 1.0
