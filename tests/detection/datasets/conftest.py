"""Shared by the tests of datasets."""

import pytest

from detection.config.task import default_task
from detection.datasets import read_split
from detection.datasets.base import Split


@pytest.fixture(autouse=True)
def _nothing_was_read(fresh_cache) -> None:
    """Clear the caches, because these tests rewrite files in place."""


def read(name: str, **datasets: object) -> Split:
    """Read a split with keys of the node DATASETS set."""
    cfg = default_task()
    cfg.DATASETS.update({key: str(value) for key, value in datasets.items()})
    return read_split(name, cfg)
