"""FCN-16s: structure by the paper's sentence, alignment of pixels and cells, loss, augmentation."""

import numpy as np
import pytest
import torch
from torch import nn

from detection.config.task import default_task
from detection.data.sem_seg import Augmentation, AugmentationParams
from detection.modeling.fcn16s import FCN16sHead, pixel_loss, upsample


def test_the_head_is_the_papers():
    """A.5: two 3x3 of 256 channels with dilation 6, BN and ReLU, and a 1x1 classifier."""
    head = FCN16sHead(2048, 21)
    convs = [*head.convs[::3], head.predictor]
    assert [type(layer) for layer in head.convs[1:3]] == [nn.BatchNorm2d, nn.ReLU]
    assert [type(layer) for layer in head.convs[4:]] == [nn.BatchNorm2d, nn.ReLU]
    assert [(c.in_channels, c.out_channels, c.kernel_size, c.dilation) for c in convs] == [
        (2048, 256, (3, 3), (6, 6)),
        (256, 256, (3, 3), (6, 6)),
        (256, 21, (1, 1), (1, 1)),
    ]
    assert [c.bias is not None for c in convs] == [False, False, True]
    assert head(torch.zeros(1, 2048, 5, 7)).shape == (1, 21, 5, 7)


@pytest.mark.parametrize("size", [(65, 81), (64, 96), (70, 50), (1, 17)])
def test_cell_i_is_at_pixel_16_i(size):
    """Scores equal to the cells' positions become the pixels' positions, up to the last cell."""
    h, w = (-(-side // 16) for side in size)
    rows = torch.arange(h).float()[:, None].expand(h, w) * 16
    columns = torch.arange(w).float()[None].expand(h, w) * 16
    full = upsample(torch.stack([rows, columns])[None], size)[0]
    assert full.shape == (2, *size)
    y = torch.arange(size[0]).clamp(max=16 * (h - 1)).float()[:, None].expand(size)
    x = torch.arange(size[1]).clamp(max=16 * (w - 1)).float()[None].expand(size)
    torch.testing.assert_close(full, torch.stack([y, x]), atol=1e-4, rtol=0)


def test_a_backbone_of_padded_layers_is_aligned_as_assumed():
    """An impulse at pixel 16 i excites cell i most, through convolutions and pooling."""
    layers: list[nn.Module] = [nn.Conv2d(1, 1, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1)]
    layers += [nn.Conv2d(1, 1, 3, 2, 1, bias=False) for _ in range(2)]
    backbone = nn.Sequential(*layers)
    for layer in backbone:
        if isinstance(layer, nn.Conv2d):  # a bump, highest in the middle
            bump = torch.hann_window(layer.kernel_size[0] + 2, periodic=False)[1:-1]
            layer.weight.data[:] = bump[:, None] * bump
    for cell in (1, 2, 3):
        image = torch.zeros(1, 1, 65, 65)
        image[..., 16 * cell, 16 * cell] = 1
        row, column = divmod(int(backbone(image).argmax()), 5)
        assert (row, column) == (cell, cell)


def test_the_loss_is_the_mean_over_labeled_pixels():
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 2, 2)
    labels = torch.randint(0, 3, (2, 17, 17))
    labels[0] = 255
    full = upsample(scores, (17, 17)).log_softmax(dim=1)
    by_hand = -full[1].gather(0, labels[1][None]).mean()
    torch.testing.assert_close(pixel_loss(scores, labels, 255), by_hand)
    assert pixel_loss(scores, torch.full_like(labels, 255), 255) == 0


def augmentation(height: int, width: int) -> Augmentation:
    crop_px = height, width
    return Augmentation((0.5, 2.0), True, crop_px, pad_value=(1.2, 2.6, 3), ignore_value=255)


def image(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an image whose red channel is 10 times the label, and its labels."""
    labels = np.zeros((height, width), np.uint8)
    labels[:, width // 2 :] = 20
    pixels = np.stack([labels * 10, labels, labels], axis=-1)
    return pixels, labels


@pytest.mark.parametrize("crop", [(32, 32), (20, 48)])
def test_pixels_and_labels_stay_together(crop):
    pixels, labels = image(40, 60)
    for draw in (
        AugmentationParams(1.0, False, (0, 0)),
        AugmentationParams(1.0, True, (0.9, 0.4)),
        AugmentationParams(2.0, True, (0.5, 0.5)),
    ):
        cropped, cropped_labels = augmentation(*crop).apply(pixels, labels, draw)
        assert cropped.shape == (*crop, 3) and cropped_labels.shape == crop
        inner = np.abs(np.diff(cropped_labels.astype(int), axis=1)) == 0
        inner = np.pad(inner, ((0, 0), (1, 0))) & np.pad(inner, ((0, 0), (0, 1)))
        difference = np.abs(cropped[..., 0].astype(int) - 10 * cropped_labels.astype(int))
        assert difference[inner].max() <= 60  # the interpolated edge only
        assert (difference[inner] == 0).mean() > 0.9
    flipped, _ = augmentation(0, 0).apply(pixels, labels, AugmentationParams(1.0, True, (0, 0)))
    assert np.array_equal(flipped, pixels[:, ::-1])


def test_samples_cover_the_papers_range():
    rng = np.random.RandomState(0)
    draws = [augmentation(32, 32).sample_params(rng) for _ in range(2000)]
    scales = np.array([draw.scale for draw in draws])
    assert 0.5 <= scales.min() < 0.51 and 1.99 < scales.max() <= 2.0
    assert abs(scales.mean() - 1.25) < 0.03
    assert abs(np.mean([draw.flip for draw in draws]) - 0.5) < 0.05
    # Every place of the crop can be sampled, the last one too.
    places = {
        int(
            augmentation(2, 2).apply(*ramp(5), AugmentationParams(1.0, False, (0, draw.corner[1])))[
                1
            ][0, 0]
        )
        for draw in draws[:200]
    }
    assert places == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("value", "size"), [((0, 1.0), (0, 0)), ((64, 1.0), (64, 64)), ((513, 1.5), (513, 770))]
)
def test_the_keys_of_the_crop(value, size):
    cfg = default_task()
    cfg.INPUT.SEM_SEG_CROP_SIZE, cfg.INPUT.SEM_SEG_CROP_ASPECT = value
    assert Augmentation.from_config(cfg).crop_px == size


def test_every_place_of_a_rectangle_can_be_sampled():
    """A crop of 2 x 3 pixels from 4 x 5 has 3 x 3 places; one of 4 x 8 is padded at the right."""
    labels = np.arange(20, dtype=np.uint8).reshape(4, 5)
    pixels = np.repeat(labels[..., None], 3, axis=-1)
    corners = [(y / 10, x / 10) for y in range(10) for x in range(10)]
    crops = [
        augmentation(2, 3).apply(pixels, labels, AugmentationParams(1.0, False, corner))[1]
        for corner in corners
    ]
    assert {int(crop[0, 0]) for crop in crops} == {0, 1, 2, 5, 6, 7, 10, 11, 12}
    assert all(np.array_equal(crop, crop[0, 0] + [[0, 1, 2], [5, 6, 7]]) for crop in crops)
    padded, padded_labels = augmentation(4, 8).apply(
        pixels, labels, AugmentationParams(1.0, False, (0.9, 0.9))
    )
    assert np.array_equal(padded_labels[:, :5], labels) and (padded_labels[:, 5:] == 255).all()
    assert (padded[:, 5:] == [1, 3, 3]).all()


def test_the_size_is_relative_to_the_shorter_side():
    """Mmsegmentation's RandomResize of (2048, 512): both limits are scaled."""
    fixed = Augmentation(
        (0.5, 2.0), False, (0, 0), (0, 0, 0), 255, short_edge_px=20, max_size_px=30
    )
    for (height, width), scale, expected in (
        ((40, 50), 1.0, (20, 25)),
        ((40, 50), 2.0, (40, 50)),
        ((10, 60), 1.0, (5, 30)),
        ((10, 60), 0.5, (3, 15)),
    ):
        resized, labels = fixed.apply(
            *image(height, width), AugmentationParams(scale, False, (0, 0))
        )
        assert resized.shape[:2] == labels.shape == expected


def test_a_crop_that_one_class_fills_is_sampled_again():
    """The first crop has one class, the second 7 of 8 pixels of it, the third half of each."""
    fixed = Augmentation((1.0, 1.0), False, (8, 8), (0, 0, 0), 255, max_class_share=0.75)
    labels = np.zeros((8, 32), np.uint8)
    labels[:, 16:] = 1
    labels[0, :] = 255  # does not count
    pixels = np.zeros((8, 32, 3), np.uint8)
    corners = [(0.0, x / 25) for x in (0.5, 9.5, 12.5)]
    taken = []
    for number in (1, 2, 3):
        first, *others = corners[:number]
        taken.append(
            fixed.apply(pixels, labels, AugmentationParams(1.0, False, first, tuple(others)))[1]
        )
    assert [(crop[1:] == 1).mean() for crop in taken] == [0.0, 0.125, 0.5]
    rng = np.random.RandomState(0)
    assert len(fixed.sample_params(rng).others) == 10
    assert len({corner for _ in range(9) for corner in fixed.sample_params(rng).others}) == 90


def ramp(width: int) -> tuple[np.ndarray, np.ndarray]:
    labels = np.tile(np.arange(width, dtype=np.uint8), (2, 1))
    return np.repeat(labels[..., None], 3, axis=-1), labels
