"""Stop requests: signals upon which a run saves its state and exits.

Pre-training, classification and both detection engines behave alike:

- A signal is recorded and handled after the current iteration, or the one after it, whose state is
  saved: the processes of pre-training and classification learn of it one step late.
- A second SIGINT, while the first is still being handled, exits at once.
- A run that has done its last iteration continues to its end.
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
    """Return the signals that this system has; Windows, which can import this, has few."""
    return tuple(signal.Signals[name] for name in names if hasattr(signal, name))


STOP_SIGNALS = signals_by_name("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


class StopRequest:
    """Stop request, set by a signal handler and read after each iteration."""

    def __init__(self) -> None:
        self._number: int | None = None  # no Event, because a second signal would wait for its lock

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; a second SIGINT raises KeyboardInterrupt at once."""
        if self._number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._number = number

    @property
    def received(self) -> int | None:
        """Received signal; SIGHUP if torchrun has exited; None to continue."""
        if self._number is None and distributed.launcher_died():
            self._number = signal.SIGHUP
        return self._number


@contextmanager
def stop_signals(stop: StopRequest | None = None) -> Iterator[StopRequest]:
    """Let signals request a stop after the iteration instead of ending the process.

    Schedulers send SIGTERM and SIGUSR1/2 before they reclaim a machine; SIGINT is Ctrl-C. Only the
    main thread can handle signals; in other threads no stop is ever requested.
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
    """End a run that received a signal and has saved its state `after`, e.g., "iteration 4".

    Raises:
        KeyboardInterrupt: For SIGINT; the message is printed.
        Preempted: For other signals.
    """
    again = "run the same command with --resume to continue"
    end(number, f"stopped after {after} and saved {saved}; {again}")


def end(number: int, message: str) -> NoReturn:
    """End a run as `leave` does, with another message."""
    if number == signal.SIGINT:
        print(message, flush=True)
        raise KeyboardInterrupt
    raise Preempted(message)


def ignore_stop_signals(worker: int) -> None:
    """Ignore signals in a data-loader worker.

    They reach the whole process group, but workers are ended by their parent.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
