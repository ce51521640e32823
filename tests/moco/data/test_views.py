"""Augmented views, center crops, and the order of the items."""

import dataclasses
import os
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, Resize

from moco.data.augment import crop_view, sample_view
from moco.data.images import FileImages, find_images, open_images
from moco.data.views import Views, positions_of_steps
from moco.engine.evaluation import CenterBatches
from tests.oracles.augmentations import V2

AUG = dataclasses.replace(V2, crop_px=16)


class InMemory(FileImages):
    """Random images of the given (W, H)."""

    def __init__(self, sizes):
        super().__init__(["-"] * len(sizes))
        rng = np.random.default_rng(0)
        self.pixels = [rng.integers(0, 256, (h, w, 3), np.uint8) for w, h in sizes]

    def read(self, index):
        return torch.from_numpy(self.pixels[index])


@pytest.mark.parametrize(
    ("resize_px", "crop_px"), [(256, 224), (37, 32), (55, 48), (73, 64), (64, 64), (75, 64)]
)
def test_evaluation_crop_equals_torchvision(resize_px, crop_px):
    sizes = [(500, 375), (375, 500), (333, 500), (500, 331), (257, 256), (256, 257), (256, 300)]
    sizes += [(300, 256), (256, 256), (1024, 683), (640, 427), (91, 64), (64, 97), (33, 517)]
    sizes += [(w, h) for w in range(61, 84, 5) for h in range(62, 91, 7)]
    images = InMemory(sizes)
    batch = CenterBatches(images, resize_px, crop_px).__getitems__(range(len(sizes))).pixels
    reference = Compose([Resize(resize_px), CenterCrop(crop_px)])
    for size, pixels, crop in zip(sizes, images.pixels, batch, strict=True):
        expected = torch.from_numpy(np.array(reference(Image.fromarray(pixels)))).permute(2, 0, 1)
        assert torch.equal(crop, expected), size


def both_views(positions):
    return [(*position, view) for view in (0, 1) for position in positions]


class Numbers(FileImages):
    """A dataset of the given length whose images are not read."""

    def __init__(self, length):
        super().__init__(["-"] * length)


def test_each_epoch_is_a_permutation_without_the_incomplete_batch():
    steps = list(positions_of_steps(Numbers(10), 3, 0, 0, 6))
    assert [len(step) for step in steps] == [3] * 6
    epochs = [[i for step in steps[a : a + 3] for _, i in step] for a in (0, 3)]
    assert all(len(set(epoch)) == 9 and max(epoch) < 10 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [step[0][0] for step in steps] == [0, 0, 0, 1, 1, 1]
    assert list(positions_of_steps(Numbers(10), 3, 0, 5, 6)) == steps[5:]


class TestViews:
    def test_depend_on_seed_epoch_index_and_view_only(self, images):
        data = open_images(images)
        a, b = Views(data, AUG, seed=1), Views(data, AUG, seed=1, cache_bytes=10_000)
        items = both_views([(0, 3), (0, 5), (1, 3)])
        one = a.__getitems__(items)
        b.__getitems__([(0, 5, 1)])  # now in the cache
        for row, item in enumerate(items):
            alone = b.__getitems__([item])
            assert torch.equal(alone.pixels[0], one.pixels[row])
            assert torch.equal(alone.params[0], one.params[row])
        assert len({tuple(crop.flatten().tolist()) for crop in one.pixels}) == len(items)
        seed_2 = Views(data, AUG, seed=2).__getitems__(items[:1])
        assert not torch.equal(seed_2.pixels[0], one.pixels[0])

    def test_are_drawn_from_one_stream_per_image(self, images):
        """Earlier runs are resumed with the same samples: first the query's, then the key's."""
        data = open_images(images)
        batch = Views(data, AUG, seed=7).__getitems__([(2, 4, 1), (2, 4, 0)])
        image = data.read(4)
        rng = Random("7 2 4 0")
        for row in (1, 0):
            view = sample_view(rng, (image.shape[1], image.shape[0]), AUG)
            assert torch.equal(batch.pixels[row], crop_view(image, view, 16))
            assert batch.params[row].tolist() == pytest.approx(view.colors)

    def test_each_image_is_decoded_once(self, images):
        class Counting(FileImages):
            def read(self, index):
                reads.append(index)
                return super().read(index)

        reads = []
        views = Views(Counting(find_images(images)), AUG, seed=0)
        batch = views.__getitems__([(0, 5, 0), (0, 2, 1), (0, 5, 1), (0, 5, 0)])
        assert reads == [5, 2]
        assert torch.equal(batch.pixels[0], batch.pixels[3])
        assert torch.equal(batch.params[0], batch.params[3])
        assert not torch.equal(batch.pixels[0], batch.pixels[2])

    def test_cache_keeps_to_its_size(self, images):
        data = Views(open_images(images), AUG, seed=0, cache_bytes=10_000)
        data.__getitems__([(0, i, 0) for i in range(10)])
        assert 0 < sum(p.nbytes for p in data._cache.values()) <= 10_000

    def test_bad_image(self, images, tmp_path):
        (tmp_path / "bad.jpg").write_bytes(b"")
        data = FileImages([tmp_path / "bad.jpg", *find_images(images)])
        failed = Views(data, AUG, seed=0).__getitems__([(0, 4, 0), (0, 0, 0)])
        assert not failed.complete
        assert "bad.jpg: the file is empty" in failed.bad[0]

        first, second = (
            Views(data, AUG, seed=0, skip_bad=True).__getitems__(items)
            for items in ([(0, 4, 0), (0, 0, 0), (0, 0, 1)], [(0, 0, 1)])
        )
        assert first.complete and len(first.bad) == 1
        assert torch.equal(first.pixels[2], second.pixels[0])
        only_bad = FileImages([tmp_path / "bad.jpg"])
        assert not Views(only_bad, AUG, 0, skip_bad=True).__getitems__([(0, 0, 0)]).complete

    def test_paths_with_any_bytes(self, images, tmp_path):
        name = os.fsdecode(b"caf\xe9 \xf0\x9f\x90\x88.jpg")
        try:
            (tmp_path / name).write_bytes(next(images.iterdir()).read_bytes())
        except OSError:
            pytest.skip("this file system refuses such names")
        assert Views(open_images(tmp_path), AUG, 0).__getitems__([(0, 0, 0)]).complete
