"""Locks that outlive the process that took them."""

import errno
import fcntl
import subprocess
import sys
import threading

import pytest

from benchmarks.suites import folder as suite_folder
from benchmarks.suites import locks
from benchmarks.suites.locks import Lock, exclusive, held
from moco.common.errors import UserError


@pytest.mark.race
def test_a_lock_outlives_the_process_that_took_it(tmp_path):
    path = tmp_path / "lock"
    lock = Lock.take(path)
    assert lock is not None and held(path) and Lock.take(path) is None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, pass_fds=[lock.fd])
    lock.release()
    assert held(path), "the child has it still"
    child.communicate(b"\n")
    assert not held(path)
    again = Lock.take(path)
    assert again is not None
    again.release()
    assert not held(tmp_path / "none") and not (tmp_path / "none").exists()


@pytest.mark.race
def test_one_at_a_time(tmp_path):
    """Whoever wants the lock while another has it waits, also in the same process."""
    entered = threading.Event()

    def enter() -> None:
        with exclusive(tmp_path / "lock"):
            entered.set()

    thread = threading.Thread(target=enter)
    with exclusive(tmp_path / "lock"):
        thread.start()
        assert not entered.wait(0.3)
    thread.join(30)
    assert entered.is_set()


@pytest.mark.parametrize("call", ["agree", "take"])
def test_a_file_system_without_locks(lab, call, monkeypatch):
    """One line, and nothing is computed without them."""

    def flock(fd: int, kind: int) -> None:
        if call == "agree" or kind & fcntl.LOCK_NB:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with pytest.raises(UserError, match=rf"^{lab.out}.*No locks available") as error:
        lab.run()
    assert "\n" not in str(error.value) and not lab.events()


def test_a_folder_that_cannot_be_written(lab, monkeypatch):
    monkeypatch.setattr(suite_folder.os, "access", lambda path, mode: path != lab.path)
    with pytest.raises(UserError, match=rf"^{lab.path}: cannot be written"):
        lab.run("--dry-run")
    (lab.path / "file").touch()
    with pytest.raises(UserError, match=rf"^{lab.path}/file: cannot be written"):
        Lock.take(lab.path / "file" / "lock")
