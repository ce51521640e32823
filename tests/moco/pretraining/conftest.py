from collections.abc import Callable
from pathlib import Path

import pytest

from tests.moco.classification import classify_runs

labeled, pretrained = classify_runs.labeled, classify_runs.pretrained


@pytest.fixture
def opts(images: Path, tiny: Callable[..., list[str]], tmp_path: Path) -> Callable[..., list[str]]:
    """`opts(folder, KEY=value)`: the arguments of a tiny run of 8 steps in tmp_path/folder."""
    return lambda folder="run", **changes: tiny(
        DATA__ROOT=images, OUTPUT_DIR=tmp_path / folder, **changes
    )
