"""The runner of suites, on a training program in miniature: once each, whatever is killed when.

The tables are made by the real functions, and compared byte by byte.
"""

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from PIL import Image
from tests.benchmarks.fake_trainer import HOLD, ITERATIONS, backend

from benchmarks import run_suite
from benchmarks.suites import folder as suite_folder
from benchmarks.suites import locks as claims
from benchmarks.suites import runner as suite_runner
from benchmarks.suites.checks import check, resolve_names
from benchmarks.suites.executors import local as executors
from benchmarks.suites.executors.local import Launch, LocalExecutor, make_executor, visible_gpus
from benchmarks.suites.folder import State, SuiteFolder, asked, check_agreement
from benchmarks.suites.locks import Claim, alone, held
from benchmarks.suites.runner import foresee
from benchmarks.suites.suite import Init, Measured, RunSpec, expand, load_suite, parse_inits
from detection import train_net
from moco.classification import classify
from moco.common.errors import DataError, Preempted, UserError
from moco.finetune import FINETUNE
from moco.linear import LINEAR

ROOT = Path(__file__).resolve().parents[3]
KILLS = 10


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_runner, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(suite_runner, "SURVEY_SECONDS", 0.05)
    monkeypatch.setattr(suite_runner, "AGAIN_SECONDS", 0.2)


class Lab:
    """A suite of two tasks and its weights in a folder, and ways to run it.

    Attributes:
        with_tables: make the tables at the end, which takes longer than all the runs.
    """

    def __init__(self, path: Path, inits: Sequence[str] = ("random", "mine"), trials: int = 2):
        self.with_tables = False
        self.path, self.out, self.journal = path, path / "out", path / "journal"
        (path / "task.yaml").write_text("SOLVER: {MAX_ITER: 8}\n")
        tasks = [{"config": "task.yaml", "name": name} for name in ("a", "b")]
        content = {"name": "small", "title": "Two tasks", "trials": trials, "tasks": tasks}
        (path / "suite.yaml").write_text(yaml.safe_dump(content))
        self.inits = []
        for name in inits:
            (path / f"{name}.pth").write_text(f"weights of {name}")
            word = name if name == "random" else f"{name}={path / name}.pth"
            self.inits += ["--init", word]

    def arguments(self, *more: str) -> list[str]:
        output = ["--output", str(self.out), "--executor", "cpu", "--workers", "2"]
        return [str(self.path / "suite.yaml"), *self.inits, *output, *more]

    def run(self, *more: str, delay: float = 0.0, problems: Sequence[str] = ()) -> None:
        """In this process."""
        self.main(backend(self.journal, delay, problems), *more)

    def main(self, programs: run_suite.Backend, *more: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not self.with_tables:
                patch.setattr(run_suite, "write_tables", lambda *arguments: [])
            run_suite.main(self.arguments(*more), programs)

    def start(self, *more: str, delay: float = 0.02, host: str = "") -> subprocess.Popen[bytes]:
        """In a process of its own; what it prints goes to `runner.log`."""
        with open(self.path / "runner.log", "ab") as log:
            return subprocess.Popen(
                self.words(delay, *more),
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "MOCO_PROGRESS": "on", "FAKE_HOST": host},
            )

    def words(self, delay: float, *more: str) -> list[str]:
        mode = "--suite" if self.with_tables else "--suite-without-tables"
        program = ["-m", "tests.benchmarks.fake_trainer", mode, str(self.journal), str(delay)]
        return [sys.executable, *program, *self.arguments(*more)]

    def events(self) -> list[tuple[str, str, int]]:
        """(what, run, process) in the order in which they happened."""
        if not self.journal.exists():
            return []
        lines = [line.split() for line in self.journal.read_text().splitlines()]
        return [(what, name, int(pid)) for what, name, pid in lines]

    def count(self, what: str) -> Counter:
        return Counter(name for event, name, _ in self.events() if event == what)

    def tables(self) -> dict[str, bytes]:
        files = (self.out / "tables").rglob("*")
        return {path.name: path.read_bytes() for path in files if path.is_file()}

    def hold(self) -> None:
        """From now on runs wait after their second iteration, until they are told to stop."""
        (self.path / HOLD).touch()

    def go(self) -> None:
        (self.path / HOLD).unlink(missing_ok=True)

    def wait_for(self, condition, seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (self.path / "runner.log").read_text()
            time.sleep(0.01)

    def states(self) -> Counter:
        folder = SuiteFolder(self.out)
        return Counter(folder.state(spec).kind for spec in folder.asked()[1])


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Lab:
    monkeypatch.chdir(ROOT)
    return Lab(tmp_path)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_suite_to_its_tables_and_nothing_twice(lab, capsys):
    lab.with_tables = True
    lab.run()
    assert len(lab.count("done")) == 8 and set(lab.count("done").values()) == {1}
    assert lab.count("start") == lab.count("done") and not lab.count("resume")
    shown = capsys.readouterr().out
    assert "Two tasks: 8 runs, on the CPU, 2 at a time" in shown and "mine" in shown
    assert "python -m benchmarks.make_table" in shown and str(lab.out / "tables") in shown
    tables = lab.tables()
    assert {"table.md", "table.csv", "table.tex", "table.html"} <= set(tables)
    # A run is named after its init, and its weights are those that were given.
    copy = lab.out / "inits" / "mine.pth"
    assert copy.read_text() == "weights of mine" and not copy.is_symlink()
    (lab.out / "tables" / ".tmp-half").write_text("of a runner that was killed while writing")
    lab.run()
    assert len(lab.events()) == 8 * (2 + ITERATIONS)
    assert lab.tables() == tables


def test_more_trials_and_inits_come_on_top(lab):
    lab.run("--trials", "1")
    assert len(lab.count("done")) == 4
    (lab.path / "new.pth").write_text("other weights")
    lab.run("--trials", "2", "--init", f"new={lab.path / 'new.pth'}")
    assert len(lab.count("done")) == 12 and set(lab.count("done").values()) == {1}


def test_weights_at_another_place_on_another_machine(lab):
    """What a run was given stays there for the machines that continue it."""
    lab.run("--trials", "1")
    copy = lab.out / "inits" / "mine.pth"
    (lab.path / "mine.pth").rename(lab.path / "elsewhere.pth")
    lab.inits = ["--init", "random", "--init", f"mine={lab.path / 'elsewhere.pth'}"]
    lab.run()
    assert copy.read_text() == "weights of mine"
    (lab.path / "elsewhere.pth").unlink()
    assert copy.read_text() == "weights of mine"
    assert len(lab.count("done")) == 8 and set(lab.count("done").values()) == {1}
    # What an earlier version has left, and what is damaged, is replaced.
    (lab.path / "elsewhere.pth").write_text("weights of mine")
    for damage in (lambda: copy.symlink_to("nowhere.pth"), lambda: copy.write_text("half")):
        copy.unlink()
        damage()
        lab.run()
        assert copy.read_text() == "weights of mine" and not copy.is_symlink()


@pytest.mark.race
def test_kill_9_at_ten_moments(lab):
    """Killed ten times, with or without its processes: the same bytes, and no trial twice."""
    lab.with_tables = True
    lab.run(delay=0.02)
    tables, num_runs = lab.tables(), len(lab.count("done"))
    shutil.rmtree(lab.out)
    lab.journal.unlink()
    moments = random.Random(0)
    for kill in range(KILLS):
        runner, before = lab.start(delay=0.1), len(lab.events())
        lab.wait_for(lambda r=runner, n=before: len(lab.events()) > n or r.poll() is not None)
        time.sleep(moments.uniform(0.0, 0.6))
        runner.kill()
        runner.wait()
        if kill % 2:  # as when the machine goes down
            for pid in {pid for _, _, pid in lab.events() if is_alive(pid)}:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
    last = lab.start()
    assert last.wait(300) == 0, (lab.path / "runner.log").read_text()
    assert lab.tables() == tables
    # A process may be killed between its record and its note of it.
    assert lab.states() == {"done": num_runs} and set(lab.count("done").values()) == {1}
    # An iteration is noted after it was saved: what was killed later than that is never done again.
    noted = Counter(event[:2] for event in lab.events() if event[0].startswith("iteration"))
    assert set(noted.values()) == {1}, "a trial was begun anew"
    assert not lab.count("locked"), "a process was started beside another one of its run"


@pytest.mark.race
def test_processes_of_a_killed_runner_are_waited_for(lab, capsys):
    lab.hold()
    runner = lab.start()
    lab.wait_for(lambda: len(lab.count("iteration-2")) == 2)
    runner.kill()
    runner.wait()
    orphans = {pid for _, _, pid in lab.events()}
    assert len(orphans) == 2 and all(map(is_alive, orphans))
    assert lab.states() == {"running": 2, "waiting": 6}
    # They keep their places, so the next runner starts nothing beside them.
    busy = LocalExecutor(lab.out, ["0", "1"], cpu=True)
    assert busy.reserve(0) is None
    capsys.readouterr()
    lab.go()
    lab.run()
    said = capsys.readouterr().err
    assert "note: a random seed 0 (embedded), a mine seed 0 (embedded): computed by proc" in said
    assert set(lab.count("done").values()) == {1} and len(lab.count("done")) == 8
    assert lab.count("start") == lab.count("done") and not lab.count("resume")
    events = lab.events()
    for pid in orphans:
        assert [what for what, _, own in events if own == pid][-1] == "done"


@pytest.mark.race
@pytest.mark.parametrize("hosts", [("one", "one"), ("one", "other")])
def test_two_runners_share_a_folder(lab, hosts):
    """On one machine, whose two places they have between them, and on two with a place each."""
    more = ["--trials", "3", *(["--workers", "1"] if len(set(hosts)) == 2 else [])]
    lab.hold()  # so that the second one does not come too late
    runners = [lab.start(*more, host=host) for host in hosts]
    lab.wait_for(lambda: len(lab.count("iteration-2")) == 2)
    lab.go()
    assert [runner.wait(300) for runner in runners] == [0, 0], (lab.path / "runner.log").read_text()
    assert len(lab.count("done")) == 12 and set(lab.count("done").values()) == {1}
    assert lab.count("start") == lab.count("done")
    assert not lab.count("resume") and not lab.count("locked")
    working: set[str] = set()
    for what, name, _ in lab.events():
        working |= {name}
        assert len(working) <= 2
        working -= {name} if what == "done" else set()
    if len(set(hosts)) == 2:
        claims = [json.loads(path.read_text()) for path in lab.out.glob("runs/*/*/*/.claim")]
        assert {claim["runner"] for claim in claims} == {runner.pid for runner in runners}


def test_a_failure_is_shown_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    lab = Lab(tmp_path, inits=("bad", "mine"), trials=1)
    lab.with_tables = True
    with pytest.raises(run_suite.SuiteFailed, match="2 of 4 runs failed and are in no number") as e:
        lab.run()
    assert e.value.exit_code == 1
    assert {name.split("/")[1] for name in lab.count("done")} == {"mine"}
    shown = capsys.readouterr()
    [log] = lab.out.glob("runs/a/bad/*/suite.log")
    line = "failed: a bad seed 0 (embedded): the loss is nan at iteration 3; its log is "
    assert f"{line}{log}" in shown.err
    tables = lab.tables()
    numbers = tables["runs.csv"].decode()
    assert "mine" in numbers and "bad" not in numbers
    assert b"the loss is nan at iteration 3" in b"".join(tables.values())
    assert lab.states() == {"done": 2, "failed": 2}
    with pytest.raises(run_suite.SuiteFailed):
        lab.run("--baseline", "bad")
    said = capsys.readouterr().out
    assert "note: no run of the baseline bad is done; gaps refer to nothing\n" in said
    before = lab.events()
    with pytest.raises(run_suite.SuiteFailed):
        lab.run()
    assert lab.events() == before and lab.tables() == tables
    with pytest.raises(run_suite.SuiteFailed):
        lab.run("--retry-failed")
    assert sum(lab.count("resume").values()) == 2  # once each, from its checkpoint
    assert set(lab.count("start").values()) == {1}


def test_a_retry_forgets_what_was(lab, capsys):
    """The next failure's text is its own, and while it runs the run is not a failed one."""

    def failing(words: str) -> run_suite.Backend:
        def command(spec: RunSpec, folder: Path) -> list[str]:
            assert not (folder / "failed.json").exists()
            return [sys.executable, "-c", f"print({words!r}); raise SystemExit(4)"]

        return run_suite.replace(backend(lab.journal), command=command)

    for words, more in (("error: old", ()), ("something new", ("--retry-failed",))):
        with pytest.raises(run_suite.SuiteFailed):
            lab.main(failing(words), "--trials", "1", *more)
        assert words.removeprefix("error: ") in capsys.readouterr().err
    texts = [json.loads(p.read_text())["error"] for p in lab.out.glob("runs/*/*/*/failed.json")]
    assert texts == ["something new"] * 4


@pytest.mark.race
def test_what_a_later_call_had_failed_is_not_tried_again(tmp_path, monkeypatch):
    """With two runners and --retry-failed, each failed run is tried once, not in turns."""
    monkeypatch.chdir(ROOT)
    lab = Lab(tmp_path, inits=("bad",), trials=2)
    with pytest.raises(run_suite.SuiteFailed):
        lab.run()
    runners = [lab.start("--retry-failed") for _ in range(2)]
    assert [runner.wait(300) for runner in runners] == [1, 1]
    assert set(lab.count("resume").values()) == {1} and len(lab.count("resume")) == 4


@pytest.mark.race
def test_sigterm_saves_and_the_same_command_goes_on(lab):
    lab.hold()
    runner = lab.start()
    lab.wait_for(lambda: len(lab.count("iteration-2")) == 2)
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(300) == 85
    said = (lab.path / "runner.log").read_text()
    assert "error: stopped by SIGTERM; the same command goes on from here" in said
    assert len(lab.count("saved")) == 2 and not any(is_alive(pid) for _, _, pid in lab.events())
    assert lab.states() == {"interrupted": 2, "waiting": 6}
    lab.go()
    lab.run()
    assert set(lab.count("done").values()) == {1} and len(lab.count("done")) == 8
    iterations = Counter(event[:2] for event in lab.events() if event[0].startswith("iteration"))
    assert set(iterations.values()) == {1}, "an iteration was done again"


@pytest.mark.race
def test_ctrl_c_in_the_terminal_reaches_the_runner_alone(lab):
    """The whole foreground group gets SIGINT; runs must be asked to save by SIGTERM instead."""
    lab.hold()
    runner = subprocess.Popen(
        lab.words(0.0),
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    lab.wait_for(lambda: len(lab.count("iteration-2")) == 2)
    os.killpg(runner.pid, signal.SIGINT)
    _, said = runner.communicate(timeout=300)
    assert runner.returncode == 85 and b"stopped by SIGINT" in said
    assert len(lab.count("saved")) == 2


@pytest.mark.race
def test_a_process_that_does_not_save_is_killed(lab, monkeypatch):
    def deaf(spec: RunSpec, folder: Path) -> list[str]:
        code = (
            "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            f"open({str(lab.journal)!r}, 'a').write('start x %d\\n' % os.getpid()); time.sleep(1e6)"
        )
        return [sys.executable, "-c", code]

    def interrupt(*arguments) -> None:
        if len(lab.events()) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(suite_runner.Runner, "_survey", interrupting(interrupt))
    own = run_suite.replace(backend(lab.journal), command=deaf)
    with pytest.raises(Preempted):
        lab.main(own, "--stop-seconds", "0.3")
    assert not any(is_alive(pid) for _, _, pid in lab.events())
    assert not list(lab.out.glob("runs/*/*/*/failed.json"))  # stopped is not failed


def interrupting(hook):
    survey = suite_runner.Runner._survey

    def both(self) -> None:
        survey(self)
        hook()

    return both


def test_status_shows_hostile_records_as_text(lab, capsys):
    lab.run()
    paths = sorted(lab.out.rglob("run.json"))
    changes = ({"status": "failed", "notes": ["\x1b[2J"]}, {"init": "\x1b[2J"}, {"notes": 5})
    for path, changed in zip(paths, changes, strict=False):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    paths[3].write_text("[" * 100_000)
    paths[3].with_name("metrics.json").write_text(f'{{"iteration": {10**400}}}\n' + "[" * 10_000)
    capsys.readouterr()
    lab.run("--status")
    printed = capsys.readouterr().out
    assert printed.replace("\n", "").isprintable()
    assert printed.count("\\x1b[2J") == 2 and printed.count("not a valid run record") == 2


def test_status_only_reads(lab, capsys):
    with pytest.raises(UserError, match=r"suite\.json: no suite was started here"):
        lab.run("--status")
    runner = lab.start(delay=0.3)
    lab.wait_for(lambda: len(lab.count("iteration-2")) == 2)
    run_suite.main([str(lab.path / "suite.yaml"), "--output", str(lab.out), "--status"])
    shown = capsys.readouterr().out
    assert "small: 2 running, 6 waiting of 8, about 0:" in shown
    assert re.search(
        r"^suite: 0%, about \S+ left: 0/8 done; a random seed 0 \(embedded\) 0%, a mine seed 0",
        (lab.path / "runner.log").read_text(),
        re.M,
    )
    going = re.findall(r" running +(\d)/8 +(\d+)%", shown)
    assert len(going) == 2, shown
    for at, percent in going:  # how far they are depends on how fast this test is
        assert int(at) >= 2 and abs(int(percent) - 12.5 * int(at)) <= 0.5
    runner.terminate()
    runner.wait(30)
    before = snapshot(lab.out)
    lab.run("--status")
    assert snapshot(lab.out) == before
    assert "2 interrupted, 6 waiting of 8; nothing is running" in capsys.readouterr().out
    lab.run()
    capsys.readouterr()
    lab.run("--status")
    assert capsys.readouterr().out.endswith("small: 8 done of 8\n")


def snapshot(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_dry_run_lists_and_writes_nothing(lab, capsys):
    lab.run("--dry-run")
    assert not lab.out.exists() and not lab.events()
    shown = capsys.readouterr().out
    assert shown.count("unknown  ") >= 8 and "CPU hours:" not in shown
    assert "\n8 to do; how long that takes is not known (a, b): give --seconds-per-iter" in shown
    lab.run("--dry-run", "--seconds-per-iteration", "a=450")
    shown = capsys.readouterr().out
    assert "8 to do: 4.00 CPU hours; how long 4 of them take is not known (b): give" in shown
    lab.run("--dry-run", "--seconds-per-iteration", "450", "--seconds-per-iteration", "b=225")
    shown = capsys.readouterr().out
    # 4 runs of 8 iterations of 450 s are 4 hours, 4 of 225 s are 2; two at a time.
    assert "8 to do: 6.00 CPU hours, about 3:00:00 here" in shown
    assert shown.count("stated") == 8
    lab.run("--trials", "1")
    capsys.readouterr()
    before = snapshot(lab.out)
    lab.run("--dry-run", "--seconds-per-iteration", "450")
    shown = capsys.readouterr().out
    # The fake's records say 4 s for 8 iterations.
    assert "4 to do: 0.00 CPU hours, about 0:08 here" in shown and "measured, 2 runs" in shown
    assert snapshot(lab.out) == before
    lab.run()
    capsys.readouterr()
    lab.run("--dry-run")
    assert "\n0 to do\n" in capsys.readouterr().out


def test_what_is_left_of_begun_and_failed_runs(tmp_path, capsys, monkeypatch):
    """A run that failed is not to be done, unless it is tried again; of a begun one the rest is."""
    monkeypatch.chdir(ROOT)
    lab = Lab(tmp_path, inits=("bad", "mine"), trials=1)
    with pytest.raises(run_suite.SuiteFailed):
        lab.run()
    for path in lab.out.glob("runs/*/mine/*/run.json"):
        path.unlink()
    for path in lab.out.glob("runs/*/mine/*/metrics.json"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
    capsys.readouterr()
    # Two runs of 8 iterations of 900 s have done 6, two have failed after the second.
    for more, line in (((), "2 to do: 1.00"), (("--retry-failed",), "4 to do: 4.00")):
        lab.run("--dry-run", "--seconds-per-iteration", "900", *more)
        assert f"\n{line} CPU hours, about " in capsys.readouterr().out


def edit_records(lab: Lab, pattern: str, change) -> None:
    for path in lab.out.glob(f"runs/{pattern}/run.json"):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))


def test_speeds_of_other_hardware_are_not_this_machines(lab, capsys):
    def elsewhere(content: dict) -> None:
        content["provenance"]["hardware"]["gpus"] = ["a GPU"]
        content["seconds"] = 8000.0

    lab.run("--trials", "1")
    edit_records(lab, "*/mine/*", elsewhere)
    capsys.readouterr()
    lab.run("--dry-run")
    shown = capsys.readouterr().out
    assert shown.count("measured, 1 run ") == 8
    assert "4 to do: 0.00 CPU hours, about 0:08 here" in shown
    edit_records(lab, "*/*/*", elsewhere)
    lab.run("--dry-run")
    assert "4 to do; how long that takes is not known (a, b)" in capsys.readouterr().out


def test_seconds_of_a_last_process_alone_are_no_speed(lab, capsys):
    """The record of a detection run that was continued does not say how long all of it took."""
    lab.run("--trials", "1")
    edit_records(lab, "*/mine/*", lambda content: content.update(seconds=0.08))
    for path in lab.out.glob("runs/*/mine/*/.claim"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"iteration": 7.0}))
    capsys.readouterr()
    lab.run("--dry-run")
    shown = capsys.readouterr().out
    assert shown.count("measured, 1 run ") == 8 and ", about 0:08 here" in shown


def test_nothing_starts_that_would_fail(lab, capsys):
    with pytest.raises(UserError, match="nothing was started: 2 problems, see above") as error:
        lab.run(problems=["a from mine: no such dataset", "b: too wide"])
    assert error.value.exit_code == 2
    said = capsys.readouterr().err
    assert "problem: a from mine: no such dataset\nproblem: b: too wide\n" in said
    with pytest.raises(UserError, match="nothing was started: b: too wide"):
        lab.run("--dry-run", problems=["b: too wide"])
    with pytest.raises(DataError, match=r"--init x=no\.pth: no such file; --init y=no\.pth: no s"):
        lab.run("--init", "x=no.pth", "--init", "y=no.pth")
    with pytest.raises(UserError, match="--baseline x: no such init; choices are random, mine"):
        lab.run("--baseline", "x")
    with pytest.raises(UserError, match="--gpus-per-run: got 2, expected none, as on CPU cores"):
        lab.run("--gpus-per-run", "2")
    assert not lab.events() and not lab.out.exists()


def test_a_folder_is_one_suites(lab, tmp_path):
    lab.run()
    (lab.path / "mine.pth").write_text("other weights under the same name")
    with pytest.raises(UserError, match=r"was made by another call \(inits: mine was .*, is "):
        lab.run()
    with pytest.raises(UserError, match="was made by another call"):
        lab.run("--dry-run", problems=["this is not looked at"])
    with pytest.raises(UserError, match="trials of a: 2 before"):
        lab.run("--trials", "1")
    with pytest.raises(UserError, match=rf"^{lab.path}/mine.pth: is a file; expected a folder, ch"):
        lab.run("--dry-run", "--output", str(lab.path / "mine.pth" / "out"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"holds other files \(thesis.tex\)"):
        lab.run("--output", str(other))


def test_what_two_calls_must_agree_on(lab):
    suite = load_suite(lab.path / "suite.yaml")
    inits = {"mine": Init("/w", "a" * 64)}
    first = asked(suite, inits, 2, ["embedded"], None, "1")
    check_agreement(first, first, "here")
    more = {**inits, "new": Init("/n", "b" * 64)}
    check_agreement(first, asked(suite, more, 3, ["embedded", "detectron2"], None, "1"), "here")
    with_place = suite.__class__(
        **{
            **vars(suite),
            "tasks": tuple(
                run_suite.replace(task, overrides=(("DATASETS.VOC_DIR", "/data"),))
                for task in suite.tasks
            ),
        }
    )
    check_agreement(first, asked(with_place, inits, 2, ["embedded"], None, "1"), "here")

    def trained_on(path: str) -> dict:
        task = run_suite.replace(suite.tasks[0], overrides=(("DATASETS.COCO_TRAIN_JSON", path),))
        other = run_suite.replace(suite, tasks=(task,))
        return asked(other, inits, 2, ["embedded"], None, "1")

    check_agreement(trained_on("/data/full.json"), trained_on("/other/full.json"), "here")
    with pytest.raises(UserError, match=r"COCO_TRAIN_JSON was full\.json, is half\.json"):
        check_agreement(trained_on("/data/full.json"), trained_on("/data/half.json"), "here")
    for changed, message in (
        (asked(suite, more, 2, ["detectron2"], None, "1"), "engines: .'embedded'. before"),
        (asked(suite, inits, 2, ["embedded"], 4, "1"), "gpus_per_run: None before, 4 now"),
        (asked(suite, inits, 2, ["embedded"], None, "2"), "version: '1' before, '2' now"),
        (asked(suite, {}, 2, ["embedded"], None, "1"), "inits: mine is missing"),
    ):
        with pytest.raises(UserError, match=f"here was made by another call .{message}"):
            check_agreement(first, changed, "here")


def test_a_record_of_something_else_is_no_result(lab, capsys):
    """A record that was copied into a folder, or left there by other weights, never counts."""
    lab.with_tables = True
    lab.run("--trials", "1")
    [path] = lab.out.glob("runs/a/mine/*/run.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "weights_sha256": "f" * 64}))
    with pytest.raises(run_suite.SuiteFailed, match="1 of 4"):
        lab.run("--trials", "1")
    assert "run.json is not of this run: weights_sha256 is ffff" in capsys.readouterr().err
    assert "f" * 64 not in lab.tables()["runs.csv"].decode()


@pytest.mark.parametrize("record", ["of other weights", "damaged"])
def test_a_folder_of_something_else_is_not_continued(lab, capsys, record):
    """Not with --retry-failed, either: its checkpoints are those of the other run."""
    lab.run("--trials", "1")
    [path] = lab.out.glob("runs/a/mine/*/run.json")
    whole = path.read_text()
    other = json.dumps(json.loads(whole) | {"weights_sha256": "f" * 64})
    path.write_text("{" if record == "damaged" else other)
    before = lab.events()
    with pytest.raises(run_suite.SuiteFailed, match="1 of 4"):
        lab.run("--trials", "1", "--retry-failed")
    assert lab.events() == before
    said = capsys.readouterr().err
    assert f"; remove {path.parent}, and the same command computes it anew\n" in said
    shutil.rmtree(path.parent)
    lab.run("--trials", "1")
    assert path.read_text() == whole and len(lab.count("start")) == 4
    assert not lab.count("resume")


@pytest.mark.race
def test_a_folder_in_use_by_another_program_is_waited_for(lab):
    lab.run("--trials", "1")
    [spec] = [s for s in SuiteFolder(lab.out).asked()[1] if s.task == "b" and s.init == "mine"]
    folder = SuiteFolder(lab.out).run(spec)
    shutil.rmtree(folder)
    code = (
        "import sys; from moco.common.run import RunFolder\n"
        "with RunFolder(sys.argv[1], resume=True): print('held', flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=-1, stdout=-1)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"

    def release() -> None:
        lab.wait_for(lambda: sum(lab.count("locked").values()) == 2)
        holder.communicate(b"\n")

    thread = threading.Thread(target=release)
    thread.start()
    lab.run("--trials", "1")
    thread.join()
    assert lab.states() == {"done": 4} and not list(folder.glob("failed.json"))
    assert lab.count("start")[spec.name] == 2  # once before its folder was removed


def test_a_run_that_another_runner_has_just_ended_is_not_started(lab, monkeypatch):
    """Between the look at a run and its claim: what counts is what is on disk under the claim."""
    ended = lab.path / "ended"
    lab.run("--trials", "1")
    shutil.copytree(lab.out / "runs", ended)
    for record in lab.out.glob("runs/*/*/*/run.json"):
        record.unlink()
    before = lab.events()

    def end_all() -> None:
        shutil.copytree(ended, lab.out / "runs", dirs_exist_ok=True)

    monkeypatch.setattr(suite_runner.Runner, "_survey", interrupting(end_all))
    lab.run("--trials", "1")
    assert lab.events() == before


def test_interrupted_again_and_again_without_getting_on(lab, capsys):
    def leaving(spec: RunSpec, folder: Path) -> list[str]:
        line = (
            f"open({str(lab.journal)!r}, 'a').write('start {spec.task} 0\\n'); raise SystemExit(85)"
        )
        return [sys.executable, "-c", line]

    own = run_suite.replace(backend(lab.journal), command=leaving)
    with pytest.raises(run_suite.SuiteFailed):
        lab.main(own, "--trials", "1")
    assert set(lab.count("start").values()) == {2 * suite_runner.MAX_FRUITLESS}
    assert "it was interrupted 3 times without a new checkpoint" in capsys.readouterr().err


def test_a_new_checkpoint_is_progress(tmp_path, monkeypatch):
    """metrics.json has a line every 20 iterations, and preemption may come more often."""
    monkeypatch.chdir(ROOT)
    lab = Lab(tmp_path, inits=("often",), trials=1)
    lab.run()
    assert set(lab.count("resume").values()) == {ITERATIONS - 1}
    assert lab.states() == {"done": 2}


def kept(lab: Lab) -> set[tuple[str, ...]]:
    """The checkpoints in the folders of the runs."""
    folders = lab.out.glob("runs/*/*/*")
    return {tuple(sorted(path.name for path in run.glob("model_*"))) for run in folders}


def test_which_checkpoints_stay(lab, capsys):
    lab.run("--dry-run")
    line = "disk for checkpoints: 8.0 GB with --keep final, 16.0 GB with last, 64.0 GB with all; "
    assert line in capsys.readouterr().out
    every = tuple(f"model_{number:07d}.pth" for number in range(1, ITERATIONS + 1))
    lab.run("--trials", "1", "--keep", "all")
    assert kept(lab) == {every}
    lab.run()
    assert kept(lab) == {every, every[-1:]}, "what was done before is left alone"
    lab.run("--keep", "last")
    assert kept(lab) == {every[-2:], every[-1:]}, "unless a policy is asked for"
    lab.run("--keep", "final")
    assert kept(lab) == {every[-1:]}


def test_of_a_run_that_goes_on_two_checkpoints_stay(lab, monkeypatch):
    monkeypatch.setattr(suite_runner, "KEEP_SECONDS", 0.0)
    numbers: list[int] = []

    def count() -> None:
        numbers.extend(len(names) for names in kept(lab))

    monkeypatch.setattr(suite_runner.Runner, "_tidy", after(suite_runner.Runner._tidy, count))
    lab.run("--trials", "1", delay=0.2)
    assert max(numbers) <= 3  # one may come between the two looks
    assert set(lab.count("done").values()) == {1} and kept(lab) == {("model_0000008.pth",)}


def after(method, hook):
    def both(self) -> None:
        method(self)
        hook()

    return both


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("pass", "it ended without a record"),
        ("import os; os.kill(os.getpid(), 9)", r"it was killed by signal 9 \(SIGKILL\)"),
        ("print('error: old'); raise SystemExit(4)", "old"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_why_a_process_failed(lab, code, message, capsys):
    own = run_suite.replace(
        backend(lab.journal), command=lambda spec, folder: [sys.executable, "-c", code]
    )
    with pytest.raises(run_suite.SuiteFailed):
        lab.main(own, "--trials", "1")
    folder = SuiteFolder(lab.out)
    for spec in folder.asked()[1]:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(folder.state(spec).text)


@pytest.mark.race
def test_claims_outlive_the_process_that_took_them(tmp_path):
    path = tmp_path / "claim"
    claim = Claim.take(path)
    assert claim is not None and held(path) and Claim.take(path) is None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, pass_fds=[claim.fd])
    claim.release()
    assert held(path), "the child has it still"
    child.communicate(b"\n")
    assert not held(path)
    again = Claim.take(path)
    assert again is not None
    again.release()
    assert not held(tmp_path / "none") and not (tmp_path / "none").exists()


@pytest.mark.parametrize("call", ["agree", "take"])
def test_a_file_system_without_locks(lab, call, monkeypatch):
    """One line, and nothing is computed without them."""

    def flock(fd: int, kind: int) -> None:
        if call == "agree" or kind & fcntl.LOCK_NB:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(claims.fcntl, "flock", flock)
    folder = lab.out if call == "agree" else lab.out / ".slots" / socket.gethostname()
    with pytest.raises(UserError, match=rf"^{folder}: this file system has no locks \(No locks av"):
        lab.run()
    assert not lab.events()


def test_a_folder_that_cannot_be_written(lab, monkeypatch):
    monkeypatch.setattr(suite_folder.os, "access", lambda path, mode: path != lab.path)
    with pytest.raises(UserError, match=rf"^{lab.path}: cannot be written; choose another --"):
        lab.run("--dry-run")
    (lab.path / "file").touch()
    with pytest.raises(UserError, match=rf"^{lab.path}/file: cannot be written \((Not|File)"):
        Claim.take(lab.path / "file" / "claim")


@pytest.mark.race
def test_a_full_disk_is_one_line(lab, monkeypatch):
    """What had started is asked to save, and the same command goes on."""
    note, noted = SuiteFolder.note_claim, []

    def note_claim(folder: SuiteFolder, claim: Claim, spec: RunSpec) -> None:
        noted.append(spec)
        if len(noted) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        note(folder, claim, spec)

    monkeypatch.setattr(SuiteFolder, "note_claim", note_claim)
    message = rf"^{lab.out}: No space left on device; mend that, and the same command goes on$"
    with pytest.raises(UserError, match=message):
        lab.run(delay=0.1)
    assert not any(is_alive(pid) for _, _, pid in lab.events())
    lab.run()
    assert len(lab.count("done")) == 8 and set(lab.count("done").values()) == {1}


@pytest.mark.race
def test_one_at_a_time(tmp_path):
    """Who asks for the lock while another has it waits, also in the same process."""
    entered = threading.Event()

    def enter() -> None:
        with alone(tmp_path / "lock"):
            entered.set()

    thread = threading.Thread(target=enter)
    with alone(tmp_path / "lock"):
        thread.start()
        assert not entered.wait(0.3)
    thread.join(30)
    assert entered.is_set()


def test_gpus_are_packed_in_groups(tmp_path):
    executor = LocalExecutor(tmp_path, ["0", "1", "2"], cpu=False)
    assert (executor.gpus, executor.places) == (3, 3)
    pair, single = executor.reserve(2), executor.reserve(1)
    assert pair is not None and single is not None
    assert (pair.devices, single.devices) == (("0", "1"), ("2",))
    assert executor.reserve(1) is None
    log = tmp_path / "log"
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES']); input()"
    launch = Launch((sys.executable, "-c", "import time; time.sleep(60)"), log)
    process = executor.start(launch, pair)
    pair.release()  # as when the runner dies
    assert executor.reserve(2) is None, "the process has its devices still"
    process.kill()
    pair = executor.reserve(2)
    assert pair is not None and pair.devices == ("0", "1")
    shown = executor.start(Launch((sys.executable, "-c", code.replace("; input()", "")), log), pair)
    while shown.poll() is None:
        time.sleep(0.01)
    assert log.read_text() == "0,1\n"
    pair.release()
    one = executor.reserve(1)
    assert one is not None and executor.reserve(2) is None  # 1 is free, 2 are wanted
    assert executor.reserve(1) is not None, "none is kept where there were too few"


def test_a_run_too_large_for_now_is_passed_over(tmp_path, lab):
    """Groups of 2 and 1 on 3 GPUs: the small one does not wait for the large ones."""
    suite = load_suite(lab.path / "suite.yaml")
    specs = expand(suite, {"random": Init("random", None)}, 1, ["embedded"], version="1")
    specs = [run_suite.replace(specs[0], gpus=g, name=f"{n}", iterations=1) for n, g in
             (("first", 2), ("second", 2), ("small", 1))]  # fmt: skip
    folder = SuiteFolder(tmp_path / "packed")
    started = tmp_path / "started"
    code = (
        f"import sys, time; open({str(started)!r}, 'a').write(sys.argv[1] + ' ');"
        "time.sleep(0.3); raise SystemExit(4)"
    )
    executor = LocalExecutor(folder.path, ["0", "1", "2"], cpu=False)
    runner = suite_runner.Runner(
        folder, specs, executor, lambda spec: [sys.executable, "-c", code, spec.name]
    )
    runner.run()
    words = started.read_text().split()
    assert sorted(words[:2]) == ["first", "small"] and words[2] == "second"


def test_which_executor(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6,-1,7")
    assert visible_gpus() == ("4", "6")
    assert make_executor("auto", tmp_path).gpus == 2
    assert make_executor("cpu", tmp_path, workers=3).places == 3
    with pytest.raises(UserError, match="--workers: got 2, expected at least 1, and only on the C"):
        make_executor("auto", tmp_path, workers=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == () and make_executor("auto", tmp_path).gpus == 0
    with pytest.raises(UserError, match="--executor local: no GPU is visible"):
        make_executor("local", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(executors.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(OSError))
    assert visible_gpus() == ()


def test_time_left_by_hand(lab):
    suite = load_suite(lab.path / "suite.yaml")
    inits = {"random": Init("random", None), "mine": Init("/w", "a" * 64)}
    specs = expand(suite, inits, 1, ["embedded"], version="1")
    specs = tuple(run_suite.replace(spec, iterations=100) for spec in specs)
    names = [spec.name for spec in specs]  # a random, a mine, b random, b mine
    states = {names[0]: State("done", 100, seconds=50.0), names[1]: State("running", 40)}
    of_a, measured = [Measured("a", "embedded", 0, 0.5)], [Measured("b", "embedded", 0, 1.0)]
    found = foresee(specs, states, of_a + measured, places=2)
    # a takes 50 s, b 100 s: 30 s of a are left beside 100 s of b; the other b starts at 30 s.
    assert found.seconds_left == pytest.approx(130.0)
    assert found.done == pytest.approx((50 + 20) / 300)
    # A running process tells its speed: 40 iterations in 60 s, but of 100 it began at 20.
    going = {names[3]: State("running", 60, seconds=60.0, began_at=20)}
    assert foresee(specs[2:], going, [], places=1).seconds_left == pytest.approx(150 + 60)
    assert foresee(specs[2:], going, measured, places=1).seconds_left == pytest.approx(100 + 40)
    # Of b nothing is known: it is taken to last as long as a.
    assert foresee(specs, states, of_a, places=2).seconds_left == pytest.approx(30 + 50)
    assert foresee(specs, {}, [], places=2).seconds_left == float("inf")
    failed = {name: State("failed") for name in names}
    assert foresee(specs, failed, [], places=2) == suite_runner.Forecast(1.0, 0.0)


@pytest.mark.parametrize("name", ["paper", "smoke"])
def test_commands_are_what_the_programs_understand(name, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", "/data")
    suite = load_suite(ROOT / "configs" / "suites" / f"{name}.yaml")
    inits = {"random": Init("random", None), "mine": Init("/w/mine.pth", "a" * 64)}
    for gpus in (0, 8):
        specs = expand(suite, inits, 2, ["detectron2", "embedded"], version="1", available=gpus)
        assert name != "paper" or {spec.gpus for spec in specs} == ({8} if gpus else {0})
        for spec in specs:
            words = run_suite.command(spec, tmp_path / "out")
            assert words[0] == sys.executable
            if spec.program == "detection":
                assert words[1:3] == ["-m", "detection.train_net"]
                args = train_net.build_parser().parse_args(words[3:])
                assert args.resume and args.engine == spec.engine
                assert args.num_gpus == max(spec.gpus, 1)
                assert args.visualize == (4 if spec.seed == 0 else 0)
                given = dict(zip(args.opts[::2], args.opts[1::2], strict=True))
                assert given["MODEL.WEIGHTS"] == spec.weights
            else:
                start = words.index(f"moco.{spec.program}") + 1
                assert ("torch.distributed.run" in words) == (gpus > 1)
                protocol = LINEAR if spec.program == "linear" else FINETUNE
                args = classify.parse_args(protocol, words[start:])
                assert (args.resume, args.checkpoint) == ("auto", spec.weights)
                assert args.init == ("" if spec.init == "random" else "mine")
                given = dict(zip(args.opts[::2], args.opts[1::2], strict=True))
                assert given["DATA.ROOT"].startswith("/data/")
            assert args.config_file == str(spec.config)
            assert given["OUTPUT_DIR"] == str(tmp_path / "out")
            assert given["SEED"] == str(spec.seed)


def test_detectron2s_names_of_weights(tmp_path, monkeypatch):
    """A backbone becomes its file; what a training would refuse is refused, before a download."""
    zoo = pytest.importorskip("detection.d2.model_zoo")
    asked = []

    def get_local_path(name: str) -> str:
        asked.append(name)
        state = torchvision.models.resnet18().state_dict()
        moved = {key: v + 1 if key.endswith("running_mean") else v for key, v in state.items()}
        torch.save(moved, tmp_path / "R-18.pkl")
        return str(tmp_path / "R-18.pkl")

    monkeypatch.setattr(zoo.PathManager, "get_local_path", get_local_path)
    given = {"random": "random", "mine": "my.pth"}
    assert resolve_names(given) == given
    for name, message in (
        ("https://example.org/r50.pth", "this address is not read; download the file"),
        ("detectron2://COCO-Detection/faster_rcnn_R_50_C4_1x/137257644/m.pkl", "a whole detector"),
    ):
        with pytest.raises(UserError, match=f"{name}: {message}"):
            resolve_names(given | {"x": name})
    assert not asked
    name = "detectron2://ImageNetPretrained/torchvision/R-18.pkl"
    files = resolve_names(given | parse_inits([name]))
    assert files == given | {"R-18": str(tmp_path / "R-18.pkl")} and set(asked) == {name}
    # Without Detectron2 there is only the address.
    for module in [key for key in sys.modules if key.startswith(("detectron2", "detection.d2"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "detectron2", None)
    with pytest.raises(UserError, match=r"download https://\S+/torchvision/R-18\.pkl and give the"):
        resolve_names({"x": name})


def test_flags_may_follow_the_overrides():
    words = ["suite.yaml", "--opts", "SOLVER.BASE_LR", "1", "SEED=-1", "--dry-run"]
    args = run_suite.build_parser().parse_args(words)
    assert args.dry_run and args.opts == ["SOLVER.BASE_LR", "1", "SEED=-1"]


def test_missing_data_are_looked_for_by_their_own_kind(tmp_path, monkeypatch):
    """The same task file, on VOC, COCO, and a folder of the user's own."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "nowhere"))
    suite = load_suite(ROOT / "configs" / "suites" / "smoke.yaml")
    specs = expand(suite, {"random": Init("random", None)}, 1, ["embedded"], version="1")
    voc, coco, own = check(specs, False).problems
    assert voc.startswith("voc_small") and voc.endswith("detection.datasets doctor voc")
    assert coco.startswith("coco_small") and coco.endswith("detection.datasets doctor coco")
    assert own.startswith("bccd_small") and "detection.datasets doctor --voc-dir" in own


def test_the_real_checks_name_every_problem(tmp_path, monkeypatch):
    """Data, weights and keys of the real programs, without a dataset on this machine."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = tmp_path / "text.pth"
    text.write_text("not weights")
    suite = load_suite(ROOT / "configs" / "suites" / "smoke.yaml")
    suite = run_suite.replace(suite, tasks=suite.tasks[:1])
    probe = load_suite(ROOT / "configs" / "suites" / "imagenet.yaml").tasks[0]
    suite = run_suite.replace(suite, tasks=(*suite.tasks, probe))
    inits = {"random": Init("random", None), "text": Init(str(text), "a" * 64)}
    specs = expand(suite, inits, 3, ["embedded"], version="1")
    found = check(specs, False)
    assert len(found.problems) == 2, found.problems  # not one for each trial
    data, weights = found.problems
    assert data.startswith("voc_small from random (embedded): ") and "nowhere/VOC2007" in data
    assert "python -m detection.datasets doctor voc" in data
    assert weights.startswith("voc_small from text (embedded), imagenet_linear from text: ")
    assert "text.pth" in weights
    assert all("\n" not in problem for problem in found.problems)
    assert found.hardware["gpus"] == []
    # Without a row of random weights, too, bad weights do not hide what is wrong with the data.
    found = check([spec for spec in specs if spec.init == "text"], False)
    assert len(found.problems) == 2 and any("nowhere/VOC2007" in p for p in found.problems)


def test_tasks_that_tables_would_take_for_one(tmp_path, monkeypatch):
    """Else the tables would be refused when everything is done."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for split, name in (("train", "a"), ("train", "b"), ("val", "a"), ("val", "b")):
        folder = tmp_path / "data" / split / name
        folder.mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (8, 8)).save(folder / f"{index}.png")
    (tmp_path / "probe.yaml").write_text("TASK: tiny\nSOLVER: {BATCH_SIZE: 2, MAX_EPOCHS: 200}\n")
    tasks = [
        {"config": "probe.yaml", "name": name, "program": name, **changes}
        for name, changes in (("linear", {}), ("finetune", {}))
    ]
    overrides = {"overrides": {"DATA.ROOT": str(tmp_path / "data"), "MODEL.ARCH": "resnet18"}}
    content = {"name": "s", "tasks": [task | overrides for task in tasks]}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(content))
    suite = load_suite(tmp_path / "suite.yaml")
    specs = expand(suite, {"random": Init("random", None)}, 1, ["embedded"], version="1")
    found = check(specs, False)
    assert found.problems == (
        "linear and finetune: both would be tiny_resnet18 in the tables; give one of them a file "
        "(or TASK) of its own name",
    )
    assert set(found.iterations.values()) == {400}
    assert check(specs[:1], False).problems == ()
