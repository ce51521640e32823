"""Match records of AP, image by image: `inference/matches.npz` next to a run's predictions.

They determine the AP exactly, without model, images and annotations, also for any resample of the
test images (benchmarks/report/bootstrap.py).

The file contains plain arrays: `metric`, `images` and, for each kind (bbox, segm, keypoints), the
fields of `Matches`, with the flags of the thresholds as bits.

D: detections, T: IoU thresholds, G: objects that count, I: images.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detection.evaluation.metrics import MATCHES_NAME, MAX_MATCHES_BYTES
from moco.common.errors import DataError
from moco.common.files import PathLike, atomic_write
from moco.common.limits import CorruptFileError, open_zip, read_part

THRESHOLDS = 10  # .50:.05:.95, also of keypoints' OKS
COCO, LVIS, VOC = "coco", "lvis", "voc_"  # VOC is followed by the year of its metric
KINDS = ("bbox", "segm", "keypoints")
MAX_IMAGES = 200_000
_TYPES = {"classes": "<u2", "images": "<u4", "scores": "<f8", "true": "<u2", "ignored": "<u2"}
_OBJECT_TYPES = {"object_classes": "<u2", "object_images": "<u4"}
_BITS = 1 << np.arange(THRESHOLDS, dtype=np.uint16)


@dataclass(frozen=True, eq=False)
class Matches:
    """Matched detections of one kind, sorted by class, each class by rank.

    Attributes:
        classes: (D,) contiguous ids, ascending.
        images: (D,) indices of images.
        scores: (D,) scores in 0..1, as the metric ranks them.
        true: (D, T) True for true positives.
        ignored: (D, T) True for detections that are neither true nor false positives: of a
            difficult object, a crowd or, in LVIS, a class that is not annotated exhaustively.
        object_classes: (G,) classes of the objects that count.
        object_images: (G,) indices of their images.
    """

    classes: NDArray[np.integer]
    images: NDArray[np.integer]
    scores: NDArray[np.float64]
    true: NDArray[np.bool_]
    ignored: NDArray[np.bool_]
    object_classes: NDArray[np.integer]
    object_images: NDArray[np.integer]

    def of_class(self, class_id: int) -> slice:
        """Return the slice of the detections of a class."""
        return slice(*np.searchsorted(self.classes, [class_id, class_id + 1]).tolist())

    def counts(self, class_id: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Count the true and the false positives of a class up to each rank; (D, T) each."""
        mine = self.of_class(class_id)
        true, false = self.true[mine], ~self.true[mine] & ~self.ignored[mine]
        return np.cumsum(true, 0, np.float64), np.cumsum(false, 0, np.float64)


@dataclass(frozen=True)
class MatchFile:
    """Match records of one evaluation.

    Attributes:
        metric: `coco`, `lvis`, `voc_2007` or `voc_2012`.
        images: Ids of all test images, indexed by `Matches.images`.
        kinds: Kind (bbox, segm, keypoints) → its matches.
    """

    metric: str
    images: tuple[str, ...]
    kinds: Mapping[str, Matches]


def join(parts: Sequence[Mapping[str, Any]]) -> Matches:
    """Concatenate the matches of the classes, in the order of their ids.

    Args:
        parts: `images`, `scores`, `true`, `ignored` and `object_images` of each class.
    """

    def concatenate(name: str, empty: Any) -> Any:
        return np.concatenate([empty, *(part[name] for part in parts)])

    flags, ids = np.empty((0, THRESHOLDS), bool), np.empty(0, np.int64)
    counts = ([len(part[name]) for part in parts] for name in ("scores", "object_images"))
    classes, object_classes = (np.repeat(np.arange(len(parts)), number) for number in counts)
    return Matches(
        classes=classes,
        images=concatenate("images", ids),
        scores=concatenate("scores", np.empty(0)),
        true=concatenate("true", flags),
        ignored=concatenate("ignored", flags),
        object_classes=object_classes,
        object_images=concatenate("object_images", ids),
    )


def write_matches(folder: Path, content: MatchFile) -> None:
    """Write `folder/matches.npz`."""
    arrays: dict[str, Any] = {"metric": np.array([content.metric])}
    arrays["images"] = np.array(content.images, dtype=str)
    for kind, matches in content.kinds.items():
        for name, dtype in (_TYPES | _OBJECT_TYPES).items():
            array = getattr(matches, name)
            array = array @ _BITS if array.ndim == 2 else array
            arrays[f"{kind}.{name}"] = array.astype(dtype)
    atomic_write(folder / MATCHES_NAME, lambda file: np.savez_compressed(file, **arrays))


def parse_matches(content: bytes, name: PathLike) -> MatchFile:
    """Parse the content of a file of match records, which may come from an untrusted source.

    Raises:
        DataError: If the file is damaged or implausibly large; the message starts with `name`.
    """
    try:
        with open_zip(io.BytesIO(content)) as archive:
            parts = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if sum(info.file_size for info in parts.values()) > MAX_MATCHES_BYTES:
                raise CorruptFileError(f"arrays of more than {MAX_MATCHES_BYTES} bytes")
            arrays = {name: _array(read_part(archive, info)) for name, info in parts.items()}
        [metric], images = arrays["metric"].tolist(), arrays["images"]
        if metric not in (COCO, LVIS, f"{VOC}2007", f"{VOC}2012") or images.dtype.kind != "U":
            raise ValueError("unknown metric, or image ids that are not text")
        if len(images) > MAX_IMAGES:
            raise CorruptFileError(f"{len(images)} images, at most {MAX_IMAGES}")
        kinds = {
            kind: _matches({name: arrays[f"{kind}.{name}"] for name in _TYPES | _OBJECT_TYPES})
            for kind in KINDS
            if f"{kind}.scores" in arrays
        }
        for matches in kinds.values():
            for numbers in (matches.images, matches.object_images):
                if np.any(numbers >= len(images)):
                    raise ValueError("an image index beyond the images")
        return MatchFile(metric, tuple(images.tolist()), kinds)
    except Exception as error:  # damaged archives raise many types
        raise DataError(f"{name}: not a file of matches, or damaged ({error})") from error


def _array(content: bytes) -> NDArray[Any]:
    """Parse a one-dimensional array of numbers or texts in NumPy's format, without objects."""
    stream = io.BytesIO(content)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array in another version of its format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    if len(shape) != 1 or dtype.kind not in "fuU":
        raise ValueError(f"an array of {len(shape)} dimensions of {dtype}")
    if math.prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise ValueError("an array that is not as long as declared")
    return np.frombuffer(content, dtype, offset=stream.tell())


def _matches(arrays: Mapping[str, NDArray[Any]]) -> Matches:
    """Build `Matches`; raise ValueError if the arrays contradict each other."""
    for types in (_TYPES, _OBJECT_TYPES):
        if len({len(arrays[name]) for name in types}) != 1:
            raise ValueError("arrays have different lengths")
        if wrong := [name for name, dtype in types.items() if arrays[name].dtype != dtype]:
            raise ValueError(f"{wrong[0]} has the wrong type")
    if not np.isfinite(arrays["scores"]).all():
        raise ValueError("scores are not finite")
    if np.any(np.diff(arrays["classes"].astype(np.int64)) < 0):
        raise ValueError("classes are not sorted")
    flags = {name: (arrays[name][:, None] & _BITS) > 0 for name in ("true", "ignored")}
    return Matches(**{**arrays, **flags})
