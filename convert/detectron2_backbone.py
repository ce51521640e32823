"""Detectron2's own backbone as a reference implementation, in a process of its own.

The process is the command `python -m detection.backbone_features`, because convert/ imports nothing
of detection/ or Detectron2. Importing Detectron2 takes as long as everything else in a conversion,
so the process starts early and is shown the file when there is one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moco.common.children import own_modules
from moco.common.errors import DataError
from moco.common.files import PathLike, load_torch

if TYPE_CHECKING:
    from torch import Tensor

COMMAND = "detection.backbone_features"
# What the process writes once Detectron2 is imported. If it ends before, Detectron2 does not work
# on this machine, which is no fault of the file.
READY = "ready"
TIMEOUT_SECONDS = 600.0


def installed() -> bool:
    """Whether there is a Detectron2; whether it can be imported, its process has to find out."""
    return importlib.util.find_spec("detectron2") is not None


class Detectron2Backbone:
    """Starts to import Detectron2 at once; `show` it a file, then take its `features`.

    A context manager: on leaving, the process is gone and its files are deleted.

    Attributes:
        skipped: why there are no features, "" while there may be some.
    """

    def __init__(self) -> None:
        self.skipped = ""
        self._path: Path | None = None
        self._process: subprocess.Popen[str] | None = None
        if not installed():
            self.skipped = "Detectron2 is not installed"
            return
        self._folder = tempfile.TemporaryDirectory(prefix="detectron2-features-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **own_modules()},
        )

    def __enter__(self) -> Detectron2Backbone:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._process is not None:
            self._process.kill()
            # Closes the pipes, too.
            self._process.communicate()
            self._folder.cleanup()

    def show(self, path: PathLike) -> None:
        """Let it read a converted file; returns at once."""
        self._path = Path(path).resolve()
        if self._process is None:
            return
        assert self._process.stdin is not None
        # If it has ended already, `features` says why.
        with contextlib.suppress(BrokenPipeError):
            paths = json.dumps([str(self._path), self._output()])
            print(paths, file=self._process.stdin, flush=True)

    def features(self) -> dict[str, Tensor] | None:
        """What it made of convert/verify.py's image: "stem", "res2", .. "res5"; None if `skipped`.

        Raises DataError: Detectron2 could not build the network, or not read the file.
        """
        if self._process is None:
            return None
        try:
            output, errors = self._process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise DataError(
                f"{self._path}: verification failed: Detectron2's backbone gave no features in "
                f"{TIMEOUT_SECONDS:g} seconds"
            ) from error
        last = (errors.strip().splitlines() or [f"exit status {self._process.returncode}"])[-1]
        if READY not in output.split():
            self.skipped = f"Detectron2 cannot be imported ({last[:200]})"
            return None
        if self._process.returncode:
            raise DataError(f"{self._path}: verification by Detectron2's backbone failed: {last}")
        features: dict[str, Tensor] = load_torch(self._output())
        return features

    def _output(self) -> str:
        return str(Path(self._folder.name) / "features.pth")
