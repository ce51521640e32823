"""Fixtures and settings of all tests: one thread, quiet progress, and the real data, if any."""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
# The files that take minutes come first, so that no worker has one left when the other is done, and
# those that wait, so that what .ci/run runs beside them uses that time.
LONG = (
    "test_plain_detectron2.py",
    "test_stop_and_resume.py",
    "test_reliability_distributed.py",
    "test_device.py",
    "test_refusals.py",
)

os.environ.setdefault("MOCO_PROGRESS", "off")
os.environ.setdefault("MPLBACKEND", "Agg")
# Of every process, so that what two of them compute is equal.
os.environ["OMP_NUM_THREADS"] = os.environ.get("MOCO_TEST_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# A shell lets what it starts in the background ignore Ctrl-C, and so all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name parameters of bytes by their argument: archives hold the time at which they were made.

    Processes that share the tests must give each test the same name.
    """
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collections, and exempt what is there from later ones.

    They would visit the objects of all tests, and again in each process that a test forks.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that take the fixture `detectron2` with its name; put long files first."""
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if "detectron2" in getattr(item, "fixturenames", ()):
            item.add_marker("detectron2")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with `coco/`, `VOC2007/` and `bccd/`: real images, not part of the project."""
    path = Path(os.environ.get("MOCO_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip("no real images here; set MOCO_TEST_DATA to a folder with coco/ VOC2007/ bccd/")
    return path.resolve()


@pytest.fixture
def register(monkeypatch):
    """Return a function that registers what comes from outside for the duration of a test."""

    def add(registry, function):
        monkeypatch.setattr(registry, "_obj_map", dict(registry))
        registry.register(function)

    return add


@pytest.fixture(scope="session")
def detectron2():
    """Return the real Detectron2, or skip the test where it is not installed."""
    return pytest.importorskip("detectron2")
