"""Requests to stop: signals that a run answers by saving its state and leaving.

One behavior for pre-training, classification and both detection engines:

- A signal is noted and read after the iteration at hand, which is then saved.
- SIGINT once more, while the first is still being answered, leaves at once.
- A run that is through its last iteration continues to its end.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from moco.common import distributed
from moco.common.errors import Preempted


def signals_by_name(*names: str) -> tuple[signal.Signals, ...]:
    """Those of the signals that this system has; Windows, where modules load, has few."""
    return tuple(signal.Signals[name] for name in names if hasattr(signal, name))


STOP_SIGNALS = signals_by_name("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


class StopRequest:
    """Set by a signal handler, read after each iteration."""

    def __init__(self) -> None:
        self._number: int | None = None  # and not an Event, whose lock a second signal waits for

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # twice: now
        self._number = number

    @property
    def received(self) -> int | None:
        """The signal; SIGHUP where torchrun is gone; None to continue."""
        if self._number is None and distributed.launcher_died():
            self._number = signal.SIGHUP
        return self._number


@contextmanager
def stop_signals(stop: StopRequest | None = None) -> Iterator[StopRequest]:
    """While open, a signal requests a stop after the iteration instead of ending the process.

    SIGTERM and SIGUSR1/2 are what schedulers send before they take a machine away, SIGINT is
    Ctrl-C. Outside the main thread, which alone may handle signals, nothing is ever requested.
    """
    stop = stop or StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(number: int, after: str, saved: Path) -> NoReturn:
    """End a run that got a signal and has saved its state `after`, e.g., "iteration 4".

    Raises:
        KeyboardInterrupt: for SIGINT, the message is printed. Preempted: for the others.
    """
    again = "run the same command with --resume to continue"
    end(number, f"stopped after {after} and saved {saved}; {again}")


def end(number: int, message: str) -> NoReturn:
    """`leave` with another message."""
    if number == signal.SIGINT:
        print(message, flush=True)
        raise KeyboardInterrupt
    raise Preempted(message)


def ignore_stop_signals(worker: int) -> None:
    """For data-loader workers: signals reach the whole group, and their parent ends them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
