"""The decoding of every kind of image, and files that are not images."""

import io
import random

import numpy as np
import pytest
from PIL import Image

from moco.common.errors import DataError
from moco.data.decode import decode, decode_pixels


def save(path, mode="RGB", size=(8, 6), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, options.pop("color", 0)).save(path, **options)
    return path


@pytest.mark.parametrize(
    "mode, color, expected",
    [
        ("L", 100, (100, 100, 100)),
        ("RGBA", (10, 20, 30, 0), (10, 20, 30)),
        ("LA", (50, 0), (50, 50, 50)),
        ("1", 1, (255, 255, 255)),
        ("I;16", 257 * 77, (77, 77, 77)),
    ],
)
def test_modes(tmp_path, mode, color, expected):
    image = decode(save(tmp_path / "x.png", mode, color=color))
    assert image.mode == "RGB"
    assert image.getpixel((3, 3)) == expected


def test_palette_and_cmyk(tmp_path):
    red = Image.new("RGB", (4, 4), (200, 30, 40))
    red.quantize(4).save(tmp_path / "p.png")
    assert decode(tmp_path / "p.png").getpixel((0, 0)) == (200, 30, 40)
    red.convert("CMYK").save(tmp_path / "c.tif")
    assert np.abs(np.subtract(decode(tmp_path / "c.tif").getpixel((0, 0)), (200, 30, 40))).max() < 3


def test_16_bit_gray_is_scaled_not_clipped(tmp_path):
    wide = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(wide).save(tmp_path / "x.png")
    assert np.asarray(decode(tmp_path / "x.png")).mean() == pytest.approx(127.5, abs=1)


def test_a_files_content_is_decoded_as_the_file(tmp_path):
    path = save(tmp_path / "x.png", color=(1, 2, 3))
    assert np.array_equal(decode(path.read_bytes(), "a:x.png"), decode(path))
    for content, reason in ((b"", "the file is empty"), (b"text", "not an image")):
        with pytest.raises(DataError, match=f"^a:x.png: {reason}"):
            decode(content, "a:x.png")


ROTATED = Image.Exif()
ROTATED[0x0112] = 6  # by a quarter turn, which is ignored


def noise(mode="RGB", size=(33, 21)):
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    return coarse.resize(size, Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.parametrize(
    "mode, options",
    [
        ("RGB", {"format": "JPEG"}),
        ("RGB", {"format": "JPEG", "subsampling": 0, "quality": 95}),
        ("RGB", {"format": "JPEG", "progressive": True}),
        ("RGB", {"format": "JPEG", "exif": ROTATED}),
        ("L", {"format": "JPEG"}),
        ("CMYK", {"format": "JPEG"}),
        ("RGB", {"format": "PNG"}),
    ],
)
def test_pixels_are_those_of_the_image(tmp_path, mode, options):
    path = tmp_path / "x.jpg"
    noise(mode).save(path, **options)
    expected = np.asarray(decode(path))
    for source in (path, path.read_bytes()):
        pixels = decode_pixels(source, "x.jpg")
        assert pixels.shape == (21, 33, 3) and pixels.is_contiguous()
        assert np.array_equal(pixels, expected)


def test_damaged_files_have_the_pixels_or_the_error_of_pil():
    file = io.BytesIO()
    noise(size=(64, 48)).save(file, "JPEG")
    rng, refused = random.Random(0), 0
    for i in range(80):
        damaged = bytearray(file.getvalue())
        if i % 4:
            for _ in range(rng.choice((1, 5, 50))):
                damaged[rng.randrange(2, len(damaged))] = rng.randrange(256)
        else:
            del damaged[rng.randrange(100, len(damaged)) :]
        try:
            expected = np.asarray(decode(bytes(damaged), "x"))
        except DataError as error:
            refused += 1
            with pytest.raises(DataError) as raised:
                decode_pixels(bytes(damaged), "x")
            assert str(raised.value) == str(error)
        else:
            assert np.array_equal(decode_pixels(bytes(damaged), "x"), expected)
    assert 0 < refused < 80
