"""Page of a suite that is being computed: when it is written, and in a browser."""

import re
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.report.style import Progress
from benchmarks.suites import tables
from benchmarks.suites.forecast import Forecast
from benchmarks.suites.runs import DONE, FAILED, RUNNING, WAITING, Run, State
from benchmarks.suites.tables import TablesSoFar
from tests.browser import find_browser

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("suite")
    return [Run(name, f"run {name}", folder / name, (), iterations=4) for name in NAMES]


def states(*kinds: str) -> dict[str, State]:
    return {name: State(kind, 2.0, "<i>why</i>") for name, kind in zip(NAMES, kinds, strict=False)}


def page_of(page: Path, progress: Progress) -> None:
    """Write the runs that had ended, instead of tables."""
    ended = {kind: number for kind, number in progress.counts.items() if kind in (DONE, FAILED)}
    text = f"{ended} {progress.share} {progress.listed}"
    page.write_text(text, encoding="utf-8")


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_tables_are_made_when_a_run_has_ended(runs, monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "REST", 0)
    page = tmp_path / "table.html"
    with TablesSoFar("s", runs, partial(page_of, page)) as made:
        speeds = {runs[0].speed_key: [30.0]}
        made.update(states(RUNNING), Forecast(0.25, 1.0), speeds)
        wait_for(page.exists)
        # Two of four iterations of 30 s are left, and four of each run that waits.
        text = page.read_text()
        assert text.startswith("{} 0.25") and "0.5, 'about 1:00 left'" in text
        assert text.count("'waiting', 0.0, 'about 2:00 left'") == 2
        made.update(states(RUNNING), Forecast(0.3, 1.0), speeds)  # no run has ended
        time.sleep(0.3)
        assert page.read_text() == text

        def ended() -> bool:
            made.update(states(DONE, FAILED), Forecast(0.5, 1.0), {})
            return "{'done': 1, 'failed': 1}" in page.read_text()

        wait_for(ended)


def test_time_left_is_known_before_any_run_has_ended(runs, monkeypatch):
    running = {"a": State(RUNNING, 2.0, seconds=20.0), "b": State(WAITING), "c": State(WAITING)}
    found = tables.describe("s", runs, running, Forecast(0.1, 1.0), {})
    assert [left for *_, left, _ in found.listed] == ["about 0:20 left", *["about 0:40 left"] * 2]
    monkeypatch.setitem(tables.LISTED, WAITING, 1)
    found = tables.describe("s", runs, running, Forecast(0.1, 1.0), {})
    assert [title for title, *_ in found.listed] == ["run a", "run b"]
    assert found.counts[WAITING] == 2
    ended = tables.describe("s", runs, states(DONE, FAILED, DONE), Forecast(1.0, 0.0), {})
    assert [left for *_, left, _ in ended.listed] == [""]


def fail(progress: Progress) -> None:
    raise OSError("no\nspace")


def test_a_page_that_fails_stops_nothing(runs, monkeypatch, capsys):
    monkeypatch.setattr(tables, "REST", 0)
    with TablesSoFar("s", runs, fail) as made:
        for kinds in ((DONE,), (DONE, FAILED), (DONE, FAILED, DONE)):
            made.update(states(*kinds), Forecast(0.5, 1.0), {})
            wait_for(lambda: made._making.done())
    assert (
        capsys.readouterr().err.count("note: the page cannot be written (OSError: no space)") == 1
    )


def dump(browser: str, address: str, profile: Path, *more: str) -> str:
    """Return a page as the browser renders it; its clock waits for responses."""
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    argv += [*more, "--dump-dom", address]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.slow
def test_an_open_page_follows_the_suite_to_its_tables(lab, tmp_path):
    browser = find_browser()
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
    assert '<button type="button">pre-train</button>' in last, "the script ran"
