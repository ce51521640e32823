"""The report of a suite that is being computed: when it is made, and in a browser."""

import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from benchmarks import run_suite
from benchmarks.report.progress import Progress
from benchmarks.suites import live
from benchmarks.suites.forecast import Forecast
from benchmarks.suites.live import Live
from benchmarks.suites.runs import DONE, FAILED, RUNNING, Run, State

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("suite")
    return [Run(name, f"run {name}", folder / name, tuple, iterations=4) for name in NAMES]


def states(*kinds: str) -> dict[str, State]:
    return {name: State(kind, 2.0, "<i>why</i>") for name, kind in zip(NAMES, kinds, strict=False)}


def test_the_report_is_made_seldom_and_not_less_than_once(runs, monkeypatch):
    monkeypatch.setattr(live, "EVERY_SECONDS", 0.4)
    made: list[Progress] = []
    with Live("s", runs, lambda progress: str(made.append(progress))) as opened:
        opened.update(states(RUNNING), Forecast(0.0, 1.0))
        deadline = time.monotonic() + 30
        while not made:
            assert time.monotonic() < deadline
        for _ in range(20):  # the states change, and no run ends
            opened.update(states(RUNNING, RUNNING), Forecast(0.1, 1.0))
        for kinds in ((DONE,), (DONE, FAILED), (DONE, FAILED, DONE)):
            opened.update(states(*kinds), Forecast(0.5, 1.0))
            time.sleep(0.05)
        while len(made) < 2:
            assert time.monotonic() < deadline
        time.sleep(0.5)
    assert [progress.counts for progress in made] == [
        {"running": 1, "waiting": 2},
        {"done": 2, "failed": 1},
    ]


def test_the_report_of_many_runs_is_made_in_a_process_of_its_own(runs, monkeypatch):
    made = {}
    for many in (len(runs) + 1, len(runs)):
        monkeypatch.setattr(live, "MANY", many)
        made[many], _ = live.of_runs(runs, os.getpid)
    assert made[len(runs) + 1] == os.getpid() != made[len(runs)]


def test_reports_rest_longer_the_longer_they_take():
    assert [live.rest(seconds) for seconds in (0.1, 2.0, 30.0)] == [10.0, 120.0, 6000.0]


def test_a_report_that_fails_stops_nothing(lab, monkeypatch, capsys):
    def fail(*arguments, **keys) -> str:
        raise OSError("no\nspace")

    monkeypatch.setattr(live, "EVERY_SECONDS", 0.05)
    monkeypatch.setattr(live, "REST", 0)
    monkeypatch.setattr(run_suite, "refresh_tables", fail)
    monkeypatch.setattr(run_suite, "write_tables", lambda *arguments: [])
    lab.with_tables = True
    lab.run("--trials", "1")
    lab.assert_once(4)
    assert capsys.readouterr().err.count("note: no tables yet (OSError: no space)") == 1


@pytest.fixture
def browser() -> str:
    programs = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    return next(filter(None, programs), None) or pytest.skip("no Chromium is installed")


def dump(browser: str, address: str, profile: Path, *more: str) -> str:
    """What a browser shows, as HTML; its clock stands still while an answer is awaited."""
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    argv += [*more, "--dump-dom", address]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.slow
def test_an_open_page_follows_the_suite_to_its_tables(browser, lab, tmp_path):
    lab.run("--trials", "1")
    lab.hold()
    lab.with_tables, lab.executor = True, ("--executor", "cpu", "--workers", "4")
    page = lab.out / "tables" / "table.html"
    with lab.start() as runner:
        lab.wait_for(lambda: len(lab.count("iteration-2")) == 8 and page.exists())
        first = dump(browser, page.as_uri(), tmp_path / "first", "--virtual-time-budget=10000")
        threading.Timer(1, lab.release).start()
        assert runner.wait(60) == 0
    last = dump(browser, page.as_uri(), tmp_path / "last")
    assert re.search(r"<title>\d\d% ", first) and 'class="share"' in first
    assert '<meta http-equiv="refresh" content="30">' in first
    assert "<b>4</b> done" in first and "<b>4</b> running" in first
    assert re.findall(r'<a href="#runs-a--\w+">(\d)</a>', first) == ["1", "1"]
    assert "<title>Transfer results</title>" in last and 'id="progress"' not in last
    assert "refresh" not in last
    assert re.findall(r'<a href="#runs-a--\w+">(\d)</a>', last) == ["2", "2"]
    assert "<button>pre-train</button>" in last, "the script ran"
