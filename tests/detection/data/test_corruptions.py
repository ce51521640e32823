"""Corrupted test images: all 15 work, an image is always the same, and both engines see them."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

from detection.data.corruptions import NAMES, CorruptionMapper, corrupt, find_failing
from detection.train_net import main

pytestmark = pytest.mark.skipif(
    find_spec("imagecorruptions") is None, reason="imagecorruptions is not installed"
)
RANDOM = ("_noise", "glass_blur", "motion_blur", "snow", "frost", "fog", "elastic_transform")


@pytest.fixture(scope="module")
def pixels():
    ramp = np.linspace(0, 255, 64 * 70 * 3).reshape(64, 70, 3)
    return np.random.default_rng(0).normal(ramp, 20).clip(0, 255).astype(np.uint8)


def test_every_corruption_works_here():
    assert find_failing() == {} and len(NAMES) == 15


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_pixels_and_the_callers_random_numbers_stay(pixels, name):
    np.random.seed(7)
    expected = np.random.random()
    np.random.seed(7)
    one, again, other = (corrupt(pixels, name, 3, seed) for seed in (1, 1, 2))
    assert np.random.random() == expected
    assert one.shape == pixels.shape and one.dtype == np.uint8
    assert (one == again).all() and (one != pixels).any()
    assert (one == other).all() == (not name.endswith(RANDOM))


def test_three_of_them_by_hand(pixels):
    """Contrast and brightness by their formulas, and the share of salt and pepper."""
    x = pixels / 255.0
    mean = x.mean(axis=(0, 1))
    by_hand = np.uint8(((x - mean) * 0.2 + mean).clip(0, 1) * 255)
    assert (corrupt(pixels, "contrast", 3, 0) == by_hand).all()
    gray = np.full((64, 64, 3), 100, np.uint8)
    assert np.abs(corrupt(gray, "brightness", 3, 0).astype(float) - 100 - 0.3 * 255).max() <= 1
    share = (corrupt(gray, "impulse_noise", 3, 0) != 100).mean()
    assert share == pytest.approx(0.09, abs=0.015)


def test_mapper_reads_the_corrupted_image_under_the_records_name(tmp_path, pixels):
    path = tmp_path / "7.png"
    Image.fromarray(pixels).save(path)
    record = {"file_name": str(path), "image_id": 7}

    def mapper(record, params):
        return {**record, "seen": np.asarray(Image.open(record["file_name"])), "params": params}

    one, again = (CorruptionMapper(mapper, "shot_noise", 3)(record, 5) for _ in range(2))
    other = CorruptionMapper(mapper, "shot_noise", 3)({**record, "image_id": 8}, 5)
    assert (one["seen"] == again["seen"]).all() and (one["seen"] != other["seen"]).any()
    assert (one["file_name"], one["params"]) == (str(path), 5)


@pytest.mark.slow
def test_robustness_of_a_trained_model(small_config, small_options, r18_file, tmp_path):
    """All 15 are evaluated once, in files next to the run, which stays as it was."""
    from benchmarks.robustness import main as robustness
    from detection.evaluation.metrics import ROBUSTNESS_NAME

    folder = tmp_path / "run"
    argv = ["--engine", "embedded", "--config-file", small_config, *small_options]
    main([*argv, "MODEL.WEIGHTS", str(r18_file), "OUTPUT_DIR", str(folder), "SEED", "0"])
    before = {p: p.read_bytes() for p in folder.rglob("*.json")}
    robustness([str(folder)])
    found = json.loads((folder / ROBUSTNESS_NAME).read_text())
    assert found["corrupted"].keys() == set(NAMES) and found["failing"] == {}
    assert {p: p.read_bytes() for p in before} == before
    predictions = [
        p.read_bytes() for p in sorted(folder.glob("corrupted/*.3/inference/*_test.json"))
    ]
    assert len(predictions) == len(set(predictions)) == 15
    records = {p: p.stat().st_mtime_ns for p in folder.glob("corrupted/*/inference/run.json")}
    robustness([str(folder)])
    assert records == {p: p.stat().st_mtime_ns for p in records} and len(records) == 15
