"""Samples for a model: an image and its annotations, resized and flipped.

Bitwise identical to Detectron2's DatasetMapper (detectron2/data/dataset_mapper.py) under the same
random numbers, which are sampled in batches.py.

Shapes: R objects; boxes (x1, y1, x2, y2) in pixels of the resized image; sizes (height, width).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import torch
from fvcore.transforms.transform import TransformList
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from detection.data import sem_seg
from detection.data.jitter import LargeScaleJitter, Moved, Resize, flips
from detection.data.objects import (
    boxes_of_bitmaps,
    boxes_of_polygons,
    draw_polygons,
    nonempty,
)
from detection.data.random_state import private_random, seed_all
from detection.data.sample import Sample
from detection.datasets.base import Record
from detection.datasets.images import OpenURL, check_size, read_image
from detection.datasets.labels import read_labels
from detection.datasets.layout import image_size
from moco.common.errors import DataError

_FLIPPED: dict[str, tuple[int, ...]] = {"none": (), "horizontal": (2,), "vertical": (1,)}
_LEARNED = ("annotations", "sem_seg_file_name")
_XYXY = 0  # BoxMode.XYXY_ABS; the readers' other mode is 1, XYWH_ABS


@dataclass(frozen=True)
class Draw:
    """Sampled changes of an image: its shorter side (0 = as it is), its flip."""

    short_edge_px: int
    flip: str = "none"


@dataclass(frozen=True)
class Augmentation:
    """Random resizing and flipping.

    Attributes:
        short_edges_px: the sizes to choose from, or (lowest, highest) with `sampling` "range".
        sampling: "choice" or "range".
        flip: "horizontal", "vertical" or "none"; done with probability 1/2.
    """

    short_edges_px: tuple[int, ...]
    sampling: str
    flip: str

    def draw(self, rng: np.random.RandomState) -> Draw:
        """The random numbers are ResizeShortestEdge's and RandomFlip's."""
        if self.sampling == "range":
            low, high = self.short_edges_px
            short_edge = rng.randint(low, high + 1)
        else:
            # The number that `rng.choice` takes, in a fifth of its time.
            short_edge = self.short_edges_px[rng.randint(len(self.short_edges_px))]
        flipped = self.flip != "none" and rng.uniform() < 0.5
        return Draw(int(short_edge), self.flip if flipped else "none")


def resized_size(size: tuple[int, int], short_edge_px: int, max_size_px: int) -> tuple[int, int]:
    """(height, width) with the given shorter side, unless the longer one would exceed its limit.

    Rounds half up: ResizeShortestEdge.get_output_shape.
    """
    if short_edge_px == 0:
        return size
    height, width = size
    scale = short_edge_px / min(height, width)
    if height < width:
        new_height, new_width = float(short_edge_px), scale * width
    else:
        new_height, new_width = scale * height, float(short_edge_px)
    longer = max(new_height, new_width)
    scale = max_size_px / longer if longer > max_size_px else 1.0
    return int(new_height * scale + 0.5), int(new_width * scale + 0.5)


@dataclass(frozen=True)
class Mapper:
    """A record and its sampled changes -> a sample for a detector.

    Attributes:
        max_size_px: limit of the longer side.
        channel_order: "RGB" or "BGR".
        masks: "polygon" or "bitmask" (INPUT.MASK_FORMAT), "" for none.
        flip_indices: of the keypoints after a horizontal flip; None: keypoints are not read.
        learning: read the annotations at all.
        jitter: what a draw does instead of resizing and flipping; boxes are then those of what is
            left of the masks, where there are masks.
        open_url: opens images whose path contains `://`.
    """

    max_size_px: int
    channel_order: str
    masks: str = ""
    flip_indices: tuple[int, ...] | None = None
    learning: bool = True
    jitter: LargeScaleJitter | None = None
    open_url: OpenURL | None = None

    def __call__(self, record: Record, draw: Any) -> Sample:
        """Read one image and change it and its objects.

        Raises:
            DataError: the image cannot be read or is not of the size its annotation says, or a
                mask is of the wrong kind.
        """
        image = read_image(record["file_name"], self.open_url)
        check_size(record, image.size[::-1])
        planes, moved = self._changed(image, draw)
        sample = _sample(record, planes)
        if self.learning:
            sample.update(self._objects(record, moved))
        return sample

    def _changed(self, image: Image.Image, draw: Any) -> tuple[Tensor, Moved]:
        """(3, H, W), and what happened."""
        width, height = image.size
        if self.jitter is not None:
            jittered = self.jitter.changes((height, width), draw)
            pixels = jittered.transforms.apply_image(np.asarray(image))
            return _planes(pixels, self.channel_order), jittered
        size = resized_size((height, width), draw.short_edge_px, self.max_size_px)
        if draw.short_edge_px:
            image = image.resize(size[::-1], Image.Resampling.BILINEAR)
        # Band by band: twice as fast as whole pixels that are put in this order afterwards.
        bands = bytearray().join(image.tobytes("raw", band) for band in self.channel_order)
        planes = torch.frombuffer(bands, dtype=torch.uint8).view(3, *size)
        flipped = _FLIPPED[draw.flip]
        transforms = TransformList([Resize((height, width), size), *flips(draw.flip, size)])
        moved = Moved(transforms, size, draw.flip)
        return planes.flip(flipped) if flipped else planes, moved

    def _objects(self, record: Record, moved: Moved) -> Sample:
        """Boxes, classes, masks and keypoints of what is no crowd and has an area."""
        objects = [item for item in record["annotations"] if not item.get("iscrowd", 0)]
        learned: dict[str, Any] = {
            "boxes": torch.as_tensor(_boxes(objects, moved), dtype=torch.float32),
            "classes": torch.tensor([item["category_id"] for item in objects], dtype=torch.int64),
        }
        if self.flip_indices is not None:
            points = [_keypoints(item, moved, self.flip_indices) for item in objects]
            shape = (len(objects), len(self.flip_indices), 3)
            learned["keypoints"] = torch.as_tensor(np.array(points).reshape(shape)).float()
        polygons: list[list[NDArray[np.float64]]] = []
        if self.masks == "bitmask":
            bitmaps = np.zeros((len(objects), *moved.size), dtype=bool)
            for bitmap, item in zip(bitmaps, objects, strict=True):
                bitmap[:] = _bitmap(item["segmentation"], moved)
            learned["masks"] = torch.from_numpy(bitmaps)
        elif self.masks:
            polygons = [_only_polygons(item["segmentation"], moved, record) for item in objects]
        if self.jitter is not None and self.masks:
            bitmasks = self.masks == "bitmask"
            boxes = boxes_of_bitmaps(learned["masks"]) if bitmasks else boxes_of_polygons(polygons)
            learned["boxes"] = boxes
        keep = nonempty(learned["boxes"], 1e-5)
        if self.masks == "bitmask":
            keep &= learned["masks"].flatten(1).any(dim=1)
        kept: Any = {name: values[keep] for name, values in learned.items()}
        if self.masks == "polygon":
            kept["masks"] = [own for own, good in zip(polygons, keep, strict=True) if good]
        return kept


@dataclass(frozen=True)
class LabelMapper:
    """A record and its sampled changes -> a sample for a segmenter; None: the image as it is."""

    augmentation: sem_seg.Augmentation
    channel_order: str
    open_url: OpenURL | None = None

    def __call__(self, record: Record, draw: sem_seg.Draw | None) -> Sample:
        """Read one image, and its labels if it is to be changed.

        Raises:
            DataError: one cannot be read, or is not of the size that the record says.
        """
        # With its colors in the model's order, because the crop's padding is.
        pixels = np.asarray(read_image(record["file_name"], self.open_url))
        check_size(record, pixels.shape[:2])
        if draw is None:
            return _sample(record, _planes(pixels, self.channel_order))
        if self.channel_order == "BGR":
            pixels = pixels[..., ::-1]
        labels = read_labels(record["sem_seg_file_name"], self.open_url)
        pixels, labels = self.augmentation.apply(np.ascontiguousarray(pixels), labels, draw)
        sample = _sample(record, _planes(pixels, "RGB"))  # as it is
        return sample | {"sem_seg": torch.as_tensor(labels.astype("int64"))}


@dataclass(frozen=True)
class SeededMapper:
    """A mapper that samples from the random streams of its process, made a function of a seed.

    Deviation: a sample depends neither on the worker that makes it nor on those that were made
    before, as in Detectron2, whose mappers these are.
    """

    mapper: Callable[[Record], Sample]
    open_url: OpenURL | None = None

    def __call__(self, record: Record, seed: int) -> Sample:
        """Map one record, in training with what it samples from `seed`.

        Raises:
            DataError: the image cannot be read or is not of the size that the record says.
        """
        path = record["file_name"]
        check_size(record, image_size(path, open_url=self.open_url)[::-1])
        with private_random():
            seed_all(seed)
            try:
                return self.mapper(record)
            except Exception:  # Pillow raises many kinds
                read_image(path, self.open_url)  # says what is wrong, if it is the image
                raise


def draw_seed(rng: np.random.RandomState) -> int:
    """Sample the seed of a `SeededMapper`."""
    return int(rng.randint(2**32, dtype=np.uint32))


def flip_indices(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> tuple[int, ...]:
    """The keypoint at each place after a horizontal flip, which exchanges `pairs`."""
    other = dict(pairs) | {right: left for left, right in pairs}
    return tuple(names.index(other.get(name, name)) for name in names)


def _sample(record: Record, image: Tensor) -> Sample:
    """Return the image with what its record has, but for what is learned."""
    sample: Any = {key: value for key, value in record.items() if key not in _LEARNED}
    return sample | {"image": image}


def _planes(pixels: NDArray[np.uint8], channel_order: str) -> Tensor:
    """(H, W, 3) → (3, H, W)."""
    if channel_order == "BGR":
        pixels = pixels[..., ::-1]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _boxes(objects: Sequence[dict[str, Any]], moved: Moved) -> NDArray[np.float64]:
    """Return the boxes (R, 4), clipped to the image.

    A box of four integers stays one, as in Detectron2: resizing truncates its corners.
    """
    boxes = np.empty((len(objects), 4))
    whole = np.array([all(type(v) is int for v in item["bbox"]) for item in objects], dtype=bool)
    for chosen, dtype in ((whole, np.int64), (~whole, np.float64)):
        rows = np.flatnonzero(chosen).tolist()
        corners = np.array([_corners(objects[row]) for row in rows], dtype=dtype)
        corners = moved(corners.reshape(-1, 2, 2))
        boxes[rows] = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
    return boxes.clip(0, moved.size[::-1] * 2)


def _corners(item: dict[str, Any]) -> Sequence[float]:
    """Return (x1, y1, x2, y2); of fractions from width and height in single precision.

    The dtypes are those of BoxMode.convert: one fraction among four numbers makes all float32.
    """
    if item["bbox_mode"] == _XYXY:
        return item["bbox"]
    box = np.array(item["bbox"])
    x, y, width, height = box if box.dtype.kind == "i" else box.astype(np.float32)
    return [x, y, x + width, y + height]


def _polygons(shape: Sequence[Any], moved: Moved) -> list[NDArray[np.float64]]:
    """Of one object: x0, y0, x1, y1, ... each; whole numbers stay whole, as in Detectron2."""
    parts = moved.polygons([np.array(part).reshape(-1, 2) for part in shape])
    return [part.reshape(-1).astype(np.float64) for part in parts]


def _only_polygons(shape: Any, moved: Moved, record: Record) -> list[NDArray[np.float64]]:
    if not isinstance(shape, list):
        raise DataError(
            f"{record['file_name']}: has a mask in run lengths, not in polygons; set "
            "INPUT.MASK_FORMAT bitmask"
        )
    return _polygons(shape, moved)


def _bitmap(shape: Any, moved: Moved) -> NDArray[np.bool_]:
    """(H, W) of one object in polygons or run lengths."""
    if isinstance(shape, list):
        return draw_polygons(_polygons(shape, moved), moved.size)
    return moved.bitmap(mask_util.decode(shape)).astype(bool)


def _keypoints(item: dict[str, Any], moved: Moved, flipped: tuple[int, ...]) -> NDArray[np.float64]:
    """(number, 3): x, y and visibility; all 0 where there is none or it is outside."""
    points = np.array(item["keypoints"], dtype=np.float64).reshape(-1, 3)
    points[:, :2] = moved(points[:, :2])
    x, y = points[:, :2].T
    outside = (x < 0) | (y < 0) | (x > moved.size[1]) | (y > moved.size[0])
    points[outside, 2] = 0
    if moved.flip == "horizontal":
        points = points[list(flipped)]
    points[points[:, 2] == 0] = 0
    return points
