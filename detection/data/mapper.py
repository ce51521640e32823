"""Mappers from records to samples: an image and its annotations, augmented.

Bitwise identical to Detectron2's DatasetMapper (detectron2/data/dataset_mapper.py) under the same
random numbers, which batches.py samples.

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
from detection.data.random_state import private_random, seed_all
from detection.data.sample import (
    Sample,
    boxes_of_bitmaps,
    boxes_of_polygons,
    draw_polygons,
    nonempty,
)
from detection.data.transforms import AppliedTransforms, LargeScaleJitter, Resize, flips
from detection.datasets.base import Record
from detection.datasets.files import OpenURL, check_size, image_size, read_image
from detection.datasets.labels import read_record_labels
from moco.common.errors import DataError

_FLIPPED: dict[str, tuple[int, ...]] = {"none": (), "horizontal": (2,), "vertical": (1,)}
_LEARNED = ("annotations", "sem_seg_file_name", "first_label")
_XYXY = 0  # BoxMode.XYXY_ABS; the readers' other mode is 1, XYWH_ABS


@dataclass(frozen=True)
class AugmentationParams:
    """Sampled augmentation of an image: its shorter side in px (0 does not resize) and its flip."""

    short_edge_px: int
    flip: str = "none"


@dataclass(frozen=True)
class Augmentation:
    """Random resizing and flipping.

    Attributes:
        short_edges_px: Sizes to choose from, or (lowest, highest) with `sampling` "range".
        sampling: "choice" or "range".
        flip: "horizontal", "vertical" or "none"; applied with probability 1/2.
    """

    short_edges_px: tuple[int, ...]
    sampling: str
    flip: str

    def sample_params(self, rng: np.random.RandomState) -> AugmentationParams:
        """Sample the augmentation of one image, as ResizeShortestEdge and RandomFlip do."""
        if self.sampling == "range":
            low, high = self.short_edges_px
            short_edge = rng.randint(low, high + 1)
        else:
            # Equal to `rng.choice`, in a fifth of its time.
            short_edge = self.short_edges_px[rng.randint(len(self.short_edges_px))]
        flipped = self.flip != "none" and rng.uniform() < 0.5
        return AugmentationParams(int(short_edge), self.flip if flipped else "none")


def resized_size(size: tuple[int, int], short_edge_px: int, max_size_px: int) -> tuple[int, int]:
    """Return (height, width) for a shorter side, reduced if the longer one exceeds its limit.

    Sizes are rounded half up, as in ResizeShortestEdge.get_output_shape.
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
    """Mapper from a record and its sampled augmentation to a sample for a detector.

    Attributes:
        max_size_px: Limit of the longer side.
        channel_order: "RGB" or "BGR".
        masks: "polygon" or "bitmask" (INPUT.MASK_FORMAT), "" for none.
        flip_indices: Order of the keypoints after a horizontal flip; None does not read keypoints.
        learning: Read the annotations.
        jitter: Applied instead of resizing and flipping; with masks, boxes are then computed from
            the cropped masks.
        open_url: Opens images whose path contains `://`.
    """

    max_size_px: int
    channel_order: str
    masks: str = ""
    flip_indices: tuple[int, ...] | None = None
    learning: bool = True
    jitter: LargeScaleJitter | None = None
    open_url: OpenURL | None = None

    def __call__(self, record: Record, params: Any) -> Sample:
        """Read one image and augment it and its objects.

        Raises:
            DataError: If the image cannot be read, its size is not the annotated one, or a mask has
                the wrong format.
        """
        image = read_image(record["file_name"], self.open_url)
        check_size(record, image.size[::-1])
        planes, applied = self._augment(image, params)
        sample = _sample(record, planes)
        if self.learning:
            sample.update(self._objects(record, applied))
        return sample

    def _augment(self, image: Image.Image, params: Any) -> tuple[Tensor, AppliedTransforms]:
        """Return the augmented image (3, H, W) and its transforms."""
        width, height = image.size
        if self.jitter is not None:
            jittered = self.jitter.transforms((height, width), params)
            pixels = jittered.transforms.apply_image(np.asarray(image))
            return _planes(pixels, self.channel_order), jittered
        size = resized_size((height, width), params.short_edge_px, self.max_size_px)
        if params.short_edge_px:
            image = image.resize(size[::-1], Image.Resampling.BILINEAR)
        # Reading band by band is twice as fast as transposing whole pixels afterwards.
        bands = bytearray().join(image.tobytes("raw", band) for band in self.channel_order)
        planes = torch.frombuffer(bands, dtype=torch.uint8).view(3, *size)
        flipped = _FLIPPED[params.flip]
        transforms = TransformList([Resize((height, width), size), *flips(params.flip, size)])
        applied = AppliedTransforms(transforms, size, params.flip)
        return planes.flip(flipped) if flipped else planes, applied

    def _objects(self, record: Record, applied: AppliedTransforms) -> Sample:
        """Return boxes, classes, masks and keypoints of the objects with an area and no crowd."""
        objects = [item for item in record["annotations"] if not item.get("iscrowd", 0)]
        learned: dict[str, Any] = {
            "boxes": torch.as_tensor(_boxes(objects, applied), dtype=torch.float32),
            "classes": torch.tensor([item["category_id"] for item in objects], dtype=torch.int64),
        }
        if self.flip_indices is not None:
            points = [_keypoints(item, applied, self.flip_indices) for item in objects]
            shape = (len(objects), len(self.flip_indices), 3)
            learned["keypoints"] = torch.as_tensor(np.array(points).reshape(shape)).float()
        polygons: list[list[NDArray[np.float64]]] = []
        if self.masks == "bitmask":
            bitmaps = np.zeros((len(objects), *applied.size), dtype=bool)
            for bitmap, item in zip(bitmaps, objects, strict=True):
                bitmap[:] = _bitmap(item["segmentation"], applied)
            learned["masks"] = torch.from_numpy(bitmaps)
        elif self.masks:
            polygons = [_only_polygons(item["segmentation"], applied, record) for item in objects]
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
    """Mapper from a record and its sampled augmentation, if any, to a sample for a segmenter.

    Attributes:
        augmentation: Augmentation of the training.
        channel_order: "RGB" or "BGR".
        open_url: Opens images whose path contains `://`.
        short_edge_px: Shorter side in evaluation; 0 does not resize.
        max_size_px: Limit of the longer side in evaluation.
    """

    augmentation: sem_seg.Augmentation
    channel_order: str
    open_url: OpenURL | None = None
    short_edge_px: int = 0
    max_size_px: int = 0

    def __call__(self, record: Record, params: sem_seg.AugmentationParams | None) -> Sample:
        """Read one image, and in training (`params` is not None) its labels, and augment both.

        Raises:
            DataError: If one of them cannot be read or its size is not the recorded one.
        """
        # Channels are put in the model's order first, because the crop's padding has it.
        image = read_image(record["file_name"], self.open_url)
        size = image.size[::-1]
        check_size(record, size)
        if params is None:
            if self.short_edge_px:
                height, width = resized_size(size, self.short_edge_px, self.max_size_px)
                image = image.resize((width, height), Image.Resampling.BILINEAR)
            return _sample(record, _planes(np.asarray(image), self.channel_order))
        pixels = np.asarray(image)
        if self.channel_order == "BGR":
            pixels = pixels[..., ::-1]
        labels = read_record_labels(record, self.open_url)
        pixels, labels = self.augmentation.apply(np.ascontiguousarray(pixels), labels, params)
        sample = _sample(record, _planes(pixels, "RGB"))  # already in the model's order
        return sample | {"sem_seg": torch.as_tensor(labels.astype("int64"))}


@dataclass(frozen=True)
class SeededMapper:
    """Mapper whose random numbers, taken from the streams of its process, follow from a seed.

    Deviation: a sample depends neither on its worker nor on the samples before it. In Detectron2,
    whose mappers are wrapped here, it does.
    """

    mapper: Callable[[Record], Sample]
    open_url: OpenURL | None = None

    def __call__(self, record: Record, seed: int) -> Sample:
        """Map one record with all random streams seeded by `seed`.

        Raises:
            DataError: If the image cannot be read or its size is not the recorded one.
        """
        path = record["file_name"]
        check_size(record, image_size(path, open_url=self.open_url)[::-1])
        with private_random():
            seed_all(seed)
            try:
                return self.mapper(record)
            except Exception:  # Pillow raises many types of errors
                read_image(path, self.open_url)  # raises DataError if the image is the cause
                raise


def sample_seed(rng: np.random.RandomState) -> int:
    """Sample the seed of a `SeededMapper`."""
    return int(rng.randint(2**32, dtype=np.uint32))


def flip_indices(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> tuple[int, ...]:
    """Return the order of the keypoints after a horizontal flip, which swaps `pairs`."""
    other = dict(pairs) | {right: left for left, right in pairs}
    return tuple(names.index(other.get(name, name)) for name in names)


def _sample(record: Record, image: Tensor) -> Sample:
    """Return the image with the fields of its record, except annotations."""
    sample: Any = {key: value for key, value in record.items() if key not in _LEARNED}
    return sample | {"image": image}


def _planes(pixels: NDArray[np.uint8], channel_order: str) -> Tensor:
    """Convert RGB pixels (H, W, 3) to (3, H, W) in `channel_order`."""
    if channel_order == "BGR":
        pixels = pixels[..., ::-1]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _boxes(objects: Sequence[dict[str, Any]], applied: AppliedTransforms) -> NDArray[np.float64]:
    """Return the boxes (R, 4), clipped to the image.

    As in Detectron2, a box of four integers remains integer: resizing truncates its corners.
    """
    boxes = np.empty((len(objects), 4))
    whole = np.array([all(type(v) is int for v in item["bbox"]) for item in objects], dtype=bool)
    for chosen, dtype in ((whole, np.int64), (~whole, np.float64)):
        rows = np.flatnonzero(chosen).tolist()
        corners = np.array([_corners(objects[row]) for row in rows], dtype=dtype)
        corners = applied(corners.reshape(-1, 2, 2))
        boxes[rows] = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
    return boxes.clip(0, applied.size[::-1] * 2)


def _corners(item: dict[str, Any]) -> Sequence[float]:
    """Return (x1, y1, x2, y2), computed from width and height in fp32 unless all are integers.

    The dtypes are those of BoxMode.convert, where one float among four numbers makes all fp32.
    """
    if item["bbox_mode"] == _XYXY:
        return item["bbox"]
    box = np.array(item["bbox"])
    x, y, width, height = box if box.dtype.kind == "i" else box.astype(np.float32)
    return [x, y, x + width, y + height]


def _polygons(shape: Sequence[Any], applied: AppliedTransforms) -> list[NDArray[np.float64]]:
    """Transform the polygons of one object; as in Detectron2, integers remain integers.

    Each polygon is x0, y0, x1, y1, ...
    """
    parts = applied.polygons([np.array(part).reshape(-1, 2) for part in shape])
    return [part.reshape(-1).astype(np.float64) for part in parts]


def _only_polygons(
    shape: Any, applied: AppliedTransforms, record: Record
) -> list[NDArray[np.float64]]:
    if not isinstance(shape, list):
        raise DataError(
            f"{record['file_name']}: got a run-length encoded mask, expected polygons; set "
            "INPUT.MASK_FORMAT to bitmask"
        )
    return _polygons(shape, applied)


def _bitmap(shape: Any, applied: AppliedTransforms) -> NDArray[np.bool_]:
    """Return the transformed mask (H, W) of one object, from polygons or run lengths."""
    if isinstance(shape, list):
        return draw_polygons(_polygons(shape, applied), applied.size)
    return applied.bitmap(mask_util.decode(shape)).astype(bool)


def _keypoints(
    item: dict[str, Any], applied: AppliedTransforms, flipped: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return x, y and visibility (number, 3); all 0 if a keypoint is unlabeled or outside."""
    points = np.array(item["keypoints"], dtype=np.float64).reshape(-1, 3)
    points[:, :2] = applied(points[:, :2])
    x, y = points[:, :2].T
    outside = (x < 0) | (y < 0) | (x > applied.size[1]) | (y > applied.size[0])
    points[outside, 2] = 0
    if applied.flip == "horizontal":
        points = points[list(flipped)]
    points[points[:, 2] == 0] = 0
    return points
