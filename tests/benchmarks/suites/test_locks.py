"""Locks: one at a time, and folders that have none. See test_executors.py for inherited ones."""

import errno
import fcntl
import threading

import pytest

from benchmarks.suites import folder as suite_folder
from benchmarks.suites import locks
from benchmarks.suites.locks import Lock, exclusive
from moco.common.errors import UserError


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
