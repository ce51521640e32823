import dataclasses
import math
from random import Random

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as TF
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import RandomResizedCrop

from moco.data import augment
from moco.data.augment import (
    NUM_PARAMS,
    apply_colors,
    crop_view,
    sample_box,
    sample_colors,
    sample_view,
)
from tests.oracles.augmentations import V1, V2, V3


def sample_views(rng, image, aug, pixels, params):
    """Write two views of an image (H, W, 3) to the two rows of `pixels` and `params`."""
    H, W, _ = image.shape
    for row in range(2):
        view = sample_view(rng, (W, H), aug)
        pixels[row] = crop_view(image, view, aug.crop_px)
        params[row] = torch.tensor(view.colors)


@pytest.fixture
def images():
    torch.manual_seed(0)
    x = torch.rand(4, 3, 12, 10)
    x[0, :, :4] = x[0, :1, :4]  # gray, where hue is undefined
    x[1] = 0
    return x


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue", "grayscale"])
def test_color_operations_equal_torchvisions(images, name):
    ours = images.clone()
    if name == "grayscale":
        augment.grayscale(ours)
        theirs = TF.rgb_to_grayscale(images, num_output_channels=3)
    else:
        values = torch.tensor([0.3, 0.1, -0.4, 0.5] if name == "hue" else [0.6, 0.9, 1.0, 1.4])
        getattr(augment, f"adjust_{name}")(ours, values.view(-1, 1, 1, 1))
        adjust = getattr(TF, f"adjust_{name}")
        theirs = torch.stack([adjust(x, float(v)) for x, v in zip(images, values, strict=True)])
    atol = 1e-5 if name == "hue" else 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    assert not torch.allclose(ours[0], images[0], atol=0.01)


def test_operations_follow_the_kinds_order():
    b, c, s, h, gray = range(5)
    order = augment.ORDERS.index((h, c, s, b))
    assert augment.operations(order, True, V2) == (h, c, s, b, gray)
    assert augment.operations(order, False, V2) == (h, c, s, b)
    assert augment.operations(-1, True, V2) == (gray,)
    assert augment.operations(order, True, V1) == (gray, c, b)
    no_hue = dataclasses.replace(V1, jitter=(0.4, 0.4, 0.4, 0.0))
    assert augment.operations(order, False, no_hue) == (c, s, b)


def test_blur_is_a_gaussian_of_each_images_sigma():
    x = torch.rand(3, 3, 40, 40)
    sigma = torch.tensor([0.5, 2.0, 0.1])
    ours = x.clone()
    augment.gaussian_blur(ours, sigma.view(-1, 1, 1, 1))
    for i in range(3):
        radius = math.ceil(3 * sigma[i])
        padded = TF.pad(x[i], [radius] * 4, padding_mode="edge")
        blurred = TF.gaussian_blur(padded, [2 * radius + 1] * 2, [float(sigma[i])] * 2)
        inside = blurred[:, radius:-radius, radius:-radius]
        torch.testing.assert_close(ours[i], inside, rtol=0, atol=1e-5)


# The largest and the mean difference in levels of 255. PIL truncates or rounds to integer levels,
# its hue has 256 steps and its saturation 8 bits, and its blur consists of three box filters.
@pytest.mark.parametrize(
    "name, value, largest, mean",
    [
        ("brightness", 0.6, 1, 0.5),
        ("brightness", 1.4, 1, 0.5),
        ("contrast", 0.6, 1, 0.5),
        ("contrast", 1.4, 1, 0.5),
        ("saturation", 0.6, 1.25, 0.5),
        ("saturation", 1.4, 1.25, 0.5),
        ("hue", 0.1, 13, 1.1),
        ("hue", -0.4, 13, 1.1),
        ("grayscale", None, 0.51, 0.3),
        ("blur", 0.1, 0, 0),
        ("blur", 1.0, 3, 0.7),
        ("blur", 2.0, 3, 0.7),
        ("solarize", None, 0, 0),
    ],
)
def test_each_operation_equals_pils(name, value, largest, mean):
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    image = coarse.resize((80, 80), Image.Resampling.BICUBIC)
    ours = TF.to_tensor(image)[None]
    if name == "grayscale":
        augment.grayscale(ours)
        theirs = TF.to_grayscale(image, 3)
    elif name == "solarize":
        augment.solarize(ours)
        theirs = ImageOps.solarize(image)
    elif name == "blur":
        augment.gaussian_blur(ours, torch.full((1, 1, 1, 1), value))
        theirs = image.filter(ImageFilter.GaussianBlur(value))
    else:
        getattr(augment, f"adjust_{name}")(ours, torch.full((1, 1, 1, 1), value))
        theirs = getattr(TF, f"adjust_{name}")(image, value)
    difference = (ours[0] - TF.to_tensor(theirs)).abs() * 255
    assert difference.max() <= largest + 1e-3
    assert difference.mean() <= mean + 1e-3
    change = (TF.to_tensor(image) - TF.to_tensor(theirs)).abs() * 255
    assert change.mean() > 2 * difference.mean() or not change.any()


def test_boxes_are_distributed_as_torchvisions():
    rng, size, n = Random(0), (300, 200), 4000
    torch.manual_seed(0)
    image = torch.empty(3, size[1], size[0])
    ours, theirs = [], []
    for _ in range(n):
        left, top, right, bottom = sample_box(rng, size, (0.2, 1.0), (3 / 4, 4 / 3))
        assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
        ours.append((left, top, right - left, bottom - top))
        i, j, h, w = RandomResizedCrop.get_params(image, [0.2, 1.0], [3 / 4, 4 / 3])
        theirs.append((j, i, w, h))
    ours, theirs = np.array(ours, dtype=float), np.array(theirs, dtype=float)
    assert np.abs(ours.mean(0) - theirs.mean(0)).max() < 4  # standard errors are below 1.1 px
    assert np.abs(ours.std(0) / theirs.std(0) - 1).max() < 0.06


@pytest.mark.stored
def test_samples_of_a_seed_stay_the_same():
    """With other numbers, earlier runs could not be repeated."""
    rng = Random(0)
    for aug, box, colors in (
        (V1, (8, 2, 41, 40), [11, 0.680561, 0.947337, 1.08871, 0.330409, 0, 0, 0]),
        (V2, (2, 3, 36, 32), [-1, 1.041014, 1.165249, 1.037953, 0.062893, 0, 0, 0]),
    ):
        view = augment.sample_view(rng, (60, 40), aug)
        assert (view.box, view.flip) == (box, False)
        assert view.colors == pytest.approx(colors, abs=1e-6)


def test_box_of_a_image_that_no_crop_fits():
    """Torchvision's fallback: the largest center crop within the aspect ratios."""
    assert sample_box(Random(0), (400, 10), (1.0, 1.0), (3 / 4, 4 / 3)) == (193, 0, 206, 10)
    assert sample_box(Random(0), (10, 400), (1.0, 1.0), (3 / 4, 4 / 3)) == (0, 193, 10, 206)


def test_probabilities_and_ranges_of_colors():
    rng = Random(0)
    sampled = np.array([sample_colors(rng, V2) for _ in range(6000)])
    jittered = sampled[:, augment.ORDER] >= 0
    assert jittered.mean() == pytest.approx(0.8, abs=0.02)
    assert sampled[:, augment.GRAY].mean() == pytest.approx(0.2, abs=0.02)
    assert (sampled[:, augment.SIGMA_PX] > 0).mean() == pytest.approx(0.5, abs=0.02)
    orders = np.bincount(sampled[jittered, augment.ORDER].astype(int), minlength=24)
    assert orders.min() > 0.7 * orders.mean() and len(orders) == 24
    factors = sampled[:, augment.FACTORS : augment.FACTORS + 4]
    assert factors.min(0) == pytest.approx([0.6, 0.6, 0.6, -0.1], abs=0.01)
    assert factors.max(0) == pytest.approx([1.4, 1.4, 1.4, 0.1], abs=0.01)
    sigmas = sampled[sampled[:, augment.SIGMA_PX] > 0, augment.SIGMA_PX]
    assert (sigmas.min(), sigmas.max()) == pytest.approx((0.1, 2.0), abs=0.01)
    assert all(sample_colors(rng, V1)[augment.ORDER] >= 0 for _ in range(100))
    views = np.array([[sample_colors(rng, view) for view in V3] for _ in range(4000)])
    assert (views[:, :, augment.SIGMA_PX] > 0).mean(0) == pytest.approx([1, 0.1], abs=0.02)
    assert views[:, :, augment.SOLARIZE].mean(0) == pytest.approx([0, 0.2], abs=0.02)


@pytest.mark.parametrize("aug", [V1, V2, V3[1]], ids=["v1", "v2", "v3"])
def test_views_equal_the_official_operations_on_pil(aug):
    """PIL, with the samples and the order of main_moco.py, gives the same up to its rounding."""
    aug = dataclasses.replace(aug, crop_px=32, blur_prob=0.0)
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    image = coarse.resize((90, 70), Image.Resampling.BICUBIC)
    N = 40
    pixels, params = torch.empty(N, 2, 3, 32, 32, dtype=torch.uint8), torch.empty(N, 2, NUM_PARAMS)
    for n in range(N):
        sample_views(Random(n), torch.from_numpy(np.array(image)), aug, pixels[n], params[n])
    pixels, params = pixels.flatten(0, 1), params.flatten(0, 1)
    ours = apply_colors(pixels, params, aug)
    theirs = torch.stack(
        [official_colors(x, p, aug) for x, p in zip(pixels, params.tolist(), strict=True)]
    )
    # PIL truncates after each of five operations, and its hue has 8 bits.
    assert (ours - theirs).abs().mean() * 255 < 2.0
    assert (ours - theirs).abs().mean(dim=(1, 2, 3)).max() * 255 < 4.0


def official_colors(x, params, aug):
    image = TF.to_pil_image(x)
    order, *factors, hue, gray, _, solarized = params
    if aug.gray_first and gray:
        image = TF.to_grayscale(image, 3)
    for op in augment.ORDERS[int(order)] if order >= 0 else ():
        adjust = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)[op]
        image = adjust(image, [*factors, hue][op])
    if not aug.gray_first and gray:
        image = TF.to_grayscale(image, 3)
    if solarized:
        image = ImageOps.solarize(image)
    return TF.to_tensor(image)


@pytest.mark.parametrize("flip_prob", [0.0, 1.0])
def test_crops_equal_pils_antialiased_resize_and_flip(flip_prob):
    image = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    aug = dataclasses.replace(V1, crop_px=24, flip_prob=flip_prob)
    pixels, params = torch.empty(2, 3, 24, 24, dtype=torch.uint8), torch.empty(2, NUM_PARAMS)
    sample_views(Random(5), torch.from_numpy(image), aug, pixels, params)
    rng = Random(5)
    for view in range(2):
        box = sample_box(rng, (80, 60), aug.crop_scale, aug.crop_ratio)
        _, params_again = rng.random(), sample_colors(rng, aug)
        crop = Image.fromarray(image).crop(box).resize((24, 24), Image.Resampling.BILINEAR)
        crop = ImageOps.mirror(crop) if flip_prob else crop
        difference = pixels[view].permute(1, 2, 0).numpy().astype(int) - np.asarray(crop)
        assert np.abs(difference).max() <= 1
        assert params[view].tolist() == pytest.approx(params_again)


@pytest.mark.parametrize("kind", [V1, V2], ids=["v1", "v2"])
def test_colors_of_a_view_do_not_depend_on_the_batch(kind):
    aug = dataclasses.replace(kind, crop_px=16)
    pixels = torch.randint(0, 256, (12, 3, 16, 16), dtype=torch.uint8)
    params = torch.tensor([sample_colors(Random(i), aug) for i in range(12)])
    together = apply_colors(pixels, params, aug)
    alone = [apply_colors(pixels[i : i + 1], params[i : i + 1], aug)[0] for i in range(12)]
    assert torch.equal(together, torch.stack(alone))


def test_normalization_comes_last():
    x = augment.normalize(torch.full((1, 3, 2, 2), 0.5), (0.5, 0.25, 0.0), (1.0, 0.5, 0.25))
    assert x[0, :, 0, 0].tolist() == [0.0, 0.5, 2.0]
    pixels = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    params = torch.tensor([sample_colors(Random(i), V2) for i in range(6)])
    mean, std = (0.5, 0.25, 0.0), (1.0, 0.5, 0.25)
    expected = augment.normalize(apply_colors(pixels, params, V2), mean, std)
    found = apply_colors(pixels, params, V2, mean, std)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    plain = torch.tensor([[-1.0, 1, 1, 1, 0, 0, 0, 0]]).expand(6, -1)
    torch.testing.assert_close(apply_colors(pixels, plain, V2), pixels / 255)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("aug", [V1, V2, V3[1]], ids=["v1", "v2", "v3"])
def test_opencv_equals_the_operations_of_a_gpu(monkeypatch, aug, threads):
    """The cases include every order, gray, blur, and factors below and above 1."""
    pytest.importorskip("cv2")
    rng, generator = Random(0), torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (96, 3, 20, 20), dtype=torch.uint8, generator=generator)
    pixels[:, :, :8] = pixels[:, :1, :8]  # gray, where hue is undefined
    pixels[::4, :, 8:10] = 0
    params = torch.tensor([sample_colors(rng, aug) for _ in range(96)])
    params[:, augment.ORDER] = torch.arange(96) % 24
    params[:, augment.GRAY] = (torch.arange(96) >= 72).float()
    params[::5, augment.SIGMA_PX] = torch.linspace(0.1, 2, 20)
    assert params[:, augment.SOLARIZE].any() == (aug == V3[1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = apply_colors(pixels, params, aug)
    monkeypatch.setattr(augment.opencv, "AVAILABLE", False)
    torch.testing.assert_close(found, apply_colors(pixels, params, aug), rtol=0, atol=1e-5)
