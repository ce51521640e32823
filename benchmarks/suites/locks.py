"""File locks that child processes inherit.

A lock is held until the last process with its descriptor has ended: the trainings of a killed
runner keep their locks, so that no second process starts while one still computes the same run.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from moco.common.errors import UserError
from moco.common.files import open_descriptor, read_text

with suppress(ImportError):  # on Windows, where these modules are only imported
    import fcntl


class Lock:
    """Exclusive lock on a file; create it with `acquire`.

    Attributes:
        fd: File descriptor; a child inherits the lock by `subprocess.Popen(pass_fds=...)`.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def acquire(cls, path: Path) -> "Lock | None":
        """Lock `path`, which is created if missing and never removed.

        Returns:
            The lock, or None if another process holds it.

        Raises:
            UserError: If the folder cannot be written, or its file system has no locks.
        """
        fd = _open(path)
        if _locked(fd, path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return cls(fd)
        os.close(fd)
        return None

    def write(self, content: Mapping[str, Any]) -> None:
        """Write what other processes can read while the lock is held."""
        data = json.dumps(dict(content)).encode()
        os.pwrite(self.fd, data, 0)
        os.ftruncate(self.fd, len(data))

    def release(self) -> None:
        """Close the descriptor; the lock stays held while a process that inherited it lives."""
        os.close(self.fd)


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock, without changing the file."""
    try:
        fd = open_descriptor(path, os.O_RDONLY)
    except OSError:
        return False
    # A shared lock, so that several processes can test at once; `Lock.acquire` is retried soon.
    free = _locked(fd, path, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(fd)
    return not free


def read_holder(path: Path) -> dict[str, Any]:
    """Read what the holder of a lock has written; empty if nothing or only a part is there."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_descriptor(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be written ({error.strerror})") from error


def _locked(fd: int, path: Path, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind)
    except (BlockingIOError, PermissionError):  # some file systems answer EACCES
        return False
    except OSError as error:
        os.close(fd)
        raise UserError(
            f"{path.parent}: this file system has no locks ({error.strerror}), and without them a "
            "run may be computed twice; choose a folder on another one, or mount it with flock"
        ) from error
    return True
