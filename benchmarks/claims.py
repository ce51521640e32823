"""A lock on a file that a process hands on to the processes it starts.

It is held until the last of them has ended, so a runner that is killed leaves its training
processes' claims standing, and nobody starts a second process beside one that still works.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Claim:
    """An exclusive lock; to be taken with :meth:`take`.

    Attributes:
        fd: give it to ``subprocess.Popen(pass_fds=...)`` to hand the lock on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def take(cls, path: Path) -> "Claim | None":
        """Lock ``path`` (made if missing, never removed); None while another process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    def write(self, content: Mapping[str, Any]) -> None:
        """What others may read while it is held: see :func:`read`."""
        data = json.dumps(dict(content)).encode()
        os.pwrite(self.fd, data, 0)
        os.ftruncate(self.fd, len(data))

    def release(self) -> None:
        """Let go; it stays locked while a process that inherited it lives."""
        os.close(self.fd)


def held(path: Path) -> bool:
    """Whether somebody holds the claim; changes nothing on disk."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared, so that any number may ask at once; :meth:`Claim.take` is tried again in a moment.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def read(path: Path) -> dict[str, Any]:
    """What the holder has written; empty if there is nothing whole."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
