"""Progress with speed and time left: a bar on a terminal, a line now and then elsewhere.

`MOCO_PROGRESS=off` silences both, for programs that start others and draw their own bar.
"""

import os
import sys
import time
from types import TracebackType
from typing import Any

LINE_EVERY_SECONDS = 10.0


class Progress:
    """Counts `total` items of work; use as a context manager.

    Args:
        total: number of items in all.
        desc: what is being done, e.g. `"pre-train"`.
        unit: name of one item, e.g. `"img"`.
        initial: items done before (a resumed run); they do not count towards the speed.
        silent: show nothing.
    """

    def __init__(
        self, total: int, desc: str, unit: str = "it", initial: int = 0, silent: bool = False
    ) -> None:
        self.total, self.desc, self.unit = total, desc, unit
        self._done = self._initial = initial
        self._postfix: dict[str, Any] = {}
        self._silent = silent or os.environ.get("MOCO_PROGRESS") == "off"
        self._bar = None
        if not self._silent and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                desc=desc,
                unit=unit,
                initial=initial,
                dynamic_ncols=True,
                smoothing=0.1,
            )
        self._start = self._last_line = time.monotonic()

    def update(self, n: int = 1, **postfix: Any) -> None:
        """Count `n` more items; `postfix` are values to show beside the count."""
        self._done += n
        self._postfix.update(postfix)
        if self._bar is not None:
            self._bar.set_postfix(self._postfix, refresh=False)
            self._bar.update(n)
        elif not self._silent:
            now = time.monotonic()
            if now - self._last_line >= LINE_EVERY_SECONDS or self._done == self.total:
                self._last_line = now
                print(self.line(now - self._start), file=sys.stderr, flush=True)

    def line(self, elapsed_seconds: float) -> str:
        """One line: `desc: done/total unit, speed, time left, postfix`."""
        rate = (self._done - self._initial) / max(elapsed_seconds, 1e-9)
        left = (self.total - self._done) / rate if rate > 0 else float("inf")
        parts = [
            f"{self.desc}: {self._done}/{self.total} {self.unit}",
            f"{rate:.4g} {self.unit}/s",
            f"{format_seconds(left)} left",
        ]
        parts += [f"{name}={value}" for name, value in self._postfix.items()]
        return ", ".join(parts)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def format_seconds(seconds: float) -> str:
    """`3725` → `1:02:05`; `65` → `1:05`; infinity → `?`."""
    if seconds == float("inf"):
        return "?"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"
