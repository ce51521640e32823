"""Detectron2's names of pre-trained backbones: from ``detectron2://…`` to a local file."""

import contextlib
import io
import socket
from collections.abc import Iterator
from pathlib import Path

from detectron2.checkpoint.catalog import ModelCatalog  # also registers catalog://
from detectron2.utils.file_io import PathManager

from detection.weights import model_zoo_url
from moco.errors import UserError

TIMEOUT_SECONDS = 10.0  # of one connection or read, not of the download


def resolve_detectron2_name(name: str) -> Path:
    """The file behind a ``detectron2://`` or ``catalog://`` name, from the cache or downloaded.

    Detectron2's own PathManager does both, so a file that it has is not fetched again.

    Raises:
        UserError: no such model, no network, or a server that does not answer within seconds.
    """
    try:
        if name.startswith("catalog://"):
            ModelCatalog.get(name.removeprefix("catalog://"))
        # Its progress bar would stand above the one line of an error.
        with socket_timeout(TIMEOUT_SECONDS), contextlib.redirect_stderr(io.StringIO()):
            return Path(PathManager.get_local_path(name))
    except (OSError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(
            f"MODEL.WEIGHTS {name}: cannot be fetched ({reason}); download "
            f"{model_zoo_url(name)} and give the file's path"
        ) from error


@contextlib.contextmanager
def socket_timeout(seconds: float) -> Iterator[None]:
    """iopath opens its connections without a timeout of their own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
