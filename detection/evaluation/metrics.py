"""Names and units of results, the same from every engine to every table.

A metric is called `<kind>/<name>` and is in 0..100:

    bbox, segm, keypoints   AP, AP50, AP75, AP-<class>; on COCO and LVIS also APs, APm, APl (small,
                            medium, large), on LVIS APr, APc, APf (rare, common, frequent); on VOC
                            also AP50-<class>, and AP_detectron2, AP50_detectron2,
                            AP75_detectron2 where a class has no object to test on
    densepose               AP, AP50, AP75, APm, APl
    sem_seg                 mIoU, fwIoU, mACC, pACC, IoU-<class>
    linear, finetune        top1, top5: 1-crop accuracy (moco/linear.py, moco/finetune.py)
    knn                     top1 (moco/knn.py)
    bbox_TTA, segm_TTA      with test-time augmentation (TEST.AUG, on Detectron2); not in tables

AP is the mean over IoU .50:.05:.95 (of keypoints: OKS, of densepose: GPS); on VOC of the VOC AP,
elsewhere of the dataset's own. It is the mean over the classes that have an object to test on;
`_detectron2`: over all of them, as Detectron2's VOC metric takes it.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

# What is shown of each kind, kinds in the order of the paper's columns.
HEADLINE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bbox", "segm", "keypoints", "densepose"), ("AP", "AP50", "AP75")),
    "sem_seg": ("mIoU",),
    **dict.fromkeys(("linear", "finetune"), ("top1", "top5")),
    "knn": ("top1",),
}
# What an engine must report: the Cityscapes metric of instances has no AP75.
REQUIRED = {**HEADLINE, "segm": ("AP", "AP50")}
# The match records beside an evaluation's predictions (detection/evaluation/matches.py).
MATCHES_NAME = "matches.npz"
# What `moco-transfer errors` and `robustness` put into a run's folder.
ERRORS_NAME, ROBUSTNESS_NAME, CORRUPTED = "error_types.json", "robustness.json", "corrupted"
MAX_MATCHES_BYTES = 1 << 29  # of all arrays: 20 million detections
# Shown without the kind's name where it is the only one.
_ALONE = {"bbox", "sem_seg", "linear", "finetune", "knn"}
# As in the paper's tables: bounding box, mask, keypoints, dense pose.
_MARKS = {"bbox": "bb", "segm": "mk", "keypoints": "kp", "densepose": "dp"}


def headline_names(names: Collection[str]) -> tuple[str, ...]:
    """What to show of metrics called `names`: of each kind there is what `HEADLINE` has.

    A name that is not `REQUIRED` is left out where it is not among `names`.
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
    """Whether an evaluation with metrics of these names keeps match records.

    VOC's, COCO's and LVIS's do. Cityscapes', of masks alone, does not: of an image its package
    gives overlaps, and what they make of a detection is decided where it averages.
    """
    return any(name.startswith("bbox/") for name in metrics)


def titles(names: Sequence[str]) -> tuple[str, ...]:
    """`AP50^mk` and the like, as the paper's column heads; without the kind where it is plain."""
    kinds = {name.split("/", 1)[0] for name in names}
    plain = len(kinds) == 1 and kinds <= _ALONE
    return tuple(
        short if plain or not _MARKS.get(kind) else f"{short}^{_MARKS[kind]}"
        for kind, short in (name.rsplit("/", 1) for name in names)
    )


def canonical(metrics: Mapping[str, float]) -> dict[str, float]:
    """Keep the metrics of the kinds in `HEADLINE`, under their names.

    DensePose's own evaluators call the AP of the geodesic point similarity (the paper's AP^dp)
    densepose_gps, and write -1 times 100 where there was nothing to measure.
    """
    named = {name.replace("densepose_gps/", "densepose/"): v for name, v in metrics.items()}
    return {
        name: math.nan if value == -100 else value
        for name, value in named.items()
        if name.split("/")[0] in HEADLINE
    }


def for_record(
    metrics: Mapping[str, float], kinds: Sequence[str] = ("bbox",)
) -> tuple[dict[str, float | None], list[str]]:
    """Metrics as a run record stores them, and a note where a number is missing.

    NaN is not JSON and no result: it becomes None. Numbers are rounded to 1e-6.

    Args:
        kinds: what the task must report (keys of `HEADLINE`).

    Raises:
        ValueError: a metric of `REQUIRED` is absent, or any is outside 0..100 (a fault of the
            engine).
    """
    stored: dict[str, float | None] = {}
    for name, value in metrics.items():
        rounded = round(float(value), 6)  # an average of hundreds may end at 100.00000000000003
        if not math.isfinite(value):
            stored[name] = None
        elif 0 <= rounded <= 100:
            stored[name] = rounded
        else:
            raise ValueError(f"{name}: got {value}, expected 0..100")
    required = [f"{kind}/{name}" for kind in kinds for name in REQUIRED[kind]]
    absent = [name for name in required if name not in stored]
    if absent:
        raise ValueError(f"the engine reported no {', '.join(absent)}")
    missing = [name for name, value in stored.items() if value is None]
    notes = [f"not a number, so null: {', '.join(missing)}"] if missing else []
    return stored, notes


def headline(metrics: Mapping[str, float | None]) -> str:
    """`AP 12.30  AP50 30.10  AP75 7.90`, `mIoU 74.40`, or, of several kinds or of one that
    has to be named, `bbox AP 38.90 AP50 59.60 AP75 42.70  segm AP 35.40 …`."""
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
