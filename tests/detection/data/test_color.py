"""Photometric distortion: ranges, both channel orders, and what each change does."""

import colorsys

import numpy as np
import pytest

from detection.data.transforms import ColorDistortion


@pytest.fixture
def image():
    return np.random.RandomState(0).randint(0, 256, (9, 7, 3)).astype(np.uint8)


def test_nothing_is_changed_by_default(image):
    assert np.array_equal(ColorDistortion().apply(image, "RGB"), image)


def test_samples_cover_the_ranges_of_mmsegmentation():
    rng = np.random.RandomState(1)
    samples = [ColorDistortion.sample(rng) for _ in range(2000)]
    for name, middle, width in (
        ("brightness", 0, 32),
        ("contrast", 1, 0.5),
        ("saturation", 1, 0.5),
        ("hue", 0, 0.1),
    ):
        values = np.array([getattr(params, name) for params in samples])
        assert 0.45 < (values == middle).mean() < 0.55
        assert middle - width <= values.min() < middle - 0.9 * width
        assert middle + 0.9 * width < values.max() <= middle + width
    assert 0.45 < np.mean([params.contrast_last for params in samples]) < 0.55


def test_brightness_and_contrast_are_clipped(image):
    found = ColorDistortion(brightness=20, contrast=1.5).apply(image, "RGB")
    expected = np.clip(np.clip(image.astype(int) + 20, 0, 255) * 1.5, 0, 255)
    assert np.array_equal(found, expected.astype(np.uint8))


@pytest.mark.parametrize("changed", [ColorDistortion(saturation=0.6), ColorDistortion(hue=0.08)])
def test_saturation_and_hue(changed, image):
    found = changed.apply(image, "RGB")
    for before, after in zip(image.reshape(-1, 3), found.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(before / 255.0))
        shifted = (hue + changed.hue) % 1, saturation * changed.saturation, value
        expected = 255 * np.array(colorsys.hsv_to_rgb(*shifted))
        assert np.abs(expected - after).max() <= 8  # of 8 bits in HSV
    swapped = changed.apply(np.ascontiguousarray(image[..., ::-1]), "BGR")
    assert np.array_equal(swapped[..., ::-1], found)
