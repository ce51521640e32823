"""Fixtures of suites of fake runs, which are polled often."""

from pathlib import Path

import pytest

from benchmarks.suites import runner
from tests.benchmarks.suites.lab import ROOT, Lab


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(runner, "AGAIN_SECONDS", 0.2)


@pytest.fixture
def lab(tmp_path: Path, quick: None) -> Lab:
    """Two tasks from two inits with two seeds: eight runs."""
    return Lab(tmp_path)


@pytest.fixture
def failing_lab(tmp_path: Path, quick: None) -> Lab:
    """One seed of each task, of which the runs from the init `bad` fail."""
    return Lab(tmp_path, inits=("bad", "mine"), trials=1)
