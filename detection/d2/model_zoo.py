"""Detectron2's names of pre-trained backbones and of task files, as local files."""

import contextlib
import io
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import detectron2
from detectron2.checkpoint.catalog import ModelCatalog  # also registers catalog://
from detectron2.config import CfgNode
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


def find_config(name: str, scratch: Path) -> str:
    """A plain copy of a model-zoo file such as ``COCO-Detection/retinanet_R_50_FPN_1x.yaml``.

    Some of these files compute values by YAML's Python tags. They are code of the installed
    Detectron2, so its own loader reads them, and them alone.

    Args:
        scratch: where the copy goes.

    Returns:
        ``name`` itself where the installed Detectron2 has no such file.
    """
    # Not by its own model_zoo.get_config_file, which needs an older setuptools.
    folder = Path(detectron2.__file__).resolve().parent / "model_zoo" / "configs"
    path = (folder / name).resolve()
    if not path.is_file() or not path.is_relative_to(folder.resolve()):
        return name
    loader = logging.getLogger("fvcore.common.config")  # warns of what the file may do
    level = loader.level
    loader.setLevel(logging.ERROR)
    try:
        content = CfgNode.load_yaml_with_base(str(path), allow_unsafe=True)
    finally:
        loader.setLevel(level)
    copy = scratch / path.name
    copy.write_text(json.dumps(content))  # which is YAML, too
    return str(copy)


@contextlib.contextmanager
def socket_timeout(seconds: float) -> Iterator[None]:
    """iopath opens its connections without a timeout of their own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
