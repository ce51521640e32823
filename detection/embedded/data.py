"""Pictures and boxes for the detector: read, resize, flip, group by shape, batch.

Bit for bit what Detectron2's DatasetMapper, TrainingSampler and AspectRatioGroupedDataset give
under the same NumPy seed. All random numbers are drawn in one place, the plan of batches, in
the order in which Detectron2 draws them without workers. So the batches do not depend on the
number of workers (Detectron2's do), and a run resumes at iteration i by skipping i batches of the
plan, which reads no picture.

Shapes: R boxes (x1, y1, x2, y2) in pixels of the resized picture; sizes are (height, width).
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from detection.datasets.base import Record
from moco.errors import DataError, UserError

# A picture as the detector takes it: "image" (3, H, W) uint8, "boxes" (R, 4), "classes" (R,), and
# the record's "file_name", "image_id", "height", "width".
Sample = dict[str, Any]

_EXIF_ORIENTATION = 274
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MIN_BOX_SIDE_PX = 1e-5
_XYXY = 0  # BoxMode.XYXY_ABS; the readers' other mode is 1, XYWH_ABS
STOP_AFTER_SECONDS = 30


@dataclass(frozen=True)
class Draw:
    """One picture of a batch: which one, its shorter side in pixels (0 = as it is), its flip."""

    index: int
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

    def draw(self, index: int, rng: np.random.RandomState) -> Draw:
        """What happens to one picture; the draws are ResizeShortestEdge's and RandomFlip's."""
        if self.sampling == "range":
            low, high = self.short_edges_px
            short_edge = rng.randint(low, high + 1)
        else:
            short_edge = rng.choice(self.short_edges_px)
        flipped = self.flip != "none" and rng.uniform() < 0.5
        return Draw(index, int(short_edge), self.flip if flipped else "none")


def read_picture(path: str) -> Image.Image:
    """An RGB picture, turned as its EXIF says.

    Raises:
        DataError: missing, truncated, or not a picture.
    """
    try:
        with Image.open(path) as image:
            image.load()
            method = _TRANSPOSE.get(image.getexif().get(_EXIF_ORIENTATION, 1))
            return (image if method is None else image.transpose(method)).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: cannot be read as a picture ({reason}); replace it") from error


def resized_size(size: tuple[int, int], short_edge_px: int, max_size_px: int) -> tuple[int, int]:
    """(height, width) with the given shorter side, unless the longer one would exceed its limit.

    Rounds half up: ResizeShortestEdge.get_output_shape.
    """
    if short_edge_px == 0:
        return size
    height, width = size
    scale = short_edge_px * 1.0 / min(height, width)
    if height < width:
        new_height, new_width = short_edge_px * 1.0, scale * width
    else:
        new_height, new_width = scale * height, short_edge_px * 1.0
    if max(new_height, new_width) > max_size_px:
        scale = max_size_px * 1.0 / max(new_height, new_width)
        new_height, new_width = new_height * scale, new_width * scale
    return int(new_height + 0.5), int(new_width + 0.5)


def load_sample(record: Record, draw: Draw, *, max_size_px: int, channel_order: str) -> Sample:
    """Read one picture and apply a draw to it and to its boxes.

    Args:
        channel_order: "RGB" or "BGR".

    Raises:
        DataError: the picture cannot be read or is not of the size its annotation says.
    """
    image = read_picture(record["file_name"])
    width, height = image.size
    if (height, width) != (record["height"], record["width"]):
        raise DataError(
            f"{record['file_name']}: the picture is {width}x{height}, its annotation says "
            f"{record['width']}x{record['height']}; correct the annotation's size"
        )
    new_height, new_width = resized_size((height, width), draw.short_edge_px, max_size_px)
    if draw.short_edge_px:
        image = image.resize((new_width, new_height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    objects = [item for item in record["annotations"] if not item.get("iscrowd", 0)]
    corners_of = np.array([_corners(item) for item in objects], dtype=np.float64)
    boxes = corners_of.reshape(-1, 2, 2)
    boxes = boxes * (new_width * 1.0 / width, new_height * 1.0 / height)
    if draw.flip == "horizontal":
        pixels, boxes[..., 0] = pixels[:, ::-1], new_width - boxes[..., 0]
    elif draw.flip == "vertical":
        pixels, boxes[..., 1] = pixels[::-1], new_height - boxes[..., 1]
    if channel_order == "BGR":
        pixels = pixels[..., ::-1]
    corners = np.concatenate([boxes.min(axis=1), boxes.max(axis=1)], axis=1).clip(min=0)
    corners = np.minimum(corners, (new_width, new_height, new_width, new_height))
    tensors = _without_empty(
        torch.as_tensor(corners, dtype=torch.float32),
        torch.tensor([item["category_id"] for item in objects], dtype=torch.int64),
    )
    return {
        "image": torch.as_tensor(np.ascontiguousarray(pixels.transpose(2, 0, 1))),
        "boxes": tensors[0],
        "classes": tensors[1],
        **{name: record[name] for name in ("file_name", "image_id", "height", "width")},
    }


def _corners(item: dict[str, Any]) -> Sequence[float]:
    """(x1, y1, x2, y2); from width and height in single precision, as BoxMode.convert."""
    if item["bbox_mode"] == _XYXY:
        return item["bbox"]
    x, y, width, height = np.array(item["bbox"], dtype=np.float32)
    return [x, y, x + width, y + height]


def _without_empty(boxes: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    keep = (boxes[:, 2:] - boxes[:, :2] > _MIN_BOX_SIDE_PX).all(dim=1)
    return boxes[keep], classes[keep]


def with_objects(records: Sequence[Record]) -> list[Record]:
    """The records with an object that is no crowd (DATALOADER.FILTER_EMPTY_ANNOTATIONS)."""
    return [
        record
        for record in records
        if any(not item.get("iscrowd", 0) for item in record["annotations"])
    ]


def shuffled_forever(size: int, seed: int) -> Iterator[int]:
    """Permutations of range(size), one after the other without end: TrainingSampler's stream."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(size, generator=generator).tolist()


def plan_batches(
    records: Sequence[Record],
    augmentation: Augmentation,
    *,
    batch_size: int,
    group_by_shape: bool,
    seed: int,
) -> Iterator[list[Draw]]:
    """Batches of draws without end; with `group_by_shape` wide pictures are not mixed with others.

    A picture that has no partners yet waits for them, as in AspectRatioGroupedDataset.
    """
    rng = np.random.RandomState(seed % 2**32)
    waiting: dict[bool, list[Draw]] = {True: [], False: []}
    for index in shuffled_forever(len(records), seed):
        record = records[index]
        group = waiting[group_by_shape and record["width"] > record["height"]]
        group.append(augmentation.draw(index, rng))
        if len(group) == batch_size:
            yield group.copy()
            group.clear()


class Pictures(Dataset[Any]):
    """Draws -> samples. A picture that cannot be read comes back as the error itself.

    Raised in a worker, the error would reach the user wrapped in that worker's traceback.
    """

    def __init__(self, records: Sequence[Record], max_size_px: int, channel_order: str) -> None:
        self.records, self.max_size_px = records, max_size_px
        self.channel_order = channel_order

    def __getitem__(self, draw: Draw) -> Sample | DataError:
        try:
            return load_sample(
                self.records[draw.index],
                draw,
                max_size_px=self.max_size_px,
                channel_order=self.channel_order,
            )
        except DataError as error:
            return error


def load_batches(
    pictures: Pictures, plan: Iterable[list[Draw]], num_workers: int
) -> Generator[list[Sample]]:
    """Batches of samples in the order of the plan.

    The call itself (not the first batch) draws one number from torch's stream, as every
    DataLoader does and so Detectron2. Close the iterator to end its workers.

    Raises:
        DataError: from the iterator; a picture cannot be read.
    """
    loader = DataLoader(
        pictures,
        batch_sampler=plan,
        num_workers=num_workers,
        collate_fn=list,
        worker_init_fn=_outlive_the_stop_signal,
    )
    return _raising(iter(loader))


def _raising(batches: Iterator[list[Sample | DataError]]) -> Generator[list[Sample]]:
    try:
        for batch in batches:
            for sample in batch:
                if isinstance(sample, DataError):
                    # Not `raise sample`: it would refer to itself through this frame.
                    raise DataError(str(sample))
            yield batch  # type: ignore[misc]
    finally:
        del batches  # ends the workers now, and not when somebody drops the traceback


def _outlive_the_stop_signal(worker: int) -> None:
    """Workers leave their parent time to save, when a scheduler signals all processes at once.

    Not for ever: whoever terminates a worker and waits for its end would wait for ever, too.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(STOP_AFTER_SECONDS))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def training_batches(
    records: Sequence[Record],
    augmentation: Augmentation,
    *,
    max_size_px: int,
    channel_order: str,
    batch_size: int,
    group_by_shape: bool,
    num_workers: int,
    seed: int,
    skip: int = 0,
) -> Generator[list[Sample]]:
    """Training batches without end, from batch number `skip` on.

    Raises:
        UserError: there is no record.
        DataError: a picture cannot be read.
    """
    if not records:
        raise UserError("DATASETS.TRAIN holds no picture with an object; check its annotations")
    plan = plan_batches(
        records,
        augmentation,
        batch_size=batch_size,
        group_by_shape=group_by_shape,
        seed=seed,
    )
    pictures = Pictures(records, max_size_px, channel_order)
    return load_batches(pictures, islice(plan, skip, None), num_workers)


def evaluation_batches(
    records: Sequence[Record],
    *,
    short_edge_px: int,
    max_size_px: int,
    channel_order: str,
    num_workers: int,
) -> Generator[list[Sample]]:
    """Every record once, in order, one picture per batch as in Detectron2 (no padding)."""
    plan = [[Draw(index, short_edge_px)] for index in range(len(records))]
    return load_batches(Pictures(records, max_size_px, channel_order), plan, num_workers)
