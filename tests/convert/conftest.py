"""Files of checkpoints under names that say nothing, and what refuses them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.convert_to_d2 import convert_file
from moco.common.errors import DataError, UserError


@pytest.fixture
def save_pickle(tmp_path: Path) -> Callable[..., Path]:
    """Write a pickle under a name that says nothing about it; protocol 2 as Python 2 wrote it."""

    def write(value: Any, name: str = "weights.file", protocol: int = 2) -> Path:
        (tmp_path / name).write_bytes(pickle.dumps(value, protocol=protocol))
        return tmp_path / name

    return write


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a checkpoint under a name that says nothing about it."""

    def write(value: Any, name: str = "some.file") -> Path:
        torch.save(value, tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def refuse(tmp_path: Path, save: Any) -> Callable[..., str]:
    """Convert a checkpoint (or file), expect one line of error and no output; return the line."""

    def check(
        checkpoint: Any, reason: str, error: type[UserError] = DataError, **kwargs: Any
    ) -> str:
        src = checkpoint if isinstance(checkpoint, Path) else save(checkpoint)
        before = set(tmp_path.rglob("*"))
        with pytest.raises(error, match=reason) as caught:
            convert_file(src, tmp_path / "out.pth", **kwargs)
        assert set(tmp_path.rglob("*")) == before, "something was left behind"
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        assert str(src) in message, "the line names the file"
        return message

    return check
