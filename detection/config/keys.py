"""Every key of a task, as data: Detectron2's with its defaults, and this project's own.

`HONORED` and `DETECTRON2_ONLY` together are all keys of Detectron2 0.6's `get_cfg()`
(detectron2/config/defaults.py); a test compares both with it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from convert.families.base import families
from moco.common.cfgnode import cfg_sha256, differing

# Names, defaults and meaning are Detectron2's (detectron2/config/defaults.py). px: pixels of the
# network's input. Sequences keep Detectron2's types, because yacs compares types.
HONORED: dict[str, Any] = {
    # cuda, cuda:N or cpu. Not set by the user: cuda where there is one, else cpu.
    "MODEL.DEVICE": "cuda",
    # random, or a file from convert/convert_to_d2.py; with --eval-only a trained model_final.pth.
    "MODEL.WEIGHTS": "",
    # In the order of INPUT.FORMAT, 0..255. Set by the weights' contract.
    "MODEL.PIXEL_MEAN": [103.530, 116.280, 123.675],
    "MODEL.PIXEL_STD": [1.0, 1.0, 1.0],
    "MODEL.META_ARCHITECTURE": "GeneralizedRCNN",
    "MODEL.MASK_ON": False,
    "MODEL.KEYPOINT_ON": False,
    "MODEL.BACKBONE.NAME": "build_resnet_backbone",
    # Number of leading parts that are not trained and whose BN is frozen. ResNet: stem and stages,
    # 0..5. ViT: the embeddings of patches and positions, then the blocks.
    "MODEL.BACKBONE.FREEZE_AT": 2,
    "MODEL.RESNETS.DEPTH": 50,
    "MODEL.RESNETS.NORM": "FrozenBN",
    "MODEL.RESNETS.NUM_GROUPS": 1,
    "MODEL.RESNETS.WIDTH_PER_GROUP": 64,
    # Where a bottleneck's stride sits; False = torchvision and MoCo, True = MSRA.
    "MODEL.RESNETS.STRIDE_IN_1X1": True,
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 64,
    # 256 for bottlenecks, 64 for ResNet-18 and -34.
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 256,
    "MODEL.RESNETS.OUT_FEATURES": ["res4"],
    "MODEL.RESNETS.RES5_DILATION": 1,  # 2: res5 of stride 1
    "MODEL.FPN.IN_FEATURES": [],
    "MODEL.FPN.OUT_CHANNELS": 256,
    "MODEL.FPN.NORM": "",
    "MODEL.FPN.FUSE_TYPE": "sum",  # sum or avg of the two ways to a map
    "MODEL.PROPOSAL_GENERATOR.MIN_SIZE": 0,  # px; proposals must be larger in both directions
    "MODEL.RPN.IN_FEATURES": ["res4"],
    "MODEL.ANCHOR_GENERATOR.SIZES": [[32, 64, 128, 256, 512]],  # px, square root of the area
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS": [[0.5, 1.0, 2.0]],  # height / width
    "MODEL.ANCHOR_GENERATOR.OFFSET": 0.0,  # of the first anchor's center, in strides, 0..1
    "MODEL.RPN.CONV_DIMS": [-1],  # channels of each 3x3 convolution; -1 = as many as the map has
    "MODEL.RPN.IOU_THRESHOLDS": [0.3, 0.7],  # background below, foreground from
    "MODEL.RPN.BBOX_REG_WEIGHTS": (1.0, 1.0, 1.0, 1.0),
    "MODEL.RPN.SMOOTH_L1_BETA": 0.0,  # 0 = L1
    "MODEL.RPN.LOSS_WEIGHT": 1.0,  # of both RPN losses
    "MODEL.RPN.BBOX_REG_LOSS_WEIGHT": 1.0,  # times LOSS_WEIGHT
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": 256,
    "MODEL.RPN.POSITIVE_FRACTION": 0.5,
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 12000,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 6000,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 2000,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 1000,
    "MODEL.RPN.NMS_THRESH": 0.7,
    "MODEL.ROI_HEADS.NAME": "Res5ROIHeads",
    "MODEL.ROI_HEADS.NUM_CLASSES": 80,
    "MODEL.ROI_HEADS.IN_FEATURES": ["res4"],
    "MODEL.ROI_HEADS.IOU_THRESHOLDS": [0.5],
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 512,
    "MODEL.ROI_HEADS.POSITIVE_FRACTION": 0.25,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.05,
    "MODEL.ROI_HEADS.NMS_THRESH_TEST": 0.5,
    "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS": (10.0, 10.0, 5.0, 5.0),
    "MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA": 0.0,  # 0 = L1
    "MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_WEIGHT": 1.0,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 14,
    "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": 0,
    # Of StandardROIHeads; Res5ROIHeads has res5 instead.
    "MODEL.ROI_BOX_HEAD.NAME": "",
    "MODEL.ROI_BOX_HEAD.NUM_CONV": 0,
    "MODEL.ROI_BOX_HEAD.CONV_DIM": 256,
    "MODEL.ROI_BOX_HEAD.NUM_FC": 0,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 1024,
    "MODEL.ROI_BOX_HEAD.NORM": "",
    "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG": False,  # the same deltas for all classes
    # A binary loss for every class instead of a softmax; the federated one is about the classes of
    # a batch's regions and sampled ones, by number of images to a power (LVIS v1 has that number).
    "MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE": False,
    "MODEL.ROI_BOX_HEAD.USE_FED_LOSS": False,
    "MODEL.ROI_BOX_HEAD.FED_LOSS_NUM_CLASSES": 50,
    "MODEL.ROI_BOX_HEAD.FED_LOSS_FREQ_WEIGHT_POWER": 0.5,
    # Of CascadeROIHeads: a stage for each.
    "MODEL.ROI_BOX_CASCADE_HEAD.IOUS": (0.5, 0.6, 0.7),
    "MODEL.ROI_BOX_CASCADE_HEAD.BBOX_REG_WEIGHTS": (
        (10.0, 10.0, 5.0, 5.0),
        (20.0, 20.0, 10.0, 10.0),
        (30.0, 30.0, 15.0, 15.0),
    ),
    "MODEL.ROI_MASK_HEAD.NUM_CONV": 0,
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 256,
    "MODEL.ROI_MASK_HEAD.NORM": "",
    "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION": 14,
    "MODEL.ROI_MASK_HEAD.POOLER_SAMPLING_RATIO": 0,
    "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS": 17,
    "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS": (512,) * 8,
    "MODEL.ROI_KEYPOINT_HEAD.LOSS_WEIGHT": 1.0,
    "MODEL.ROI_KEYPOINT_HEAD.NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS": True,
    "MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE": 1,  # else it is not trained on
    "MODEL.ROI_KEYPOINT_HEAD.POOLER_RESOLUTION": 14,
    "MODEL.ROI_KEYPOINT_HEAD.POOLER_SAMPLING_RATIO": 0,
    "MODEL.RETINANET.NUM_CLASSES": 80,
    "MODEL.RETINANET.IN_FEATURES": ["p3", "p4", "p5", "p6", "p7"],
    "MODEL.RETINANET.NUM_CONVS": 4,  # of each of the two towers
    "MODEL.RETINANET.NORM": "",
    "MODEL.RETINANET.IOU_THRESHOLDS": [0.4, 0.5],
    "MODEL.RETINANET.IOU_LABELS": [0, -1, 1],  # below, between, above them; -1 = not learned
    "MODEL.RETINANET.PRIOR_PROB": 0.01,  # of every class at the start, 0..1
    "MODEL.RETINANET.FOCAL_LOSS_ALPHA": 0.25,
    "MODEL.RETINANET.FOCAL_LOSS_GAMMA": 2.0,
    "MODEL.RETINANET.BBOX_REG_WEIGHTS": (1.0, 1.0, 1.0, 1.0),
    "MODEL.RETINANET.SMOOTH_L1_LOSS_BETA": 0.1,  # 0 = L1
    "MODEL.RETINANET.SCORE_THRESH_TEST": 0.05,
    "MODEL.RETINANET.TOPK_CANDIDATES_TEST": 1000,  # per map, before NMS
    "MODEL.RETINANET.NMS_THRESH_TEST": 0.5,
    "MODEL.SEM_SEG_HEAD.NAME": "SemSegFPNHead",
    "MODEL.SEM_SEG_HEAD.IN_FEATURES": ["p2", "p3", "p4", "p5"],
    "MODEL.SEM_SEG_HEAD.NUM_CLASSES": 54,
    "MODEL.SEM_SEG_HEAD.CONVS_DIM": 128,
    "MODEL.SEM_SEG_HEAD.NORM": "GN",
    "MODEL.SEM_SEG_HEAD.IGNORE_VALUE": 255,
    "MODEL.SEM_SEG_HEAD.LOSS_WEIGHT": 1.0,
    "INPUT.MIN_SIZE_TRAIN": (800,),  # px, shorter side
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": "choice",
    "INPUT.MAX_SIZE_TRAIN": 1333,  # px, longer side
    "INPUT.MIN_SIZE_TEST": 800,  # px; 0 = the original size
    "INPUT.MAX_SIZE_TEST": 1333,
    "INPUT.RANDOM_FLIP": "horizontal",
    "INPUT.FORMAT": "BGR",
    "INPUT.MASK_FORMAT": "polygon",  # what masks are learned from: polygon or bitmask
    "DATASETS.TRAIN": (),
    "DATASETS.TEST": (),
    "DATALOADER.NUM_WORKERS": 4,
    "DATALOADER.ASPECT_RATIO_GROUPING": True,
    "DATALOADER.FILTER_EMPTY_ANNOTATIONS": True,
    "DATALOADER.SAMPLER_TRAIN": "TrainingSampler",
    "DATALOADER.REPEAT_THRESHOLD": 0.0,  # share of images; rarer classes are repeated
    "DATALOADER.REPEAT_SQRT": True,  # by the square root
    "SOLVER.MAX_ITER": 40000,
    "SOLVER.BASE_LR": 0.001,
    "SOLVER.MOMENTUM": 0.9,
    "SOLVER.NESTEROV": False,
    "SOLVER.WEIGHT_DECAY": 0.0001,
    "SOLVER.WEIGHT_DECAY_NORM": 0.0,
    "SOLVER.WEIGHT_DECAY_BIAS": None,  # None = WEIGHT_DECAY
    "SOLVER.BIAS_LR_FACTOR": 1.0,  # of the biases' learning rate
    "SOLVER.CLIP_GRADIENTS.ENABLED": False,
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": "value",  # value, or norm: of each parameter
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": 1.0,
    "SOLVER.CLIP_GRADIENTS.NORM_TYPE": 2.0,
    # WarmupMultiStepLR: GAMMA at each of STEPS; WarmupCosineLR: half a cosine to BASE_LR_END.
    "SOLVER.LR_SCHEDULER_NAME": "WarmupMultiStepLR",
    "SOLVER.BASE_LR_END": 0.0,  # 0..BASE_LR
    "SOLVER.GAMMA": 0.1,
    "SOLVER.STEPS": (30000,),  # iterations at which the learning rate is multiplied by GAMMA
    "SOLVER.WARMUP_FACTOR": 1.0 / 1000,
    "SOLVER.WARMUP_ITERS": 1000,
    "SOLVER.WARMUP_METHOD": "linear",
    # Mixed precision in training, not in evaluation; see SOLVER.PRECISION.
    "SOLVER.AMP.ENABLED": False,
    "SOLVER.CHECKPOINT_PERIOD": 5000,  # iterations
    "SOLVER.IMS_PER_BATCH": 16,  # images, over all processes
    # Number of processes that batch, learning rate and schedule are meant for; with another number
    # they are scaled to it (see `scale_to_processes`). 0: they stay as they are.
    "SOLVER.REFERENCE_WORLD_SIZE": 0,
    "TEST.EVAL_PERIOD": 0,  # iterations; 0 = only at the end
    "TEST.DETECTIONS_PER_IMAGE": 100,
    "TEST.KEYPOINT_OKS_SIGMAS": [],  # empty: the 17 of COCO
    "TEST.PRECISE_BN.ENABLED": False,
    "TEST.PRECISE_BN.NUM_ITER": 200,
    "OUTPUT_DIR": "./output",
    "SEED": -1,  # negative: one is sampled and recorded
    "CUDNN_BENCHMARK": False,  # fastest kernels by trial; not reproducible
}

# This project's own keys, beside those of its backbone families (convert/families/).
TRANSFER: dict[str, Any] = {
    # imagenet: 7x7 stride 2 + max-pool. cifar: 3x3 stride 1. stride2: 3x3 stride 2. The last two
    # have no max-pool and exist on the embedded engine only. Set by the weights' contract.
    "MODEL.RESNETS.STEM": "imagenet",
    # Side of the square that images are padded to, px, also in evaluation; 0: as far as the
    # backbone needs. For backbones with a pyramid.
    "MODEL.BACKBONE.SQUARE_PAD": 0,
    # Keep maps and kernels in memory as (H, W, C): faster in mixed precision, other last bits.
    "MODEL.CHANNELS_LAST": False,
    # A custom dataset in VOC layout (Annotations/ ImageSets/Main/ JPEGImages/). When set,
    # DATASETS.TRAIN and TEST become <folder>_<split> and NUM_CLASSES follows.
    "DATASETS.VOC_DIR": "",
    # Class names in order for VOC_DIR; empty: all names in its annotations, sorted.
    "DATASETS.VOC_CLASSES": [],
    # Metric for VOC_DIR: 2007 = 11 points (as the paper's tables), 2012 = area under the curve.
    "DATASETS.VOC_YEAR": 2007,
    # A custom dataset in COCO's JSON format: the two annotation files, and the folders of
    # their images (empty: beside the file). When set they replace DATASETS.TRAIN and TEST, and
    # NUM_CLASSES follows.
    "DATASETS.COCO_TRAIN_JSON": "",
    "DATASETS.COCO_TRAIN_ROOT": "",
    "DATASETS.COCO_TEST_JSON": "",
    "DATASETS.COCO_TEST_ROOT": "",
    # Keypoints of a custom dataset that change places in a flipped image, as (("a", "b"), …); a
    # pair of one keypoint stays. Empty: by their names, left and right.
    "DATASETS.KEYPOINT_FLIP_PAIRS": [],
    # Which training images are used; empty: all. 10%: one of five subsets of a tenth, by the seed;
    # 10%.3: the third. tune: all but a tenth, which is tested on instead of DATASETS.TEST. See
    # detection/datasets/parts.py.
    "DATASETS.PART": "",
    # A file of published subsets, as Unbiased Teacher's COCO_supervision.txt, for DATASETS.PART.
    "DATASETS.PART_INDEX": "",
    # Side of the square crops that semantic segmentation trains on, px; 0 = the whole image.
    "INPUT.SEM_SEG_CROP_SIZE": 0,
    # Lowest and highest ratio of its random scaling.
    "INPUT.SEM_SEG_SCALE_RANGE": [1.0, 1.0],
    # Large-scale jitter (Ghiasi et al. 2021, arXiv 2012.07177) in place of the sizes of training:
    # the image is flipped, made to fit a square of SIZE px times a ratio from SCALE_RANGE, and cut
    # to the square; with masks, boxes are those of the masks that are left.
    "INPUT.LSJ.ENABLED": False,
    "INPUT.LSJ.SIZE": 1024,
    "INPUT.LSJ.SCALE_RANGE": [0.1, 2.0],
    # Fill the square where the image is smaller, with gray 128 (Detectron2's new baselines);
    # False leaves that to the backbone's padding (ViTDet).
    "INPUT.LSJ.PAD": True,
    # Most detections of a class in an image that COCO's metric counts, of boxes and masks; AP at
    # another number is not comparable with COCO's (Roboflow's RF100-VL takes 500).
    "TEST.COCO_MAX_DETECTIONS": 100,
    # Of test images: a name and 1..5 of detection/data/corruptions.py, as fog.3; empty: none.
    "INPUT.CORRUPTION": "",
    # fp32; bf16: convolutions and matrix products of the training in bfloat16 (autocast); auto:
    # bf16 where the processor computes in it. SOLVER.AMP.ENABLED follows; if it alone is set this
    # becomes bf16, and on a GPU with Detectron2 fp16, as there.
    "SOLVER.PRECISION": "fp32",
    # SGD or AdamW, or what is registered in detection.modeling.optimizer.OPTIMIZERS.
    "SOLVER.OPTIMIZER": "SGD",
    "SOLVER.BETAS": (0.9, 0.999),  # of AdamW, 0..1
    # Factor of the learning rate from each layer of the backbone to the one below it, above 0 to 1;
    # 1: none. detection/modeling/layer_decay.py says what the layers are.
    "SOLVER.LR_DECAY": 1.0,
    # Weight decay of position embeddings and of layer scale, with AdamW; 0 or more.
    "SOLVER.WEIGHT_DECAY_EMBED": 0.0,
    # The grid that the learning rate was chosen from, as `run_suite --tune` sets it: what it names
    # is not a part of the protocol, the grid is.
    "SOLVER.TUNED": "",
    # Who gets the numbers of metrics.json: tensorboard, wandb, mlflow, or what is registered in
    # moco.engine.loggers.LOGGERS.
    "LOG.LOGGERS": ("tensorboard",),
}
FAMILIES = families()
TRANSFER |= {key: value for family in FAMILIES for key, value in family.keys.items()}

_NORMS = ("BN", "FrozenBN", "SyncBN", "naiveSyncBN")
# The embedded engine's choices where Detectron2 has more (detection/embedded/supported.py checks).
EMBEDDED_CHOICES: dict[str, tuple[Any, ...]] = {
    "MODEL.META_ARCHITECTURE": ("GeneralizedRCNN", "RetinaNet", "SemanticSegmentor"),
    "MODEL.BACKBONE.NAME": (
        "build_resnet_backbone",
        "build_resnet_fpn_backbone",
        "build_retinanet_resnet_fpn_backbone",
        "build_resnet_dilated_c5_backbone",
        "build_vit_sfp_backbone",
        "build_vit_fpn_backbone",
        *(f"build_{family.name}_fpn_backbone" for family in FAMILIES if family.pyramid),
    ),
    "MODEL.RESNETS.DEPTH": (10, 18, 34, 50, 101, 152),
    "MODEL.RESNETS.NORM": _NORMS,
    "MODEL.RESNETS.RES5_DILATION": (1, 2),
    "MODEL.FPN.NORM": (*_NORMS, "GN", "LN", ""),
    "MODEL.FPN.FUSE_TYPE": ("sum", "avg"),
    "MODEL.RESNETS.STEM": ("imagenet", "cifar", "stride2"),
    "MODEL.ROI_HEADS.NAME": (
        "Res5ROIHeads",
        "Res5ROIHeadsExtraNorm",
        "StandardROIHeads",
        "CascadeROIHeads",
    ),
    "MODEL.ROI_BOX_HEAD.NORM": (*_NORMS, "GN", "LN", ""),
    "MODEL.ROI_MASK_HEAD.NORM": (*_NORMS, "GN", "LN", ""),
    # Detectron2 gives BN and SyncBN statistics of their own on every map there.
    "MODEL.RETINANET.NORM": ("GN", "LN", ""),
    "MODEL.RETINANET.IOU_LABELS": ([0, -1, 1], [0, 1]),
    "MODEL.SEM_SEG_HEAD.NORM": (*_NORMS, "GN"),
}
# The choices of the loop and its data, on both engines.
LOOP_CHOICES: dict[str, tuple[Any, ...]] = {
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": ("choice", "range"),
    "INPUT.RANDOM_FLIP": ("horizontal", "vertical", "none"),
    "INPUT.MASK_FORMAT": ("polygon", "bitmask"),
    "DATALOADER.SAMPLER_TRAIN": ("TrainingSampler", "RepeatFactorTrainingSampler"),
    "SOLVER.LR_SCHEDULER_NAME": ("WarmupMultiStepLR", "WarmupCosineLR"),
    "SOLVER.WARMUP_METHOD": ("linear", "constant"),
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": ("value", "norm"),
}

# What does not make two runs different experiments: the trial, where it ran, and what belongs to
# the weights (named in the run record) and not to the task.
NOT_PROTOCOL = (
    "SEED",
    "OUTPUT_DIR",
    "MODEL.WEIGHTS",
    "MODEL.DEVICE",
    "MODEL.CHANNELS_LAST",
    "DATALOADER.NUM_WORKERS",
    "DATASETS.VOC_DIR",
    "DATASETS.COCO_TRAIN_JSON",
    "DATASETS.COCO_TRAIN_ROOT",
    "DATASETS.COCO_TEST_JSON",
    "DATASETS.COCO_TEST_ROOT",
    "DATASETS.PART_INDEX",
    "SOLVER.CHECKPOINT_PERIOD",
    "SOLVER.REFERENCE_WORLD_SIZE",
    "LOG.LOGGERS",
    "INPUT.FORMAT",
    "MODEL.PIXEL_MEAN",
    "MODEL.PIXEL_STD",
    "MODEL.RESNETS.STRIDE_IN_1X1",
    *(key for family in FAMILIES for key in family.not_protocol),
)

DATA_KEY = "DATASETS.ANNOTATIONS_SHA256"  # in a record; not a key that a user sets

# What the embedded engine knows and cannot change: it accepts such a key at exactly this value, so
# that a `config.yaml` written by Detectron2 loads, and refuses any other value by name.
DETECTRON2_ONLY: dict[str, Any] = {
    "DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST": 1000,
    "DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TRAIN": 2000,
    "DATASETS.PROPOSAL_FILES_TEST": (),
    "DATASETS.PROPOSAL_FILES_TRAIN": (),
    "GLOBAL.HACK": 1.0,
    "INPUT.CROP.ENABLED": False,
    "INPUT.CROP.SIZE": [0.9, 0.9],
    "INPUT.CROP.TYPE": "relative_range",
    "MODEL.ANCHOR_GENERATOR.ANGLES": [[-90, 0, 90]],
    "MODEL.ANCHOR_GENERATOR.NAME": "DefaultAnchorGenerator",
    "MODEL.LOAD_PROPOSALS": False,
    "MODEL.PANOPTIC_FPN.COMBINE.ENABLED": True,
    "MODEL.PANOPTIC_FPN.COMBINE.INSTANCES_CONFIDENCE_THRESH": 0.5,
    "MODEL.PANOPTIC_FPN.COMBINE.OVERLAP_THRESH": 0.5,
    "MODEL.PANOPTIC_FPN.COMBINE.STUFF_AREA_LIMIT": 4096,
    "MODEL.PANOPTIC_FPN.INSTANCE_LOSS_WEIGHT": 1.0,
    "MODEL.PROPOSAL_GENERATOR.NAME": "RPN",
    "MODEL.RESNETS.DEFORM_MODULATED": False,
    "MODEL.RESNETS.DEFORM_NUM_GROUPS": 1,
    "MODEL.RESNETS.DEFORM_ON_PER_STAGE": [False, False, False, False],
    "MODEL.RETINANET.BBOX_REG_LOSS_TYPE": "smooth_l1",
    "MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_TYPE": "smooth_l1",
    "MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlignV2",
    "MODEL.ROI_BOX_HEAD.TRAIN_ON_PRED_BOXES": False,
    "MODEL.ROI_HEADS.IOU_LABELS": [0, 1],
    "MODEL.ROI_HEADS.PROPOSAL_APPEND_GT": True,
    "MODEL.ROI_KEYPOINT_HEAD.NAME": "KRCNNConvDeconvUpsampleHead",
    "MODEL.ROI_KEYPOINT_HEAD.POOLER_TYPE": "ROIAlignV2",
    "MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK": False,
    "MODEL.ROI_MASK_HEAD.NAME": "MaskRCNNConvUpsampleHead",
    "MODEL.ROI_MASK_HEAD.POOLER_TYPE": "ROIAlignV2",
    "MODEL.RPN.BBOX_REG_LOSS_TYPE": "smooth_l1",
    "MODEL.RPN.BOUNDARY_THRESH": -1,
    "MODEL.RPN.HEAD_NAME": "StandardRPNHead",
    "MODEL.RPN.IOU_LABELS": [0, -1, 1],
    "MODEL.SEM_SEG_HEAD.COMMON_STRIDE": 4,
    "TEST.AUG.ENABLED": False,
    "TEST.AUG.FLIP": True,
    "TEST.AUG.MAX_SIZE": 4000,
    "TEST.AUG.MIN_SIZES": (400, 500, 600, 700, 800, 900, 1000, 1100, 1200),
    "VERSION": 2,
}


# Keys of Detectron2 that are known and can be at nothing but its default.
FIXED: dict[str, Any] = {
    "FLOAT32_PRECISION": "",
    "SOLVER.NUM_DECAYS": 3,
    "SOLVER.RESCALE_INTERVAL": False,
    "TEST.EXPECTED_RESULTS": [],
    "VIS_PERIOD": 0,
}

DEFAULTS = {**HONORED, **DETECTRON2_ONLY, **FIXED, **TRANSFER}


def protocol_sha256(config: Mapping[str, Any]) -> str:
    """Hash the experiment: equal for the two engines, the seeds and the weights of one task.

    Only values that differ from `DEFAULTS` count, so that a new key changes no hash.

    Args:
        config: every key, flat, and `DATA_KEY`, as a run's record has them.
    """
    kept = differing({key: config[key] for key in DEFAULTS if key in config}, DEFAULTS)
    if DATA_KEY in config:
        kept[DATA_KEY] = config[DATA_KEY]
    return cfg_sha256(kept, (*NOT_PROTOCOL, *tuned_axes(kept)))


def tuned_axes(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Key → values of the grid that SOLVER.TUNED names; {} where nothing was tuned."""
    found = re.findall(r"([A-Z_.]+)=(\S*)", str(config.get("SOLVER.TUNED", "")))
    return {key: tuple(values.split(",")) for key, values in found}


def tuned_values(config: Mapping[str, Any]) -> dict[str, str]:
    """Key → the value of the grid that was chosen."""
    values = {key: config.get(key) for key in tuned_axes(config)}
    return {k: f"{v:g}" if isinstance(v, int | float) else str(v) for k, v in values.items()}


def at_edge(value: str, axis: Sequence[str]) -> bool:
    """Whether a value is the lowest or the highest of several that were tried."""
    return len(axis) > 1 and value in (min(axis, key=float), max(axis, key=float))
