"""Progress with speed and time left: a bar on a terminal, elsewhere an occasional line.

`MOCO_PROGRESS=off` disables both, for programs that start others and draw their own bar.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Self

LINE_EVERY_SECONDS = 30.0


class Bar:
    """Progress bar on a terminal, elsewhere lines on stderr; a context manager.

    Args:
        silent: Show nothing.
        terminal: Arguments of tqdm for the bar on a terminal.
    """

    def __init__(self, silent: bool = False, **terminal: Any) -> None:
        self._silent = silent or os.environ.get("MOCO_PROGRESS") == "off"
        self.terminal = None
        if not self._silent and sys.stderr.isatty():
            from tqdm import tqdm

            self.terminal = tqdm(dynamic_ncols=True, leave=None, **terminal)
        self._last = time.monotonic()
        self._shown: Any = None

    def line(self, state: Any, text: Callable[[], str], now: bool = False) -> None:
        """Print a line if the state has changed, at most every LINE_EVERY_SECONDS.

        Args:
            state: Value that is compared with the state at the last line.
            text: Function that returns the line.
            now: Print without waiting, because this is the last line.
        """
        waits = time.monotonic() - self._last < LINE_EVERY_SECONDS and not now
        if self._silent or self.terminal is not None or waits or state == self._shown:
            return
        self._last, self._shown = time.monotonic(), state
        print(text(), file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the bar and leave it on the terminal."""
        if self.terminal is not None:
            self.terminal.close()


class Progress(Bar):
    """Progress of `total` items of work.

    Args:
        total: Total number of items.
        desc: Description of the work, e.g. `"pre-train"`.
        unit: Name of one item, e.g. `"img"`.
        initial: Number of items done before a resumed run; they do not count towards the speed.
        silent: Show nothing.
    """

    def __init__(
        self, total: int, desc: str, unit: str = "it", initial: int = 0, silent: bool = False
    ) -> None:
        super().__init__(silent, total=total, desc=desc, unit=unit, initial=initial, smoothing=0.1)
        self.total, self.desc, self.unit = total, desc, unit
        self._done = self._initial = self._shown = initial
        self._postfix: dict[str, Any] = {}
        self._start = time.monotonic()

    def update(self, n: int = 1, **postfix: Any) -> None:
        """Count `n` more items and show the values of `postfix` after the count."""
        self._done += n
        self._postfix.update(postfix)
        if self.terminal is not None:
            self.terminal.set_postfix(self._postfix, refresh=False)
            self.terminal.update(n)
        self.line(self._done, self._text, now=self._done == self.total)

    def _text(self) -> str:
        """Format `desc: done/total unit, speed, time left, postfix`."""
        rate = (self._done - self._initial) / max(time.monotonic() - self._start, 1e-9)
        left = (self.total - self._done) / rate if rate > 0 else float("inf")
        parts = [
            f"{self.desc}: {self._done}/{self.total} {self.unit}",
            f"{rate:.4g} {self.unit}/s",
            f"{format_seconds(left)} left",
        ]
        parts += [f"{name}={value}" for name, value in self._postfix.items()]
        return ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """Format seconds: `3725` → `1:02:05`; `65` → `1:05`; infinity → `?`."""
    if seconds == float("inf"):
        return "?"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"
