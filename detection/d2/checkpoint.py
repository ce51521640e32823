"""Detectron2's checkpoints: written whole or not at all, and read without unpickling anything."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.checkpoint import DetectionCheckpointer

from convert.files import read_file, to_tensor
from moco.common.errors import DataError
from moco.common.files import PathLike, atomic_torch_save, atomic_write_text, load_torch

logger = logging.getLogger(__name__)


class SafeCheckpointer(DetectionCheckpointer):
    """Detectron2's own, but for how bytes come from a file and get into one.

    A check before Detectron2 unpickles a file would not do: one file can be two formats at once.
    """

    def save(self, name: str, **kwargs: Any) -> None:
        if not self.save_dir or not self.save_to_disk:
            return
        states = {key: item.state_dict() for key, item in self.checkpointables.items()}
        path = Path(self.save_dir) / f"{name}.pth"
        atomic_torch_save(path, {"model": self.model.state_dict(), **states, **kwargs})
        logger.info("saved %s", path)
        self.tag_last_checkpoint(path.name)

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        atomic_write_text(Path(self.save_dir) / "last_checkpoint", last_filename_basename)

    def _load_file(self, filename: str) -> dict[str, Any]:
        content = read_file(filename)
        if not isinstance(content, Mapping):
            raise DataError(f"{filename}: holds a {type(content).__name__}, expected a dict")
        content = dict(content) if "model" in content else {"model": content}
        content["model"] = {
            key: to_tensor(key, value, filename) if isinstance(value, np.ndarray) else value
            for key, value in dict(content["model"]).items()
        }
        return content


def check_checkpoint(path: PathLike) -> dict[str, Any]:
    """The content of a checkpoint that can be resumed from.

    Raises:
        DataError: it cannot; found before it is half loaded.
    """
    content = load_torch(path)
    found = set(content) if isinstance(content, dict) else set()
    missing = {"model", "trainer", "iteration"} - found
    if missing:
        raise DataError(
            f"{path}: has no {', '.join(sorted(missing))}, so it is not one of this engine's "
            "checkpoints; correct last_checkpoint, or start from scratch with --overwrite"
        )
    return dict(content)
