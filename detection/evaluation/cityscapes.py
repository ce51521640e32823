"""Cityscapes' average precision of instance masks, by cityscapesscripts.

Equal to Detectron2's `CityscapesInstanceEvaluator` (detectron2/evaluation/
cityscapes_evaluation.py). The package compares files, so masks are written into a temporary folder.
It predates numpy 2.4, so the functions that it misses are patched while it runs.
"""

import copy
import importlib
import tempfile
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from fvcore.common.config import CfgNode
from PIL import Image

from detection.datasets.base import Split, require_package
from detection.evaluation.base import EVALUATORS, Evaluator, Metric, Prediction
from detection.evaluation.predictions import Row, coco_rows, write_coco
from moco.common.errors import UserError

_METRIC = "cityscapesscripts.evaluation.evalInstanceLevelSemanticLabeling"


@dataclass
class CityscapesEvaluator:
    """Evaluator of Cityscapes' instances: segm/AP, AP50 and AP-<class>, 0..100.

    Attributes:
        split: Name of the split and of the prediction file.
        class_names: Cityscapes' names of the things, by contiguous id.
        truth: `file_name` of every image of the split → file with its instance ids.
        folder: Folder of the prediction file.
        rows: Predictions in COCO's format, by `file_name`.
    """

    split: str
    class_names: Sequence[str]
    truth: Mapping[str, str]
    folder: Path
    rows: dict[str, list[Row]] = field(default_factory=dict)

    def add(self, record: dict[str, Any], prediction: Prediction) -> None:
        """Add one image's instances; raise ValueError if they have no masks."""
        from cityscapesscripts.helpers.labels import name2label

        label_ids = {i: name2label[name].id for i, name in enumerate(self.class_names)}
        rows = coco_rows(record["image_id"], prediction, label_ids)
        if rows and "segmentation" not in rows[0]:
            raise ValueError(f"{self.split}: the engine returned no masks for segm AP")
        self.rows[record["file_name"]] = rows

    def extend(self, other: Self) -> None:
        """Add the images that another process collected."""
        self.rows |= other.rows

    def evaluate(self) -> dict[str, float]:
        """Write and evaluate the predictions; raise ValueError if an image was not added."""
        if missing := self.truth.keys() - self.rows.keys():
            raise ValueError(f"{self.split}: no prediction for {len(missing)} images")
        write_coco(self.folder, self.split, [row for file in self.truth for row in self.rows[file]])
        metric = importlib.import_module(_METRIC)
        with tempfile.TemporaryDirectory(prefix="cityscapes-") as name:
            folder = Path(name).resolve()
            lists = [self._write(folder, i, self.rows[file]) for i, file in enumerate(self.truth)]
            truths = [str(Path(file).resolve()) for file in self.truth.values()]
            args = copy.copy(metric.args)
            args.predictionPath, args.predictionWalk = str(folder), None
            args.gtInstancesFile = str(folder / "gtInstances.json")
            args.JSONOutput, args.quiet, args.colorized = False, True, False
            with _patched_for_numpy(metric), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
                result = metric.evaluateImgLists(lists, truths, args)
        averages = result["averages"]
        metrics = {"segm/AP": averages["allAp"], "segm/AP50": averages["allAp50%"]}
        for class_name in self.class_names:
            metrics[f"segm/AP-{class_name}"] = averages["classes"][class_name]["ap"]
        return {name: float(100 * value) for name, value in metrics.items()}

    def _write(self, folder: Path, index: int, rows: Sequence[Row]) -> str:
        """Write one image's masks as PNG files; return the path of the text file listing them."""
        from pycocotools import mask as mask_util

        lines = []
        for number, row in enumerate(rows):
            png = folder / f"{index}_{number}.png"
            mask = mask_util.decode(row["segmentation"])
            Image.fromarray(mask * np.uint8(255)).save(png, compress_level=1)
            lines.append(f"{png.name} {row['category_id']} {row['score']!r}\n")
        path = folder / f"{index}.txt"
        path.write_text("".join(lines), encoding="utf-8")
        return str(path)


@contextmanager
def _patched_for_numpy(metric: Any) -> Iterator[None]:
    """Patch the package's module for today's numpy, and disable its dump of the matches.

    `np.in1d` no longer exists. The dump would be written into the working directory, and fails on
    numpy's numbers. If all detections of a class are inside its groups, none counts, and the
    package takes the last element of an empty `cumsum`; a sum of 0 gives the AP of 0.
    """
    numpy, dump = metric.np, metric.writeDict2JSON
    changes = {
        "in1d": lambda array, values: np.isin(np.ravel(array), values),
        "cumsum": lambda array: np.cumsum(array) if len(array) else np.zeros(1),
    }
    metric.np = types.SimpleNamespace(**(vars(np) | changes))
    metric.writeDict2JSON = lambda content, path: None
    try:
        yield
    finally:
        metric.np, metric.writeDict2JSON = numpy, dump


@EVALUATORS.register()
def cityscapes_instance(cfg: CfgNode) -> Metric:
    """Return the metric of instances: the AP of masks."""

    def build(split: Split, folder: Path) -> Evaluator:
        if not cfg.MODEL.MASK_ON:
            raise UserError(f"{split.name} is evaluated by masks: MODEL.MASK_ON must be True")
        require_package("cityscapesscripts", "cityscapes", f"{split.name}: the metric needs")
        return CityscapesEvaluator(split.name, split.classes, split.truth, folder)

    return Metric(("segm",), build)
