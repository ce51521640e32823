"""Label maps of semantic segmentation: PNG files whose pixel values are class ids."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from detection.datasets.base import Record, Split
from detection.datasets.images import OpenURL, opened
from detection.datasets.layout import image_size
from moco.common.errors import DataError
from moco.data.decode import FORMATS

_SAMPLE = 32  # label maps whose values are checked before training


def read_labels(path: Path | str, open_url: OpenURL | None = None) -> NDArray[np.uint8]:
    """Read class ids (H, W) as stored: gray value, or index into the palette and never its color.

    Raises:
        DataError: the file is missing, damaged, or has neither 8-bit gray nor palette pixels.
    """
    try:
        with opened(str(path), open_url) as file, Image.open(file, formats=FORMATS) as image:
            mode = image.mode
            labels = np.array(image)  # never convert("L"): of a palette it would keep the colors
    except Exception as error:  # Pillow raises many kinds, all mean the same to the user
        raise DataError(f"{path}: not a label map or damaged ({error})") from error
    if mode not in ("L", "P"):
        raise DataError(
            f"{path}: got an image of mode {mode}, expected class ids as 8-bit gray (L) or "
            "palette (P) pixels"
        )
    return labels


def semantic_split(
    name: str,
    classes: tuple[str, ...],
    ignored: int,
    records: Sequence[Record],
    metadata: dict[str, Any],
) -> Split:
    """A split of label maps, of which all headers and a sample of the labels are checked.

    Raises:
        DataError: a label map that is no image, has another size than its image or odd labels.
    """
    digest = hashlib.sha256()
    for record in records:
        path, image = record["sem_seg_file_name"], os.path.basename(record["file_name"])
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        size, wanted = image_size(path), (record["width"], record["height"])
        if size != wanted:
            raise DataError(
                f"{path}: {size[0]}x{size[1]} contradicts {image}, which is {wanted[0]}x{wanted[1]}"
            )
        digest.update(f"{image} {size}\n".encode())
        digest.update(hashlib.sha256(raw).digest())
    check_labels(records, len(classes), ignored)
    return Split(
        name=name,
        evaluator_type="sem_seg",
        classes=classes,
        records=tuple(records),
        annotations_sha256=digest.hexdigest(),
        metadata=metadata | {"stuff_classes": list(classes), "ignore_label": ignored},
    )


def check_labels(
    records: Sequence[Record], num_classes: int, ignored: int, *, everything: bool = False
) -> None:
    """The labels are 0..num_classes - 1 or `ignored`, in an evenly spread sample or everywhere.

    Raises:
        DataError: names the first label map with another label, or with colors instead of labels.
    """
    step = 1 if everything else max(1, len(records) // _SAMPLE)
    for record in records[::step]:
        path = record["sem_seg_file_name"]
        values = np.unique(read_labels(path))
        odd = values[(values >= num_classes) & (values != ignored)]
        if odd.size:
            raise DataError(
                f"{path}: label {odd[0]}, expected 0..{num_classes - 1} or {ignored}; labels are "
                "palette indices, not colors or gray values"
            )
