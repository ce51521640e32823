"""Match records of COCO's and LVIS's metrics, extracted from pycocotools or hotcoco.

Both return an evaluation as Python lists, which takes hotcoco many times longer than evaluating. So
it evaluates again only the detections of classes that have an object in their image; the matches of
the others follow from the annotations.

D: detections, T: IoU thresholds, G: objects that count.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detection.datasets.base import gc_disabled
from detection.evaluation.matches import THRESHOLDS, Matches

Ints = NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Detections:
    """Detections of a metric, shared by all kinds. A cell is a pair of image and class.

    Attributes:
        image_ids: Image ids of the annotations, ascending.
        category_ids: Category ids of the annotations, ascending.
        cells: (D,) index of the image · number of classes + index of the class.
        scores: (D,)
        ranks: (D,) rank by score within the cell, from 0.
        annotated: (D,) True if the cell has an object.
        counted: (D,) False if LVIS's metric leaves the detection out.
    """

    image_ids: Ints
    category_ids: Ints
    cells: Ints
    scores: NDArray[np.float64]
    ranks: Ints
    annotated: NDArray[np.bool_]
    counted: NDArray[np.bool_]


def detections(
    rows: Sequence[Mapping[str, Any]], content: Mapping[str, Any], per_image: int | None = None
) -> Detections:
    """Assign results in COCO's format to cells, and find the ones that count.

    Args:
        rows: Results in COCO's format.
        content: Content of the file of annotations.
        per_image: LVIS's limit on the detections of an image; None for COCO's metric, which counts
            every class in every image. LVIS's counts the classes that an image has objects of or
            was verified to have none of (Gupta et al. 2019, section 2).
    """
    image_ids, category_ids = (
        np.array(sorted(each["id"] for each in content[name])) for name in ("images", "categories")
    )

    def cells_of(parts: Iterable[Mapping[str, Any]]) -> Ints:
        pairs = [(part["image_id"], part["category_id"]) for part in parts]
        if not pairs:
            return np.empty(0, np.int64)
        images, categories = zip(*pairs, strict=True)
        first = np.searchsorted(image_ids, images) * len(category_ids)
        return first + np.searchsorted(category_ids, categories)

    own, scores = cells_of(rows), np.array([row["score"] for row in rows])
    annotated = np.isin(own, cells_of(content["annotations"]))
    counted = np.ones(len(own), bool)
    if per_image is not None:
        negative = cells_of(
            {"image_id": image["id"], "category_id": category}
            for image in content["images"]
            for category in image["neg_category_ids"]
        )
        counted = annotated | np.isin(own, negative)
        counted &= _ranks(own // len(category_ids), scores) < per_image
    ranks = _ranks(own, scores)
    return Detections(image_ids, category_ids, own, scores, ranks, annotated, counted)


def _ranks(groups: Ints, scores: NDArray[np.float64]) -> Ints:
    """Return the rank (D,) by score within the group; ties keep their order, as in pycocotools."""
    order = np.lexsort((-scores, groups))
    ordered, ranks = groups[order], np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return ranks


def extract(evaluation: Any, found: Detections, at: Ints, counted: NDArray[np.bool_]) -> Matches:
    """Extract the matches with objects of all sizes.

    Args:
        evaluation: A `COCOeval` of either package after `evaluate`.
        found: All detections.
        at: Indices of the evaluated detections in `found`; the package numbers them from 1.
        counted: (D,) True for the detections that belong to the result.
    """
    params = evaluation.params
    everything = list(params.areaRng[params.areaRngLbl.index("all")])
    true, ignored = np.zeros((2, len(found.scores), THRESHOLDS), bool)
    with gc_disabled():
        cells = [
            cell
            for cell in evaluation.evalImgs
            if cell is not None and len(cell["gtIds"]) and list(cell["aRng"]) == everything
        ]
        # pycocotools treats a match with the object of id 0 as none.
        findable = [
            [not skip and (number or "gtMatched" in cell) for skip, number in _objects(cell)]
            for cell in cells
        ]
        for t in range(THRESHOLDS):
            of_objects = (cell["gtMatches"][t] for cell in cells)
            ids = [
                number
                for numbers, counts in zip(of_objects, findable, strict=True)
                for number, count in zip(numbers, counts, strict=True)
                if number and count
            ]
            true[at[np.array(ids, np.int64) - 1], t] = True
        hard = [cell for cell in cells if any(any(row) for row in cell["dtIgnore"])]
        ids = list(chain.from_iterable(cell["dtIds"] for cell in hard))
        ignored[at[np.array(ids, np.int64) - 1]] = _flags([cell["dtIgnore"] for cell in hard])
        objects = [sum(not skip for skip, _ in _objects(cell)) for cell in cells]
        pairs = [(cell["category_id"], cell["image_id"]) for cell in cells]
        del cells, hard
    categories, images = zip(*pairs, strict=True) if pairs else ((), ())
    object_classes = np.repeat(np.searchsorted(found.category_ids, categories), objects)
    object_images = np.repeat(np.searchsorted(found.image_ids, images), objects)
    by_class = np.lexsort((object_images, object_classes))
    detection_images, classes = np.divmod(found.cells, len(found.category_ids))
    # Ties are in the order of the images.
    order = np.lexsort((found.ranks, detection_images, -found.scores, classes))
    order = order[counted[order]]
    return Matches(
        classes=classes[order],
        images=detection_images[order],
        scores=found.scores[order],
        true=true[order],
        ignored=ignored[order],
        object_classes=object_classes[by_class],
        object_images=object_images[by_class],
    )


def _objects(cell: Mapping[str, Any]) -> Iterator[tuple[bool, int]]:
    """Return (is ignored, id) of each object of a cell."""
    return zip(cell["gtIgnore"], cell["gtIds"], strict=True)


def _flags(parts: Sequence[Any]) -> Any:
    """Concatenate the flags (T, d) of each cell to (D, T), bool."""
    rows = (list(chain.from_iterable(part[t] for part in parts)) for t in range(THRESHOLDS))
    return np.array(list(rows), dtype=bool).T
