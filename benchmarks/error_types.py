"""Analysis of detection errors by TIDE's six types (Bolya et al. 2020, arXiv 2008.08115).

    python -m benchmarks.error_types RUN [RUN ...]

RUN is the OUTPUT_DIR of a finished run, or a folder of several. The analysis reads the run's
predictions (`inference/<split>.json`) and the test annotations on this machine, and needs no model.
It writes `RUN/error_types.json`, which the reports read (benchmarks/report/analysis.py).

Deviation: on VOC the AP50 is COCO's, with 101 recall points instead of 11, and a difficult object
is an ignore region, in which no detection is an error. The numbers equal those of tidecv, TIDE's
own code, if every class has an object and no region is ignored; otherwise tidecv counts ignored
detections as errors, too, and averages over classes that have detections and no object.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moco.common.command import command_parser
from moco.common.errors import echo, run_cli
from moco.common.files import expand_home, read_text

if TYPE_CHECKING:
    from benchmarks.report.records import FinishedRun
    from detection.datasets.base import Split

MATCHED, BACKGROUND = 0.5, 0.1  # TIDE's t_f and t_b: IoU of a match, IoU of the background


def error_types(run: "FinishedRun") -> dict[str, Any]:
    """Compute the number and the cost of each error type of a run.

    Returns:
        `ap50` in 0..100; `delta`, the AP50 points gained if a type is fixed; `counts` by type.

    Raises:
        UserError: If there are no predictions, their dataset is missing or differs from the run's,
            the metric is neither VOC's nor COCO's, or hotcoco is not installed.
    """
    from benchmarks.report.analysis import find_predictions, precision_recall
    from detection.datasets.base import require_package
    from detection.evaluation.coco import MAX_DETECTIONS, metric_annotations, split_annotations

    split, path = find_predictions(run)
    config = run.record.config
    require_package("hotcoco", "metrics", f"{split.name}: the metric needs")
    precision_recall(run)  # raises if the dataset here is not the one that the run was tested on
    import hotcoco

    if split.evaluator_type == "pascal_voc":
        truth, found = _from_voc(split, path)
        annotations = hotcoco.COCO(truth)
    else:
        found = json.loads(read_text(path))
        masked = config.get("MODEL.MASK_ON", False)
        truth = metric_annotations(split_annotations(split), split.images, masked=masked)
        annotations = hotcoco.COCO(truth)
    boxes = [{k: v for k, v in row.items() if k != "segmentation"} for row in found]
    evaluation = hotcoco.COCOeval(annotations, annotations.load_res(boxes), "bbox")
    evaluation.params.maxDets = [config.get("TEST.COCO_MAX_DETECTIONS", MAX_DETECTIONS)]
    evaluation.evaluate()
    tide = evaluation.tide_errors(pos_thr=MATCHED, bg_thr=BACKGROUND)
    names = tide["counts"].keys()  # `delta_ap` also has the totals FP and FN
    return {
        "ap50": round(100 * tide["ap_base"], 6),
        "delta": {name: round(100 * tide["delta_ap"][name], 6) for name in names},
        "counts": dict(tide["counts"]),
    }


def _from_voc(split: "Split", path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return VOC annotations and detections in COCO's format, with 0-based XYWH boxes."""
    from detection.evaluation.predictions import read_voc

    number = {image_id: i for i, image_id in enumerate(split.truth)}
    annotations: list[dict[str, Any]] = []
    for image_id, truth in split.truth.items():
        objects = zip(truth.boxes, truth.classes, truth.difficult, strict=True)
        for (x1, y1, x2, y2), class_id, difficult in objects:  # 1-based, inclusive
            box = [float(x) for x in (x1 - 1, y1 - 1, x2 - x1 + 1, y2 - y1 + 1)]
            own = {"id": len(annotations) + 1, "image_id": number[image_id], "bbox": box}
            own |= {"area": box[2] * box[3], "iscrowd": int(difficult)}
            annotations.append({**own, "category_id": int(class_id)})
    found = [
        {**row, "image_id": number[image_id], "bbox": [x1, y1, x2 - x1, y2 - y1]}
        for image_id, rows in read_voc(path).items()
        for row in rows
        for x1, y1, x2, y2 in [row["bbox"]]
    ]
    images = [
        {"id": i, "width": 0, "height": 0, "file_name": image_id} for image_id, i in number.items()
    ]
    names = [{"id": i, "name": name} for i, name in enumerate(split.classes)]
    return {"images": images, "annotations": annotations, "categories": names}, found


def main(argv: Sequence[str] | None = None) -> None:
    """Analyze the errors of the given runs, and write one file next to each record."""
    args = build_parser().parse_args(argv)
    from benchmarks.report.records import finished_detectors
    from detection.evaluation.metrics import ERRORS_NAME
    from moco.common.files import atomic_write_json

    runs = finished_detectors(args.runs)
    for run in runs:
        found = error_types(run)
        atomic_write_json(run.folder / ERRORS_NAME, {"run": run.digest, **found})
        shown = "  ".join(f"{name} {value:.1f}" for name, value in found["delta"].items())
        echo(f"{run.folder}: AP50 {found['ap50']:.1f}; points gained if fixed: {shown}")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer errors`."""
    parser = command_parser(
        "errors",
        "Classify the errors of finished runs by TIDE's types: class, "
        "localization, both, duplicate, background, missed.",
    )
    parser.add_argument(
        "runs", nargs="+", type=expand_home, metavar="RUN", help="OUTPUT_DIR of a run"
    )
    return parser


if __name__ == "__main__":
    run_cli(main)
