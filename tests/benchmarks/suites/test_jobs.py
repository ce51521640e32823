"""Processes: order, slots, failures, and the time left by hand."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.suites.jobs import (
    Job,
    JobFailed,
    _Board,
    _Running,
    last_line,
    processes_left,
    run_jobs,
    time_left,
)
from moco.common.errors import Preempted

pytestmark = pytest.mark.race
ROOT = Path(__file__).resolve().parents[3]


def job(tmp_path: Path, name: str, code: str = "pass", seconds: float = 1.0, **more) -> Job:
    command = (sys.executable, "-c", code)
    return Job(name, lambda: command, tmp_path / f"{name}.log", seconds, **more)


def test_order_and_slots(tmp_path):
    note = (
        "import os, sys, time; open(sys.argv[0] if 0 else {path!r}, 'a').write('+{name} ');"
        "time.sleep(0.2); open({path!r}, 'a').write('-{name} ')"
    )
    path = str(tmp_path / "order")

    def noted(name: str, after=()) -> Job:
        return job(tmp_path, name, note.format(path=path, name=name), after=after)

    seconds = run_jobs([noted("a"), noted("c", after=("a", "b")), noted("b")], workers=1)
    assert (tmp_path / "order").read_text() == "+a -a +b -b +c -c "
    assert set(seconds) == {"a", "b", "c"} and all(value > 0.1 for value in seconds.values())


def test_two_at_a_time(tmp_path):
    meet = (
        "import pathlib, time\n"
        "pathlib.Path({own!r}).touch()\n"
        "end = time.time() + 300\n"
        "while not pathlib.Path({other!r}).exists():\n"
        "    assert time.time() < end\n"
        "    time.sleep(0.02)\n"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    run_jobs(
        [
            job(tmp_path, "1", meet.format(own=a, other=b)),
            job(tmp_path, "2", meet.format(own=b, other=a)),
        ],
        workers=2,
    )


def test_children_have_one_thread_and_no_bar(tmp_path):
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['MOCO_PROGRESS'])"
    run_jobs([job(tmp_path, "a", code)], workers=1)
    assert (tmp_path / "a.log").read_text() == "1 off\n"


def note_pid(tmp_path: Path) -> str:
    path = str(tmp_path / "pid")
    return f"import os, pathlib, time; pathlib.Path({path!r}).write_text(str(os.getpid()))"


def killed_call(tmp_path: Path, code: str) -> int:
    """A call that was killed with SIGKILL while its only job runs; the job's process."""
    program = (
        "import sys; from pathlib import Path; from benchmarks.suites.jobs import Job, run_jobs\n"
        f"command = [sys.executable, '-c', {code!r}]\n"
        f"run_jobs([Job('a', lambda: command, Path({str(tmp_path / 'a.log')!r}), 1.0)], 1)"
    )
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    assert processes_left(tmp_path) == ["a"]
    caller.kill()
    caller.wait()
    return int((tmp_path / "pid").read_text())


@pytest.mark.parametrize("ends_well", [True, False])
def test_the_process_of_a_killed_call_is_taken_over(tmp_path, capsys, ends_well):
    """Waited for, and started again only if it did not come to its end."""
    out, go = tmp_path / "out", tmp_path / "go"
    code = (
        f"{note_pid(tmp_path)}\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\n"
        f"{ends_well} and open({str(out)!r}, 'a').write('first ')"
    )
    killed_call(tmp_path, code)
    assert processes_left(tmp_path) == ["a"]
    again = f"open({str(out)!r}, 'a').write('second ')"
    timer = threading.Timer(0.5, go.touch)
    timer.start()
    run_jobs([job(tmp_path, "a", again, is_done=out.exists)], workers=1)
    timer.join()
    assert out.read_text() == ("first " if ends_well else "second ")
    assert "note: a is still computed by a process of an earlier call" in capsys.readouterr().err
    assert not processes_left(tmp_path)


def test_the_process_of_a_killed_call_is_stopped(tmp_path):
    """With the call that has taken it over."""
    pid = killed_call(tmp_path, f"{note_pid(tmp_path)}; time.sleep(60)")
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Preempted):
        run_jobs([job(tmp_path, "a")], workers=1)
    assert not processes_left(tmp_path)
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.02)


def test_a_failure_is_one_line_and_stops_the_rest(tmp_path):
    pid_file = tmp_path / "pid"
    sleeper = (
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(1e6)"
    )
    failing = (
        f"import sys, time, pathlib\nwhile not pathlib.Path({str(pid_file)!r}).exists():"
        " time.sleep(0.02)\nprint('step 1')\n"
        "print('error: loss is nan at step 5', file=sys.stderr)\n"
        "print('bye')\nsys.exit(4)"
    )
    after = job(tmp_path, "later", after=("bad",))
    with pytest.raises(JobFailed) as error:
        run_jobs([job(tmp_path, "long", sleeper), job(tmp_path, "bad", failing), after], workers=2)
    assert error.value.exit_code == 4
    log = tmp_path / "bad.log"
    assert str(error.value) == f"bad failed: loss is nan at step 5; its log is {log}"
    assert not (tmp_path / "later.log").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_killed_process_is_a_failure(tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(JobFailed, match="killed by signal 9") as error:
        run_jobs([job(tmp_path, "a", code)], workers=1)
    assert error.value.exit_code == 1


@pytest.fixture
def as_in_the_foreground():
    """A shell starts background jobs with SIGINT ignored; Python then raises nothing for it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, Preempted),
        (signal.SIGHUP, Preempted),
    ],
)
def test_an_interrupt_leaves_no_process_behind(
    tmp_path, number, error, as_in_the_foreground, capsys
):
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt() -> None:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(error) as caught:
        run_jobs([job(tmp_path, "a", code)], workers=1)
    assert "the same command continues" in str(caught.value) + capsys.readouterr().out
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert signal.getsignal(number) == before


def test_fraction_comes_from_the_last_whole_line(tmp_path):
    metrics = tmp_path / "metrics.json"
    one = job(tmp_path, "a", metrics=metrics, iterations=200)
    assert one.fraction() == 0.0
    lines = [json.dumps({"iteration": i, "padding": "x" * 100}) for i in range(0, 100, 20)]
    metrics.write_text("\n".join(lines) + '\n{"iterat')
    assert one.fraction() == 0.4
    metrics.write_text('{"iteration": 500}\n')
    assert one.fraction() == 1.0


def test_last_line(tmp_path):
    log = tmp_path / "log"
    log.write_text("a\nerror: what, where\nmore\n\n")
    assert last_line(log) == "what, where"
    log.write_text("a\nlast words\n\n")
    assert last_line(log) == "last words"
    log.write_text("")
    assert last_line(log) == "it printed nothing"


def test_time_left_by_hand(tmp_path):
    def named(name, *after):
        return job(tmp_path, name, after=after)

    jobs = [named("p"), named("r0"), named("r1"), named("m0", "p"), named("m1", "p")]
    left = {"p": 10.0, "r0": 4.0, "r1": 4.0, "m0": 5.0, "m1": 5.0}
    # slot 1: p 0-10, m0 10-15; slot 2: r0 0-4, r1 4-8, idle until p is done, m1 10-15
    assert time_left(jobs, left, (), workers=2) == 15.0
    assert time_left(jobs, left, (), workers=1) == 28.0
    # r1 runs beside p already: r0 waits for a slot
    assert time_left(jobs, {**left, "r1": 1.0}, ("p", "r1"), workers=2) == 15.0
    # p is done: m0 and m1 follow r0
    assert time_left(jobs, {"r0": 2.0, "m0": 5.0, "m1": 5.0}, ("r0",), workers=2) == 7.0
    assert time_left(jobs, {}, (), workers=2) == 0.0


def test_speed_counts_what_this_call_did(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    jobs = [job(tmp_path, "a", seconds=100.0), job(tmp_path, "b", seconds=50.0)]
    board = _Board(jobs, workers=1)
    with open(tmp_path / "log", "wb") as log:
        # resumed at 40%, now at 60%: 20 of the expected seconds took 30
        board.running["a"] = _Running(process, log, started=10.0, initial=0.4, fraction=0.6)
        assert board.speed(now=40.0) == pytest.approx(1.5)
        assert board.left(now=40.0) == pytest.approx(1.5 * (40 + 50))
        assert board.done() == pytest.approx(60 / 150)
        del board.running["a"]
        board.seconds["a"], board.finished_work = 90.0, 60.0
        assert board.left(now=100.0) == pytest.approx(1.5 * 50)
