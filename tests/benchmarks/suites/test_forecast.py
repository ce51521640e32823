"""Progress lines of a plan without a terminal."""

import re

from benchmarks.suites import forecast
from benchmarks.suites.forecast import Display, Forecast
from moco.common import progress


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_line_when_something_changed_with_a_time_left_that_moves(monkeypatch, capsys):
    clock, lines = Clock(), []
    monkeypatch.delenv("MOCO_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(forecast, "time", clock)
    display = Display("suite")

    def seconds(until: float, *shown: object) -> None:
        while clock.now < until:
            clock.now += 1.0
            display.show(*shown)
            if line := capsys.readouterr().err:
                lines.append((clock.now, *re.search(r"(\d+)%, about (\S+) left", line).groups()))

    seconds(300, Forecast(0.25, 600.0), "one runs")  # only the time changes
    seconds(301, Forecast(0.25, 600.0), "two run")
    seconds(330, Forecast(0.5, 60.0), "two run")
    seconds(390, Forecast(0.5, 60.0), "three run")
    seconds(400, Forecast(0.5, 60.0), "four run")  # longer than the forecast
    seconds(401, Forecast(1.0, 0.0), "done")
    assert lines == [
        (30, "25", "9:31"),
        (301, "25", "5:00"),
        (331, "50", "0:31"),
        (391, "50", "13:00"),
        (401, "100", "0:00"),
    ]
