"""VOC and COCO tasks on real pictures, unmodified but for sizes and durations."""

import json
import math

import pytest

from tests.detection.test_d2_tasks import run
from tests.oracles.real_voc import with_links

pytestmark = pytest.mark.usefixtures("detectron2")

TASKS = (
    "voc/faster_rcnn_R_50_C4_9k",
    "voc/faster_rcnn_R_50_dilated_C5_24k",
    "voc/fcn16s_R_50_30k",
    "coco/mask_rcnn_R_50_FPN_1x",
    "coco/mask_rcnn_R_50_C4_1x",
)
# The real pictures have VOC2007's splits only.
SPLITS = {
    "voc/faster_rcnn_R_50_dilated_C5_24k": ("voc_2007_trainval", "voc_2007_test"),
    "voc/fcn16s_R_50_30k": ("voc_2007_sem_seg_trainval", "voc_2007_sem_seg_test"),
}
NUM_TEST = {"voc/": 78, "coco": 100}


@pytest.fixture(scope="module")
def real_root(shared_data, tmp_path_factory):
    """VOC2007 and COCO under one folder, as $DETECTRON2_DATASETS has them."""
    root = tmp_path_factory.mktemp("real")
    with_links(shared_data / "VOC2007", root / "VOC2007")
    (root / "coco").symlink_to(shared_data / "coco")
    return root


@pytest.mark.parametrize("task", TASKS)
def test_a_task_on_real_pictures(task, real_root, narrow_r50_file, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(real_root))
    train, test = SPLITS.get(task, (None, None))
    opts = [] if train is None else ["DATASETS.TRAIN", (train,), "DATASETS.TEST", (test,)]
    record = run(task, narrow_r50_file, tmp_path / "run", *opts)
    assert (record.status, record.iterations) == ("done", 2)
    main = "sem_seg/mIoU" if "fcn16s" in task else "bbox/AP"
    value = record.metrics[main]
    assert value is not None and math.isfinite(value) and 0 <= value < 50
    if main == "bbox/AP":  # every test picture was looked at: no score is too low to be kept
        (path,) = (tmp_path / "run" / "inference").glob("*.json")
        content = json.loads(path.read_text())
        found = content["predictions"] if "voc" in task else content
        assert len({prediction["image_id"] for prediction in found}) == NUM_TEST[task[:4]]
