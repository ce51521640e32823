"""Bitwise equality of this project's runs, on both engines, with plain Detectron2.

Compared are images and losses of every iteration and process, and the weights, predictions and
metrics at the end. The data has the edge cases of real datasets (tests/oracles/edge_cases.py).
"Plain" is `DefaultTrainer` (tests/oracles/plain_detectron2.py), except

models               FCN-16s, ConvNeXt, dilated C5 with its reduction, the extra norm of C4 are this
                     project's, Detectron2 has none; its ViT and its Swin have no builder for a
                     configuration, so that the oracle builds its Swin
FCN-16s's mapper     DatasetMapper cannot scale by a ratio and pad labels where it crops
LSJ's augmentations  have no key; those of projects/ViTDet/configs/common, where masks in run
                     lengths are padded with background, not with objects
AdamW                has no key; get_default_optimizer_params with the layers' decay
device_ids=None      DistributedDataParallel takes none on a CPU
norms                SyncBatchNorm refuses a CPU: naiveSyncBN on two processes, BN on one
focal loss           is compiled first: RetinaNet's first call has other bits before
0 workers            with workers its augmentation depends on their number
mappers              of DensePose, crops, proposals, instances with labels of every pixel: its own
                     on both sides, and each image from a seed of its own
EVAL_PERIOD 0        the iterator of a test loader takes a number from torch's stream
PreciseBN            at the end of one process alone: on two, its ranks end with other statistics
COCOeval in Python   the compiled one divides without pycocotools' epsilon: other last bits
metrics              no boundary IoU (with OpenCV) and no accuracy of one class, which we have not
"""

import json
import math
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convert.convert_to_d2 import convert_file
from detection.train_net import main
from moco.common.run import read_record
from tests.oracles import layouts_swin
from tests.oracles.edge_cases import write_edge_cases, write_labels
from tests.oracles.recorder import lines, recorded
from tests.oracles.small_tasks import CONFIGS, ENGINES, SMALL, SMALL_SEM_SEG, SMALL_VIT, logged
from tests.oracles.tiny_coco import write_coco
from tests.oracles.users_modules import CATALOG, PANOPTIC, SPARSE

pytestmark = [
    pytest.mark.detectron2,
    pytest.mark.slow,
    pytest.mark.usefixtures("detectron2", "fresh_cache"),
]

COCO = {"DATASETS.TRAIN": ("coco_2017_train",), "DATASETS.TEST": ("coco_2017_val",)}
EIGHT = {
    "SOLVER.IMS_PER_BATCH": 4,
    "SOLVER.MAX_ITER": 8,
    "SOLVER.STEPS": (5, 7),
    "SOLVER.WARMUP_ITERS": 3,
    "SOLVER.CHECKPOINT_PERIOD": 8,
    "SOLVER.PRECISION": "fp32",
    "SOLVER.AMP.ENABLED": False,
    "DATALOADER.NUM_WORKERS": 0,
    "TEST.EVAL_PERIOD": 0,
    "TEST.PRECISE_BN.NUM_ITER": 3,
    "TEST.DETECTIONS_PER_IMAGE": 20,
    "INPUT.MIN_SIZE_TRAIN": (48, 56, 64),
    "INPUT.MAX_SIZE_TRAIN": 120,
    "INPUT.MIN_SIZE_TEST": 60,
    "INPUT.MAX_SIZE_TEST": 120,
    "SEED": 3,
}
BOXES = {**SMALL, **COCO, **EIGHT}
ADAMW = {"SOLVER.BASE_LR": 1e-3, "SOLVER.OPTIMIZER": "AdamW"}
JITTER = {"INPUT.LSJ.ENABLED": True, "INPUT.LSJ.SIZE": 64, "INPUT.LSJ.SCALE_RANGE": [0.3, 3.0]}
CLIP = {
    "SOLVER.CLIP_GRADIENTS.ENABLED": True,
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": "norm",
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": 0.5,
}
VITDET = {
    **BOXES,
    **SMALL_VIT,
    **ADAMW,
    **JITTER,
    **CLIP,
    "SOLVER.LR_DECAY": 0.7,
    "MODEL.BACKBONE.SQUARE_PAD": 64,
    "MODEL.VIT.WINDOW_SIZE": 3,
    "INPUT.MAX_SIZE_TEST": 64,
}
# Images without any object; with masks Detectron2 needs one in each.
WITH_EMPTY = {"DATALOADER.FILTER_EMPTY_ANNOTATIONS": False}
OF_COCO = {"MODEL.ROI_HEADS.NUM_CLASSES": 80}
CLIPPED = {
    **CLIP,
    "SOLVER.NESTEROV": True,
    "SOLVER.WEIGHT_DECAY_BIAS": 0.0,
    "SOLVER.WEIGHT_DECAY_NORM": 1e-4,
    "SOLVER.BIAS_LR_FACTOR": 2.0,
}
CONVNEXT = {
    **BOXES,
    **ADAMW,
    "MODEL.CONVNEXT.DEPTHS": [1, 1, 3, 1],
    "MODEL.CONVNEXT.DIMS": [8, 12, 16, 24],
}
SWIN = {
    **BOXES,
    **ADAMW,
    "MODEL.SWIN.EMBED_DIM": layouts_swin.WIDTH,
    "MODEL.SWIN.DEPTHS": layouts_swin.DEPTHS,
    "MODEL.SWIN.NUM_HEADS": layouts_swin.HEADS,
    "MODEL.SWIN.WINDOW_SIZE": layouts_swin.WINDOW,
}
SWIN_CASCADE = {
    **SWIN,
    **JITTER,
    "MODEL.BACKBONE.SQUARE_PAD": 64,
    "INPUT.MAX_SIZE_TEST": 64,
}
# Name → task file, keys, and whether the masks are polygons alone or also in run lengths.
ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "c4": ("voc/faster_rcnn_R_50_C4_24k", {**BOXES, **OF_COCO, **WITH_EMPTY}, "polygons"),
    "c4-mask-clipped": ("coco/mask_rcnn_R_50_C4_1x", {**BOXES, **CLIPPED}, "polygons"),
    "c5": (
        "voc/faster_rcnn_R_50_dilated_C5_24k",
        {**BOXES, **OF_COCO, **WITH_EMPTY, "DATALOADER.ASPECT_RATIO_GROUPING": False},
        "polygons",
    ),
    "fpn-mask": ("coco/mask_rcnn_R_50_FPN_1x", BOXES, "polygons"),
    "fpn-mask-bitmasks": (
        "coco/mask_rcnn_R_50_FPN_1x", {**BOXES, "INPUT.MASK_FORMAT": "bitmask"}, "runs"
    ),
    "fpn-adamw-jitter-bitmasks": (
        "coco/mask_rcnn_R_50_FPN_1x_SparK",
        {**BOXES, **JITTER, "SOLVER.BASE_LR": 1e-3, "INPUT.MASK_FORMAT": "bitmask"},
        "runs",
    ),
    "keypoints": (
        "coco/keypoint_rcnn_R_50_FPN_2x",
        {key: value for key, value in BOXES.items() if key not in COCO},
        "polygons",
    ),
    "retinanet": ("coco/retinanet_R_50_FPN_90k", {**BOXES, **WITH_EMPTY}, "polygons"),
    "fcn-16s": ("voc/fcn16s_R_50_30k", {**EIGHT, **SMALL_SEM_SEG, "INPUT.MIN_SIZE_TEST": 0}, ""),
    "vitdet": ("coco/mask_rcnn_ViT_B_100ep", VITDET, "polygons"),
    "convnext": ("coco/mask_rcnn_ConvNeXt_T_FPN_3x", CONVNEXT, "polygons"),
    "swin": ("coco/mask_rcnn_Swin_T_FPN_3x", SWIN, "polygons"),
    "swin-random": ("coco/mask_rcnn_Swin_T_FPN_3x", SWIN, "polygons"),
    "swin-cascade": ("coco/cascade_mask_rcnn_Swin_B_50ep", SWIN_CASCADE, "polygons"),
}  # fmt: skip
# Two processes share the images, average gradients and statistics, and gather what they find,
# whatever masks, heads and backbones are: boxes, masks, a normalizer of the loss that each process
# has for itself, pixels, and random depth.
IN_TWO = ("c4", "fpn-mask", "retinanet", "fcn-16s", "vitdet")
# One process alone has PreciseBN; c4-mask-clipped and fpn-mask-bitmasks have the networks of c4 and
# fpn-mask, and ViTDet has no batch norm.
IN_ONE = [row for row in ROWS if row not in ("c4", "fpn-mask", "vitdet")]
TIMES = {"time", "data_time", "rank_data_time", "eta_seconds", "iteration"}
METRICS = {"keypoints": "keypoints/AP", "fcn-16s": "sem_seg/mIoU"}


@pytest.fixture(scope="module")
def swin_file(tmp_path_factory) -> Path:
    """Convert a tiny Swin in the official names."""
    folder = tmp_path_factory.mktemp("swin")
    torch.save({"model": layouts_swin.official()}, folder / "a.file")
    convert_file(folder / "a.file", folder / "swin.pth")
    return folder / "swin.pth"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("edges")
    write_edge_cases(root / "polygons")
    write_edge_cases(root / "runs", runs=True)
    write_labels(root / "labels")
    return root


def ours(
    task: str, keys: dict[str, Any], folder: Path, engine: str, num_processes: int, *flags: str
) -> None:
    """Run the command of this project."""
    values = {**keys, "OUTPUT_DIR": folder / "run"}
    argv = ["--config-file", str(CONFIGS / f"{task}.yaml"), "--engine", engine, *flags]
    argv += ["--num-gpus", str(num_processes)]
    with recorded(folder / "seen"):
        assert main([*argv, *(str(item) for pair in values.items() for item in pair)]) == 0


def plain(config: Path, folder: Path, data: Path, num_processes: int, **options: Any) -> None:
    from tests.oracles.plain_detectron2 import train

    with recorded(folder / "seen"):
        train(config, folder / "run", data, num_processes, **options)


def predictions(file: Path) -> list[Any]:
    """Read a file in COCO's results format, its numbers in fp32."""
    rows = json.loads(file.read_text(encoding="utf-8"))
    return [
        [
            row["image_id"],
            row["category_id"],
            np.float32([*row["bbox"], row["score"], *row.get("keypoints", ())]).tolist(),
            row.get("segmentation"),
        ]
        for row in rows
    ]


def assert_equal(theirs: Path, own: Path, num_processes: int) -> None:
    """Compare inputs, losses, weights, predictions and metrics of two trainings."""
    expected, actual = lines(theirs / "seen"), lines(own / "seen")
    iterations = EIGHT["SOLVER.MAX_ITER"]
    assert len(expected) == num_processes
    for rank, seen in expected.items():
        # PreciseBN's batches come after the training's.
        assert len(seen) >= iterations
        for iteration, (one, other) in enumerate(zip(seen, actual[rank], strict=True)):
            assert one == other, f"{own.name}, {rank}, iteration {iteration}"
        assert len({line["images"] for line in seen}) > iterations // 2
    one, other = (
        torch.load(folder / "run" / "model_final.pth", weights_only=True)["model"]
        for folder in (theirs, own)
    )
    # Detectron2's Swin saves its index of the tables of relative positions.
    one = {name: value for name, value in one.items() if "relative_position_index" not in name}
    assert one.keys() == other.keys()
    assert not [name for name, value in one.items() if not torch.equal(value, other[name])]
    for file in theirs.glob("run/inference/coco_instances_results.json"):
        (other,) = own.glob("run/inference/*coco*.json")
        assert predictions(file) == predictions(other)
        assert predictions(file)
    results = json.loads((theirs / "run" / "metrics.hex.json").read_text())
    metrics = logged(own / "run")
    for name, text in results.items():
        if re.search("BoundaryIoU|B-Iou|/ACC-", name):
            continue
        value = metrics.get(f"{name}_detectron2", metrics[name])  # mIoU, if a class is absent
        if math.isnan(float.fromhex(text)):
            assert math.isnan(value or math.nan), name
        else:
            assert float(value).hex() == text, name


@pytest.mark.parametrize(
    ("row", "num_processes"),
    [*((row, 1) for row in IN_ONE), *((row, 2) for row in IN_TWO)],
)
def test_eight_iterations(
    row, num_processes, data, narrow_r50_file, swin_file, tmp_path, monkeypatch
):
    from tests.oracles.plain_detectron2 import incompatible_keys

    task, keys, masks = ROWS[row]
    root = data / (masks or "labels")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(root))
    weights = {"vitdet": "random", "convnext": "random", "swin-random": "random"}
    weights |= dict.fromkeys(("swin", "swin-cascade"), swin_file)
    keys = {**keys, "MODEL.WEIGHTS": weights.get(row, narrow_r50_file)}
    if num_processes > 1:
        keys["TEST.PRECISE_BN.ENABLED"] = False
    for engine in ENGINES:
        ours(task, keys, tmp_path / engine, engine, num_processes)
    config = tmp_path / ENGINES[0] / "run" / "config.yaml"
    plain(config, tmp_path / "plain", root, num_processes)
    for engine in ENGINES:
        assert_equal(tmp_path / "plain", tmp_path / engine, num_processes)
        checkpoint = tmp_path / engine / "run" / "model_final.pth"
        assert not incompatible_keys(config, checkpoint)
        found = logged(tmp_path / engine / "run")
        assert METRICS.get(row, "bbox/AP") in found


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a user's module that every process can import, and return its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return name

    return write


@pytest.mark.parametrize("engine", ["embedded", "detectron2, its own mapper"])
def test_the_number_of_workers_changes_no_batch(
    engine, data, narrow_r50_file, tmp_path, monkeypatch
):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(data / "polygons"))
    task, keys, _ = ROWS["fpn-mask"]
    keys = {**keys, "MODEL.WEIGHTS": narrow_r50_file, "SOLVER.MAX_ITER": 8, "SOLVER.STEPS": (6,)}
    if "mapper" in engine:
        keys["INPUT.CROP.ENABLED"] = True
    for workers in (0, 3):
        folder = tmp_path / str(workers)
        ours(task, {**keys, "DATALOADER.NUM_WORKERS": workers}, folder, engine.split(",")[0], 1)
    alone, shared = (lines(tmp_path / str(workers) / "seen") for workers in (0, 3))
    assert alone == shared
    assert len(alone["rank0.jsonl"]) == 8 + 3  # those of PreciseBN, too


def test_a_users_dataset_of_the_catalog(data, narrow_r50_file, tmp_path, module):
    """Two processes evaluate it by Detectron2's own, compiled evaluator."""
    from tests.oracles import plain_detectron2 as oracle

    task, keys, _ = ROWS["fpn-mask-bitmasks"]
    keys = {**keys, "MODEL.WEIGHTS": narrow_r50_file, "TEST.PRECISE_BN.ENABLED": False}
    keys |= {"DATASETS.TRAIN": ("users_train",), "DATASETS.TEST": ("users_val",)}
    name = module("users_dataset", CATALOG.format(root=data / "runs"))
    ours(task, keys, tmp_path / "detectron2", "detectron2", 2, "--import", name)
    config = tmp_path / "detectron2" / "run" / "config.yaml"
    given = {"register": partial(oracle.register_imported, name), "trainer": oracle.Compiled}
    plain(config, tmp_path / "plain", data / "runs", 2, **given)
    assert_equal(tmp_path / "plain", tmp_path / "detectron2", 2)
    record = read_record(tmp_path / "detectron2" / "run" / "run.json")
    assert record.provenance["imports"] == [name]
    assert record.config["MODEL.ROI_HEADS.NUM_CLASSES"] == 80


def write_proposals(root: Path, split: str, folder: Path) -> Path:
    """Write boxes for every image of a split in Detectron2's format of proposals."""
    name = root / "coco" / "annotations" / f"instances_{split}2017.json"
    rng, images = np.random.RandomState(4), json.loads(name.read_text())["images"]
    boxes = []
    for image in images:
        corners = rng.uniform(0, [image["width"], image["height"]], (24, 2, 2))
        low, high = corners.min(axis=1), corners.max(axis=1)
        boxes.append(np.concatenate([low, high], axis=1).astype(np.float32))
    content = {
        "ids": [image["id"] for image in images],
        "boxes": boxes,
        "objectness_logits": [rng.randn(24).astype(np.float32) for _ in images],
        "bbox_mode": 0,
    }
    (folder / f"{split}.pkl").write_bytes(pickle.dumps(content))
    return folder / f"{split}.pkl"


@pytest.mark.parametrize(
    ("kind", "num_processes"), [("crop", 1), ("proposals", 1), ("panoptic", 1), ("panoptic", 2)]
)
def test_what_detectron2_alone_maps(
    kind, num_processes, data, narrow_r50_file, tmp_path, monkeypatch, module
):
    from tests.oracles import plain_detectron2 as oracle

    root = data / "polygons"
    monkeypatch.setenv("DETECTRON2_DATASETS", str(root))
    task, keys, _ = ROWS["fpn-mask"]
    keys = {**keys, "MODEL.WEIGHTS": narrow_r50_file, "TEST.PRECISE_BN.ENABLED": num_processes == 1}
    given, flags = {"trainer": oracle.Seeded}, []
    if kind == "crop":
        keys |= {"INPUT.CROP.ENABLED": True, "INPUT.CROP.SIZE": [0.6, 0.8]}
    elif kind == "proposals":
        files = {split: str(write_proposals(root, split, tmp_path)) for split in ("train", "val")}
        keys |= {"MODEL.LOAD_PROPOSALS": True}
        keys |= {"MODEL.PROPOSAL_GENERATOR.NAME": "PrecomputedProposals"}
        keys |= {"DATASETS.PROPOSAL_FILES_TRAIN": (files["train"],)}
        keys |= {"DATASETS.PROPOSAL_FILES_TEST": (files["val"],)}
    else:
        keys |= {"DATASETS.TRAIN": ("users_train",), "DATASETS.TEST": ("users_val",)}
        keys |= {"MODEL.META_ARCHITECTURE": "PanopticFPN", "MODEL.SEM_SEG_HEAD.CONVS_DIM": 32}
        keys |= {"MODEL.SEM_SEG_HEAD.NORM": "BN", "MODEL.SEM_SEG_HEAD.NUM_CLASSES": 4}
        keys["SOLVER.BASE_LR"] = 0.002  # else nothing is found on two processes
        name = module(
            f"users_panoptic_{num_processes}",
            CATALOG.format(root=root) + PANOPTIC.format(root=root),
        )
        given = {"register": partial(oracle.register_imported, name), "trainer": oracle.Stuff}
        flags = ["--import", name]
    ours(task, keys, tmp_path / "detectron2", "detectron2", num_processes, *flags)
    config = tmp_path / "detectron2" / "run" / "config.yaml"
    plain(config, tmp_path / "plain", root, num_processes, **given)
    assert_equal(tmp_path / "plain", tmp_path / "detectron2", num_processes)


def test_densepose(narrow_r50_file, tmp_path, monkeypatch):
    pytest.importorskip("densepose")
    from tests.oracles import plain_detectron2 as oracle
    from tests.oracles.tiny_body import write_body

    monkeypatch.setenv("FVCORE_CACHE", str(write_body(tmp_path / "cache")))
    splits = {"train2014": 8, "valminusminival2014": 4, "minival2014": 3}
    root = write_coco(tmp_path / "data", splits, densepose=True)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(root))
    keys = {key: value for key, value in BOXES.items() if key not in COCO}
    keys |= {"MODEL.WEIGHTS": narrow_r50_file, "SOLVER.IMS_PER_BATCH": 2}
    own = tmp_path / "detectron2"
    ours("coco/densepose_rcnn_R_50_FPN_s1x", keys, own, "detectron2", 1)
    given = {"register": oracle.register_densepose, "trainer": oracle.densepose_trainer}
    plain(own / "run" / "config.yaml", tmp_path / "plain", root, 1, **given)
    assert_equal(tmp_path / "plain", own, 1)
    found = json.loads((tmp_path / "plain" / "run" / "metrics.hex.json").read_text("utf-8"))
    assert "densepose_gps/AP" in found


def test_test_time_augmentation_and_what_is_logged(
    data, narrow_r50_file, tmp_path, monkeypatch, module
):
    """All values of plain Detectron2's metrics.json are logged, including rare ones."""
    from tests.oracles import plain_detectron2 as oracle

    monkeypatch.setenv("DETECTRON2_DATASETS", str(data / "polygons"))
    task, keys, _ = ROWS["fpn-mask"]
    keys = {**keys, "MODEL.WEIGHTS": narrow_r50_file, "MODEL.ROI_HEADS.NAME": "SparseHeads"}
    keys |= {"TEST.AUG.ENABLED": True, "TEST.AUG.MIN_SIZES": (48, 72), "TEST.AUG.MAX_SIZE": 150}
    name = module("users_heads", SPARSE.format(name="SparseHeads"))
    own, theirs = tmp_path / "detectron2", tmp_path / "plain"
    ours(task, keys, own, "detectron2", 1, "--import", name)
    given = {"register": partial(oracle.register_imported, name)}
    plain(own / "run" / "config.yaml", theirs, data / "polygons", 1, **given)

    their_log, our_log = logged(theirs / "run"), logged(own / "run")
    assert {"users/sparse", "rpn/num_pos_anchors", "segm/AP", *TIMES} <= their_log.keys()
    assert their_log.keys() <= our_log.keys()
    for key in their_log.keys() - TIMES:
        one, other = (math.nan if log[key] is None else log[key] for log in (their_log, our_log))
        assert one == other or (math.isnan(one) and math.isnan(other)), key

    results = json.loads((theirs / "run" / "metrics.hex.json").read_text("utf-8"))
    record = read_record(own / "run" / "run.json").metrics
    names = {f"{kind}_TTA/{metric}" for kind in ("bbox", "segm") for metric in ("AP", "AP50")}
    assert names <= results.keys()
    for key in names:
        assert record[key] == round(float.fromhex(results[key]), 6), key
    found = predictions(own / "run" / "inference_TTA" / "coco_2017_val.json")
    assert found == predictions(theirs / "run" / "inference" / "coco_instances_results.json")
    assert main(["--eval-only", "--resume", "OUTPUT_DIR", str(own / "run"), "--import", name]) == 0
    assert read_record(own / "run" / "inference" / "run.json").metrics == record
