"""Stopping, killing and resuming every command that trains, as a black box.

Each test starts commands (`tests.oracles.commands`) and reads the files of a run: the checkpoint
that `last_checkpoint` names, metrics.json and run.json. All drivers run in every scenario that
applies to them, and are compared with the same run without interruption.
"""

import functools
import hashlib
import json
import shutil
import signal
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles.commands import AGENT, TORCHRUN, Done, Fault, run, start, wait, wait_for_fault
from tests.oracles.drivers import (
    DETECTRON2,
    SAVING,
    TRAININGS,
    TWO,
    VARIANTS,
    Driver,
    suite,
    write_data,
)

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.timeout(900)]
STOPPED = 85  # the exit code: run the same command again with --resume


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the images and weights of all drivers."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def layouts(request: pytest.FixtureRequest, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Detectron2's names of datasets refer to the tiny ones."""
    kind = "of_lvis" if "lvis" in request.node.callspec.id else "of_all_others"
    monkeypatch.setenv("DETECTRON2_DATASETS", str(data / "layouts" / kind))


@pytest.fixture(autouse=True)
def _needs_detectron2(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("detectron2"):
        request.getfixturevalue("detectron2")


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Driver], Path]:
    """Return `straight(driver)`, the folder of its run without interruption."""

    @functools.cache
    def folder_of(command: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("straight")
        done = run(command, folder)
        assert done.code == 0, done.err
        return folder / "run"

    def folder(driver: Driver) -> Path:
        if driver == TWO[1]:  # its processes compute what those of --num-gpus do
            driver = TWO[2]
        elif driver.launcher:
            driver = replace(driver, launcher=AGENT)
        return folder_of(tuple(driver.command(data)))

    return folder


def newest(folder: Path) -> dict[str, Any]:
    """Load the checkpoint that `last_checkpoint` names."""
    name = (folder / "last_checkpoint").read_text()
    content: dict[str, Any] = torch.load(folder / name, weights_only=True)
    return content


def steps_done(folder: Path) -> int:
    content = newest(folder)
    return int(content["step"] if "step" in content else content["iteration"] + 1)


def without_times(value: Any) -> Any:
    """Remove durations and provenance, so that runs of one protocol and seed compare equal."""
    if isinstance(value, dict):
        return {
            key: without_times(part)
            for key, part in value.items()
            if not str(key).endswith(("time", "seconds", "per_second", "created", "provenance"))
        }
    if isinstance(value, list | tuple):
        return [without_times(part) for part in value]
    if isinstance(value, torch.Tensor):
        content = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    return repr(value)  # NaN equals itself then


def lines(folder: Path) -> list[Any]:
    """Read metrics.json by iteration."""
    found = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    counts = Counter((line["iteration"], name) for line in found for name in line)
    # A finished detector is evaluated again, but no other metric is logged twice.
    twice = {name for (_, name), number in counts.items() if number > 1 and "/" not in name}
    assert not twice - {"iteration", "epoch", "time", "data_time", "eta_seconds"}
    by_iteration: dict[int, dict[str, Any]] = {}
    for line in found:
        by_iteration.setdefault(line["iteration"], {}).update(line)
    return [without_times(by_iteration[number]) for number in sorted(by_iteration)]


def final_state(folder: Path) -> dict[str, Any]:
    """Return everything in a finished run's folder that depends on the training."""
    record = json.loads((folder / "run.json").read_text())
    record.pop("run_id", None)
    assert not list(folder.glob(".tmp-*")), "something half-written"
    last = newest(folder)
    return {"newest": without_times(last), "lines": lines(folder)} | {
        "record": without_times(record)
    }


def assert_same(folder: Path, expected: Path) -> None:
    """Compare two finished runs."""
    mine, theirs = final_state(folder), final_state(expected)
    for part, value in theirs.items():
        assert mine[part] == value, part


def content(folder: Path) -> dict[str, str]:
    """Hash every file except logs."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "log.txt" and "tfevents" not in path.name
    }


def assert_stopped(done: Done, folder: Path, code: int = STOPPED) -> int:
    """Check the line on what was saved and how to resume; return the number of steps."""
    assert done.code == code, done
    assert "Traceback" not in done.err
    text = done.out if code == 130 else done.last
    assert "stopped after" in text and "run the same command with --resume" in text, done
    assert str(Path("run") / (folder / "last_checkpoint").read_text()) in text
    assert not (folder / "run.json").exists()
    return steps_done(folder)


@pytest.mark.parametrize("driver", TRAININGS)
def test_stopped_again_and_again(driver, data, straight, tmp_path):
    """A run stopped by each signal, also in an evaluation and by Ctrl-C, ends like one without."""
    resume, folder, steps = driver.command(data, "--resume"), tmp_path / "run", [0]
    again = Fault(signal.SIGINT, *driver.train, to="group", again=True)
    done = run(driver.command(data), tmp_path, again)
    assert done.code == 130 and "stopped after" not in done.out  # twice means now
    for fault in (
        Fault(signal.SIGTERM, *driver.train),
        Fault(signal.SIGUSR1, *driver.test),
        Fault(signal.SIGINT, *driver.train, to="group"),
    ):
        done = run(resume, tmp_path, fault)
        steps.append(assert_stopped(done, folder, 130 if fault.to == "group" else STOPPED))
    assert 0 < steps[1] < steps[2] < steps[3] < driver.steps
    assert run(resume, tmp_path).code == 0
    assert_same(folder, straight(driver))


@pytest.mark.parametrize("driver", SAVING)
def test_killed_at_any_change_of_a_file(driver, data, straight, tmp_path):
    """Kills before, in and after writing or removing a checkpoint always leave a whole one."""
    folder, kills, steps = tmp_path / "run", 0, 0
    for count in range(2, 200, 3):
        fault = Fault(signal.SIGKILL, "/run/", count, event="change")
        done = wait(start(driver.command(data, "--resume"), tmp_path, fault), tmp_path)
        if done.code == 0:
            break
        assert done.code == -signal.SIGKILL, done
        kills += 1
        if (folder / "last_checkpoint").exists():
            assert steps_done(folder) >= steps
            steps = steps_done(folder)
    assert kills >= 5 and steps
    assert_same(folder, straight(driver))


@pytest.mark.parametrize("driver", SAVING)
def test_resuming_a_finished_run_changes_nothing(driver, data, straight, tmp_path):
    folder = Path(shutil.copytree(straight(driver), tmp_path / "run"))
    done = run(driver.command(data, "--resume"), tmp_path)
    assert done.code == 0
    log = folder / "log.txt"
    text = done.out + done.err + (log.read_text() if log.exists() else "")
    assert f"after step {driver.steps} of" in text or "model_final.pth" in text
    assert_same(folder, straight(driver))


@pytest.fixture
def stopped(data: Path, tmp_path: Path) -> Callable[[Driver], Path]:
    """Return `stopped(driver)`, the folder of a run that was stopped in the middle."""

    def stop(driver: Driver) -> Path:
        done = run(driver.command(data), tmp_path, Fault(signal.SIGTERM, *driver.train))
        assert_stopped(done, tmp_path / "run")
        return tmp_path / "run"

    return stop


@pytest.mark.parametrize("driver", TRAININGS)
def test_another_run_is_refused(driver, data, stopped, tmp_path):
    """Resuming with other keys, weights or data is refused and changes nothing."""
    before = content(stopped(driver))
    for words, text in driver.changes.items():
        done = run(driver.command(data, "--resume", *words), tmp_path)
        assert done.code in (2, 3) and text in done.last, done
        assert done.err.startswith("error: ") and done.err.count("\n") == 1
        assert content(tmp_path / "run") == before
    assert run(driver.command(data), tmp_path).code == 2  # without --resume


@pytest.mark.parametrize("driver", [*SAVING, DETECTRON2.param()])
def test_a_damaged_newest_checkpoint(driver, data, straight, tmp_path):
    """It is passed over with a warning, by the same rule in every training."""
    folder = tmp_path / "run"
    for kind in ("empty", "cut off", "text", "a flipped bit", "missing"):
        shutil.copytree(straight(driver), folder)
        (folder / "run.json").unlink()
        path = folder / (folder / "last_checkpoint").read_text()
        whole = bytearray(path.read_bytes())
        size = {"empty": 0, "cut off": len(whole) // 2}.get(kind, len(whole))
        if kind == "a flipped bit":
            with zipfile.ZipFile(path) as archive:
                largest = max(archive.infolist(), key=lambda info: info.file_size)
            whole[largest.header_offset + largest.file_size // 2] ^= 1
        path.write_bytes(b"text" if kind == "text" else whole[:size])
        if kind == "missing":
            path.unlink()
        done = run(driver.command(data, "--resume"), tmp_path)
        assert done.code == 0, done
        [warning] = [line for line in done.out.splitlines() if line.startswith("warning: ")]
        named = f"names '{path.name}'" if kind == "missing" else f"a checkpoint: run/{path.name}: "
        assert named in warning
        assert kind == "missing" or (folder / "superseded_1" / path.name).is_file()
        assert_same(folder, straight(driver))
        shutil.rmtree(folder)


@pytest.mark.parametrize("driver", SAVING)
def test_a_second_process_is_refused_until_the_first_is_killed(driver, data, straight, tmp_path):
    first = start(driver.command(data), tmp_path, Fault(signal.SIGSTOP, *driver.train))
    wait_for_fault(first, tmp_path)
    (tmp_path / "second").mkdir()
    second = run(driver.command(data, "--resume", "OUTPUT_DIR", "../run"), tmp_path / "second")
    assert second.code == 5 and "is in use by another process" in second.last
    assert second.err.count("\n") == 1
    first.kill()
    assert wait(first, tmp_path).code == -signal.SIGKILL
    assert run(driver.command(data, "--resume"), tmp_path).code == 0
    assert_same(tmp_path / "run", straight(driver))


@pytest.mark.parametrize("driver", SAVING)
def test_a_full_disk_and_a_kill_in_a_write(driver, data, stopped, straight, tmp_path):
    """Saved files stay, no partial file gets its name, and the run resumes with space again."""
    folder, resume = stopped(driver), driver.command(data, "--resume")
    last = folder / (folder / "last_checkpoint").read_text()
    before = last.read_bytes()
    for is_killed in (True, False):
        done = run(resume, tmp_path, max_bytes=len(before) // 2, is_killed=is_killed)
        assert done.code == (-signal.SIGXFSZ if is_killed else 2), done
        assert is_killed == bool(list(folder.glob(".tmp-*")))
        assert last.read_bytes() == before
        assert (folder / "last_checkpoint").read_text() == last.name
        for path in folder.glob("*.pt*"):
            torch.load(path, weights_only=True)
    assert "error: cannot write run/" in done.last and "bytes written" in done.last
    assert "Traceback" not in done.err
    assert run(resume, tmp_path).code == 0
    assert_same(folder, straight(driver))


@pytest.mark.parametrize("driver", SAVING)
def test_an_older_checkpoint_replaces_what_came_after_it(driver, data, straight, tmp_path):
    folder = Path(shutil.copytree(straight(driver), tmp_path / "run"))
    older, *newer = sorted(path for path in folder.glob("*.pt*") if path.is_file())
    if driver.takes_file:
        words = driver.command(data, "--resume", f"run/{older.name}")
    else:
        (folder / "last_checkpoint").write_text(older.name)
        words = driver.command(data, "--resume")
    done = run(words, tmp_path)
    assert done.code == 0, done
    aside = {path.name for path in (folder / "superseded_1").iterdir()}
    assert aside == {"earlier_run.json", *(path.name for path in newer)}
    assert "note: " in done.out and "run/superseded_1" in done.out
    assert_same(folder, straight(driver))


@pytest.mark.parametrize("driver", [driver.param() for driver in VARIANTS])
@pytest.mark.usefixtures("layouts")
def test_every_kind_of_training(driver, data, straight, tmp_path):
    """A run stopped, killed later and resumed ends like one without interruption."""
    resume = driver.command(data, "--resume")
    done = run(driver.command(data), tmp_path, Fault(signal.SIGTERM, *driver.train))
    assert_stopped(done, tmp_path / "run")
    later = Fault(signal.SIGKILL, "/run/metrics.json", 1, event="change")
    assert run(resume, tmp_path, later).code == -signal.SIGKILL
    assert run(resume, tmp_path).code == 0
    assert_same(tmp_path / "run", straight(driver))


@pytest.mark.parametrize("driver", [driver.param() for driver in TWO])
def test_two_processes_stop_together(driver, data, straight, tmp_path):
    """Both stop if one of them gets the signal, and if only their parent does."""
    resume, folder, steps = driver.command(data, "--resume"), tmp_path / "run", []
    for words, to in ((driver.command(data), "self"), (resume, "parent")):
        fault = Fault(signal.SIGTERM, *driver.train, to=to, where="child")
        done = run(words, tmp_path, fault)
        assert done.code == (1 if driver.launcher else STOPPED), done
        assert done.err.count("error: stopped after") == (2 if driver.launcher else 1), done
        steps.append(steps_done(folder))
        assert not (folder / "run.json").exists()
    assert 0 < steps[0] < steps[1] < driver.steps
    shutil.copytree(folder, tmp_path / "alone/run")
    alone = run([*driver.words(data), "--resume"], tmp_path / "alone")
    if driver.takes_file:
        assert alone.code == 2 and "was trained by 2 processes, this run has 1" in alone.last
    else:
        log = (tmp_path / "alone/run/log.txt").read_text()
        assert alone.code == 0 and "resumed with other images and random numbers, because" in log
    if driver.launcher:
        resume = replace(driver, launcher=AGENT).command(data, "--resume")
    assert run(resume, tmp_path).code == 0
    assert_same(folder, straight(driver))


@pytest.mark.parametrize("driver", [driver.param() for driver in TWO if not driver.launcher])
def test_a_stop_during_a_long_evaluation_of_two_processes(driver, data, straight, tmp_path):
    """The evaluation, longer than torch's elastic agent waits after a signal, ends as usual."""
    fault = Fault(signal.SIGTERM, *driver.test, to="command", seconds=35, where="child")
    done = run(driver.command(data), tmp_path, fault)
    assert 0 < assert_stopped(done, tmp_path / "run") < driver.steps
    assert any("bbox/AP" in line for line in lines(tmp_path / "run"))
    assert run(driver.command(data, "--resume"), tmp_path).code == 0
    assert_same(tmp_path / "run", straight(driver))


@pytest.mark.parametrize("target", ["self", "command"])
@pytest.mark.parametrize("driver", [driver.param() for driver in (TWO[0], TWO[2])])
def test_one_process_is_killed(driver, target, data, tmp_path):
    """If one of two processes or their parent is killed, `wait` sees that none is left."""
    timeout = ("--dist-timeout", "20") if driver.takes_file else ()
    fault = Fault(signal.SIGKILL, *driver.train, to=target, where="child")
    done = run(driver.command(data, *timeout), tmp_path, fault, is_fresh=True)
    assert done.code not in (0, STOPPED), done
    record = tmp_path / "run/run.json"
    assert not record.exists() or json.loads(record.read_text())["status"] == "failed"
    if target == "command" and driver.launcher:
        assert done.err.count("error: stopped after") == 2, done
    if target == "self":
        assert "of this run died" in done.err and "--resume" in done.err, done


def test_torchrun_starts_a_lost_process_again(data, straight, tmp_path):
    """--overwrite does not delete what the first attempt has saved."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.json").write_text("an earlier run's\n")
    driver = replace(TWO[0], launcher=(*TORCHRUN[:-1], "--max-restarts=1", "-m"))
    fault = Fault(signal.SIGKILL, "/images/", 26, where="child")
    done = run(driver.command(data, "--overwrite"), tmp_path, fault)
    assert done.code == 0 and "resuming from run/checkpoint_0" in done.out, done
    assert_same(tmp_path / "run", straight(TWO[0]))


@pytest.mark.parametrize("driver", SAVING)
def test_a_run_after_its_last_step_ends_as_usual(driver, data, straight, tmp_path):
    name = (straight(driver) / "last_checkpoint").read_text()
    fault = Fault(signal.SIGTERM, f"/run/{name}", event="change")
    assert run(driver.command(data), tmp_path, fault).code == 0
    assert_same(tmp_path / "run", straight(driver))


class TestSuite:
    """Tests of the runner of a suite and the commands that it starts."""

    @pytest.fixture(scope="class")
    def whole(self, data, tmp_path_factory):
        folder = tmp_path_factory.mktemp("whole")
        done = run(suite(data), folder)
        assert done.code == 0, done
        return folder / "run"

    def runs(self, folder):
        return sorted(path.parent for path in folder.rglob("run.json"))

    def assert_same(self, folder, expected):
        pairs = list(zip(self.runs(folder), self.runs(expected), strict=True))
        assert len(pairs) == 2
        for mine, theirs in pairs:
            assert_same(mine, theirs)
        names = ("table.csv", "table.md", "table.tex")
        tables = [
            [(each / "tables" / name).read_bytes() for name in names] for each in (folder, expected)
        ]
        assert tables[0] == tables[1]

    def test_stopped(self, data, whole, tmp_path):
        """The commands that it has started save and stop with it; the same command resumes."""
        steps = [0]
        for number, image in ((signal.SIGTERM, 28), (signal.SIGINT, 12)):
            done = run(suite(data), tmp_path, Fault(number, "/train/", image, to="command"))
            assert done.code == STOPPED and f"stopped by {number.name}" in done.last, done
            [pointer] = (tmp_path / "run").rglob("last_checkpoint")
            steps.append(steps_done(pointer.parent))
            assert not self.runs(tmp_path / "run")
        assert 0 < steps[1] < steps[2] < 8
        assert run(suite(data), tmp_path).code == 0
        self.assert_same(tmp_path / "run", whole)
        [log] = [
            path for path in (tmp_path / "run").rglob("suite.log") if "resuming" in path.read_text()
        ]
        assert log.parent == pointer.parent
        before = content(tmp_path / "run")
        assert run(suite(data), tmp_path).code == 0  # nothing is left to do
        assert {k: v for k, v in content(tmp_path / "run").items() if "run.json" in k} == {
            k: v for k, v in before.items() if "run.json" in k
        }

    def test_killed(self, data, whole, tmp_path):
        """Its commands may survive a kill at changes of files, and nothing is computed twice."""
        for count in (2, 12, 30):
            fault = Fault(signal.SIGKILL, "/run/", count, event="change", where="command")
            done = wait(start(suite(data), tmp_path, fault), tmp_path)
            assert done.code in (0, -signal.SIGKILL), done
        fault = Fault(signal.SIGKILL, "/train/", 30, to="command")
        done = wait(start(suite(data), tmp_path, fault), tmp_path)
        assert done.code in (0, -signal.SIGKILL), done
        assert run(suite(data), tmp_path).code == 0
        self.assert_same(tmp_path / "run", whole)

    def test_a_failure_is_reported_and_retried_if_requested(self, data, whole, tmp_path):
        done = run(suite(data), tmp_path, Fault(signal.SIGKILL, "/train/", 44))
        assert done.code == 1 and "1 of 2 runs failed" in done.last, done
        assert "killed by signal 9 (SIGKILL)" in done.err
        done = run(suite(data), tmp_path)
        assert done.code == 1 and len(self.runs(tmp_path / "run")) == 1
        assert run([*suite(data), "--retry-failed"], tmp_path).code == 0
        self.assert_same(tmp_path / "run", whole)
