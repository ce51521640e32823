"""Fixtures of the readers' tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _fresh(fresh_cache) -> None:
    """Tests rewrite files in place."""


@pytest.fixture
def datasets(tmp_path, monkeypatch) -> Path:
    """The folder of Detectron2's own datasets, empty."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    return tmp_path
