"""Progress where there is no terminal: what a line says, and when one is printed."""

import re

import pytest

from moco.common import progress
from moco.common.progress import Progress, format_seconds


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of all displays, which are not silent."""
    monkeypatch.delenv("MOCO_PROGRESS", raising=False)
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_line_says_speed_and_time_left(clock, capsys):
    with Progress(100, "pre-train", "img", initial=40) as bar:
        clock.now += 40.0
        bar.update(20, loss="1.5")
    assert capsys.readouterr().err == "pre-train: 60/100 img, 0.5 img/s, 1:20 left, loss=1.5\n"
    assert format_seconds(3725) == "1:02:05" and format_seconds(59.6) == "1:00"
    assert format_seconds(float("inf")) == "?"


def test_at_most_two_lines_a_minute_with_a_time_left_that_moves(clock, capsys):
    printed, left = [], []
    with Progress(6000, "evaluate", "img") as bar:
        for _ in range(600):  # ten minutes
            clock.now += 1.0
            bar.update(10)
            if line := capsys.readouterr().err:
                printed.append(clock.now)
                left.append(re.search(r"\S+(?= left)", line).group())
    assert printed == [130.0 + 30 * i for i in range(20)]
    assert left[:3] == ["9:30", "9:00", "8:30"] and left[-1] == "0:00"
    assert len(set(left)) == len(left)


def test_nothing_new_is_no_line(clock, capsys):
    with Progress(100, "download", "MB") as bar:
        for _ in range(300):
            clock.now += 1.0
            bar.update(0)
        assert not capsys.readouterr().err
        bar.update(1)
        assert capsys.readouterr().err.startswith("download: 1/100 MB")
        clock.now += 60.0
        bar.update(0)
    assert not capsys.readouterr().err


def test_the_end_is_a_line_at_once(clock, capsys):
    with Progress(2, "x") as bar:
        bar.update()
        bar.update()
    assert capsys.readouterr().err.startswith("x: 2/2 it")


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_silence(how, clock, capsys, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("MOCO_PROGRESS", "off")
    with Progress(1, "x", silent=how == "argument") as bar:
        bar.update()
    assert not capsys.readouterr().err
