"""Progress without a terminal: the text of a line, and when it is printed."""

import re

import pytest

from moco.common import progress
from moco.common.progress import Progress, format_seconds


class Clock:
    """Clock that the test advances."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Replace the clock of all displays, which are not silent."""
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


def test_a_line_only_when_something_changed_and_at_the_end(clock, capsys):
    with Progress(2, "download", "MB") as bar:
        for _ in range(300):
            clock.now += 1.0
            bar.update(0)
        assert not capsys.readouterr().err
        bar.update(1)
        assert capsys.readouterr().err.startswith("download: 1/2 MB")
        clock.now += 60.0
        bar.update(0)
        assert not capsys.readouterr().err
        clock.now += 1.0
        bar.update()  # the last one does not wait
        assert capsys.readouterr().err.startswith("download: 2/2 MB")


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_silence(how, clock, capsys, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("MOCO_PROGRESS", "off")
    with Progress(1, "x", silent=how == "argument") as bar:
        bar.update()
    assert not capsys.readouterr().err
