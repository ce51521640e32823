"""Pipes and devices in the place of files: an error at once, and no reader that waits."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.suites import locks
from benchmarks.suites.data_digest import folder_digest
from detection.config.task import load_task
from detection.datasets import cache_clear
from detection.datasets.__main__ import main as doctor
from detection.datasets.files import read_image
from moco.common.cfgnode import read_yaml
from moco.common.errors import DataError, UserError
from moco.common.files import open_file, read_bytes, read_text, require_regular, sha256_file
from moco.common.run import RunFolder
from moco.data.images import describe_images, find_bad_images, open_images
from tests.detection.datasets.test_three_layouts import three_layouts

KIND = "a pipe or device, not a file"
# Files of a dataset, and the words of the errors about a pipe in their place.
FILES = [
    ("voc", "ImageSets/Main/test.txt", "has trainval; expected"),
    ("voc", "Annotations/*.xml", KIND),
    ("voc", "JPEGImages/*.jpg", KIND),
    ("coco", "test/_annotations.coco.json", "has train; expected"),
    ("coco", "test/*.jpg", KIND),
    ("yolo", "data.yaml", "no such file"),
    ("yolo", "labels/*/*.txt", "not a file"),
    ("yolo", "images/*/*.jpg", KIND),
]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail instead of waiting forever."""

    def fail(number: int, frame: object) -> None:
        pytest.fail("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def replace(path: Path) -> Path:
    """Put a pipe in the place of a file."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(("layout", "pattern", "words"), FILES)
def test_a_dataset_with_a_pipe(layout, pattern, words, voc_folder, small_config, tmp_path):
    shutil.copytree(voc_folder, tmp_path / "own")
    flag, value, keys = three_layouts(tmp_path / "own", tmp_path)[layout]
    pipe = replace(sorted((value if value.is_dir() else value.parent).glob(pattern))[0])
    cache_clear()
    with within(60), suppress(DataError):
        doctor(["doctor", flag, str(value), "--verify"])
    with within(60), pytest.raises(DataError, match=words):
        load_task(small_config, [*keys, "MODEL.WEIGHTS", "random"], "embedded")
        read_image(str(pipe))
    with within(60):
        folder_digest(str(tmp_path))


@pytest.mark.parametrize("read", [open_file, read_text, read_bytes, require_regular, sha256_file])
def test_only_regular_files_are_opened(read, tmp_path):
    for path in (replace(tmp_path / "pipe"), Path("/dev/null"), Path("/dev/zero")):
        with within(20), pytest.raises(OSError, match=KIND) as error:
            read(path)
        assert error.value.filename == str(path)
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
    (tmp_path / "link").symlink_to(__file__)
    read(tmp_path / "link")


def test_nothing_is_written_into_a_pipe(tmp_path):
    """Opening one for writing would wait for its reader."""
    with within(20), pytest.raises(OSError, match=KIND):
        open_file(replace(tmp_path / "pipe"), "ab")
    with RunFolder(tmp_path / "run", resume=True) as folder:
        replace(tmp_path / "run" / "metrics.json")
        with within(20), pytest.raises(UserError, match=KIND):
            folder.log({"iteration": 1})


def test_the_base_of_a_task_is_a_pipe(tmp_path):
    replace(tmp_path / "base.yaml")
    (tmp_path / "task.yaml").write_text("_BASE_: base.yaml\n")
    with within(20), pytest.raises(UserError, match=rf"base\.yaml: cannot be read \({KIND}"):
        read_yaml(tmp_path / "task.yaml")


def test_a_lock_is_a_pipe(tmp_path):
    path = replace(tmp_path / ".claim")
    with within(20):
        assert not locks.is_held(path) and locks.read_holder(path) == {}
        with pytest.raises(UserError, match=KIND):
            locks.Lock.acquire(path)
    replace(tmp_path / ".lock")
    with within(20), RunFolder(tmp_path, resume=True):
        pass


def test_images_for_pretraining(tmp_path):
    pipe = replace(tmp_path / "a.png")
    with within(20):
        images = open_images(tmp_path)
        assert describe_images(images) == []
        [found] = find_bad_images(images)
    assert str(pipe) in found and KIND in found
