"""Measurements of the input pipeline: two augmented views of a JPEG, in one process and thread."""

import io
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.io import decode_image
from torchvision.transforms import v2 as T

from benchmarks.speed import reference
from benchmarks.speed.measure import Setting, every_round
from benchmarks.speed.results import Result, Run, with_noise
from moco.data.augment import V1, V2, Augmentation, apply_colors
from moco.data.decode import decode_pixels
from moco.data.images import find_images, open_images
from moco.data.views import Views

IMAGENET_PX, PHOTO_PX = (500, 375), (640, 480)  # of a typical image of ImageNet, and of COCO
BLUR_PX = 13  # three sigmas to both sides
BATCH = 16
Decoder = Callable[[bytes], object]


def two_views(setting: Setting) -> list[Result]:
    """The whole path, from files to two normalized views."""
    rows, root = [], photographs(setting)
    number, sizes = described(root)
    for kind, aug in (("v1", V1), ("v2", V2)):
        contenders: dict[str, Callable[[], object]] = {
            "ours": partial(our_loader, root, aug),
            "views": partial(list, reference.loader(str(root), kind, BATCH)),
            "views torchvision": partial(list, torchvision_loader(str(root), kind)),
        }
        with suppress(ImportError):
            contenders["lightly views"] = partial(list, lightly_loader(root, kind))
        found = every_round(contenders, setting.rounds)
        found = {name: [value / number for value in all_] for name, all_ in found.items()}
        for goal in ("views", "views torchvision", "lightly views"):
            sides = {"ours": found["ours"], "reference": found.get(goal, [])}
            rows.append(with_noise(goal, sides, f"{kind}; {sizes}"))
    return rows


def without_colors(setting: Setting) -> list[Result]:
    """The path without what the training device can compute."""
    rows, root = [], photographs(setting)
    number, sizes = described(root)
    for kind, aug in (("v1", V1), ("v2", V2)):
        contenders: dict[str, Callable[[], object]] = {
            "ours": partial(our_loader, root, aug, with_colors=False),
            "reference": partial(list, reference.loader(str(root), kind, BATCH)),
        }
        found = every_round(contenders, setting.rounds)
        sides = {name: [value / number for value in all_] for name, all_ in found.items()}
        rows.append(with_noise("views_without_colors", sides, f"{kind}; {sizes}"))
    return rows


def decoding(setting: Setting) -> list[Result]:
    """Other decoders, as far as they are installed, against ours, and ours in its share."""
    root = photographs(setting)
    files = [path.read_bytes() for path in find_images(root)]
    contenders: dict[str, Callable[[], object]] = {"two views": partial(our_loader, root, V2)}
    for name, find in DECODERS.items():
        with suppress(ImportError):
            contenders[name] = partial(_each, find(), files)
    found = every_round(contenders, setting.rounds)
    found = {name: [value / len(files) for value in all_] for name, all_ in found.items()}
    ours, whole = found.pop("ours"), found.pop("two views")
    _, sizes = described(root)
    rows = [with_noise("decoding", {"ours": ours, "reference": whole}, f"v2; {sizes}")]
    for name, theirs in found.items():
        rows.append(with_noise("decoding others", {"ours": ours, "reference": theirs}, name))
    return rows


def _each(decode: Decoder, files: list[bytes]) -> None:
    for file in files:
        decode(file)


def _opencv() -> Decoder:
    import cv2

    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    return lambda file: cv2.imdecode(np.frombuffer(file, np.uint8), flags)


def _simplejpeg(**options: bool) -> Decoder:
    import simplejpeg

    return lambda file: simplejpeg.decode_jpeg(file, **options)


def _torchcodec() -> Decoder:
    from torchcodec.decoders import decode_image

    return lambda file: decode_image(torch.frombuffer(bytearray(file), dtype=torch.uint8))


def _kornia() -> Decoder:
    from kornia_rs.io import decode_image_jpegturbo

    return lambda file: decode_image_jpegturbo(file, "rgb")


def _pil(half: bool = False) -> Decoder:
    def decode(file: bytes) -> object:
        with Image.open(io.BytesIO(file)) as image:
            if half:
                image.draft("RGB", (image.width // 2, image.height // 2))
            return np.asarray(image)

    return decode


DECODERS: dict[str, Callable[[], Decoder]] = {
    "ours": lambda: lambda file: decode_pixels(file, "x"),
    "PIL": _pil,
    "PIL, half the size by the DCT": partial(_pil, half=True),
    "OpenCV": _opencv,
    "simplejpeg": _simplejpeg,
    "simplejpeg, inexact (fastdct, fastupsample)": partial(
        _simplejpeg, fastdct=True, fastupsample=True
    ),
    "torchcodec": _torchcodec,
    "kornia-rs": _kornia,
}


@cache
def described(root: Path) -> tuple[int, str]:
    """How many files there are, and of what size."""
    paths = find_images(root)
    W, H = np.mean([Image.open(path).size for path in paths], axis=0)
    kib = np.mean([path.stat().st_size for path in paths]) / 1024
    return len(paths), f"{len(paths)} files, in the mean {W:.0f} x {H:.0f} px and {kib:.0f} KiB"


@cache
def photographs(setting: Setting) -> Path:
    """A folder `0/*.jpg` of the user's images, or of generated ones."""
    count = 4 if setting.quick else 96
    folder = setting.scratch / "images" / "0"
    folder.mkdir(parents=True)
    if setting.images is None:
        generate_images(folder, count, PHOTO_PX)
    else:
        for i, path in enumerate(find_images(setting.images)[:count]):
            (folder / f"{i:03d}{path.suffix}").symlink_to(path.resolve())
    return folder.parent


def generate_images(folder: Path, count: int, size: tuple[int, int] = IMAGENET_PX) -> None:
    """JPEG files of a photograph's spectrum."""
    W, H = size
    rng = np.random.default_rng(0)
    fy, fx = np.fft.fftfreq(H)[:, None], np.fft.rfftfreq(W)[None]
    spectrum = 1 / np.maximum(np.hypot(fx, fy), 1 / W) ** 1.2
    for i in range(count):
        noise = rng.normal(size=(3, H, W))
        shape = np.fft.irfft2(np.fft.rfft2(noise) * spectrum, s=(H, W))
        shape[1:] = 0.3 * shape[1:] + shape[:1]  # channels that resemble each other
        shape = (shape - shape.mean((1, 2), keepdims=True)) / shape.std((1, 2), keepdims=True)
        pixels = np.clip(128 + 56 * shape, 0, 255).astype(np.uint8).transpose(1, 2, 0)
        Image.fromarray(pixels).save(folder / f"{i:03d}.jpg", quality=95)


def our_loader(root: Path, aug: Augmentation, with_colors: bool = True) -> None:
    images = open_images(root)
    views = Views(images, aug, seed=0)
    for first in range(0, len(images), BATCH):
        indices = range(first, min(first + BATCH, len(images)))
        batch = views.__getitems__([(0, i, view) for view in (0, 1) for i in indices])
        if with_colors:
            apply_colors(batch.pixels, batch.params, aug, reference.MEAN, reference.STD)


def torchvision_loader(root: str, kind: str) -> Iterable[object]:
    """Two views by torchvision's transforms v2, which work on tensors."""
    crop = T.RandomResizedCrop(224, scale=V1.crop_scale)
    gray = T.RandomGrayscale(V1.gray_prob)
    if kind == "v1":
        colors: list[torch.nn.Module] = [gray, T.ColorJitter(*V1.jitter)]
    else:
        jitter = T.RandomApply([T.ColorJitter(*V2.jitter)], V2.jitter_prob)
        blur = T.RandomApply([T.GaussianBlur(BLUR_PX, V2.blur_sigma_px)], V2.blur_prob)
        colors = [jitter, gray, blur]
    last = [T.ToDtype(torch.float32, scale=True), T.Normalize(reference.MEAN, reference.STD)]
    once = T.Compose([crop, *colors, T.RandomHorizontalFlip(), *last])
    dataset = reference.ImageFolder(
        root, lambda image: [once(image), once(image)], loader=partial(decode_image, mode="RGB")
    )
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH)


def lightly_loader(root: Path, kind: str) -> Iterable[object]:
    """Two views by lightly's transforms, without its own progress and command line."""
    from lightly.transforms import MoCoV1Transform, MoCoV2Transform

    transform = MoCoV1Transform() if kind == "v1" else MoCoV2Transform()
    dataset = reference.ImageFolder(str(root), transform)
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH)


GOALS: dict[str, Run | None] = {
    "views": two_views,
    "views_without_colors": without_colors,
    "decoding": decoding,
}
