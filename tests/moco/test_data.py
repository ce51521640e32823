import dataclasses
import os
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from moco.augment import V2
from moco.data import (
    CentreCrops,
    StepSampler,
    TwoViews,
    decode,
    find_images,
    find_labelled_images,
)
from moco.errors import DataError

AUG = dataclasses.replace(V2, crop_px=16)


def save(path, mode="RGB", size=(8, 6), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, options.pop("color", 0)).save(path, **options)
    return path


class TestFinding:
    def test_flat_folder(self, tmp_path):
        expected = [save(tmp_path / name) for name in ("a.JPG", "b.png", "c.webp")]
        (tmp_path / "notes.txt").write_text("no picture")
        assert find_images(tmp_path) == expected

    def test_nested_folders_and_dotfiles(self, tmp_path):
        expected = [save(tmp_path / name) for name in ("n01/x.jpg", "n02/deep/y.jpg")]
        save(tmp_path / "n01/._x.jpg", format="jpeg")
        save(tmp_path / ".cache/z.jpg")
        (tmp_path / "empty_class").mkdir()
        assert find_images(tmp_path) == expected

    def test_train_is_used_where_it_exists(self, tmp_path):
        save(tmp_path / "val/cat/v.jpg")
        assert find_images(tmp_path) == [tmp_path / "val/cat/v.jpg"]
        train = save(tmp_path / "train/cat/t.jpg")
        assert find_images(tmp_path) == [train]

    def test_list_in_a_file(self, tmp_path):
        b, a = save(tmp_path / "b.jpg"), save(tmp_path / "sub/a.jpg")
        (tmp_path / "list.txt").write_text(f"b.jpg\n\n{a}\n")
        assert find_images(tmp_path / "list.txt") == [b, a]
        (tmp_path / "list.txt").write_text("b.jpg\nmissing.jpg\n")
        with pytest.raises(DataError, match=r"list.txt: line 2: no such file .*missing.jpg"):
            find_images(tmp_path / "list.txt")

    def test_links_are_followed_once(self, tmp_path):
        picture = save(tmp_path / "real/x.jpg")
        (tmp_path / "real/loop").symlink_to(tmp_path / "real")
        root = tmp_path / "root"
        root.mkdir()
        (root / "link").symlink_to(picture.parent)
        assert find_images(root) == [root / "link/x.jpg"]

    @pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir()])
    def test_nothing_there_shows_an_example_tree(self, tmp_path, make):
        make(tmp_path / "data")
        with pytest.raises(DataError, match=r"data: no .*ROOT/train/class/0001.jpg"):
            find_images(tmp_path / "data")

    def test_labels(self, tmp_path):
        images = [save(tmp_path / name) for name in ("cat/1.jpg", "cat/sub/2.jpg", "dog/3.jpg")]
        (tmp_path / "ant").mkdir()
        save(tmp_path / ".git/x.jpg")
        assert find_labelled_images(tmp_path) == (images, [0, 0, 1], ["cat", "dog"])
        with pytest.raises(DataError, match="<class>"):
            find_labelled_images(tmp_path / "ant")


class TestDecoding:
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
    def test_modes(self, tmp_path, mode, color, expected):
        picture = decode(save(tmp_path / "x.png", mode, color=color))
        assert picture.mode == "RGB"
        assert picture.getpixel((3, 3)) == expected

    def test_palette_and_cmyk(self, tmp_path):
        red = Image.new("RGB", (4, 4), (200, 30, 40))
        red.quantize(4).save(tmp_path / "p.png")
        assert decode(tmp_path / "p.png").getpixel((0, 0)) == (200, 30, 40)
        red.convert("CMYK").save(tmp_path / "c.tif")
        assert (
            np.abs(np.subtract(decode(tmp_path / "c.tif").getpixel((0, 0)), (200, 30, 40))).max()
            < 3
        )

    def test_16_bit_grey_is_scaled_not_clipped(self, tmp_path):
        wide = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
        Image.fromarray(wide).save(tmp_path / "x.png")
        assert np.asarray(decode(tmp_path / "x.png")).mean() == pytest.approx(127.5, abs=1)

    def test_exif_orientation_is_ignored(self, tmp_path):
        exif = Image.Exif()
        exif[0x0112] = 6  # rotated by a quarter
        save(tmp_path / "x.jpg", size=(8, 6), exif=exif)
        assert decode(tmp_path / "x.jpg").size == (8, 6)

    def test_bad_files_are_named(self, tmp_path):
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        whole = tmp_path / "whole.jpg"
        Image.fromarray(noise).save(whole)
        cases = {
            "empty.jpg": (b"", "the file is empty"),
            "text.jpg": (b"<html>not found</html>", "not a picture"),
            "truncated.jpg": (whole.read_bytes()[:2000], "cannot be decoded"),
            "header.jpg": (whole.read_bytes()[:20], "not a picture|cannot be decoded"),
        }
        for name, (content, reason) in cases.items():
            (tmp_path / name).write_bytes(content)
            with pytest.raises(DataError, match=f"{name}: ({reason})"):
                decode(tmp_path / name)

    @pytest.mark.parametrize("side", [10_000, 20_000])
    def test_decompression_bombs_are_refused_before_decoding(self, tmp_path, side):
        """10,000² pixels are over PIL's limit for a warning, 20,000² over that for an error."""

        def chunk(kind, data):
            checksum = zlib.crc32(kind + data)
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

        header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
        bomb = tmp_path / "bomb.png"
        bomb.write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(bytes(1000)))
            + chunk(b"IEND", b"")
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(DataError, match=r"bomb\.png: decompression bomb"):
                decode(bomb)

    def test_centre_crop(self, tmp_path):
        pixels = np.zeros((20, 40, 3), dtype=np.uint8)
        pixels[:, 10:30] = 255
        Image.fromarray(pixels).save(tmp_path / "x.png")
        crop = CentreCrops([tmp_path / "x.png"], resize_px=10, crop_px=8)[0]
        assert crop.shape == (3, 8, 8)
        assert crop.min() == 255


class TestOrder:
    def test_each_epoch_is_a_permutation_without_the_incomplete_batch(self):
        steps = list(StepSampler(10, 3, seed=0, start=0, stop=6))
        assert [len(step) for step in steps] == [3] * 6
        epochs = [[i for step in steps[a : a + 3] for _, i in step] for a in (0, 3)]
        assert all(len(set(epoch)) == 9 and max(epoch) < 10 for epoch in epochs)
        assert epochs[0] != epochs[1]
        assert [step[0][0] for step in steps] == [0, 0, 0, 1, 1, 1]

    def test_starting_later_gives_the_same_steps(self):
        steps = list(StepSampler(10, 3, seed=4, start=0, stop=8))
        assert list(StepSampler(10, 3, seed=4, start=5, stop=8)) == steps[5:]
        assert list(StepSampler(10, 3, seed=5, start=0, stop=8)) != steps


class TestViews:
    def test_depend_on_seed_epoch_and_index_only(self, pictures):
        images = find_images(pictures)
        a, b = TwoViews(images, AUG, seed=1), TwoViews(images, AUG, seed=1, cache_bytes=10_000)
        one = a.__getitems__([(0, 3), (0, 5), (1, 3)])
        b.__getitems__([(0, 5)])  # now in the cache
        other = b.__getitems__([(1, 3), (0, 3), (0, 5)])
        assert torch.equal(one.pixels, other.pixels[:, [1, 2, 0]])
        assert torch.equal(one.params, other.params[:, [1, 2, 0]])
        assert not torch.equal(one.pixels[:, 0], one.pixels[:, 2])  # another epoch
        assert not torch.equal(one.pixels[0, 0], one.pixels[1, 0])  # two views
        seed_2 = TwoViews(images, AUG, seed=2).__getitems__([(0, 3)])
        assert not torch.equal(seed_2.pixels[:, 0], one.pixels[:, 0])

    def test_cache_keeps_to_its_size(self, pictures):
        data = TwoViews(find_images(pictures), AUG, seed=0, cache_bytes=10_000)
        data.__getitems__([(0, i) for i in range(10)])
        assert 0 < sum(p.nbytes for p in data._cache.values()) <= 10_000

    def test_bad_picture(self, pictures, tmp_path):
        (tmp_path / "bad.jpg").write_bytes(b"")
        images = [tmp_path / "bad.jpg", *find_images(pictures)]
        failed = TwoViews(images, AUG, seed=0).__getitems__([(0, 4), (0, 0)])
        assert not failed.complete
        assert "bad.jpg: the file is empty" in failed.bad[0]

        first, second = (
            TwoViews(images, AUG, seed=0, skip_bad=True).__getitems__(positions)
            for positions in ([(0, 4), (0, 0)], [(0, 0)])
        )
        assert first.complete and len(first.bad) == 1
        assert torch.equal(first.pixels[:, 1], second.pixels[:, 0])

    def test_only_bad_pictures(self, tmp_path):
        (tmp_path / "bad.jpg").write_bytes(b"")
        batch = TwoViews([tmp_path / "bad.jpg"], AUG, 0, skip_bad=True).__getitems__([(0, 0)])
        assert not batch.complete

    def test_paths_with_any_bytes(self, pictures, tmp_path):
        name = os.fsdecode(b"caf\xe9 \xf0\x9f\x90\x88.jpg")
        try:
            (tmp_path / name).write_bytes(next(pictures.iterdir()).read_bytes())
        except OSError:
            pytest.skip("this file system refuses such names")
        assert TwoViews(find_images(tmp_path), AUG, 0).__getitems__([(0, 0)]).complete
