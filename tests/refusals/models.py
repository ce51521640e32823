"""Refusals of `train` about the network: unsupported values and contradicting keys."""

from dataclasses import replace

from tests.oracles import tiny_detector as tiny
from tests.oracles.refused_files import Edit, text, words
from tests.oracles.tiny_coco import write_coco
from tests.refusals.rows import Row, rows

# A network that only this project has.
R10 = {
    **tiny.COMMON,
    "MODEL.RESNETS.DEPTH": 10,
    "MODEL.RESNETS.STEM": "stride2",
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 8,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 8,
}
CONVNEXT = {
    **tiny.FPN,
    "MODEL.BACKBONE.NAME": "build_convnext_fpn_backbone",
    "MODEL.CONVNEXT.DEPTHS": [1, 1, 3, 1],
    "MODEL.CONVNEXT.DIMS": [8, 12, 16, 24],
    "MODEL.CONVNEXT.DROP_PATH": 0.5,
}
SWIN = {
    **tiny.FPN,
    "MODEL.BACKBONE.NAME": "build_swin_fpn_backbone",
    "MODEL.SWIN.EMBED_DIM": 8,
    "MODEL.SWIN.NUM_HEADS": [1, 2, 4, 8],
}
TIMM = {
    **tiny.FPN,
    "MODEL.BACKBONE.NAME": "build_timm_fpn_backbone",
    "MODEL.TIMM.NAME": "efficientvit_b0",
}
UPERNET = {**tiny.R50_UPERNET, "MODEL.SEM_SEG_HEAD.NORM": "SyncBN"}
# A network, a changed key with its value, and a pattern of the message.
REFUSED = (
    (tiny.NARROW_R50, "META_ARCHITECTURE", "PanopticFPN", "GeneralizedRCNN, RetinaNet"),
    (tiny.NARROW_R50, "KEYPOINT_ON", True, "StandardROIHeads"),
    (tiny.NARROW_R50, "ROI_HEADS.IN_FEATURES", ["res5"], "res4"),
    (tiny.NARROW_R50, "ANCHOR_GENERATOR.SIZES", [[32], [64]], "one list"),
    (tiny.NARROW_R50, "BACKBONE.SQUARE_PAD", 2000, "pyramid"),
    (tiny.NARROW_R50, "BACKBONE.FREEZE_AT", 6, "to 5"),
    # Keys that contradict each other.
    (R10, "RESNETS.RES2_OUT_CHANNELS", 256, "8"),
    (R10, "RESNETS.NUM_GROUPS", 2, "1"),
    (R10, "ROI_HEADS.NAME", "Res5ROIHeads", "Res5ROIHeadsExtraNorm"),
    (R10, "RESNETS.RES5_DILATION", 2, "cannot be dilated"),
    (R10, "RESNETS.OUT_FEATURES", ["res5"], r"RPN.IN_FEATURES \['res4'\]"),
    (R10, "RESNETS.OUT_FEATURES", ["res6"], "stem, res2"),
    (R10, "BACKBONE.NAME", "build_resnet_dilated_c5_backbone", r"\['res5'\] and 2"),
    (R10, "BACKBONE.NAME", "build_resnet_fpn_backbone", r"FPN.IN_FEATURES \[\]"),
    (R10, "ROI_HEADS.NAME", "StandardROIHeads", "ROI_BOX_HEAD.NAME ''"),
    (R10, "META_ARCHITECTURE", "SemanticSegmentor", "SEM_SEG_HEAD.NAME"),
    # Maps that do not fit.
    (tiny.FPN, "FPN.IN_FEATURES", ["res2", "res4"], "FPN.IN_FEATURES"),
    (tiny.FPN, "RESNETS.RES5_DILATION", 2, "set it to 1"),
    (tiny.FPN, "RPN.IN_FEATURES", ["p7"], "p2, p3"),
    (tiny.FPN, "ROI_HEADS.IN_FEATURES", ["p2", "p4"], "ROI_HEADS.IN_FEATURES"),
    (tiny.FPN, "ANCHOR_GENERATOR.SIZES", [[8], [9]], "each of the 5"),
    (
        tiny.FPN,
        "ANCHOR_GENERATOR.SIZES",
        [[8], [9, 10], [11], [12], [13]],
        "all of the same length",
    ),
    (tiny.FPN, "RPN.IOU_THRESHOLDS", [0.7, 0.3], "expected 2"),
    (tiny.FPN, "ROI_HEADS.IOU_THRESHOLDS", [0.4, 0.5], "expected 1"),
    (tiny.FPN, "ROI_BOX_HEAD.NUM_FC", 0, "NUM_FC 0"),
    (tiny.FPN, "RPN.CONV_DIMS", [256, 0], r"RPN.CONV_DIMS \[256, 0\]"),
    (tiny.FPN, "ROI_HEADS.NAME", "CascadeROIHeads", "CLS_AGNOSTIC_BBOX_REG False"),
    (tiny.FPN, "ROI_BOX_HEAD.USE_FED_LOSS", True, "USE_SIGMOID_CE"),
    (tiny.CASCADE, "ROI_BOX_CASCADE_HEAD.IOUS", (0.5, 0.6), "ROI_BOX_CASCADE_HEAD.IOUS"),
    (tiny.CASCADE, "ROI_BOX_CASCADE_HEAD.IOUS", (0.6, 0.6, 0.7), "the first one 0.5"),
    (tiny.RETINANET, "RETINANET.IOU_LABELS", [0, 1], "RETINANET.IOU_THRESHOLDS"),
    (tiny.RETINANET, "RETINANET.IN_FEATURES", ["p2"], "p3, p4, p5, p6, p7"),
    (tiny.RETINANET, "FPN.IN_FEATURES", ["res3", "res4"], "FPN.IN_FEATURES"),
    (tiny.RETINANET, "MASK_ON", True, "MASK_ON True"),
    (tiny.FCN, "INPUT.RANDOM_FLIP", "vertical", "horizontal, none"),
    (tiny.FCN, "SEM_SEG_HEAD.IN_FEATURES", ["res4"], "res5"),
    (UPERNET, "SOLVER.IMS_PER_BATCH", 1, "got 1 image per process, expected 2 .*set it to 2"),
    (tiny.VIT_SFP, "VIT.PATCH_SIZE", 14, "4, 8, 16"),
    (tiny.VIT_SFP, "VIT.NUM_HEADS", 5, "num_heads"),
    (tiny.VIT_SFP, "VIT.DEPTH", 3, "at least 4"),
    (tiny.VIT_SFP, "VIT.GLOBAL_BLOCKS", [4], r"0\.\.3"),
    (tiny.VIT_SFP, "VIT.WINDOW_SIZE", -1, "0 or more"),
    (tiny.VIT_SFP, "VIT.DROP_PATH", 1.0, "less than 1"),
    (tiny.VIT_SFP, "FPN.NORM", "", "set it to LN"),
    (tiny.VIT_SFP, "ROI_HEADS.NAME", "Res5ROIHeads", "StandardROIHeads"),
    (tiny.VIT_SFP, "RPN.IN_FEATURES", ["res4"], "p2, p3"),
    (tiny.VIT_SFP, "BACKBONE.FREEZE_AT", 6, "to 5"),
    (tiny.VIT_SFP, "BACKBONE.SQUARE_PAD", 256, "INPUT.MAX_SIZE_TRAIN"),
    (tiny.DINO, "VIT.REL_POS", True, "KEEP_TOKENS"),
    (tiny.DINO, "VIT.ROPE_RESCALE", 0.5, "1 or more"),
    (tiny.DINO, "VIT.NUM_HEADS", 16, "multiple of 4"),
    (tiny.VIT_FPN, "VIT.EMBED_DIM", 40, "multiple of 32"),
    (CONVNEXT, "CONVNEXT.DIMS", [8, 12, 16], "MODEL.CONVNEXT"),
    (CONVNEXT, "FPN.IN_FEATURES", ["res3", "res5"], "MODEL.FPN.IN_FEATURES"),
    (CONVNEXT, "BACKBONE.FREEZE_AT", 6, "FREEZE_AT"),
    (CONVNEXT, "ROI_HEADS.NAME", "Res5ROIHeads", "ROI_HEADS.NAME"),
    (SWIN, "SWIN.NUM_HEADS", [1, 2, 4, 7], "MODEL.SWIN: num_heads"),
    (SWIN, "SWIN.DEPTHS", [2, 2, 6], "MODEL.SWIN: depths"),
    (TIMM, "TIMM.NAME", "", r"MODEL\.TIMM\.NAME: expected timm\'s model name"),
    (TIMM, "TIMM.NAME", "regnetq_002", r"MODEL\.TIMM\.NAME: .*no such network"),
    (TIMM, "TIMM.NAME", "levit_128s", r"MODEL\.TIMM\.NAME: .*strides \[16, 32, 64\]"),
    (TIMM, "TIMM.NAME", "test_vit", r"test_vit has one map; set build_timm_sfp_backbone"),
    (TIMM, "TIMM.NAME", "test_maxvit", r"MODEL\.BACKBONE\.SQUARE_PAD 0: .*images of one size"),
    (TIMM, "TIMM.ARGUMENTS", "img_size", r"MODEL\.TIMM\.ARGUMENTS: .*expected e\.g\. img_size"),
    (TIMM, "TIMM.PATCH_SIZE", 16, r"MODEL\.TIMM\.PATCH_SIZE 16: .*several strides"),
    (TIMM, "BACKBONE.FREEZE_AT", 6, r"0 \(nothing is frozen\) to 5 \(all of it\), or -1"),
)
ON = "train --engine embedded MODEL.WEIGHTS random OUTPUT_DIR run"
DATA = "DATASETS.VOC_DIR {tmp}/voc"
OF_DATA = ("MODEL.ROI_HEADS.NUM_CLASSES", "MODEL.SEM_SEG_HEAD.NUM_CLASSES")
SEM_SEG = (
    "DATASETS.TRAIN \"('voc_2012_sem_seg_train_aug',)\" DATASETS.TEST \"('voc_2012_sem_seg_val',)\""
)
MODELS: list[Row] = []


def of_network(keys: dict[str, object], message: str, **fields: object) -> Row:
    """Return a row about the keys of a network, on data that fit it."""
    data = SEM_SEG if keys.get("MODEL.META_ARCHITECTURE") == "SemanticSegmentor" else DATA
    own = {name: value for name, value in keys.items() if name not in OF_DATA}
    [row] = rows(f"{ON} {data} {words(own)}", ("", message), **fields)  # type: ignore[arg-type]
    return row


for base, key, value, message in REFUSED:
    whole = key if key.startswith(("INPUT", "SOLVER", "TEST")) else f"MODEL.{key}"
    row = of_network({**base, whole: value}, message, files="VOC2012")
    MODELS.append(replace(row, what=f"{whole} {value}"))
FCN = {**tiny.FCN, "MODEL.RESNETS.RES5_DILATION": 1}  # Refused when the network is built.
MODELS.append(of_network(FCN, "IN_FEATURES", files="VOC2012", leaves=("run/.*",)))

TASK = "train --config-file voc/faster_rcnn_R_18_C4_small MODEL.DEVICE cpu OUTPUT_DIR run"
TASK += " DATASETS.VOC_DIR {tmp}/voc MODEL.WEIGHTS random"
MODELS += rows(
    f"{TASK} --engine detectron2",
    ("MODEL.RESNETS.STEM 5x5", "imagenet, cifar, stride2"),
    ("MODEL.RESNETS.DEPTH 20", "10, 18, 34, 50, 101, 152"),
    ("MODEL.RESNETS.RES2_OUT_CHANNELS 32", "RES2_OUT_CHANNELS 32: .* 64"),
    ("MODEL.ROI_HEADS.NAME Res5ROIHeads", "Res5ROIHeadsExtraNorm"),
    ("MODEL.ROI_HEADS.NAME Res6ROIHeads", "Res5ROIHeadsExtraNorm"),
    ("MODEL.RESNETS.NORM SycnBN", "MODEL.RESNETS.NORM: got 'SycnBN'"),
    ("MODEL.META_ARCHITECTURE RCNN", "GeneralizedRCNN"),
    (
        "TEST.AUG.ENABLED True MODEL.KEYPOINT_ON True",
        r"TEST\.AUG\.ENABLED: .*MODEL\.KEYPOINT_ON True",
    ),
    needs=("detectron2",),
)
MASKS = "train --config-file coco/mask_rcnn_R_50_FPN_1x MODEL.DEVICE cpu OUTPUT_DIR run"
MODELS += rows(
    f"{MASKS} MODEL.WEIGHTS r50.pth SOLVER.IMS_PER_BATCH 2 --check-only",
    ("MODEL.ROI_HEADS.NUM_CLASSES 3", "coco_2017_val has 80 classes"),
    ("INPUT.FORMAT BGR", r"INPUT\.FORMAT: you set 'BGR', but the weights"),
    ("SOLVER.IMS_PER_BATCH 3 --num-gpus 2", "divided among 2 processes"),
    needs=("detectron2",),
    files="coco",
)
MODELS += rows(
    f"{MASKS} MODEL.WEIGHTS r50.pth SOLVER.IMS_PER_BATCH 2",
    ("DATASETS.TEST \"('lvis_v0.5_val',)\"", "lvis"),
    needs=("detectron2",),
    files="coco",
    code=3,
)


def module(name: str, evaluator: str) -> Edit:
    """Write a user's module that registers a dataset."""
    lines = ["from detectron2.data import MetadataCatalog"]
    lines += ["from detectron2.data.datasets import register_coco_instances"]
    for split, fold in (("train", "train2017"), ("test", "val2017")):
        paths = f"'coco/annotations/instances_{fold}.json', 'coco/{fold}'"
        lines += [f"register_coco_instances('catalog_{split}', {{}}, {paths})"]
    lines += [f"vars(MetadataCatalog.get('catalog_test'))['evaluator_type'] = {evaluator!r}"]
    return text(f"{name}.py", "\n".join(lines))


FAILS = "from detectron2.data import DatasetCatalog\ndef fails():\n    raise KeyError('no file')\n"
FAILS += "DatasetCatalog.register('failing_train', fails)\n"
FAILS += "DatasetCatalog.register('failing_test', fails)\n"
CATALOG = "DATASETS.VOC_DIR '' DATASETS.TRAIN \"('catalog_train',)\" DATASETS.TEST"
CATALOG = f"{TASK} --engine detectron2 {CATALOG} \"('catalog_test',)\""
MODELS += rows(
    CATALOG,
    ("", "catalog_train.*--import"),
    ("--import no_such_module", "--import no_such_module: .*PYTHONPATH"),
    needs=("detectron2",),
)
MODELS += rows(
    f"{CATALOG} --check-only --import registers_unknown",
    (module("registers_unknown", "panoptic"), "catalog_test: got evaluator_type 'panoptic'.*coco"),
    needs=("detectron2",),
    files="coco",
    env={"PYTHONPATH": "{tmp}"},
)
MODELS += rows(
    f"{CATALOG.replace('catalog_', 'failing_')} --check-only --import registers_failure",
    (text("registers_failure.py", FAILS), "failing_train: .*KeyError"),
    needs=("detectron2",),
    env={"PYTHONPATH": "{tmp}"},
    code=3,
)
DENSEPOSE_SPLITS = ("train2014", "valminusminival2014", "minival2014")
DENSEPOSE = "train --config-file coco/densepose_rcnn_R_50_FPN_s1x --engine detectron2"
MODELS += rows(
    f"{DENSEPOSE} MODEL.DEVICE cpu OUTPUT_DIR run MODEL.WEIGHTS random",
    (
        lambda at: write_coco(at, dict.fromkeys(DENSEPOSE_SPLITS, 2), densepose=True),
        "MODEL.DENSEPOSE_ON needs .*DensePose project.*python -m pip install.*projects/DensePose",
    ),
    needs=("detectron2",),
    without=("densepose",),
)
