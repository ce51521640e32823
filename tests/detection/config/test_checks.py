"""Constraints between keys, and checks of the data."""

import dataclasses

import pytest

from detection.config.checks import (
    check_pooled_norm,
    check_splits,
    check_values,
    highest_learning_rate,
)
from detection.config.task import default_task
from detection.datasets.base import Split
from detection.datasets.coco import flip_pairs
from detection.engine.solver import build_schedule
from detection.modeling.backbones import frozen_random, is_frozen
from moco.common.cfgnode import flatten, load_cfg
from moco.common.errors import UserError
from tests.conftest import ROOT
from tests.oracles import tiny_detector as tiny

LSJ = {"INPUT.LSJ.ENABLED": True}


def test_accepted():
    """Keys that are not used are not checked: the steps of a cosine."""
    cosine = {"SOLVER.LR_SCHEDULER_NAME": "WarmupCosineLR", "SOLVER.STEPS": (50000,)}
    adamw = {"SOLVER.OPTIMIZER": "AdamW", "SOLVER.LR_DECAY": 0.65, "SOLVER.BASE_LR_END": 1e-5}
    check_values(tiny.merge(default_task(), {**cosine, **adamw, **LSJ}))


@pytest.mark.parametrize(
    ("norm", "batch", "processes", "fits"),
    [
        ("SyncBN", 1, 1, False),
        ("SyncBN", 2, 1, True),
        ("SyncBN", 2, 2, True),  # its statistics are those of both
        ("naiveSyncBN", 2, 2, True),
        ("BN", 2, 2, False),
        ("BN", 4, 2, True),
        ("GN", 1, 1, True),
        ("", 1, 1, True),
    ],
)
def test_batch_norm_of_maps_of_one_cell_needs_two_images(norm, batch, processes, fits):
    keys = {"MODEL.SEM_SEG_HEAD.NORM": norm, "SOLVER.IMS_PER_BATCH": batch}
    cfg = tiny.merge(default_task(), {**tiny.R50_UPERNET, **keys})
    if fits:
        check_pooled_norm(cfg, processes)
        return
    message = rf"IMS_PER_BATCH {batch}: got 1 image per process.* set it to {2 * processes} or more"
    with pytest.raises(UserError, match=message):
        check_pooled_norm(cfg, processes)
    check_pooled_norm(tiny.merge(cfg, {"MODEL.SEM_SEG_HEAD.NAME": "LinearHead"}), processes)


@pytest.mark.parametrize(
    "keys",
    [
        {"STEPS": (150,), "WARMUP_ITERS": 40},
        # Detectron2's default warm-up in a short training: the highest rate is 1% of BASE_LR.
        {"STEPS": (140, 180), "WARMUP_ITERS": 1000},
        {"STEPS": (30, 180), "WARMUP_ITERS": 40},
        {"STEPS": (150,), "WARMUP_ITERS": 0},
        {"LR_SCHEDULER_NAME": "WarmupCosineLR", "WARMUP_ITERS": 40},
    ],
)
def test_the_highest_rate_is_that_of_the_schedule(keys):
    solver = default_task().SOLVER
    solver.update({"MAX_ITER": 200, "STEPS": (), "BASE_LR": 0.5} | keys)
    schedule = build_schedule(solver)
    rates = [0.5 * schedule(step / 200) for step in range(200)]
    assert highest_learning_rate(solver) == pytest.approx(max(rates), rel=0.01)


def keypoint_split(names):
    return Split(
        name="own",
        evaluator_type="coco",
        classes=("cat",),
        records=(
            {
                "file_name": "a",
                "annotations": [{"category_id": 0, "bbox": [0, 0, 9, 9], "bbox_mode": 0}],
            },
        ),
        annotations_sha256="0",
        has_keypoints=True,
        metadata={"keypoint_names": names, "keypoint_flip_map": flip_pairs(names)},
    )


def test_keypoints_of_flipped_images_need_pairs():
    cfg = default_task()
    cfg.MODEL.KEYPOINT_ON = True
    good = keypoint_split(("nose", "L_Eye", "R_Eye"))
    note = "own: keypoints that a horizontal flip swaps: L_Eye and R_Eye"
    assert note in check_splits(cfg, (good,), good)
    for names in (("nose", "tail"), ("L_Eye", "R_Eye", "left_ear")):
        split = keypoint_split(names)
        with pytest.raises(UserError, match=r"own: no .* DATASETS.KEYPOINT_FLIP_PAIRS"):
            check_splits(cfg, (split,), split)
        cfg.INPUT.RANDOM_FLIP = "none"
        check_splits(cfg, (split,), split)
        cfg.INPUT.RANDOM_FLIP = "horizontal"


def test_keypoints_of_a_catalog_have_names():
    """Detectron2's mapper needs them at the first image."""
    cfg = default_task()
    cfg.MODEL.KEYPOINT_ON = True
    split = dataclasses.replace(keypoint_split(("nose",)), metadata={}, from_catalog=True)
    with pytest.raises(UserError, match=r"own: .* keypoint_names and keypoint_flip_map"):
        check_splits(cfg, (split,), split)


def test_layers_frozen_at_random_weights_are_noted():
    cfg = default_task()

    def noted():
        return [note.split()[0] for note in frozen_random(flatten(cfg))]

    cfg.MODEL.BACKBONE.FREEZE_AT, cfg.MODEL.RESNETS.NORM = 2, "FrozenBN"
    assert noted() == ["MODEL.BACKBONE.FREEZE_AT", "MODEL.RESNETS.NORM"]
    cfg.MODEL.BACKBONE.NAME = "build_vit_sfp_backbone"
    assert noted() == ["MODEL.BACKBONE.FREEZE_AT"]
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    assert noted() == []


@pytest.mark.parametrize(
    ("file", "frozen"),
    [
        ("coco/mask_rcnn_DINOv3_ViT_B_25ep_frozen", True),
        ("coco/mask_rcnn_R_50_FPN_1x_frozen", True),
        ("coco/mask_rcnn_timm_FPN_1x_frozen", True),
        ("voc/faster_rcnn_R_18_FPN_small", False),
        ("voc/faster_rcnn_R_50_C4_24k_frozen_to_res4", False),
        ("voc/faster_rcnn_ViT_Ti_small", False),
    ],
)
def test_a_backbone_is_frozen_if_all_of_its_parts_are(file, frozen):
    cfg = load_cfg(default_task(), str(ROOT / "configs" / f"{file}.yaml"), [])
    assert is_frozen(flatten(cfg)) is frozen
    assert not is_frozen(flatten(cfg) | {"MODEL.BACKBONE.NAME": "build_a_users_backbone"})
