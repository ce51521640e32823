"""Match records of COCO's and LVIS's metrics, from what pycocotools or hotcoco found.

Both hand out an evaluation as Python lists, which takes hotcoco many times longer than to evaluate.
So it is asked again, about the detections of classes that have an object in their image; what is
said of the others follows from the annotations.

D: detections, T: IoU thresholds, G: objects that count.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detection.datasets.base import uncollected
from detection.evaluation.matches import THRESHOLDS, Matches

Ints = NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Detections:
    """What a metric is given, of all kinds.

    Attributes:
        image_ids, category_ids: of the annotations, ascending.
        cells: (D,) which pair of image and class, as index · number of classes + index.
        scores: (D,)
        ranks: (D,) by score among those of the same cell, from 0.
        annotated: (D,) whether its cell has an object.
        counted: (D,) False where LVIS's metric leaves it out.
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
    """Rows in COCO's format against the annotations.

    Args:
        content: of the file of annotations.
        per_image: LVIS's limit on the detections of an image; None: COCO's metric, which counts
            every class in every image. LVIS's counts those that an image has objects of or was
            checked to have none of (Gupta et al. 2019, section 2).
    """
    image_ids, category_ids = (
        np.array(sorted(each["id"] for each in content[name])) for name in ("images", "categories")
    )

    def cells(images: Sequence[Any], categories: Sequence[Any]) -> Ints:
        found = np.searchsorted(image_ids, images) * len(category_ids)
        return found + np.searchsorted(category_ids, categories)

    def of(parts: Iterable[Mapping[str, Any]]) -> Ints:
        pairs = [(part["image_id"], part["category_id"]) for part in parts]
        return cells(*zip(*pairs, strict=True)) if pairs else np.empty(0, np.int64)

    own, scores = of(rows), np.array([row["score"] for row in rows])
    annotated = np.isin(own, of(content["annotations"]))
    counted = np.ones(len(own), bool)
    if per_image is not None:
        negative = of(
            {"image_id": image["id"], "category_id": category}
            for image in content["images"]
            for category in image["neg_category_ids"]
        )
        counted = annotated | np.isin(own, negative)
        counted &= _ranks(own // len(category_ids), scores) < per_image
    ranks = _ranks(own, scores)
    return Detections(image_ids, category_ids, own, scores, ranks, annotated, counted)


def _ranks(groups: Ints, scores: NDArray[np.float64]) -> Ints:
    """(D,) places in groups by score; equal ones in their order, as pycocotools sorts."""
    order = np.lexsort((-scores, groups))
    ordered, ranks = groups[order], np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return ranks


def extract(evaluation: Any, found: Detections, at: Ints, counted: NDArray[np.bool_]) -> Matches:
    """The matches with objects of all sizes.

    Args:
        evaluation: a `COCOeval` of either package that has evaluated.
        at: which of `found` it was given; it numbers them from 1.
        counted: (D,) which of `found` are in the result.
    """
    params = evaluation.params
    everything = list(params.areaRng[params.areaRngLbl.index("all")])
    true, ignored = np.zeros((2, len(found.scores), THRESHOLDS), bool)
    with uncollected():
        cells = [
            cell
            for cell in evaluation.evalImgs
            if cell is not None and len(cell["gtIds"]) and list(cell["aRng"]) == everything
        ]
        # To pycocotools, a match with the object of id 0 is none.
        findable = [
            [not no and (number or "gtMatched" in cell) for no, number in _objects(cell)]
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
        objects = [sum(not no for no, _ in _objects(cell)) for cell in cells]
        pairs = [(cell["category_id"], cell["image_id"]) for cell in cells]
        del cells, hard
    categories, images = zip(*pairs, strict=True) if pairs else ((), ())
    object_classes = np.repeat(np.searchsorted(found.category_ids, categories), objects)
    object_images = np.repeat(np.searchsorted(found.image_ids, images), objects)
    by_class = np.lexsort((object_images, object_classes))
    detection_images, classes = np.divmod(found.cells, len(found.category_ids))
    # Equal scores in the order of the images.
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
    """Of each object whether it does not count, and its id."""
    return zip(cell["gtIgnore"], cell["gtIds"], strict=True)


def _flags(parts: Sequence[Any]) -> Any:
    """(T, d) of each cell → bool (D, T)."""
    rows = (list(chain.from_iterable(part[t] for part in parts)) for t in range(THRESHOLDS))
    return np.array(list(rows), dtype=bool).T
