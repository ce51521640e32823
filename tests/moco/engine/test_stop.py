"""Stop signals: recorded in the context, a second Ctrl-C exits at once, no effect elsewhere."""

import os
import signal
import threading
from pathlib import Path

import pytest

from moco.common import distributed
from moco.common.errors import Preempted
from moco.engine.stop import STOP_SIGNALS, StopRequest, exit_after_save, stop_signals

pytestmark = pytest.mark.race


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_is_recorded_and_the_handler_restored(number):
    before = [signal.getsignal(other) for other in STOP_SIGNALS]
    with stop_signals() as stop:
        assert stop.received is None
        send(number)
        assert stop.received == number
    assert [signal.getsignal(other) for other in STOP_SIGNALS] == before


def test_only_a_second_ctrl_c_exits_at_once():
    with stop_signals() as stop:
        send(signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1)
        assert stop.received is not None
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    with stop_signals():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_handlers_are_restored_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="x"), stop_signals():
        raise ValueError("x")
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_threads_handle_no_signals():
    answers = []

    def work() -> None:
        with stop_signals() as stop:
            answers.append((stop.received, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [(None, before)]


def test_a_launcher_that_has_exited_requests_a_stop(monkeypatch):
    monkeypatch.setattr(distributed, "launcher_died", lambda: True)
    assert StopRequest().received == signal.SIGHUP


def test_leaving(capsys):
    path = Path("runs/x/model_0000004.pth")
    message = f"stopped after iteration 4 and saved {path}; run the same command with --resume to"
    with pytest.raises(Preempted, match=message):
        exit_after_save(signal.SIGTERM, "iteration 4", path)
    assert capsys.readouterr().out == ""
    with pytest.raises(KeyboardInterrupt):
        exit_after_save(signal.SIGINT, "iteration 4", path)
    assert capsys.readouterr().out.startswith(message)
