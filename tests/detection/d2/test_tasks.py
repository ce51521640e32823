"""Every task file: built, trained for two iterations, evaluated, recorded; in both engines alike.

The data is generated in each dataset's own layout (tests/oracles/small_tasks.py). Without
Detectron2 the embedded engine's runs remain.
"""

import re
from pathlib import Path

import pytest
import torch

from detection.train_net import main
from moco.common.cfgnode import load_cfg
from moco.common.run import RunRecord, read_record
from tests.detection.conftest import ROOT, task_files
from tests.oracles.small_tasks import ENGINES, assert_same_run, run_both

RPN = ("proposal_generator.rpn_head",)
NEW_C4 = (*RPN, "roi_heads.box_predictor", "roi_heads.res5.norm")
NEW_FPN = (*RPN, "backbone.fpn_lateral", "backbone.fpn_output", "roi_heads.box_head",
           "roi_heads.box_predictor")  # fmt: skip
NEW_FPN_MASK = (*NEW_FPN, "roi_heads.mask_head")
NEW_RETINANET = (
    "backbone.fpn_lateral",
    "backbone.fpn_output",
    "backbone.top_block",
    "head.cls_subnet",
    "head.bbox_subnet",
    "head.cls_score",
    "head.bbox_pred",
)
NEW_FCN = ("sem_seg_head.head.convs", "sem_seg_head.head.predictor")
NEW_UPERNET = ("pooled", "bottleneck", "laterals", "outputs", "fuse", "predictor", "auxiliary")
# Task → the layers that start at random. Everything else comes from the weights.
NEW_LAYERS = {
    "voc/faster_rcnn_R_50_C4_24k": NEW_C4,
    "voc/faster_rcnn_R_50_dilated_C5_24k": (
        *RPN, "backbone.reduce", "roi_heads.box_head", "roi_heads.box_predictor",
    ),
    "voc/fcn16s_R_50_30k": NEW_FCN,
    "voc/upernet_R_50_40k": tuple(f"sem_seg_head.{part}" for part in NEW_UPERNET),
    "coco/mask_rcnn_R_50_C4_1x": (*NEW_C4, "roi_heads.mask_head"),
    "coco/mask_rcnn_R_50_FPN_1x_frozen": NEW_FPN_MASK,
    "voc/faster_rcnn_R_50_C4_24k_frozen_to_res4": NEW_C4,
    "coco/mask_rcnn_R_50_FPN_1x": NEW_FPN_MASK,
    "coco/mask_rcnn_R_50_FPN_1x_SparK": NEW_FPN_MASK,
    "coco/mask_rcnn_R_50_FPN_1x_4conv1fc": NEW_FPN_MASK,
    "coco/retinanet_R_50_FPN_90k": NEW_RETINANET,
    "coco/keypoint_rcnn_R_50_FPN_2x": (*NEW_FPN, "roi_heads.keypoint_head"),
    "coco/densepose_rcnn_R_50_FPN_s1x": (
        *NEW_FPN, "roi_heads.densepose_head", "roi_heads.densepose_predictor",
    ),
    "lvis/mask_rcnn_R_50_FPN_1x": NEW_FPN_MASK,
    "lvis/mask_rcnn_R_50_FPN_1x_v1": NEW_FPN_MASK,
    "lvis/mask_rcnn_R_50_FPN_1x_v1_4conv1fc": NEW_FPN_MASK,
    "lvis/mask_rcnn_R_50_FPN_1x_frozen_bn": NEW_FPN_MASK,
    "cityscapes/mask_rcnn_R_50_FPN_24k": NEW_FPN_MASK,
    "cityscapes/fcn16s_R_50_90k": NEW_FCN,
    "cityscapes/upernet_R_50_80k": tuple(f"sem_seg_head.{part}" for part in NEW_UPERNET),
}  # fmt: skip
# Kinds of metric by what the file's name says.
METRICS = {
    "voc/faster": {"bbox/AP", "bbox/AP50", "bbox/AP75"},
    "coco/mask": {"bbox/AP", "bbox/AP50", "bbox/AP75", "segm/AP", "segm/AP50", "segm/AP75"},
    "coco/retinanet": {"bbox/AP", "bbox/AP50", "bbox/AP75"},
    "coco/keypoint": {"bbox/AP", "keypoints/AP", "keypoints/AP50", "keypoints/AP75"},
    "coco/densepose": {"bbox/AP", "densepose/AP", "densepose/AP50", "densepose/AP75"},
    "lvis": {"bbox/AP", "segm/AP", "segm/AP50", "segm/AP75", "segm/APr", "segm/APc", "segm/APf"},
    "cityscapes/mask": {"segm/AP", "segm/AP50"},
    "fcn16s": {"sem_seg/mIoU", "sem_seg/pACC"},
    "upernet": {"sem_seg/mIoU", "sem_seg/pACC"},
}
# Those of ConvNeXts, Swins, vision transformers, timm and ADE20k are in parity/.
_IN_PARITY = "_small$|timm|ConvNeXt|Swin|ViT|ade20k/"
PAPER_TASKS = [path for path in task_files() if not re.search(_IN_PARITY, path)]
# One of each network, dataset and metric; the others differ in their schedules.
_OTHER_SCHEDULES = r"_lr|_9k|_12k|_180k|C4_2x|FPN_2x|_6x"
DISTINCT = [t for t in PAPER_TASKS if "keypoint" in t or not re.search(_OTHER_SCHEDULES, t)]
OF_DETECTRON2 = "coco/densepose_rcnn_R_50_FPN_s1x"  # alone


# Parameters in millions at full width, which the runs below do not have.
PARAMETERS = {
    "voc/faster_rcnn_R_50_C4": 33.2,
    "voc/faster_rcnn_R_50_dilated_C5": 62.2,
    "voc/fcn16s": 28.8,
    "voc/upernet": 66.4,
    "coco/mask_rcnn_R_50_C4": 36.0,
    "coco/mask_rcnn_R_50_FPN": 44.4,
    "coco/mask_rcnn_R_50_FPN_1x_SparK": 45.7,  # four convolutions for one of two layers of the head
    "coco/mask_rcnn_R_50_FPN_1x_4conv1fc": 45.7,
    "coco/mask_rcnn_R_50_FPN_2x_4conv1fc": 45.7,
    "coco/retinanet": 38.0,
    "coco/keypoint": 59.2,
    "lvis/mask_rcnn_R_50_FPN": 50.6,
    "lvis/mask_rcnn_R_50_FPN_1x_v1": 50.4,
    "lvis/mask_rcnn_R_50_FPN_1x_v1_4conv1fc": 51.8,
    "cityscapes/mask_rcnn": 44.0,
    "cityscapes/fcn16s": 28.8,
    "cityscapes/upernet": 66.4,
}


def test_the_table_names_every_distinct_task_file():
    assert set(NEW_LAYERS) == set(DISTINCT)


@pytest.mark.detectron2
@pytest.mark.parametrize("task", [task for task in PAPER_TASKS if task != OF_DETECTRON2])
def test_the_model_at_full_width(task, detectron2):
    """The numbers of parameters are those of Detectron2's models with the paper's layers added."""
    from detectron2.modeling import build_model

    from detection.d2.config import transfer_defaults
    from detection.modeling.norms import with_process_norms

    file, opts = ROOT / "configs" / f"{task}.yaml", ["MODEL.DEVICE", "meta"]
    with torch.device("meta"):
        model = build_model(with_process_norms(load_cfg(transfer_defaults(), file, opts), 1))
    expected = PARAMETERS[max((part for part in PARAMETERS if part in task), key=len)]
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(expected, abs=0.1)
    frozen = task.endswith(("1x_frozen", "frozen_to_res4"))
    assert all(p.requires_grad for p in model.parameters()) != frozen


@pytest.mark.detectron2
@pytest.mark.slow
@pytest.mark.parametrize("task", DISTINCT)
def test_a_task_trains_and_evaluates_equally_on_detectron2(task, task_run, detectron2, tmp_path):
    if task == OF_DETECTRON2:
        pytest.importorskip("densepose")
        from tests.oracles.tiny_body import write_body

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FVCORE_CACHE", str(write_body(tmp_path / "cache")))
            check_run(task, *task_run("detectron2", task))
        return
    check_run(task, *task_run("detectron2", task))
    assert_same_run(*(task_run(engine, task)[0] for engine in ENGINES))


IN_BOTH = [task for task in DISTINCT if task != OF_DETECTRON2]


@pytest.mark.slow
@pytest.mark.parametrize("task", IN_BOTH)
def test_a_task_trains_and_evaluates_on_the_embedded_engine(task, task_run):
    check_run(task, *task_run("embedded", task))


@pytest.mark.detectron2
@pytest.mark.slow
@pytest.mark.parametrize("cascade", [False, True], ids=["standard", "cascade"])
def test_both_engines_have_the_same_federated_loss(
    cascade, narrow_r50_file, data_of, tmp_path, detectron2
):
    """The classes that it samples come from the training split; evaluated again from the file."""
    task = "lvis/mask_rcnn_R_50_FPN_1x_v1"
    data_of(task)
    keys = {"USE_SIGMOID_CE": True, "USE_FED_LOSS": True, "FED_LOSS_NUM_CLASSES": 9}
    opts = [item for key, value in keys.items() for item in (f"MODEL.ROI_BOX_HEAD.{key}", value)]
    if cascade:
        opts += ["MODEL.ROI_HEADS.NAME", "CascadeROIHeads"]
        opts += ["MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", True]
    record = run_both(task, narrow_r50_file, tmp_path, *opts)
    for engine in ENGINES:
        folder = tmp_path / engine
        assert main(["--engine", engine, "--eval-only", "--resume", "OUTPUT_DIR", str(folder)]) == 0
        assert read_record(folder / "inference" / "run.json").metrics == record.metrics
    state = torch.load(folder / "model_final.pth", weights_only=True)["model"]
    name = f"roi_heads.box_predictor.{'2.' if cascade else ''}fed_loss_cls_weights"
    assert state[name].pow(2).round().int().tolist() == [1 + i % 5 for i in range(1, 1204)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    ["coco/mask_rcnn_R_50_FPN_1x", "coco/keypoint_rcnn_R_50_FPN_2x", "voc/fcn16s_R_50_30k"],
)
def test_the_embedded_engine_evaluates_and_plots_a_trained_model(task, task_run, data_of, tmp_path):
    """A trained model is evaluated by the config.yaml next to it, with the same numbers."""
    data_of(task)
    folder, trained = task_run("embedded", task)
    argv = ["--engine", "embedded", "--eval-only", "--visualize", "1"]
    opts = ["MODEL.WEIGHTS", folder / "model_final.pth", "OUTPUT_DIR", tmp_path / "again"]
    assert main([*argv, *map(str, opts)]) == 0
    record = read_record(tmp_path / "again" / "inference" / "run.json")
    assert record.metrics == trained.metrics
    assert len(list((tmp_path / "again" / "inference" / "visualize").glob("*.jpg"))) == 1


def check_run(task: str, folder: Path, record: RunRecord) -> None:
    assert (record.status, record.iterations) == ("done", 2)
    (expected,) = [metrics for part, metrics in METRICS.items() if part in task]
    assert set(record.metrics) >= expected
    assert record.recipe is not None
    assert record.coverage is not None and record.coverage["loaded"] == 265  # all of an R50's
    from_scratch = {layer(name) for name in record.coverage["left_at_init"]}
    assert from_scratch == set(NEW_LAYERS[task])
    state = torch.load(folder / "model_final.pth", weights_only=True)["model"]
    assert all(torch.isfinite(value).all() for value in state.values())


def layer(name: str) -> str:
    """`roi_heads.mask_head.deconv.weight` → `roi_heads.mask_head`; numbers of levels go too."""
    parts = name.split(".")
    depth = 3 if parts[:2] in (["roi_heads", "res5"], ["sem_seg_head", "head"]) else 2
    return re.sub(r"\d+$", "", ".".join(parts[:depth]))
