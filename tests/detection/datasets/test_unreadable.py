"""An image that cannot be read: one line, a record and a checkpoint, from both engines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageOps

from detection.data.mapper import SeededMapper
from detection.datasets import cache_clear
from detection.datasets.files import image_size, read_image
from detection.datasets.labels import read_labels
from detection.train_net import main
from moco.common.errors import DataError
from moco.common.files import load_torch
from moco.common.run import read_record
from tests.oracles.tiny_voc import write_voc

SCHEDULE = {
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,  # a quarter; the task's file says 64
    "SOLVER.MAX_ITER": 4,
    "SOLVER.STEPS": (3,),
    "SOLVER.CHECKPOINT_PERIOD": 100,  # nothing is saved but because of the image, and at the end
    "DATALOADER.ASPECT_RATIO_GROUPING": False,  # so that the order of the images is the sampler's
}
# The order of the 6 images in the first epoch of TrainingSampler under the task's SEED.
ORDER = torch.randperm(6, generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture
def images(tmp_path) -> Path:
    return write_voc(tmp_path / "own", {"trainval": 6, "test": 3})


@pytest.fixture
def arguments(small_config, small_options, narrow_r18_file, images) -> Callable[..., list[str]]:
    def build(engine: str, folder: Path, *opts: object, flags: tuple[str, ...] = ()) -> list[str]:
        values = SCHEDULE | {"DATASETS.VOC_DIR": images, "MODEL.WEIGHTS": narrow_r18_file}
        argv = ["--config-file", small_config, "--engine", engine, *flags, *small_options]
        argv += [str(x) for pair in values.items() for x in pair]
        return [*argv, "OUTPUT_DIR", str(folder), *map(str, opts)]

    return build


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["tif", "png", "jpg"])
def test_the_size_and_the_pixels_are_those_after_exif(ending, orientation, tmp_path):
    """Pillow turns TIFFs itself, when they are opened or decoded."""
    pixels = np.zeros((72, 96, 3), np.uint8)
    pixels[:40, :48], pixels[40:, 48:] = (200, 0, 0), (0, 200, 0)
    stored, path = Image.fromarray(pixels), tmp_path / f"a.{ending}"
    exif = stored.getexif()
    exif[0x0112] = orientation
    stored.save(path, exif=exif)
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    assert image_size(path) == image_size(path, decode=True) == upright.size
    assert np.array_equal(np.asarray(read_image(str(path))), np.asarray(upright))


@pytest.mark.parametrize(
    "read", [read_image, read_labels, lambda path: image_size(path, decode=True)]
)
def test_nothing_runs_to_read_an_image(read, tmp_path, monkeypatch):
    """PIL has a reader that runs Ghostscript on what the file says."""
    run = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **k: run.append(a))
    path = tmp_path / "a.jpg"
    Image.new("RGB", (8, 8)).save(path, "EPS")
    with pytest.raises(DataError, match=r"a\.jpg"):
        read(path)
    assert not run


@contextmanager
def truncated(path: Path) -> Iterator[None]:
    """Meanwhile the second half of the file is missing, but not its header."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    cache_clear()
    try:
        yield
    finally:
        path.write_bytes(content)
        cache_clear()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_torch(folder / "model_final.pth")["model"]


def assert_ended(error: pytest.ExceptionInfo[DataError], folder: Path, image: Path) -> None:
    text = str(error.value)
    assert text.startswith(f"{image}: ") and "\n" not in text
    assert f"doctor --voc-dir {image.parents[1]} --verify" in text
    record = read_record(folder / "run.json")
    assert record.status == "failed" and str(image) in record.notes[-1]
    assert (folder / "last_checkpoint").read_text() == "model_0000001.pth"


def test_a_file_without_its_end_is_named(arguments, images, tmp_path):
    for path in (images / "JPEGImages").glob("*.jpg"):
        path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"\.jpg"):
        main(arguments("embedded", tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_of_the_training_split(engine, workers, arguments, images, tmp_path, capfd):
    image = images / "JPEGImages" / f"{ORDER[5]:06d}.jpg"
    opts = ("DATALOADER.NUM_WORKERS", workers)
    with truncated(image), pytest.raises(DataError) as error:
        main(arguments(engine, tmp_path / "out", *opts))
    assert_ended(error, tmp_path / "out", image)
    shown = capfd.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert main(arguments(engine, tmp_path / "out", *opts, flags=("--resume",))) == 0
    assert main(arguments(engine, tmp_path / "straight", *opts)) == 0
    resumed, straight = weights(tmp_path / "out"), weights(tmp_path / "straight")
    assert all(torch.equal(resumed[key], straight[key]) for key in straight)


@pytest.mark.slow
def test_of_the_test_split(arguments, images, tmp_path):
    image = images / "JPEGImages" / "000007.jpg"
    opts = ("DATALOADER.NUM_WORKERS", 2, "TEST.EVAL_PERIOD", 2)
    with truncated(image), pytest.raises(DataError) as error:
        main(arguments("embedded", tmp_path / "out", *opts))
    assert_ended(error, tmp_path / "out", image)
    assert main(arguments("embedded", tmp_path / "out", *opts, flags=("--resume",))) == 0
    with truncated(image), pytest.raises(DataError, match=image.name):
        main(arguments("embedded", tmp_path / "out", *opts, flags=("--eval-only", "--resume")))
    record = read_record(tmp_path / "out" / "inference" / "run.json")
    assert record.status == "failed" and str(image) in record.notes[-1]


@pytest.mark.slow
def test_on_two_processes(arguments, images, tmp_path):
    """The process that reads it is not alone with it: all save, and the message is the image's."""
    image = images / "JPEGImages" / f"{ORDER[5]:06d}.jpg"
    with truncated(image), pytest.raises(DataError) as error:
        main(arguments("embedded", tmp_path / "out", flags=("--num-gpus", "2")))
    assert_ended(error, tmp_path / "out", image)


def test_gray_of_16_bits_under_another_name(images):
    """Files that no check of the dataset opens are refused when they are read."""
    path = images / "JPEGImages" / "wide.jpg"
    Image.fromarray(np.full((4, 4), 999, dtype=np.uint16)).save(path, format="png")
    with pytest.raises(DataError) as error:
        read_image(str(path))
    record = {"file_name": str(path), "height": 4, "width": 4}
    with pytest.raises(DataError) as again:
        SeededMapper(dict)(record, 0)
    assert str(again.value) == str(error.value)


def test_errors_that_are_not_the_images_stay_what_they_are(images):
    def mapper(record: object) -> dict[str, object]:
        raise KeyError("a fault of the program")

    path = images / "JPEGImages" / "000000.jpg"
    width, height = Image.open(path).size
    with pytest.raises(KeyError):
        SeededMapper(mapper)({"file_name": str(path), "height": height, "width": width}, 0)
