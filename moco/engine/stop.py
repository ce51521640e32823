"""Stop requests: signals after which a run saves its state and exits.

Pre-training, classification and both detection engines behave alike:

- A signal is recorded, and the state is saved after the current iteration. Pre-training and
  classification read the signal one step late and save after the next iteration.
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
    """Return the signals that this system has; Windows can import this module, but has few."""
    return tuple(signal.Signals[name] for name in names if hasattr(signal, name))


STOP_SIGNALS = signals_by_name("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


class StopRequest:
    """Signal handler that records a stop request, which is read after each iteration."""

    def __init__(self) -> None:
        self._number: int | None = None  # no Event, because a second signal would wait for its lock

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; a second SIGINT raises KeyboardInterrupt at once."""
        if self._number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._number = number

    @property
    def received(self) -> int | None:
        """Number of the received signal; SIGHUP if torchrun has exited; None to continue."""
        if self._number is None and distributed.launcher_died():
            self._number = signal.SIGHUP
        return self._number


@contextmanager
def stop_signals(stop: StopRequest | None = None) -> Iterator[StopRequest]:
    """Handle signals as requests to stop after the iteration instead of ending the process.

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


def exit_after_save(number: int, after: str, saved: Path) -> NoReturn:
    """Exit a run that received a signal and saved its state `after`, e.g., "iteration 4".

    Raises:
        KeyboardInterrupt: For SIGINT; the message is printed.
        Preempted: For other signals.
    """
    again = "run the same command with --resume to continue"
    exit_stopped(number, f"stopped after {after} and saved {saved}; {again}")


def exit_stopped(number: int, message: str) -> NoReturn:
    """Exit a run that received a signal, with a message; see `exit_after_save`."""
    if number == signal.SIGINT:
        print(message, flush=True)
        raise KeyboardInterrupt
    raise Preempted(message)


def ignore_stop_signals(worker: int) -> None:
    """Ignore signals in a data-loader worker.

    Signals reach the whole process group, but the parent ends its workers.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
