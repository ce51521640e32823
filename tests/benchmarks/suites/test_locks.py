"""Folders without locks. See test_executors.py for locks that children inherit."""

import errno

import pytest

from benchmarks.suites import folder as suite_folder
from benchmarks.suites import locks
from benchmarks.suites.locks import Lock
from moco.common.errors import UserError


def test_a_file_system_without_locks(lab, monkeypatch):
    """Without locks nothing is computed, and the error is one line."""

    def flock(fd: int, kind: int) -> None:
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
        Lock.acquire(lab.path / "file" / "lock")
