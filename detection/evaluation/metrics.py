"""Names and units of results, the same from every engine to every table.

A metric is called `<kind>/<name>` and is in 0..100:

    bbox, segm, keypoints   AP, AP50, AP75, AP-<class>; on COCO and LVIS also APs, APm, APl (small,
                            medium, large), on LVIS APr, APc, APf (rare, common, frequent); on VOC
                            also AP50-<class>, and AP_detectron2, AP50_detectron2,
                            AP75_detectron2 where a class has no object to test on
    densepose               AP, AP50, AP75, APm, APl
    sem_seg                 mIoU, fwIoU, mACC, pACC, IoU-<class>; also mIoU_detectron2 where a class
                            does not occur in the label maps that are tested on
    linear, finetune        top1, top5: 1-crop accuracy (moco/linear.py, moco/finetune.py)
    knn                     top1 (moco/knn.py)
    bbox_TTA, segm_TTA      under test-time augmentation (TEST.AUG, on Detectron2); not in tables

`logme` is no metric of a trained model: the LogME of its initial backbone, any finite number.

AP is averaged over IoU .50:.05:.95 (keypoints: OKS, densepose: GPS); on VOC it is the VOC AP,
elsewhere that of the dataset's metric. It is averaged over the classes that have an object to test
on; metrics with the suffix `_detectron2` over all classes, as in Detectron2's VOC metric.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from moco.common.cfgnode import cfg_sha256

# Headline metrics of each kind; kinds are in the order of the paper's columns.
HEADLINE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bbox", "segm", "keypoints", "densepose"), ("AP", "AP50", "AP75")),
    "sem_seg": ("mIoU",),
    **dict.fromkeys(("linear", "finetune"), ("top1", "top5")),
    "knn": ("top1",),
}
# Metrics that an engine must report: the Cityscapes metric of instances has no AP75.
REQUIRED = {**HEADLINE, "segm": ("AP", "AP50")}
LOGME = "logme"  # see detection/evaluation/logme.py
# Detectron2's mean IoU: without the classes that do not occur in the ground truth.
DETECTRON2_MEAN = "mIoU_detectron2"
# File of match records next to the predictions (detection/evaluation/matches.py).
MATCHES_NAME = "matches.npz"
# Files and folder that `moco-transfer errors` and `robustness` write into a run's folder.
ERRORS_NAME, ROBUSTNESS_NAME, CORRUPTED = "error_types.json", "robustness.json", "corrupted"
MAX_MATCHES_BYTES = 1 << 29  # of all arrays: 20 million detections
# Keys that a metric depends on.
_OF_METRIC = (
    *("MODEL.MASK_ON", "MODEL.KEYPOINT_ON", "DATASETS.VOC_METRIC", "DATASETS.VOC_YEAR"),
    *("TEST.DETECTIONS_PER_IMAGE", "TEST.COCO_MAX_DETECTIONS", "TEST.KEYPOINT_OKS_SIGMAS"),
    "TEST.SEM_SEG_REDUCED_SIZE",
)
# Kinds that are shown without their name if there is no other.
_ALONE = {"bbox", "sem_seg", "linear", "finetune", "knn"}
# As in the paper's tables: bounding box, mask, keypoints, dense pose.
_MARKS = {"bbox": "bb", "segm": "mk", "keypoints": "kp", "densepose": "dp"}


def metric_sha256(test: Sequence[str], config: Mapping[str, Any]) -> str:
    """Return the hash of all that a test split's metric depends on besides the predictions.

    Args:
        test: Name of the split and hash of its annotations, as in a run record.
        config: Every key by its full name.
    """
    return cfg_sha256({"test": list(test), **{key: config.get(key) for key in _OF_METRIC}})


def headline_names(names: Collection[str]) -> tuple[str, ...]:
    """Return the headline metrics of the kinds among `names`.

    A metric that is not in `REQUIRED` is left out if it is not among `names`.
    """
    kinds = {name.split("/", 1)[0] for name in names}
    return tuple(
        f"{kind}/{name}"
        for kind, shown in HEADLINE.items()
        if kind in kinds
        for name in shown
        if name in REQUIRED[kind] or f"{kind}/{name}" in names
    )


def has_matches(metrics: Iterable[str]) -> bool:
    """Return whether an evaluation with metrics of these names writes match records.

    VOC's, COCO's and LVIS's do. Cityscapes', with masks only, does not: its package returns
    overlaps per image, and matches detections only while averaging.
    """
    return any(name.startswith("bbox/") for name in metrics)


def titles(names: Sequence[str]) -> tuple[str, ...]:
    """Return column titles as in the paper, `AP50^mk`; a single plain kind has no suffix."""
    kinds = {name.split("/", 1)[0] for name in names}
    plain = len(kinds) == 1 and kinds <= _ALONE
    return tuple(
        short if plain or not _MARKS.get(kind) else f"{short}^{_MARKS[kind]}"
        for kind, short in (name.rsplit("/", 1) for name in names)
    )


def is_evaluation(line: Mapping[str, object]) -> bool:
    """Return whether a line of metrics.json is that of an evaluation."""
    return any(name.split("/")[0] in HEADLINE for name in line)


def canonical(metrics: Mapping[str, float]) -> dict[str, float]:
    """Keep the metrics of the kinds in `HEADLINE`, and `LOGME`, under their names.

    DensePose's own evaluators call the AP of the geodesic point similarity (the paper's AP^dp)
    densepose_gps, and write -1 times 100 where there was nothing to measure.
    """
    named = {name.replace("densepose_gps/", "densepose/"): v for name, v in metrics.items()}
    return {
        name: math.nan if value == -100 else value
        for name, value in named.items()
        if name.split("/")[0] in HEADLINE or name == LOGME
    }


def for_record(
    metrics: Mapping[str, float], kinds: Sequence[str] = ("bbox",)
) -> tuple[dict[str, float | None], list[str]]:
    """Convert metrics to the values of a run record; also return notes on missing numbers.

    NaN is not valid in JSON and becomes None. Numbers are rounded to 1e-6.

    Args:
        metrics: Metrics of an engine by canonical name.
        kinds: Kinds that the task must report, keys of `HEADLINE`.

    Raises:
        ValueError: If a metric of `REQUIRED` is missing, or any but `LOGME` is outside 0..100,
            which is a bug of the engine.
    """
    stored: dict[str, float | None] = {}
    for name, value in metrics.items():
        rounded = round(float(value), 6)  # an average of hundreds may end at 100.00000000000003
        if not math.isfinite(value):
            stored[name] = None
        elif 0 <= rounded <= 100 or name == LOGME:
            stored[name] = rounded
        else:
            raise ValueError(f"{name}: got {value}, expected 0..100")
    required = [f"{kind}/{name}" for kind in kinds for name in REQUIRED[kind]]
    absent = [name for name in required if name not in stored]
    if absent:
        raise ValueError(f"the engine reported no {', '.join(absent)}")
    missing = [name for name, value in stored.items() if value is None]
    notes = [f"not a number, so null: {', '.join(missing)}"] if missing else []
    if f"sem_seg/{DETECTRON2_MEAN}" in metrics:
        notes.append(
            "sem_seg/mIoU: classes are absent from the label maps tested on; one that is predicted "
            "counts as 0, as in mmsegmentation; sem_seg/mIoU_detectron2 leaves all of them out, as "
            "Detectron2 does"
        )
    return stored, notes


def headline(metrics: Mapping[str, float | None]) -> str:
    """Format the headline metrics in one line.

    For example `AP 12.30  AP50 30.10  AP75 7.90` or `mIoU 74.40`; with several kinds, or one that
    must be named, `bbox AP 38.90 AP50 59.60 AP75 42.70  segm AP 35.40 …`.
    """
    groups = {
        kind: " ".join(_shown(metrics, name) for name in names)
        for kind, names in itertools.groupby(headline_names(metrics), lambda n: n.split("/")[0])
    }
    if len(groups) == 1 and groups.keys() <= _ALONE:
        return "  ".join(_shown(metrics, name) for name in headline_names(metrics))
    return "  ".join(f"{kind} {shown}" for kind, shown in groups.items())


def _shown(metrics: Mapping[str, float | None], name: str) -> str:
    value = metrics.get(name)
    return f"{name.split('/', 1)[1]} {'-' if value is None else f'{value:.2f}'}"
