"""Table of the configuration keys of a task: Detectron2's keys and this project's own.

Detectron2's rows are all keys of Detectron2 0.6's `get_cfg()` (detectron2/config/defaults.py), with
its defaults; a test compares them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from convert.families.base import families
from moco.common.cfgnode import cfg_sha256, differing
from moco.common.keys import (
    Key,
    Keys,
    Range,
    above,
    at_least,
    below,
    interval,
    is_finite,
    numbers,
    one_of,
)

DATA_KEY = "DATASETS.ANNOTATIONS_SHA256"  # Only in run records; users cannot set it.
FAMILIES = families()
_NORMS = ("BN", "FrozenBN", "SyncBN", "naiveSyncBN")
_RATIOS = interval(expected="two ratios above 0, the lower one first")
# Descriptions that several keys share.
_CLASSES = "Number of classes; follows the dataset."
_DELTAS = "Weights of the four regression targets (dx, dy, dw, dh)."
_NMS = "IoU threshold of the NMS of detections of one class, 0..1."
_SAMPLING = (
    "Number of sampling points per cell in each direction; 0: adapted to the size of the {}."
)
_SMOOTH_L1 = "Error at which the smooth L1 box loss changes from quadratic to linear; 0 = L1."


def _are_sizes(value: Any) -> bool:
    # Detectron2 also takes one number.
    sizes = value if isinstance(value, list | tuple) else (value,)
    return len(sizes) > 0 and all(is_finite(size) and size >= 1 for size in sizes)


def _only(name: str, value: Any, **flags: Any) -> Key:
    """Return a key that the embedded engine supports at its default only.

    The engine accepts the key at this value, so that a `config.yaml` written by Detectron2 loads,
    and raises an error that names the key for any other value.
    """
    return Key(name, value, embedded=(value,), **flags)


def _norm(name: str, doc: str) -> Key:
    """Return the key of a norm that is off by default."""
    return Key(name, "", doc, embedded=(*_NORMS, "GN", "LN", ""))


def _fixed(name: str, value: Any, **flags: Any) -> Key:
    """Return a key that both engines support at its default only."""
    return Key(name, value, range=one_of(value), **flags)


# Names, defaults and meaning are Detectron2's (detectron2/config/defaults.py). px: pixels of the
# network's input. Sequences keep Detectron2's types, because yacs compares types.
# detection/embedded/supported.py checks the values that the embedded engine supports.
_DETECTRON2S = (
    Key(
        "MODEL.DEVICE",
        "cuda",
        "Device of the run: cuda, cuda:N or cpu. Unless set: cuda if a GPU is available, else cpu.",
        place=True,
        sampling=True,
    ),
    Key(
        "MODEL.WEIGHTS",
        "",
        "Pre-trained weights: random, or a file from convert/convert_to_d2.py; with --eval-only "
        "a trained model_final.pth.",
        per_run=True,
    ),
    Key(
        "MODEL.PIXEL_MEAN",
        [103.530, 116.280, 123.675],
        "Mean of each channel's pixels, in the order of INPUT.FORMAT. Set by the weights' "
        "contract.",
        numbers(3, "3 numbers of 0..255"),
        weights=True,
    ),
    Key(
        "MODEL.PIXEL_STD",
        [1.0, 1.0, 1.0],
        "Divisor of each channel's pixels, in the order of INPUT.FORMAT. Set by the weights' "
        "contract.",
        numbers(3, "3 numbers above 0", lambda std: std > 0),
        weights=True,
    ),
    Key(
        "MODEL.META_ARCHITECTURE",
        "GeneralizedRCNN",
        "Kind of detector.",
        embedded=("GeneralizedRCNN", "RetinaNet", "SemanticSegmentor"),
    ),
    Key("MODEL.MASK_ON", False, "Whether to predict a mask for each box."),
    Key("MODEL.KEYPOINT_ON", False, "Whether to predict keypoints for each box."),
    Key(
        "MODEL.BACKBONE.NAME",
        "build_resnet_backbone",
        "Builder of the backbone, including its feature pyramid.",
        embedded=(
            "build_resnet_backbone",
            "build_resnet_fpn_backbone",
            "build_retinanet_resnet_fpn_backbone",
            "build_resnet_dilated_c5_backbone",
            "build_vit_backbone",
            "build_vit_sfp_backbone",
            "build_vit_fpn_backbone",
            *(
                f"build_{family.name}{kind}_backbone"
                for kind in ("", "_fpn", "_sfp")
                for family in FAMILIES
                if family.pyramid and kind in family.pyramid.kinds
            ),
        ),
    ),
    Key(
        "MODEL.BACKBONE.FREEZE_AT",
        2,
        "Number of leading parts to freeze, batch norm included. ResNet: the stem and the "
        "stages, 0..5. ViT: the patch and position embeddings, then the blocks; timm: timm's "
        "groups of stem and stages, or blocks. Of the last two, -1: all of it.",
        training=True,
    ),
    Key(
        "MODEL.RESNETS.DEPTH",
        50,
        "Number of layers. Set by the weights' contract.",
        embedded=(10, 18, 34, 50, 101, 152),
        model=True,
    ),
    Key(
        "MODEL.RESNETS.NORM",
        "FrozenBN",
        "Norm of the backbone. FrozenBN is not trained; SyncBN computes its statistics over all "
        "processes.",
        embedded=_NORMS,
    ),
    Key(
        "MODEL.RESNETS.NUM_GROUPS",
        1,
        "Number of groups of a bottleneck's 3x3 convolution; 32 in a ResNeXt.",
        model=True,
    ),
    Key(
        "MODEL.RESNETS.WIDTH_PER_GROUP",
        64,
        "Number of channels of each group in the first stage.",
        model=True,
    ),
    Key(
        "MODEL.RESNETS.STRIDE_IN_1X1",
        True,
        "Position of a bottleneck's stride: False = the 3x3 convolution (torchvision, MoCo), "
        "True = the first 1x1 convolution (MSRA).",
        weights=True,
    ),
    Key("MODEL.RESNETS.STEM_OUT_CHANNELS", 64, "Number of channels after the stem.", model=True),
    Key(
        "MODEL.RESNETS.RES2_OUT_CHANNELS",
        256,
        "Number of output channels of the first stage: 256 for bottlenecks, 64 for ResNet-18 "
        "and -34.",
        model=True,
    ),
    Key("MODEL.RESNETS.OUT_FEATURES", ["res4"], "Stages whose feature maps the backbone returns."),
    Key(
        "MODEL.RESNETS.RES5_DILATION",
        1,
        "Dilation of the last stage; with 2, res5 has stride 1.",
        embedded=(1, 2),
    ),
    Key("MODEL.FPN.IN_FEATURES", [], "Feature maps of the backbone that the pyramid is built on."),
    Key("MODEL.FPN.OUT_CHANNELS", 256, "Number of channels of each feature map of the pyramid."),
    _norm("MODEL.FPN.NORM", "Norm of the pyramid; empty: none."),
    Key(
        "MODEL.FPN.FUSE_TYPE",
        "sum",
        "How the pyramid fuses its lateral and top-down features: sum, or avg for their average.",
        embedded=("sum", "avg"),
    ),
    Key("MODEL.PROPOSAL_GENERATOR.MIN_SIZE", 0, "Minimum side of a proposal, exclusive, px."),
    Key("MODEL.RPN.IN_FEATURES", ["res4"], "Feature maps that the RPN generates proposals from."),
    Key(
        "MODEL.ANCHOR_GENERATOR.SIZES",
        [[32, 64, 128, 256, 512]],
        "Square roots of the anchors' areas, px, one list for all feature maps or one for each.",
    ),
    Key(
        "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS",
        [[0.5, 1.0, 2.0]],
        "Height / width of the anchors, one list for all feature maps or one for each.",
    ),
    Key(
        "MODEL.ANCHOR_GENERATOR.OFFSET", 0.0, "Offset of the first anchor's center, strides, 0..1."
    ),
    Key(
        "MODEL.RPN.CONV_DIMS",
        [-1],
        "Number of channels of each 3x3 convolution; -1 = that of the input feature map.",
    ),
    Key(
        "MODEL.RPN.IOU_THRESHOLDS",
        [0.3, 0.7],
        "IoU below which an anchor is background, and IoU from which it is foreground.",
    ),
    Key("MODEL.RPN.BBOX_REG_WEIGHTS", (1.0, 1.0, 1.0, 1.0), _DELTAS),
    Key("MODEL.RPN.SMOOTH_L1_BETA", 0.0, _SMOOTH_L1),
    Key("MODEL.RPN.LOSS_WEIGHT", 1.0, "Weight of both RPN losses."),
    Key("MODEL.RPN.BBOX_REG_LOSS_WEIGHT", 1.0, "Weight of the box loss, times LOSS_WEIGHT."),
    Key("MODEL.RPN.BATCH_SIZE_PER_IMAGE", 256, "Anchors sampled per image for the losses."),
    Key("MODEL.RPN.POSITIVE_FRACTION", 0.5, "Maximum fraction of foreground anchors, 0..1."),
    Key("MODEL.RPN.PRE_NMS_TOPK_TRAIN", 12000, "Proposals kept before NMS in training, per map."),
    Key("MODEL.RPN.PRE_NMS_TOPK_TEST", 6000, "Proposals kept before NMS in evaluation, per map."),
    Key("MODEL.RPN.POST_NMS_TOPK_TRAIN", 2000, "Proposals kept after NMS in training, per image."),
    Key("MODEL.RPN.POST_NMS_TOPK_TEST", 1000, "Proposals kept after NMS in evaluation, per image."),
    Key("MODEL.RPN.NMS_THRESH", 0.7, "IoU threshold of the NMS of proposals, 0..1."),
    Key(
        "MODEL.ROI_HEADS.NAME",
        "Res5ROIHeads",
        "ROI heads, which classify and refine the proposals.",
        embedded=("Res5ROIHeads", "Res5ROIHeadsExtraNorm", "StandardROIHeads", "CascadeROIHeads"),
        model=True,
    ),
    Key("MODEL.ROI_HEADS.NUM_CLASSES", 80, _CLASSES),
    Key("MODEL.ROI_HEADS.IN_FEATURES", ["res4"], "Feature maps that proposals are pooled from."),
    Key("MODEL.ROI_HEADS.IOU_THRESHOLDS", [0.5], "IoU from which a proposal is foreground."),
    Key(
        "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE",
        512,
        "Proposals sampled per image for the losses.",
    ),
    Key(
        "MODEL.ROI_HEADS.POSITIVE_FRACTION", 0.25, "Maximum fraction of foreground proposals, 0..1."
    ),
    Key("MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.05, "Minimum score of a detection, 0..1."),
    Key("MODEL.ROI_HEADS.NMS_THRESH_TEST", 0.5, _NMS),
    Key("MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS", (10.0, 10.0, 5.0, 5.0), _DELTAS),
    Key("MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA", 0.0, _SMOOTH_L1),
    Key("MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_WEIGHT", 1.0, "Weight of the box loss."),
    Key("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", 14, "Side of a pooled proposal, cells."),
    Key("MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO", 0, _SAMPLING.format("proposal")),
    Key("MODEL.ROI_BOX_HEAD.NAME", "", "Box head of StandardROIHeads; Res5ROIHeads uses res5."),
    Key("MODEL.ROI_BOX_HEAD.NUM_CONV", 0, "Number of 3x3 convolutions of the box head."),
    Key("MODEL.ROI_BOX_HEAD.CONV_DIM", 256, "Number of channels of each convolution."),
    Key("MODEL.ROI_BOX_HEAD.NUM_FC", 0, "Number of fully connected layers after the convolutions."),
    Key("MODEL.ROI_BOX_HEAD.FC_DIM", 1024, "Number of channels of each fully connected layer."),
    _norm(
        "MODEL.ROI_BOX_HEAD.NORM",
        "Norm of the convolutions, and the extra norm of the C4 head that has one; empty: none.",
    ),
    Key("MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", False, "Whether classes share box deltas."),
    Key(
        "MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE",
        False,
        "Whether to use a binary loss for every class instead of a softmax.",
    ),
    Key(
        "MODEL.ROI_BOX_HEAD.USE_FED_LOSS",
        False,
        "Whether to use federated loss: the binary loss is computed over the classes of a "
        "batch's regions and over classes sampled by their number of images to a power (LVIS v1 "
        "records that number).",
    ),
    Key("MODEL.ROI_BOX_HEAD.FED_LOSS_NUM_CLASSES", 50, "Number of classes in federated loss."),
    Key("MODEL.ROI_BOX_HEAD.FED_LOSS_FREQ_WEIGHT_POWER", 0.5, "Power of a class's image count."),
    Key(
        "MODEL.ROI_BOX_CASCADE_HEAD.IOUS",
        (0.5, 0.6, 0.7),
        "IoU from which a box is foreground, for each stage of CascadeROIHeads.",
    ),
    Key(
        "MODEL.ROI_BOX_CASCADE_HEAD.BBOX_REG_WEIGHTS",
        ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0)),
        "Weights of the four regression targets, for each stage.",
    ),
    Key("MODEL.ROI_MASK_HEAD.NUM_CONV", 0, "Number of 3x3 convolutions before the upsampling."),
    Key("MODEL.ROI_MASK_HEAD.CONV_DIM", 256, "Number of channels of each convolution."),
    _norm("MODEL.ROI_MASK_HEAD.NORM", "Norm of the convolutions; empty: none."),
    Key(
        "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION",
        14,
        "Side of a pooled box, cells; a mask has twice that.",
    ),
    Key("MODEL.ROI_MASK_HEAD.POOLER_SAMPLING_RATIO", 0, _SAMPLING.format("box")),
    Key("MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", 17, "Number of keypoints of an object."),
    Key("MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS", (512,) * 8, "Channels of each 3x3 convolution."),
    Key("MODEL.ROI_KEYPOINT_HEAD.LOSS_WEIGHT", 1.0, "Weight of the keypoint loss."),
    Key(
        "MODEL.ROI_KEYPOINT_HEAD.NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS",
        True,
        "Whether to divide the loss by the number of visible keypoints instead of the largest "
        "possible number.",
    ),
    Key(
        "MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE",
        1,
        "Minimum number of visible keypoints of a training image; images with fewer are skipped.",
    ),
    Key("MODEL.ROI_KEYPOINT_HEAD.POOLER_RESOLUTION", 14, "Side of a pooled box, cells."),
    Key("MODEL.ROI_KEYPOINT_HEAD.POOLER_SAMPLING_RATIO", 0, _SAMPLING.format("box")),
    Key("MODEL.RETINANET.NUM_CLASSES", 80, _CLASSES),
    Key(
        "MODEL.RETINANET.IN_FEATURES",
        ["p3", "p4", "p5", "p6", "p7"],
        "Feature maps of the pyramid that RetinaNet predicts objects on.",
    ),
    Key("MODEL.RETINANET.NUM_CONVS", 4, "Number of convolutions of each of the two towers."),
    # Detectron2 keeps separate BN and SyncBN statistics for each feature map there.
    Key("MODEL.RETINANET.NORM", "", "Norm of the towers; empty: none.", embedded=("GN", "LN", "")),
    Key("MODEL.RETINANET.IOU_THRESHOLDS", [0.4, 0.5], "IoU thresholds between an anchor's labels."),
    Key(
        "MODEL.RETINANET.IOU_LABELS",
        [0, -1, 1],
        "Labels of anchors below, between and above the thresholds; -1 = ignored by the losses.",
        embedded=([0, -1, 1], [0, 1]),
    ),
    Key("MODEL.RETINANET.PRIOR_PROB", 0.01, "Class probability at initialization, 0..1."),
    Key("MODEL.RETINANET.FOCAL_LOSS_ALPHA", 0.25, "Weight of foreground in the focal loss, 0..1."),
    Key(
        "MODEL.RETINANET.FOCAL_LOSS_GAMMA",
        2.0,
        "Exponent that reduces the weight of easy anchors in the focal loss; 0: all weigh the "
        "same.",
    ),
    Key("MODEL.RETINANET.BBOX_REG_WEIGHTS", (1.0, 1.0, 1.0, 1.0), _DELTAS),
    Key("MODEL.RETINANET.SMOOTH_L1_LOSS_BETA", 0.1, _SMOOTH_L1),
    Key("MODEL.RETINANET.SCORE_THRESH_TEST", 0.05, "Minimum score of a detection, 0..1."),
    Key("MODEL.RETINANET.TOPK_CANDIDATES_TEST", 1000, "Detections kept before NMS, per map."),
    Key("MODEL.RETINANET.NMS_THRESH_TEST", 0.5, _NMS),
    Key("MODEL.SEM_SEG_HEAD.NAME", "SemSegFPNHead", "Head of semantic segmentation."),
    Key(
        "MODEL.SEM_SEG_HEAD.IN_FEATURES",
        ["p2", "p3", "p4", "p5"],
        "Input feature maps. Of a plain ViT: last_feat, or blocks such as block7, counted from 0.",
    ),
    Key("MODEL.SEM_SEG_HEAD.NUM_CLASSES", 54, _CLASSES),
    Key("MODEL.SEM_SEG_HEAD.CONVS_DIM", 128, "Number of channels of the convolutions."),
    Key(
        "MODEL.SEM_SEG_HEAD.NORM",
        "GN",
        "Norm of the convolutions; of LinearHead, before its only one. Empty: none.",
        embedded=(*_NORMS, "GN", ""),
    ),
    Key("MODEL.SEM_SEG_HEAD.IGNORE_VALUE", 255, "Label of the pixels that the loss ignores."),
    Key("MODEL.SEM_SEG_HEAD.LOSS_WEIGHT", 1.0, "Weight of the loss."),
    Key(
        "INPUT.MIN_SIZE_TRAIN",
        (800,),
        "Shorter side of training images, px.",
        Range(_are_sizes, "sizes in pixels, e.g. (800,)"),
        training=True,
    ),
    Key(
        "INPUT.MIN_SIZE_TRAIN_SAMPLING",
        "choice",
        "How MIN_SIZE_TRAIN is sampled: one of its sizes (choice), or any size between its two "
        "(range).",
        one_of("choice", "range"),
        training=True,
    ),
    Key(
        "INPUT.MAX_SIZE_TRAIN",
        1333,
        "Maximum longer side of training images, px.",
        at_least(1),
        training=True,
    ),
    Key(
        "INPUT.MIN_SIZE_TEST",
        800,
        "Shorter side of test images, px; 0 = the original size.",
        at_least(0),
    ),
    Key("INPUT.MAX_SIZE_TEST", 1333, "Maximum longer side of test images, px.", at_least(1)),
    Key(
        "INPUT.RANDOM_FLIP",
        "horizontal",
        "Direction in which half of the training images are flipped.",
        one_of("horizontal", "vertical", "none"),
        training=True,
    ),
    Key(
        "INPUT.FORMAT",
        "BGR",
        "Channel order of the images. Set by the weights' contract.",
        Range(lambda value: value in ("RGB", "BGR"), "RGB or BGR"),
        weights=True,
    ),
    Key(
        "INPUT.MASK_FORMAT",
        "polygon",
        "Representation of the ground-truth masks in training.",
        one_of("polygon", "bitmask"),
    ),
    Key("DATASETS.TRAIN", (), "Names of the training datasets.", training=True),
    Key("DATASETS.TEST", (), "Name of the test dataset."),
    Key(
        "DATALOADER.NUM_WORKERS",
        4,
        "Number of data-loader workers of each training process; 0: none.",
        at_least(0),
        place=True,
        sampling=True,
    ),
    Key(
        "DATALOADER.ASPECT_RATIO_GROUPING",
        True,
        "Whether a batch holds only landscape or only portrait images.",
    ),
    Key(
        "DATALOADER.FILTER_EMPTY_ANNOTATIONS",
        True,
        "Whether to skip training images without an object.",
    ),
    Key(
        "DATALOADER.SAMPLER_TRAIN",
        "TrainingSampler",
        "Sampler of the training images; RepeatFactorTrainingSampler repeats images of rare "
        "classes.",
        one_of("TrainingSampler", "RepeatFactorTrainingSampler"),
    ),
    Key("DATALOADER.REPEAT_THRESHOLD", 0.0, "Fraction of images below which a class is rare."),
    Key("DATALOADER.REPEAT_SQRT", True, "Whether to repeat by sqrt(threshold / fraction)."),
    Key("SOLVER.MAX_ITER", 40000, "Length of the training, iterations.", at_least(1)),
    Key(
        "SOLVER.BASE_LR",
        0.001,
        "Learning rate for a batch of IMS_PER_BATCH.",
        above(0),
        resume=False,
        tunable=True,
    ),
    Key("SOLVER.MOMENTUM", 0.9, "Momentum of SGD, 0..1."),
    Key("SOLVER.NESTEROV", False, "Whether to use Nesterov momentum."),
    Key(
        "SOLVER.WEIGHT_DECAY",
        0.0001,
        "Weight decay of all parameters except norms, and except biases if WEIGHT_DECAY_BIAS is "
        "set.",
        tunable=True,
    ),
    Key("SOLVER.WEIGHT_DECAY_NORM", 0.0, "Weight decay of norms."),
    Key("SOLVER.WEIGHT_DECAY_BIAS", None, "Weight decay of biases; None = WEIGHT_DECAY."),
    Key("SOLVER.BIAS_LR_FACTOR", 1.0, "Factor of the biases' learning rate."),
    Key("SOLVER.CLIP_GRADIENTS.ENABLED", False, "Whether to clip gradients."),
    Key(
        "SOLVER.CLIP_GRADIENTS.CLIP_TYPE",
        "value",
        "Whether to clip each value of a gradient, or the norm of each parameter's gradient.",
        one_of("value", "norm"),
    ),
    Key("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 1.0, "Maximum absolute value or norm of a gradient."),
    Key("SOLVER.CLIP_GRADIENTS.NORM_TYPE", 2.0, "Exponent p of the norm."),
    Key(
        "SOLVER.LR_SCHEDULER_NAME",
        "WarmupMultiStepLR",
        "Learning-rate schedule. WarmupMultiStepLR: multiplied by GAMMA at each of STEPS; "
        "WarmupCosineLR: half a cosine to BASE_LR_END; WarmupPolyLR: (1 - progress) to the power "
        "of POLY_LR_POWER.",
        one_of("WarmupMultiStepLR", "WarmupCosineLR", "WarmupPolyLR"),
        resume=False,
    ),
    Key(
        "SOLVER.BASE_LR_END", 0.0, "Learning rate at the end of a cosine, 0..BASE_LR.", resume=False
    ),
    Key("SOLVER.GAMMA", 0.1, "Factor of the learning rate at each of STEPS.", resume=False),
    Key(
        "SOLVER.STEPS",
        (30000,),
        "Iterations at which the learning rate is multiplied by GAMMA.",
        resume=False,
    ),
    Key(
        "SOLVER.WARMUP_FACTOR",
        1.0 / 1000,
        "Fraction of the learning rate at the first iteration of the warm-up.",
        resume=False,
    ),
    Key(
        "SOLVER.WARMUP_ITERS",
        1000,
        "Length of the warm-up, iterations.",
        at_least(0),
        resume=False,
    ),
    Key(
        "SOLVER.WARMUP_METHOD",
        "linear",
        "Shape of the warm-up: a linear increase, or a constant learning rate.",
        one_of("linear", "constant"),
        resume=False,
    ),
    Key(
        "SOLVER.AMP.ENABLED",
        False,
        "Whether to train in mixed precision; evaluation never uses it. See SOLVER.PRECISION.",
    ),
    Key(
        "SOLVER.CHECKPOINT_PERIOD", 5000, "Iterations between checkpoints.", at_least(1), speed=True
    ),
    Key(
        "SOLVER.IMS_PER_BATCH",
        16,
        "Number of images per batch, over all processes.",
        at_least(1),
        resume=False,
    ),
    Key(
        "SOLVER.REFERENCE_WORLD_SIZE",
        0,
        "Number of processes that the batch size, learning rate and schedule are meant for; "
        "with another number of processes they are scaled to it (see `scale_to_processes`). 0: "
        "no scaling.",
        protocol=False,
        sampling=True,
    ),
    Key(
        "TEST.EVAL_PERIOD",
        0,
        "Number of iterations between evaluations; 0 = only at the end.",
        at_least(0),
        free=True,
    ),
    Key(
        "TEST.DETECTIONS_PER_IMAGE",
        100,
        "Maximum number of detections per image, over all classes.",
        at_least(1),
    ),
    Key(
        "TEST.KEYPOINT_OKS_SIGMAS",
        [],
        "Sigma of each keypoint in COCO's object keypoint similarity; empty: the 17 of COCO.",
    ),
    Key(
        "TEST.PRECISE_BN.ENABLED",
        False,
        "Whether to recompute the batch norm statistics from training images before an evaluation.",
    ),
    Key(
        "TEST.PRECISE_BN.NUM_ITER",
        200,
        "Number of batches that the statistics are computed from.",
        at_least(1),
    ),
    Key("OUTPUT_DIR", "./output", "Output folder of the run.", place=True, per_run=True),
    Key(
        "SEED",
        -1,
        "Seed of all random numbers; negative: a seed is sampled and recorded.",
        Range(lambda value: value < 2**31, "less than 2**31"),
        per_run=True,
        training=True,
    ),
    Key("CUDNN_BENCHMARK", False, "Whether cuDNN times its kernels; not reproducible.", free=True),
    _only("DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST", 1000),
    _only("DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TRAIN", 2000),
    _only("DATASETS.PROPOSAL_FILES_TEST", ()),
    _only("DATASETS.PROPOSAL_FILES_TRAIN", ()),
    _only("GLOBAL.HACK", 1.0),
    _only("INPUT.CROP.ENABLED", False, training=True),
    _only("INPUT.CROP.SIZE", [0.9, 0.9], training=True),
    _only("INPUT.CROP.TYPE", "relative_range", training=True),
    _only("MODEL.ANCHOR_GENERATOR.ANGLES", [[-90, 0, 90]]),
    _only("MODEL.ANCHOR_GENERATOR.NAME", "DefaultAnchorGenerator"),
    _only("MODEL.LOAD_PROPOSALS", False),
    _only("MODEL.PANOPTIC_FPN.COMBINE.ENABLED", True),
    _only("MODEL.PANOPTIC_FPN.COMBINE.INSTANCES_CONFIDENCE_THRESH", 0.5),
    _only("MODEL.PANOPTIC_FPN.COMBINE.OVERLAP_THRESH", 0.5),
    _only("MODEL.PANOPTIC_FPN.COMBINE.STUFF_AREA_LIMIT", 4096),
    _only("MODEL.PANOPTIC_FPN.INSTANCE_LOSS_WEIGHT", 1.0),
    _only("MODEL.PROPOSAL_GENERATOR.NAME", "RPN"),
    _only("MODEL.RESNETS.DEFORM_MODULATED", False),
    _only("MODEL.RESNETS.DEFORM_NUM_GROUPS", 1),
    _only("MODEL.RESNETS.DEFORM_ON_PER_STAGE", [False, False, False, False]),
    _only("MODEL.RETINANET.BBOX_REG_LOSS_TYPE", "smooth_l1"),
    _only("MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_TYPE", "smooth_l1"),
    _only("MODEL.ROI_BOX_HEAD.POOLER_TYPE", "ROIAlignV2"),
    _only("MODEL.ROI_BOX_HEAD.TRAIN_ON_PRED_BOXES", False),
    _only("MODEL.ROI_HEADS.IOU_LABELS", [0, 1]),
    _only("MODEL.ROI_HEADS.PROPOSAL_APPEND_GT", True),
    _only("MODEL.ROI_KEYPOINT_HEAD.NAME", "KRCNNConvDeconvUpsampleHead"),
    _only("MODEL.ROI_KEYPOINT_HEAD.POOLER_TYPE", "ROIAlignV2"),
    _only("MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK", False),
    _only("MODEL.ROI_MASK_HEAD.NAME", "MaskRCNNConvUpsampleHead"),
    _only("MODEL.ROI_MASK_HEAD.POOLER_TYPE", "ROIAlignV2"),
    _only("MODEL.RPN.BBOX_REG_LOSS_TYPE", "smooth_l1"),
    _only("MODEL.RPN.BOUNDARY_THRESH", -1),
    _only("MODEL.RPN.HEAD_NAME", "StandardRPNHead"),
    _only("MODEL.RPN.IOU_LABELS", [0, -1, 1]),
    _only("MODEL.SEM_SEG_HEAD.COMMON_STRIDE", 4),
    _only("TEST.AUG.ENABLED", False),
    _only("TEST.AUG.FLIP", True),
    _only("TEST.AUG.MAX_SIZE", 4000),
    _only("TEST.AUG.MIN_SIZES", (400, 500, 600, 700, 800, 900, 1000, 1100, 1200)),
    _only("VERSION", 2, free=True),
    _fixed("FLOAT32_PRECISION", ""),
    _fixed("SOLVER.NUM_DECAYS", 3),
    _fixed("SOLVER.RESCALE_INTERVAL", False),
    _fixed("TEST.EXPECTED_RESULTS", [], free=True),
    _fixed("VIS_PERIOD", 0, free=True),
)

# This project's own keys, except those of its backbone families (convert/families/).
_OURS = (
    Key(
        "MODEL.RESNETS.STEM",
        "imagenet",
        "Stem of the ResNet. imagenet: 7x7 stride 2 + max-pool. cifar: 3x3 stride 1. stride2: "
        "3x3 stride 2. The last two have no max-pool and exist on the embedded engine only. Set "
        "by the weights' contract.",
        embedded=("imagenet", "cifar", "stride2"),
        model=True,
    ),
    Key(
        "MODEL.BACKBONE.SQUARE_PAD",
        0,
        "Side of the square that images are padded to, px, also in evaluation; 0: padded only "
        "as far as the backbone needs. For backbones with a pyramid.",
    ),
    Key(
        "MODEL.CHANNELS_LAST",
        False,
        "Whether to use the channels-last memory format (H, W, C) for feature maps and kernels; "
        "faster in mixed precision, with different rounding.",
        speed=True,
        sampling=True,
    ),
    Key(
        "DATASETS.VOC_DIR",
        "",
        "Folder of a custom dataset in VOC layout (Annotations/ ImageSets/Main/ JPEGImages/). "
        "If set, DATASETS.TRAIN and TEST become <folder>_<split> and NUM_CLASSES follows.",
        place=True,
        data="folder",
    ),
    Key(
        "DATASETS.VOC_CLASSES",
        [],
        "Class names of VOC_DIR, in order; empty: all names in its annotations, sorted.",
        model=True,
        free=True,
    ),
    Key(
        "DATASETS.VOC_YEAR",
        2007,
        "VOC's metric for VOC_DIR: 2007 = 11 points (as in the paper's tables), 2012 = area under "
        "the curve. Setting it sets VOC_METRIC voc.",
        free=True,
    ),
    Key(
        "DATASETS.VOC_METRIC",
        "voc",
        "Metric for VOC_DIR: voc, or coco = AP over ten IoU thresholds, for which difficult "
        "objects count as the others. Unless it or VOC_YEAR is set, a custom folder gets coco, as "
        "the other layouts do.",
        one_of("voc", "coco"),
        free=True,
    ),
    Key(
        "DATASETS.YOLO_YAML",
        "",
        "data.yaml of a custom dataset in YOLO layout. If set, DATASETS.TRAIN and TEST become "
        "<folder of the file>_train and _test (_val if there is none), and NUM_CLASSES follows.",
        place=True,
        data="file",
    ),
    Key(
        "DATASETS.COCO_DIR",
        "",
        "Folder of a custom dataset in COCO's format as Roboflow exports it: train/ valid/ test/, "
        "each with its images and _annotations.coco.json. If set, DATASETS.TRAIN and TEST become "
        "<folder>_train and _test (_valid if there is none), and NUM_CLASSES follows.",
        place=True,
        data="folder",
    ),
    Key(
        "DATASETS.COCO_TRAIN_JSON",
        "",
        "Training annotation file of a custom dataset in COCO's JSON format. If it and "
        "COCO_TEST_JSON are set, they replace DATASETS.TRAIN and TEST, and NUM_CLASSES follows.",
        place=True,
        run_id="name",
        data="file",
    ),
    Key(
        "DATASETS.COCO_TRAIN_ROOT",
        "",
        "Folder of the images of COCO_TRAIN_JSON; empty: next to the file.",
        place=True,
        data="folder",
    ),
    Key(
        "DATASETS.COCO_TEST_JSON",
        "",
        "Test annotation file of a custom dataset in COCO's JSON format.",
        place=True,
        run_id="name",
        data="file",
    ),
    Key(
        "DATASETS.COCO_TEST_ROOT",
        "",
        "Folder of the images of COCO_TEST_JSON; empty: next to the file.",
        place=True,
        data="folder",
    ),
    Key(
        "DATASETS.KEYPOINT_FLIP_PAIRS",
        [],
        'Pairs of keypoints of a custom dataset to swap when an image is flipped, as (("a", '
        '"b"), …); a pair of one keypoint keeps it. Empty: pairs are matched by name, left and '
        "right.",
    ),
    Key(
        "DATASETS.PART",
        "",
        "Part of the training images to train on; empty: all. 10%: one of five subsets of a "
        "tenth, by the seed; 10%.3: the third. tune: all but a tenth, which replaces "
        "DATASETS.TEST. See detection/datasets/parts.py.",
    ),
    Key(
        "DATASETS.PART_INDEX",
        "",
        "File of published subsets for DATASETS.PART, such as Unbiased Teacher's "
        "COCO_supervision.txt.",
        place=True,
        run_id=True,
        data="file",
    ),
    Key(
        "INPUT.SEM_SEG_CROP_SIZE",
        0,
        "Height of the crops for training semantic segmentation, px; 0 = the whole image.",
        at_least(0),
        training=True,
    ),
    Key(
        "INPUT.SEM_SEG_CROP_ASPECT",
        1.0,
        "Width of these crops divided by their height.",
        above(0),
        training=True,
    ),
    Key(
        "INPUT.SEM_SEG_SCALE_RANGE",
        [1.0, 1.0],
        "Minimum and maximum ratio of the random scaling for semantic segmentation.",
        _RATIOS,
        training=True,
    ),
    Key(
        "INPUT.SEM_SEG_SIZE",
        0,
        "Shorter side of training images that SEM_SEG_SCALE_RANGE is relative to, px; the longer "
        "one is at most MAX_SIZE_TRAIN, likewise. 0: the image's own size, without a limit.",
        at_least(0),
        training=True,
    ),
    Key(
        "INPUT.SEM_SEG_MAX_CLASS_SHARE",
        1.0,
        "Share of a crop's labeled pixels from which one class fills it; then another crop is "
        "sampled, up to 10 times. 1: any crop is taken.",
        Range(lambda value: 0 < value <= 1, "above 0 and at most 1"),
        training=True,
    ),
    Key(
        "INPUT.SEM_SEG_COLOR",
        False,
        "Whether to distort brightness, contrast, saturation and hue of training images of "
        "semantic segmentation (detection/data/color.py).",
        training=True,
    ),
    Key(
        "MODEL.SEM_SEG_HEAD.FEATURE_NORM",
        False,
        "Whether the head's input maps are normalized over their channels, as by a transformer's "
        "final norm, without a learned scale.",
    ),
    Key(
        "MODEL.SEM_SEG_HEAD.DROPOUT",
        0.0,
        "Dropout of the last maps' channels before the classifier, 0 to below 1.",
        below(0, 1),
    ),
    Key(
        "MODEL.SEM_SEG_HEAD.AUXILIARY_WEIGHT",
        0.4,
        "Weight of UPerHead's auxiliary loss, on the third map; 0: no auxiliary head.",
        at_least(0),
    ),
    Key(
        "TEST.SEM_SEG_WINDOW",
        0,
        "Side of the square windows in which semantic segmentation is tested, px; scores are "
        "averaged where windows overlap. 0: the whole image at once.",
        at_least(0),
    ),
    Key(
        "TEST.SEM_SEG_STRIDE",
        0,
        "Distance of neighboring windows, px; 0: as few windows as cover the image, evenly spaced.",
        at_least(0),
    ),
    Key(
        "INPUT.LSJ.ENABLED",
        False,
        "Whether to use large-scale jitter (Ghiasi et al. 2021, arXiv 2012.07177) instead of "
        "the training sizes: the image is flipped, resized to fit a square of SIZE px times a "
        "ratio from SCALE_RANGE, and cropped to the square; with masks, boxes are recomputed "
        "from the cropped masks.",
    ),
    Key("INPUT.LSJ.SIZE", 1024, "Side of the square, px.", at_least(1)),
    Key(
        "INPUT.LSJ.SCALE_RANGE",
        [0.1, 2.0],
        "Minimum and maximum ratio of the random scaling.",
        _RATIOS,
    ),
    Key(
        "INPUT.LSJ.PAD",
        True,
        "Whether to fill the square where the image is smaller, with gray 128 (Detectron2's new "
        "baselines); False leaves that to the backbone's padding (ViTDet).",
    ),
    Key(
        "TEST.COCO_MAX_DETECTIONS",
        100,
        "Maximum number of detections per class and image that COCO's metric counts, for boxes "
        "and masks; AP at another number is not comparable with COCO's (Roboflow's RF100-VL "
        "takes 500).",
        at_least(1),
    ),
    Key(
        "TEST.SEM_SEG_REDUCED_SIZE",
        0,
        "Side of the square that label maps and predictions of semantic segmentation are reduced "
        "to before they are compared, px; 0: the label maps' own size. With any other value mIoU "
        "cannot be compared with published ones: Franca's tables have 41.8 for DINOv2-L this way "
        "(100 px; valeoai/Franca#2), where DINOv2's have 47.7.",
        at_least(0),
    ),
    Key(
        "INPUT.CORRUPTION",
        "",
        "Corruption of the test images: a name from detection/data/corruptions.py and a "
        "severity 1..5, such as fog.3; empty: none.",
    ),
    Key(
        "SOLVER.PRECISION",
        "fp32",
        "Precision of the training. fp32; bf16: convolutions and matrix products in bfloat16 "
        "(autocast); auto: bf16 if the processor computes in it. SOLVER.AMP.ENABLED follows; if "
        "only that key is set, this one becomes bf16, or fp16 on a GPU with Detectron2, as "
        "Detectron2 does.",
        one_of("auto", "fp32", "bf16", "fp16"),
        free=True,  # Recipes compare SOLVER.AMP.ENABLED instead.
    ),
    Key(
        "SOLVER.OPTIMIZER",
        "SGD",
        "Optimizer: SGD, AdamW, or one registered in detection.modeling.optimizer.OPTIMIZERS.",
        resume=False,
    ),
    Key(
        "SOLVER.BETAS",
        (0.9, 0.999),
        "Betas of AdamW.",
        numbers(2, "two numbers from 0 to below 1", lambda beta: 0 <= beta < 1),
        resume=False,
    ),
    Key(
        "SOLVER.LR_DECAY",
        1.0,
        "Factor of the learning rate from each layer of the backbone to the one below it; 1: "
        "none. detection/modeling/layer_decay.py defines the layers.",
        Range(lambda value: 0 < value <= 1, "above 0 and at most 1"),
        resume=False,
        tunable=True,
    ),
    Key(
        "SOLVER.LR_DECAY_BY_STAGE",
        False,
        "Whether every stage of a ConvNeXt is one layer of SOLVER.LR_DECAY, and every downsampling "
        "belongs to the stem, as in its UPerNet.",
        resume=False,
    ),
    Key(
        "SOLVER.BACKBONE_LR_FACTOR",
        1.0,
        "Factor of the learning rate of the backbone's parameters.",
        above(0),
        resume=False,
        tunable=True,
    ),
    Key(
        "SOLVER.POLY_LR_POWER",
        0.9,
        "Power of WarmupPolyLR; 1: linear.",
        above(0),
        resume=False,
    ),
    Key(
        "SOLVER.WEIGHT_DECAY_EMBED",
        0.0,
        "Weight decay of position embeddings, Swin's tables of relative positions, tokens and "
        "layer scale, with AdamW.",
        at_least(0),
        resume=False,
    ),
    Key(
        "SOLVER.TUNED",
        "",
        "Grid that the learning rate was chosen from, set by `run_suite --tune`. The protocol "
        "contains the grid, not the chosen values.",
    ),
    Key(
        "LOG.LOGGERS",
        ("tensorboard",),
        "Loggers that receive the values of metrics.json: tensorboard, wandb, mlflow, or those "
        "registered in moco.engine.loggers.LOGGERS.",
        place=True,
    ),
)

KEYS = Keys(
    [
        *(replace(row, detectron2=True) for row in _DETECTRON2S),
        *_OURS,
        *(replace(row, model=True) for family in FAMILIES for row in family.keys),
    ]
)


def protocol_sha256(config: Mapping[str, Any]) -> str:
    """Return the hash of the protocol, which is equal for all engines, seeds and weights of a task.

    Only values that differ from the defaults are hashed, so that a new key changes no hash.

    Args:
        config: Every key by its full name, and `DATA_KEY`, as in a run record.
    """
    defaults = KEYS.defaults
    kept = differing({key: config[key] for key in defaults if key in config}, defaults)
    if DATA_KEY in config:
        kept[DATA_KEY] = config[DATA_KEY]
    return cfg_sha256(kept, (*KEYS.where(protocol=False).names, *tuned_axes(kept)))


def tuned_axes(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the grid of SOLVER.TUNED as key → values; {} if nothing was tuned."""
    found = re.findall(r"([A-Z_.]+)=(\S*)", str(config.get("SOLVER.TUNED", "")))
    return {key: tuple(values.split(",")) for key, values in found}


def tuned_values(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chosen value of each key in the grid of SOLVER.TUNED."""
    values = {key: config.get(key) for key in tuned_axes(config)}
    return {k: f"{v:g}" if isinstance(v, int | float) else str(v) for k, v in values.items()}


def at_edge(value: str, axis: Sequence[str]) -> bool:
    """Return whether a value is the lowest or the highest of several tuned values."""
    return len(axis) > 1 and value in (min(axis, key=float), max(axis, key=float))
