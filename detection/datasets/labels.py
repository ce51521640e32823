"""Label maps of semantic segmentation: PNG files whose pixel values are class ids."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from detection.datasets.base import Record, Split
from detection.datasets.files import OpenURL, image_size, open_image_file, read_content
from moco.common.errors import DataError
from moco.data.decode import FORMATS

_SAMPLE = 32  # label maps whose values are checked before training
IGNORED = 255  # label of pixels that have none; in ADE20k after 0 has become that


def read_labels(path: Path | str, open_url: OpenURL | None = None) -> NDArray[np.uint8]:
    """Read a label map's class ids (H, W): gray values, or palette indices, never colors.

    Raises:
        DataError: If the file is missing, damaged, or has neither 8-bit gray nor palette pixels.
    """
    try:
        with (
            open_image_file(str(path), open_url) as file,
            Image.open(file, formats=FORMATS) as image,
        ):
            mode = image.mode
            labels = np.array(image)  # convert("L") would turn palettes into gray
    except Exception as error:  # Pillow raises many types of errors
        raise DataError(f"{path}: not a label map or damaged ({error})") from error
    if mode not in ("L", "P"):
        raise DataError(
            f"{path}: got an image of mode {mode}, expected class ids as 8-bit gray (L) or "
            "palette (P) pixels"
        )
    return labels


def read_record_labels(
    record: Mapping[str, Any], open_url: OpenURL | None = None
) -> NDArray[np.uint8]:
    """Read the class ids (H, W) of a record.

    If the label map counts classes from `record["first_label"]`, lower values become 255.

    Raises:
        DataError: See `read_labels`.
    """
    labels = read_labels(record["sem_seg_file_name"], open_url)
    # 0 - 1 wraps to 255 in uint8.
    return labels - np.uint8(first) if (first := record.get("first_label", 0)) else labels


def semantic_split(
    name: str,
    classes: tuple[str, ...],
    records: Sequence[Record],
    metadata: dict[str, Any] | None = None,
) -> Split:
    """Build a split of semantic segmentation; check all headers and a sample of the label maps.

    Raises:
        DataError: If a label map is no image, is not of its image's size, or has invalid labels.
    """
    digest = hashlib.sha256()
    for record in records:
        path, image = record["sem_seg_file_name"], os.path.basename(record["file_name"])
        raw = read_content(path)
        size, wanted = image_size(path), (record["width"], record["height"])
        if size != wanted:
            raise DataError(
                f"{path}: {size[0]}x{size[1]} contradicts {image}, which is {wanted[0]}x{wanted[1]}"
            )
        digest.update(f"{image} {size}\n".encode())
        digest.update(hashlib.sha256(raw).digest())
    check_labels(records, len(classes), IGNORED)
    return Split(
        name=name,
        evaluator_type="sem_seg",
        classes=classes,
        records=tuple(records),
        annotations_sha256=digest.hexdigest(),
        metadata={**(metadata or {}), "stuff_classes": list(classes), "ignore_label": IGNORED},
    )


def semantic_record(image: str, label: str, size: tuple[int, int], **more: Any) -> Record:
    """Return the record of an image and its label map; `size` is (width, height)."""
    width, height = size
    names = {"file_name": image, "sem_seg_file_name": label}
    return {**names, "height": height, "width": width, **more}


def check_labels(
    records: Sequence[Record], num_classes: int, ignored: int, *, everything: bool = False
) -> None:
    """Check that labels are 0..num_classes - 1 or `ignored`.

    Args:
        records: Records with `sem_seg_file_name`.
        num_classes: Number of classes.
        ignored: Label that is ignored.
        everything: Check all label maps instead of an evenly spread sample.

    Raises:
        DataError: If a label map has another label, or colors; names the first one.
    """
    step = 1 if everything else max(1, len(records) // _SAMPLE)
    for record in records[::step]:
        path = record["sem_seg_file_name"]
        first = record.get("first_label", 0)
        values = np.unique(read_record_labels(record))
        odd = values[(values >= num_classes) & (values != ignored)]
        if odd.size:
            last, other = first + num_classes - 1, (first + ignored) % 256
            raise DataError(
                f"{path}: label {first + odd[0]}, expected {first}..{last} or {other}; labels are "
                "palette indices, not colors or gray values"
            )
