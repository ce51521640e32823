"""COCO's and LVIS's average precision of boxes, masks and keypoints.

COCO: hotcoco if installed, which is compiled and gives pycocotools' precisions bitwise, else
pycocotools; the metrics are those of Detectron2's `COCOEvaluator`
(detectron2/evaluation/coco_evaluation.py). LVIS: hotcoco, because LVIS's own package requires a
numpy from before 2023; equal to it and to Detectron2's `LVISEvaluator`.

T: IoU thresholds. R: recalls. K: categories. A: area ranges. M: limits on the detections.
"""

import contextlib
import importlib
import importlib.util
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from fvcore.common.config import CfgNode

from detection.datasets.base import XYXY_ABS, Split, require_package
from detection.datasets.coco import PERSON_KEYPOINTS
from detection.datasets.coco_json import Json, read_annotations, repair
from detection.evaluation.base import EVALUATORS, Evaluator, Metric, Prediction
from detection.evaluation.coco_matches import Detections, detections, extract
from detection.evaluation.matches import COCO, LVIS, THRESHOLDS, Matches, MatchFile, write_matches
from detection.evaluation.predictions import Row, coco_rows, encode_mask, write_coco
from moco.common.errors import UserError

COCO_KEYPOINTS = 17
RECALLS = np.linspace(0, 1, 101)
MAX_DETECTIONS = 100  # per class and image, in COCO's metric
COCO_MAX_KEYPOINTS = 20  # per class and image, in COCO's metric of keypoints
LVIS_MAX_DETECTIONS = 300  # per image
LVIS_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "APr", "APc", "APf")
# Kind → the field of a result that the metric compares.
_FIELDS = {"bbox": "bbox", "segm": "segmentation", "keypoints": "keypoints"}

# Keys that the packages read; hotcoco refuses some values of other keys, which no metric uses.
_KEYS = {
    "images": (
        "id", "file_name", "height", "width", "neg_category_ids", "not_exhaustive_category_ids",
    ),
    "annotations": (
        "id", "image_id", "category_id", "bbox", "area", "iscrowd", "segmentation", "keypoints",
        "num_keypoints",
    ),
    "categories": ("id", "name", "frequency", "keypoints"),
}  # fmt: skip

_log = logging.getLogger(__name__)


@dataclass
class _InstanceResults:
    """Base of the evaluators of results in COCO's format.

    Attributes:
        split: Name of the split and of the prediction file.
        annotations: Path or content of the annotations, which the metric reads repaired.
        category_ids: Contiguous id → the annotations' id.
        class_names: Class names by contiguous id.
        kinds: Kinds that are evaluated: bbox, segm, keypoints.
        folder: Folder of the prediction file.
        images: Ids of the images of a part; None if all images are evaluated.
        rows: Results in COCO's format.
        package: Package that computes the metric, hotcoco or pycocotools.
        metric: Name of the metric in match records.
        per_image: Maximum number of detections per image; None if it is limited per class only.
    """

    split: str
    annotations: str | dict[str, Any]
    category_ids: Mapping[int, int]
    class_names: Sequence[str]
    kinds: Sequence[str]
    folder: Path
    images: frozenset[str] | None = None
    rows: list[Row] = field(default_factory=list)
    package: str = field(default_factory=lambda: _coco_package())
    metric: ClassVar[str] = COCO
    per_image: ClassVar[int | None] = None

    def add(self, record: dict[str, Any], prediction: Prediction) -> None:
        """Add one image's instances; raise ValueError if a field of `kinds` is missing."""
        rows = coco_rows(record["image_id"], prediction, self.category_ids)
        for kind in self.kinds:
            if rows and _FIELDS[kind] not in rows[0]:
                raise ValueError(
                    f"{self.split}: the engine returned no {_FIELDS[kind]} for {kind} AP"
                )
        self.rows += rows

    def extend(self, other: Self) -> None:
        """Append the results that another process collected."""
        self.rows += other.rows

    def evaluate(self) -> dict[str, float]:
        """Write predictions and matches; return metrics by canonical name, 0..100 or NaN.

        Deviation: without any prediction the AP is 0 if there are objects. Detectron2 reports NaN,
        and a mean over seeds would leave out the worst ones.
        """
        write_coco(self.folder, self.split, self.rows)
        metrics: dict[str, float] = {}
        matches = {}
        content = metric_annotations(self.annotations, self.images, masked="segm" in self.kinds)
        with _quiet():
            truth = self._truth(content)
            found = detections(self.rows, content, self.per_image)
            for kind in self.kinds:
                nothing = [_unmatchable(content, kind)]
                evaluation = self._evaluation(truth, self._results(kind) or nothing, kind)
                values = self._values(truth, evaluation, kind)
                metrics |= {f"{kind}/{name}": value for name, value in values.items()}
                matches[kind] = self._matches(truth, evaluation, found, kind, nothing)
        images = tuple(map(str, found.image_ids.tolist()))
        write_matches(self.folder, MatchFile(self.metric, images, matches))
        return metrics

    def _matches(
        self, truth: Any, evaluation: Any, found: Detections, kind: str, nothing: list[Row]
    ) -> Matches:
        counted = found.counted & (found.ranks < evaluation.params.maxDets[-1])
        chosen = np.arange(len(self.rows))
        if self.package == "hotcoco":
            chosen = np.flatnonzero(counted & found.annotated)
            results = self._results(kind)
            rows = [results[i] for i in chosen.tolist()] or nothing
            evaluation = self._evaluation(truth, rows, kind)
            params = evaluation.params
            everything = params.areaRng[params.areaRngLbl.index("all")]
            params.areaRng, params.areaRngLbl = [everything], ["all"]
            evaluation.evaluate()
        return extract(evaluation, found, chosen, counted)

    def _truth(self, content: Json) -> Any:
        raise NotImplementedError

    def _evaluation(self, truth: Any, rows: list[Row], kind: str) -> Any:
        """Construct the package's `COCOeval`, without evaluating."""
        raise NotImplementedError

    def _values(self, truth: Any, evaluation: Any, kind: str) -> dict[str, float]:
        raise NotImplementedError

    def _results(self, kind: str) -> list[Row]:
        """Return the results for the metric of `kind`; copies, because pycocotools modifies them.

        Masks come without boxes: with a box, the metric would use the box's area as the instance's
        and assign it to another size range.
        """
        left_out = {"bbox": "segmentation", "segm": "bbox", "keypoints": "segmentation"}[kind]
        return [{k: v for k, v in row.items() if k != left_out} for row in self.rows]


@dataclass
class COCOEvaluator(_InstanceResults):
    """Evaluator of COCO's metric.

    Attributes:
        oks_sigmas: One per keypoint; if empty, COCO's own 17.
        max_detections: Maximum number of boxes and masks of a class in an image that count.
    """

    oks_sigmas: Sequence[float] = ()
    max_detections: int = MAX_DETECTIONS

    def _truth(self, content: Json) -> Any:
        return load_truth(self.package, content)

    def _evaluation(self, truth: Any, rows: list[Row], kind: str) -> Any:
        evaluation = coco_eval(self.package)(truth, truth.loadRes(rows), kind)
        if self.max_detections != MAX_DETECTIONS and kind != "keypoints":
            evaluation.params.maxDets = [1, 10, self.max_detections]
        if kind == "keypoints" and self.oks_sigmas:
            evaluation.params.kpt_oks_sigmas = np.array(self.oks_sigmas)
        return evaluation

    def _values(self, truth: Any, evaluation: Any, kind: str) -> dict[str, float]:
        params = evaluation.params
        evaluation.evaluate()
        evaluation.accumulate()
        # (T, R, K, A, M), -1 where undefined
        precision = np.asarray(evaluation.eval["precision"])

        # Slices as in pycocotools' and Detectron2's summaries, so that numpy adds in their order.
        index, last = params.areaRngLbl.index, [len(params.maxDets) - 1]
        values = {"AP": _mean(precision[:, :, :, [index("all")], last])}
        for threshold in (0.5, 0.75):
            at = precision[np.where(threshold == np.asarray(params.iouThrs))[0]]
            values[f"AP{threshold * 100:.0f}"] = _mean(at[:, :, :, [index("all")], last])
        for area in _areas(kind):
            values[f"AP{area[0]}"] = _mean(precision[:, :, :, [index(area)], last])
        if len(self.class_names) > 1:
            contiguous = {dataset_id: own for own, dataset_id in self.category_ids.items()}
            for k, category_id in enumerate(sorted(truth.getCatIds())):
                name = self.class_names[contiguous[category_id]]
                values[f"AP-{name}"] = _mean(precision[:, :, k, 0, -1])
        return values


@dataclass
class LVISEvaluator(_InstanceResults):
    """Evaluator of LVIS's metric, which ignores categories that were not annotated in an image."""

    metric: ClassVar[str] = LVIS
    per_image: ClassVar[int | None] = LVIS_MAX_DETECTIONS

    def _truth(self, content: Json) -> Any:
        import hotcoco

        return hotcoco.LVIS(content)

    def _evaluation(self, truth: Any, rows: list[Row], kind: str) -> Any:
        import hotcoco

        found = hotcoco.LVISResults(truth, rows, max_dets=self.per_image)
        return hotcoco.LVISEval(truth, found, kind)

    def _values(self, truth: Any, evaluation: Any, kind: str) -> dict[str, float]:
        evaluation.run()
        values = evaluation.get_results()
        return {n: 100 * float(values[n]) if values[n] >= 0 else np.nan for n in LVIS_METRICS}


def _unmatchable(content: Mapping[str, Any], kind: str) -> Row:
    """Return a detection that no object can match, for packages that accept no empty list."""
    image, category = content["images"][0], content["categories"][0]
    row = {"image_id": image["id"], "category_id": category["id"], "score": 0.0}
    if kind == "segm":
        empty = np.zeros((image["height"], image["width"]), dtype=bool)
        return {**row, "segmentation": encode_mask(empty)}
    if kind == "keypoints":
        lengths = (len(item["keypoints"]) for item in content["annotations"] if "keypoints" in item)
        return {**row, "keypoints": [-1e6, -1e6, 1.0] * (next(lengths, 3 * COCO_KEYPOINTS) // 3)}
    return {**row, "bbox": [-9.0, -9.0, 1.0, 1.0]}


def _areas(kind: str) -> tuple[str, ...]:
    return ("medium", "large") if kind == "keypoints" else ("small", "medium", "large")


def installed_packages() -> tuple[str, ...]:
    """Return the packages that can compute COCO's metric, the preferred one first."""
    return tuple(name for name in ("hotcoco", "pycocotools") if importlib.util.find_spec(name))


def _coco_package() -> str:
    """Return the package that computes COCO's metric; both give equal results."""
    return installed_packages()[0]


def load_truth(package: str, content: Json) -> Any:
    """Return a package's `COCO` object of annotations that `metric_annotations` returned."""
    if package == "hotcoco":
        import hotcoco

        return hotcoco.COCO(content)
    from pycocotools.coco import COCO

    truth = COCO()
    truth.dataset = content
    truth.createIndex()
    return truth


def coco_eval(package: str) -> Any:
    """Return a package's class of COCO's metric."""
    module = importlib.import_module("hotcoco" if package == "hotcoco" else "pycocotools.cocoeval")
    return module.COCOeval


def metric_annotations(
    source: str | Json, images: frozenset[str] | None = None, *, masked: bool = False
) -> Json:
    """Return repaired annotations with the keys that the metrics' packages read.

    Args:
        source: Path or content of the annotations, see `annotations_of`.
        images: Ids of the images of a part; None for all.
        masked: Leave out objects without a mask, as `with_masks` does.
    """
    whole = (read_annotations(source) if isinstance(source, str) else repair(source)).content
    content: Json = {
        kind: [{key: row[key] for key in keys if key in row} for row in whole[kind]]
        for kind, keys in _KEYS.items()
    }
    for row in content["categories"]:
        names = row.get("keypoints", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            del row["keypoints"]
    if masked:
        content["annotations"] = [a for a in content["annotations"] if a.get("segmentation")]
    if images is not None:
        content["images"] = [i for i in content["images"] if str(i["id"]) in images]
        content["annotations"] = [a for a in content["annotations"] if str(a["image_id"]) in images]
    return {"info": {}, "licenses": [], **content}


def split_annotations(split: Split) -> str | Json:
    """Return the path of a split's annotations or, without a file, content made of the records."""
    if "json_file" in split.metadata:
        return str(split.metadata["json_file"])
    categories = split.metadata["thing_dataset_id_to_contiguous_id"].items()
    ids = {index: category_id for category_id, index in categories}
    objects = [(record, item) for record in split.records for item in record["annotations"]]
    return {
        "images": [
            {
                "id": record["image_id"],
                # hotcoco refuses names that are not UTF-8; no package opens the file.
                "file_name": os.fsencode(record["file_name"]).decode("utf-8", "replace"),
                "height": record["height"],
                "width": record["width"],
            }
            for record in split.records
        ],
        "annotations": [
            {
                "id": number,
                "image_id": record["image_id"],
                "category_id": ids[item["category_id"]],
                "bbox": _xywh(item),
                "segmentation": item.get("segmentation", []),
                "iscrowd": item.get("iscrowd", 0),
            }
            for number, (record, item) in enumerate(objects, start=1)
        ],
        "categories": [{"id": ids[i], "name": name} for i, name in enumerate(split.classes)],
    }


def _xywh(item: Mapping[str, Any]) -> list[float]:
    left, top, right, bottom = box = list(item["bbox"])
    return [left, top, right - left, bottom - top] if item["bbox_mode"] == XYXY_ABS else box


def summarize(matches: Matches) -> dict[str, float]:
    """Compute AP, AP50 and AP75 over all sizes; NaN without objects.

    Bitwise identical to `COCOEvaluator`; LVIS's are equal up to rounding, because what its metric
    leaves out is ignored in the matches or not among them.

    The 101-point interpolation is pycocotools' (`COCOeval.accumulate`).
    """
    objects = np.bincount(matches.object_classes)
    precision = np.full((THRESHOLDS, len(RECALLS), len(objects)), -1.0)  # (T, R, K)
    for class_id in np.flatnonzero(objects).tolist():
        tp, fp = matches.counts(class_id)  # (D, T)
        recall = tp / objects[class_id]
        envelope = np.maximum.accumulate((tp / (fp + tp + np.spacing(1)))[::-1], axis=0)[::-1]
        for t in range(THRESHOLDS):
            at = np.searchsorted(recall[:, t], RECALLS, side="left")
            precision[t, :, class_id] = np.append(envelope[:, t], 0.0)[at]
    return {"AP": _mean(precision), "AP50": _mean(precision[[0]]), "AP75": _mean(precision[[5]])}


def _mean(precision: Any) -> float:
    """Average the defined precisions, 0..100; NaN if there are none."""
    defined = precision[precision > -1]
    return float(np.mean(defined) * 100) if defined.size else float("nan")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect what the packages print to the log at debug level."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in filter(None, printed.getvalue().splitlines()):
            _log.debug(line)


@EVALUATORS.register()
def coco(cfg: CfgNode) -> Metric:
    """Return COCO's metric: AP of boxes and, if the model predicts them, masks and keypoints."""
    kinds = _boxes_and_masks(cfg)
    if cfg.MODEL.KEYPOINT_ON:
        kinds += ("keypoints",)

    def build(split: Split, folder: Path) -> Evaluator:
        arguments = _arguments(split, kinds)
        sigmas = tuple(cfg.TEST.KEYPOINT_OKS_SIGMAS) if "keypoints" in kinds else ()
        names = tuple(split.metadata["keypoint_names"]) if "keypoints" in kinds else ()
        annotated = len(names)
        if annotated and not sigmas and names != PERSON_KEYPOINTS:
            raise UserError(
                f"TEST.KEYPOINT_OKS_SIGMAS: {split.name} has keypoints of its own; set {annotated} "
                "numbers, one per keypoint, because COCO's are for its persons' keypoints"
            )
        if annotated and annotated != (len(sigmas) or COCO_KEYPOINTS):
            raise UserError(
                f"TEST.KEYPOINT_OKS_SIGMAS: got {len(sigmas) or 'the 17 of COCO'}, expected "
                f"{annotated}, one per keypoint of {split.name}"
            )
        most = cfg.TEST.COCO_MAX_DETECTIONS
        return COCOEvaluator(**arguments, folder=folder, oks_sigmas=sigmas, max_detections=most)

    return Metric(kinds, build, _coco_package())


@EVALUATORS.register()
def lvis(cfg: CfgNode) -> Metric:
    """Return LVIS's metric: AP of boxes and, if the model predicts them, masks."""
    kinds = _boxes_and_masks(cfg)

    def build(split: Split, folder: Path) -> Evaluator:
        require_package("hotcoco", "metrics", f"{split.name}: the metric needs")
        return LVISEvaluator(**_arguments(split, kinds), folder=folder)

    return Metric(kinds, build, "hotcoco")


def _boxes_and_masks(cfg: CfgNode) -> tuple[str, ...]:
    return ("bbox", "segm") if cfg.MODEL.MASK_ON else ("bbox",)


def _arguments(split: Split, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of an evaluator; raise UserError if objects lack masks or keypoints."""
    for kind, key, annotated in (
        ("segm", "MODEL.MASK_ON", split.has_masks),
        ("keypoints", "MODEL.KEYPOINT_ON", split.has_keypoints),
    ):
        if kind in kinds and not annotated:
            raise UserError(
                f"{split.name}: not every object has annotations for {kind}; correct them or set "
                f"{key} False"
            )
    contiguous = split.metadata["thing_dataset_id_to_contiguous_id"]
    return {
        "split": split.name,
        "annotations": split_annotations(split),
        "category_ids": {index: category_id for category_id, index in contiguous.items()},
        "class_names": split.classes,
        "kinds": kinds,
        "images": split.images,
    }
