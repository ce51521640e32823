"""A file lock that a process hands on to the processes it starts.

It is held until the last of them has ended: the trainings of a runner that was killed keep their
locks, and nobody starts a second process beside one that still works.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moco.common.errors import UserError

with suppress(ImportError):  # Windows, where no command runs
    import fcntl


class Lock:
    """An exclusive lock; to be taken with `take`.

    Attributes:
        fd: give it to `subprocess.Popen(pass_fds=...)` to hand the lock on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def take(cls, path: Path) -> "Lock | None":
        """Lock `path` (made if missing, never removed); None while another process holds it.

        Raises:
            UserError: the folder cannot be written, or its file system has no locks.
        """
        fd = _open(path)
        if _locked(fd, path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return cls(fd)
        os.close(fd)
        return None

    def write(self, content: Mapping[str, Any]) -> None:
        """What others may `read` while it is held."""
        data = json.dumps(dict(content)).encode()
        os.pwrite(self.fd, data, 0)
        os.ftruncate(self.fd, len(data))

    def release(self) -> None:
        """Let go; it stays locked while a process that inherited it lives."""
        os.close(self.fd)


def held(path: Path) -> bool:
    """Whether somebody holds the lock; changes nothing on disk."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    # Shared, so that any number may ask at once; `Lock.take` is tried again in a moment.
    free = _locked(fd, path, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(fd)
    return not free


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait for the lock on `path` and keep it while the context is open.

    Raises:
        UserError: as `Lock.take`.
    """
    fd = _open(path)
    _locked(fd, path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def read(path: Path) -> dict[str, Any]:
    """What the holder has written; empty if there is nothing whole."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be written ({error.strerror})") from error


def _locked(fd: int, path: Path, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind)
    except (BlockingIOError, PermissionError):  # EACCES is what some file systems say
        return False
    except OSError as error:
        os.close(fd)
        raise UserError(
            f"{path.parent}: this file system has no locks ({error.strerror}), and without them a "
            "run may be computed twice; choose a folder on another one, or mount it with flock"
        ) from error
    return True
