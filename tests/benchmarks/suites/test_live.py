"""The report of a suite that is being computed: when it is made, who may read it, in a browser."""

import http.client
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import run_suite
from benchmarks.report.progress import Progress
from benchmarks.suites import live
from benchmarks.suites.forecast import Forecast
from benchmarks.suites.live import Live
from benchmarks.suites.runs import DONE, FAILED, RUNNING, Run, State
from moco.common.errors import UserError
from tests.benchmarks.suites.lab import Lab

NAMES = ("a", "b", "c")
SECRET = "a text of a file"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "secret.txt").write_text(SECRET)
    (folder / "link").symlink_to(folder / "secret.txt")
    return [Run(name, f"run {name}", folder / name, tuple, iterations=4) for name in NAMES]


def states(*kinds: str) -> dict[str, State]:
    return {name: State(kind, 2.0, "<i>why</i>") for name, kind in zip(NAMES, kinds, strict=False)}


@pytest.fixture(scope="module")
def served(runs: list[Run]) -> Iterator[int]:
    """The port of a page while one of its runs has failed and one is running."""
    with Live("s", runs, lambda progress: f"page {progress.counts}", 0) as opened:
        opened.update(states(FAILED, RUNNING), Forecast(0.5, 65.0))
        yield opened._server.server_port


def ask(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    """Status and text; the path is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_what_is_served(served):
    status, text = ask(served, "/")
    assert (status, text) == (200, "page {'running': 1, 'waiting': 1, 'failed': 1}")
    status, text = ask(served, "/progress")
    assert status == 200 and '<b class="share">50%</b> done, about 1:05 left' in text
    assert "run a" in text and "&lt;i&gt;why" in text and "<i>" not in text
    assert ask(served, "/", "HEAD") == (200, "")


@pytest.mark.parametrize(
    "path",
    [
        *("/link", "/secret.txt", "/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt"),
        *("//etc/passwd", "/etc/passwd", "file:///etc/passwd", "/progress/../link", "/a/", "/."),
        *("http://127.0.0.1/", "/%00", "/suite.json", "/table.html", "secret.txt"),
    ],
)
def test_no_address_leads_to_a_file(served, runs, path, monkeypatch):
    monkeypatch.chdir(runs[0].folder.parent)
    status, text = ask(served, path)
    assert status == 404 and SECRET not in text and "root:" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_it_is_only_read(served, method):
    assert ask(served, "/", method)[0] == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost", 200), ("LOCALHOST:9000", 200), ("127.0.0.1", 200)),
        *(("evil.example", 403), ("127.0.0.1.evil.example", 403), ("localhost@evil.example", 403)),
        *(("", 403), ("[", 403), ("0.0.0.0", 403)),
    ],
)
def test_other_names_of_this_machine_are_refused(served, host, status):
    """A web site may have its own name resolved to 127.0.0.1."""
    for path in ("/", "/progress"):
        assert ask(served, path, host=host)[0] == status


def test_a_port_that_is_taken(served, runs):
    for port in (served, 1 << 20):
        with pytest.raises(UserError, match=f"--serve {port}"):
            Live("s", runs, str, port)


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


def page_of(progress: Progress) -> str:
    return f"{progress.name} by process {os.getpid()}"


def test_the_report_of_many_runs_is_made_in_a_process_of_its_own(runs, monkeypatch):
    shown = {}
    for many in (len(runs) + 1, len(runs)):
        monkeypatch.setattr(live, "MANY", many)
        with Live("s", runs, page_of, 0) as opened:
            opened.update(states(RUNNING), Forecast(0.0, 1.0))
            shown[many] = ask(opened._server.server_port, "/")[1]
    own = f"s by process {os.getpid()}"
    assert shown[len(runs) + 1] == own
    assert re.fullmatch(r"s by process \d+", shown[len(runs)]) and shown[len(runs)] != own


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


def address(lab: Lab) -> str:
    """Of the page of a suite that was started."""
    lab.wait_for(lambda: "the report is on " in lab.log())
    return re.findall(r"the report is on (\S+)", lab.log())[-1]


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
    with lab.start("--serve") as runner:
        lab.wait_for(lambda: len(lab.count("iteration-2")) == 8 and page.exists())
        first = dump(browser, address(lab), tmp_path / "first", "--virtual-time-budget=10000")
        in_file = page.read_text()
        threading.Timer(1, lab.release).start()
        last = dump(browser, address(lab), tmp_path / "last", "--virtual-time-budget=100000000")
        assert runner.wait(60) == 0
    # Once in a while its clock ends while it changes pages, and it prints nothing.
    last = last or dump(browser, page.as_uri(), tmp_path / "again")
    for text in (first, in_file):
        assert re.search(r"<title>\d\d% ", text) and 'class="share"' in text
        assert "<b>4</b> done" in text and "<b>4</b> running" in text
        assert re.findall(r'<a href="#runs-a--\w+">(\d)</a>', text) == ["1", "1"]
    assert "a mine seed 1 (embedded)" in first and "running, 25%" in first
    for text in (last, page.read_text()):
        assert "<title>Transfer results</title>" in text and 'id="progress"' not in text
        assert re.findall(r'<a href="#runs-a--\w+">(\d)</a>', text) == ["2", "2"]
    assert "<button>pre-train</button>" in last, "the script ran"


@pytest.mark.slow
def test_a_suite_that_others_compute_is_shown_and_left_alone(lab):
    lab.run("--trials", "1")
    before = {path: path.stat().st_mtime_ns for path in lab.out.rglob("*")}
    lab.with_tables = True
    with lab.start("--status", "--serve") as viewer:
        port = int(address(lab).rpartition(":")[2].strip("/"))
        lab.wait_for(lambda: ask(port, "/")[0] == 200)
        text = ask(port, "/")[1]
        viewer.send_signal(signal.SIGINT)
        assert viewer.wait(60) == 0
    assert 'id="runs-a--mine"' in text and 'id="progress"' not in text
    assert {path: path.stat().st_mtime_ns for path in lab.out.rglob("*")} == before
