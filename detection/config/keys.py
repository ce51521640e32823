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
    NOT_PROTOCOL,
    Key,
    Keys,
    Range,
    Role,
    at_least,
    defaults_of,
    greater_than,
    half_open_interval,
    is_finite,
    names_of,
    numbers,
    one_of,
    ordered_pair,
)

DATA_KEY = "DATASETS.ANNOTATIONS_SHA256"  # Only in run records; users cannot set it.
FAMILIES = families()
_NORMS = ("BN", "FrozenBN", "SyncBN", "naiveSyncBN")
_ALL_NORMS = (*_NORMS, "GN", "LN", "")
_RATIOS = ordered_pair(expected="two ratios above 0, the lower one first")
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


# Keys that the embedded engine supports at their defaults only. It accepts them, so that a
# config.yaml written by Detectron2 loads, and refuses any other value by the key's name.
_FIXED_ON_EMBEDDED: dict[str, Any] = {
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
# Keys that both engines support at their defaults only.
_FIXED: dict[str, Any] = {
    "FLOAT32_PRECISION": "",
    "SOLVER.NUM_DECAYS": 3,
    "SOLVER.RESCALE_INTERVAL": False,
    "TEST.EXPECTED_RESULTS": [],
    "VIS_PERIOD": 0,
}
# Names, defaults and meaning are Detectron2's (detectron2/config/defaults.py). px: pixels of the
# network's input. Sequences keep Detectron2's types, because yacs compares types.
# detection/embedded/supported.py checks the values that the embedded engine supports.
DETECTRON2S: Keys = {
    "MODEL.DEVICE": Key(
        "cuda",
        "Device of the run: cuda, cuda:N or cpu. Unless set: cuda if a GPU is available, else cpu.",
        role=Role.PLACE,
    ),
    "MODEL.WEIGHTS": Key(
        "",
        "Pre-trained weights: random, or a file from convert/convert_to_d2.py; with --eval-only "
        "a trained model_final.pth.",
        role=Role.RUN,
    ),
    "MODEL.PIXEL_MEAN": Key(
        [103.530, 116.280, 123.675],
        "Mean of each channel's pixels, in the order of INPUT.FORMAT. Set by the weights' "
        "contract.",
        numbers(3, "3 numbers of 0..255"),
        role=Role.WEIGHTS,
    ),
    "MODEL.PIXEL_STD": Key(
        [1.0, 1.0, 1.0],
        "Divisor of each channel's pixels, in the order of INPUT.FORMAT. Set by the weights' "
        "contract.",
        numbers(3, "3 numbers above 0", lambda std: std > 0),
        role=Role.WEIGHTS,
    ),
    "MODEL.META_ARCHITECTURE": Key(
        "GeneralizedRCNN",
        "Kind of detector.",
        embedded=("GeneralizedRCNN", "RetinaNet", "SemanticSegmentor"),
    ),
    "MODEL.MASK_ON": Key(False, "Whether to predict a mask for each box."),
    "MODEL.KEYPOINT_ON": Key(False, "Whether to predict keypoints for each box."),
    "MODEL.BACKBONE.NAME": Key(
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
    "MODEL.BACKBONE.FREEZE_AT": Key(
        2,
        "Number of leading parts to freeze, batch norm included. ResNet: the stem and the "
        "stages, 0..5. ViT: the patch and position embeddings, then the blocks; timm: timm's "
        "groups of stem and stages, or blocks. Of the last two, -1: all of it.",
    ),
    "MODEL.RESNETS.DEPTH": Key(
        50,
        "Number of layers. Set by the weights' contract.",
        embedded=(10, 18, 34, 50, 101, 152),
        model=True,
    ),
    "MODEL.RESNETS.NORM": Key(
        "FrozenBN",
        "Norm of the backbone. FrozenBN is not trained; SyncBN computes its statistics over all "
        "processes.",
        embedded=_NORMS,
    ),
    "MODEL.RESNETS.NUM_GROUPS": Key(
        1, "Number of groups of a bottleneck's 3x3 convolution; 32 in a ResNeXt.", model=True
    ),
    "MODEL.RESNETS.WIDTH_PER_GROUP": Key(
        64, "Number of channels of each group in the first stage.", model=True
    ),
    "MODEL.RESNETS.STRIDE_IN_1X1": Key(
        True,
        "Position of a bottleneck's stride: False = the 3x3 convolution (torchvision, MoCo), "
        "True = the first 1x1 convolution (MSRA).",
        role=Role.WEIGHTS,
    ),
    "MODEL.RESNETS.STEM_OUT_CHANNELS": Key(64, "Number of channels after the stem.", model=True),
    "MODEL.RESNETS.RES2_OUT_CHANNELS": Key(
        256,
        "Number of output channels of the first stage: 256 for bottlenecks, 64 for ResNet-18 "
        "and -34.",
        model=True,
    ),
    "MODEL.RESNETS.OUT_FEATURES": Key(["res4"], "Stages whose feature maps the backbone returns."),
    "MODEL.RESNETS.RES5_DILATION": Key(
        1, "Dilation of the last stage; with 2, res5 has stride 1.", embedded=(1, 2)
    ),
    "MODEL.FPN.IN_FEATURES": Key([], "Feature maps of the backbone that the pyramid is built on."),
    "MODEL.FPN.OUT_CHANNELS": Key(256, "Number of channels of each feature map of the pyramid."),
    "MODEL.FPN.NORM": Key("", "Norm of the pyramid; empty: none.", embedded=_ALL_NORMS),
    "MODEL.FPN.FUSE_TYPE": Key(
        "sum",
        "How the pyramid fuses its lateral and top-down features: sum, or avg for their average.",
        embedded=("sum", "avg"),
    ),
    "MODEL.PROPOSAL_GENERATOR.MIN_SIZE": Key(0, "Minimum side of a proposal, exclusive, px."),
    "MODEL.RPN.IN_FEATURES": Key(["res4"], "Feature maps that the RPN generates proposals from."),
    "MODEL.ANCHOR_GENERATOR.SIZES": Key(
        [[32, 64, 128, 256, 512]],
        "Square roots of the anchors' areas, px, one list for all feature maps or one for each.",
    ),
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS": Key(
        [[0.5, 1.0, 2.0]],
        "Height / width of the anchors, one list for all feature maps or one for each.",
    ),
    "MODEL.ANCHOR_GENERATOR.OFFSET": Key(
        0.0, "Offset of the first anchor's center, strides, 0..1."
    ),
    "MODEL.RPN.CONV_DIMS": Key(
        [-1], "Number of channels of each 3x3 convolution; -1 = that of the input feature map."
    ),
    "MODEL.RPN.IOU_THRESHOLDS": Key(
        [0.3, 0.7], "IoU below which an anchor is background, and IoU from which it is foreground."
    ),
    "MODEL.RPN.BBOX_REG_WEIGHTS": Key((1.0, 1.0, 1.0, 1.0), _DELTAS),
    "MODEL.RPN.SMOOTH_L1_BETA": Key(0.0, _SMOOTH_L1),
    "MODEL.RPN.LOSS_WEIGHT": Key(1.0, "Weight of both RPN losses."),
    "MODEL.RPN.BBOX_REG_LOSS_WEIGHT": Key(1.0, "Weight of the box loss, times LOSS_WEIGHT."),
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": Key(256, "Anchors sampled per image for the losses."),
    "MODEL.RPN.POSITIVE_FRACTION": Key(0.5, "Maximum fraction of foreground anchors, 0..1."),
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": Key(12000, "Proposals kept before NMS in training, per map."),
    "MODEL.RPN.PRE_NMS_TOPK_TEST": Key(6000, "Proposals kept before NMS in evaluation, per map."),
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": Key(2000, "Proposals kept after NMS in training, per image."),
    "MODEL.RPN.POST_NMS_TOPK_TEST": Key(1000, "Proposals kept after NMS in evaluation, per image."),
    "MODEL.RPN.NMS_THRESH": Key(0.7, "IoU threshold of the NMS of proposals, 0..1."),
    "MODEL.ROI_HEADS.NAME": Key(
        "Res5ROIHeads",
        "ROI heads, which classify and refine the proposals.",
        embedded=("Res5ROIHeads", "Res5ROIHeadsExtraNorm", "StandardROIHeads", "CascadeROIHeads"),
        model=True,
    ),
    "MODEL.ROI_HEADS.NUM_CLASSES": Key(80, _CLASSES),
    "MODEL.ROI_HEADS.IN_FEATURES": Key(["res4"], "Feature maps that proposals are pooled from."),
    "MODEL.ROI_HEADS.IOU_THRESHOLDS": Key([0.5], "IoU from which a proposal is foreground."),
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": Key(512, "Proposals sampled per image for the losses."),
    "MODEL.ROI_HEADS.POSITIVE_FRACTION": Key(
        0.25, "Maximum fraction of foreground proposals, 0..1."
    ),
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": Key(0.05, "Minimum score of a detection, 0..1."),
    "MODEL.ROI_HEADS.NMS_THRESH_TEST": Key(0.5, _NMS),
    "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS": Key((10.0, 10.0, 5.0, 5.0), _DELTAS),
    "MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA": Key(0.0, _SMOOTH_L1),
    "MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_WEIGHT": Key(1.0, "Weight of the box loss."),
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": Key(14, "Side of a pooled proposal, cells."),
    "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": Key(0, _SAMPLING.format("proposal")),
    "MODEL.ROI_BOX_HEAD.NAME": Key("", "Box head of StandardROIHeads; Res5ROIHeads uses res5."),
    "MODEL.ROI_BOX_HEAD.NUM_CONV": Key(0, "Number of 3x3 convolutions of the box head."),
    "MODEL.ROI_BOX_HEAD.CONV_DIM": Key(256, "Number of channels of each convolution."),
    "MODEL.ROI_BOX_HEAD.NUM_FC": Key(0, "Number of fully connected layers after the convolutions."),
    "MODEL.ROI_BOX_HEAD.FC_DIM": Key(1024, "Number of channels of each fully connected layer."),
    "MODEL.ROI_BOX_HEAD.NORM": Key(
        "",
        "Norm of the convolutions, and the extra norm of the C4 head that has one; empty: none.",
        embedded=_ALL_NORMS,
    ),
    "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG": Key(False, "Whether classes share box deltas."),
    "MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE": Key(
        False, "Whether to use a binary loss for every class instead of a softmax."
    ),
    "MODEL.ROI_BOX_HEAD.USE_FED_LOSS": Key(
        False,
        "Whether to use federated loss: the binary loss is computed over the classes of a "
        "batch's regions and over classes sampled by their number of images to a power (LVIS v1 "
        "records that number).",
    ),
    "MODEL.ROI_BOX_HEAD.FED_LOSS_NUM_CLASSES": Key(50, "Number of classes in federated loss."),
    "MODEL.ROI_BOX_HEAD.FED_LOSS_FREQ_WEIGHT_POWER": Key(0.5, "Power of a class's image count."),
    "MODEL.ROI_BOX_CASCADE_HEAD.IOUS": Key(
        (0.5, 0.6, 0.7), "IoU from which a box is foreground, for each stage of CascadeROIHeads."
    ),
    "MODEL.ROI_BOX_CASCADE_HEAD.BBOX_REG_WEIGHTS": Key(
        ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0)),
        "Weights of the four regression targets, for each stage.",
    ),
    "MODEL.ROI_MASK_HEAD.NUM_CONV": Key(0, "Number of 3x3 convolutions before the upsampling."),
    "MODEL.ROI_MASK_HEAD.CONV_DIM": Key(256, "Number of channels of each convolution."),
    "MODEL.ROI_MASK_HEAD.NORM": Key(
        "", "Norm of the convolutions; empty: none.", embedded=_ALL_NORMS
    ),
    "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION": Key(
        14, "Side of a pooled box, cells; a mask has twice that."
    ),
    "MODEL.ROI_MASK_HEAD.POOLER_SAMPLING_RATIO": Key(0, _SAMPLING.format("box")),
    "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS": Key(17, "Number of keypoints of an object."),
    "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS": Key((512,) * 8, "Channels of each 3x3 convolution."),
    "MODEL.ROI_KEYPOINT_HEAD.LOSS_WEIGHT": Key(1.0, "Weight of the keypoint loss."),
    "MODEL.ROI_KEYPOINT_HEAD.NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS": Key(
        True,
        "Whether to divide the loss by the number of visible keypoints instead of the largest "
        "possible number.",
    ),
    "MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE": Key(
        1, "Minimum number of visible keypoints of a training image; images with fewer are skipped."
    ),
    "MODEL.ROI_KEYPOINT_HEAD.POOLER_RESOLUTION": Key(14, "Side of a pooled box, cells."),
    "MODEL.ROI_KEYPOINT_HEAD.POOLER_SAMPLING_RATIO": Key(0, _SAMPLING.format("box")),
    "MODEL.RETINANET.NUM_CLASSES": Key(80, _CLASSES),
    "MODEL.RETINANET.IN_FEATURES": Key(
        ["p3", "p4", "p5", "p6", "p7"],
        "Feature maps of the pyramid that RetinaNet predicts objects on.",
    ),
    "MODEL.RETINANET.NUM_CONVS": Key(4, "Number of convolutions of each of the two towers."),
    # Detectron2 keeps separate BN and SyncBN statistics for each feature map there.
    "MODEL.RETINANET.NORM": Key("", "Norm of the towers; empty: none.", embedded=("GN", "LN", "")),
    "MODEL.RETINANET.IOU_THRESHOLDS": Key([0.4, 0.5], "IoU thresholds between an anchor's labels."),
    "MODEL.RETINANET.IOU_LABELS": Key(
        [0, -1, 1],
        "Labels of anchors below, between and above the thresholds; -1 = ignored by the losses.",
        embedded=([0, -1, 1], [0, 1]),
    ),
    "MODEL.RETINANET.PRIOR_PROB": Key(0.01, "Class probability at initialization, 0..1."),
    "MODEL.RETINANET.FOCAL_LOSS_ALPHA": Key(0.25, "Weight of foreground in the focal loss, 0..1."),
    "MODEL.RETINANET.FOCAL_LOSS_GAMMA": Key(
        2.0,
        "Exponent that reduces the weight of easy anchors in the focal loss; 0: all weigh the "
        "same.",
    ),
    "MODEL.RETINANET.BBOX_REG_WEIGHTS": Key((1.0, 1.0, 1.0, 1.0), _DELTAS),
    "MODEL.RETINANET.SMOOTH_L1_LOSS_BETA": Key(0.1, _SMOOTH_L1),
    "MODEL.RETINANET.SCORE_THRESH_TEST": Key(0.05, "Minimum score of a detection, 0..1."),
    "MODEL.RETINANET.TOPK_CANDIDATES_TEST": Key(1000, "Detections kept before NMS, per map."),
    "MODEL.RETINANET.NMS_THRESH_TEST": Key(0.5, _NMS),
    "MODEL.SEM_SEG_HEAD.NAME": Key("SemSegFPNHead", "Head of semantic segmentation."),
    "MODEL.SEM_SEG_HEAD.IN_FEATURES": Key(
        ["p2", "p3", "p4", "p5"],
        "Input feature maps. Of a plain ViT: last_feat, or blocks such as block7, counted from 0.",
    ),
    "MODEL.SEM_SEG_HEAD.NUM_CLASSES": Key(54, _CLASSES),
    "MODEL.SEM_SEG_HEAD.CONVS_DIM": Key(128, "Number of channels of the convolutions."),
    "MODEL.SEM_SEG_HEAD.NORM": Key(
        "GN",
        "Norm of the convolutions; of LinearHead, before its only one. Empty: none.",
        embedded=(*_NORMS, "GN", ""),
    ),
    "MODEL.SEM_SEG_HEAD.IGNORE_VALUE": Key(255, "Label of the pixels that the loss ignores."),
    "MODEL.SEM_SEG_HEAD.LOSS_WEIGHT": Key(1.0, "Weight of the loss."),
    "INPUT.MIN_SIZE_TRAIN": Key(
        (800,),
        "Shorter side of training images, px.",
        Range(_are_sizes, "sizes in pixels, e.g. (800,)"),
    ),
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": Key(
        "choice",
        "How MIN_SIZE_TRAIN is sampled: one of its sizes (choice), or any size between its two "
        "(range).",
        one_of("choice", "range"),
    ),
    "INPUT.MAX_SIZE_TRAIN": Key(1333, "Maximum longer side of training images, px.", at_least(1)),
    "INPUT.MIN_SIZE_TEST": Key(
        800, "Shorter side of test images, px; 0 = the original size.", at_least(0)
    ),
    "INPUT.MAX_SIZE_TEST": Key(1333, "Maximum longer side of test images, px.", at_least(1)),
    "INPUT.RANDOM_FLIP": Key(
        "horizontal",
        "Direction in which half of the training images are flipped.",
        one_of("horizontal", "vertical", "none"),
    ),
    "INPUT.FORMAT": Key(
        "BGR",
        "Channel order of the images. Set by the weights' contract.",
        Range(lambda value: value in ("RGB", "BGR"), "RGB or BGR"),
        role=Role.WEIGHTS,
    ),
    "INPUT.MASK_FORMAT": Key(
        "polygon",
        "Representation of the ground-truth masks in training.",
        one_of("polygon", "bitmask"),
    ),
    "DATASETS.TRAIN": Key((), "Names of the training datasets."),
    "DATASETS.TEST": Key((), "Name of the test dataset."),
    "DATALOADER.NUM_WORKERS": Key(
        4,
        "Number of data-loader workers of each training process; 0: none.",
        at_least(0),
        role=Role.PLACE,
    ),
    "DATALOADER.ASPECT_RATIO_GROUPING": Key(
        True, "Whether a batch holds only landscape or only portrait images."
    ),
    "DATALOADER.FILTER_EMPTY_ANNOTATIONS": Key(
        True, "Whether to skip training images without an object."
    ),
    "DATALOADER.SAMPLER_TRAIN": Key(
        "TrainingSampler",
        "Sampler of the training images; RepeatFactorTrainingSampler repeats images of rare "
        "classes.",
        one_of("TrainingSampler", "RepeatFactorTrainingSampler"),
    ),
    "DATALOADER.REPEAT_THRESHOLD": Key(0.0, "Fraction of images below which a class is rare."),
    "DATALOADER.REPEAT_SQRT": Key(True, "Whether to repeat by sqrt(threshold / fraction)."),
    "SOLVER.MAX_ITER": Key(40000, "Length of the training, iterations.", at_least(1)),
    "SOLVER.BASE_LR": Key(
        0.001,
        "Learning rate for a batch of IMS_PER_BATCH.",
        greater_than(0),
        resume=False,
        tunable=True,
    ),
    "SOLVER.MOMENTUM": Key(0.9, "Momentum of SGD, 0..1."),
    "SOLVER.NESTEROV": Key(False, "Whether to use Nesterov momentum."),
    "SOLVER.WEIGHT_DECAY": Key(
        0.0001,
        "Weight decay of all parameters except norms, and except biases if WEIGHT_DECAY_BIAS is "
        "set.",
        tunable=True,
    ),
    "SOLVER.WEIGHT_DECAY_NORM": Key(0.0, "Weight decay of norms."),
    "SOLVER.WEIGHT_DECAY_BIAS": Key(None, "Weight decay of biases; None = WEIGHT_DECAY."),
    "SOLVER.BIAS_LR_FACTOR": Key(1.0, "Factor of the biases' learning rate."),
    "SOLVER.CLIP_GRADIENTS.ENABLED": Key(False, "Whether to clip gradients."),
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": Key(
        "value",
        "Whether to clip each value of a gradient, or the norm of each parameter's gradient.",
        one_of("value", "norm"),
    ),
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": Key(1.0, "Maximum absolute value or norm of a gradient."),
    "SOLVER.CLIP_GRADIENTS.NORM_TYPE": Key(2.0, "Exponent p of the norm."),
    "SOLVER.LR_SCHEDULER_NAME": Key(
        "WarmupMultiStepLR",
        "Learning-rate schedule. WarmupMultiStepLR: multiplied by GAMMA at each of STEPS; "
        "WarmupCosineLR: half a cosine to BASE_LR_END; WarmupPolyLR: (1 - progress) to the power "
        "of POLY_LR_POWER.",
        one_of("WarmupMultiStepLR", "WarmupCosineLR", "WarmupPolyLR"),
        resume=False,
    ),
    "SOLVER.BASE_LR_END": Key(
        0.0, "Learning rate at the end of a cosine, 0..BASE_LR.", resume=False
    ),
    "SOLVER.GAMMA": Key(0.1, "Factor of the learning rate at each of STEPS.", resume=False),
    "SOLVER.STEPS": Key(
        (30000,), "Iterations at which the learning rate is multiplied by GAMMA.", resume=False
    ),
    "SOLVER.WARMUP_FACTOR": Key(
        1.0 / 1000,
        "Fraction of the learning rate at the first iteration of the warm-up.",
        resume=False,
    ),
    "SOLVER.WARMUP_ITERS": Key(
        1000, "Length of the warm-up, iterations.", at_least(0), resume=False
    ),
    "SOLVER.WARMUP_METHOD": Key(
        "linear",
        "Shape of the warm-up: a linear increase, or a constant learning rate.",
        one_of("linear", "constant"),
        resume=False,
    ),
    "SOLVER.AMP.ENABLED": Key(
        False,
        "Whether to train in mixed precision; evaluation never uses it. See SOLVER.PRECISION.",
    ),
    "SOLVER.CHECKPOINT_PERIOD": Key(
        5000, "Iterations between checkpoints.", at_least(1), role=Role.SPEED
    ),
    "SOLVER.IMS_PER_BATCH": Key(
        16, "Number of images per batch, over all processes.", at_least(1), resume=False
    ),
    "SOLVER.REFERENCE_WORLD_SIZE": Key(
        0,
        "Number of processes that the batch size, learning rate and schedule are meant for; "
        "with another number of processes they are scaled to it (see `scale_to_processes`). 0: "
        "no scaling.",
        role=Role.SPEED,
    ),
    "TEST.EVAL_PERIOD": Key(
        0, "Number of iterations between evaluations; 0 = only at the end.", at_least(0)
    ),
    "TEST.DETECTIONS_PER_IMAGE": Key(
        100, "Maximum number of detections per image, over all classes.", at_least(1)
    ),
    "TEST.KEYPOINT_OKS_SIGMAS": Key(
        [], "Sigma of each keypoint in COCO's object keypoint similarity; empty: the 17 of COCO."
    ),
    "TEST.PRECISE_BN.ENABLED": Key(
        False,
        "Whether to recompute the batch norm statistics from training images before an evaluation.",
    ),
    "TEST.PRECISE_BN.NUM_ITER": Key(
        200, "Number of batches that the statistics are computed from.", at_least(1)
    ),
    "OUTPUT_DIR": Key("./output", "Output folder of the run.", role=Role.RUN),
    "SEED": Key(
        -1,
        "Seed of all random numbers; negative: a seed is sampled and recorded.",
        Range(lambda value: value < 2**31, "less than 2**31"),
        role=Role.RUN,
    ),
    "CUDNN_BENCHMARK": Key(False, "Whether cuDNN times its kernels; not reproducible."),
    **{name: Key(value, embedded=(value,)) for name, value in _FIXED_ON_EMBEDDED.items()},
    **{name: Key(value, range=one_of(value)) for name, value in _FIXED.items()},
}

# This project's own keys, except those of its backbone families (convert/families/).
OURS: Keys = {
    "MODEL.RESNETS.STEM": Key(
        "imagenet",
        "Stem of the ResNet. imagenet: 7x7 stride 2 + max-pool. cifar: 3x3 stride 1. stride2: "
        "3x3 stride 2. The last two have no max-pool and exist on the embedded engine only. Set "
        "by the weights' contract.",
        embedded=("imagenet", "cifar", "stride2"),
        model=True,
    ),
    "MODEL.BACKBONE.SQUARE_PAD": Key(
        0,
        "Side of the square that images are padded to, px, also in evaluation; 0: padded only "
        "as far as the backbone needs. For backbones with a pyramid.",
    ),
    "MODEL.BACKBONE.PER_IMAGE": Key(
        False,
        "Whether a wholly frozen backbone computes the maps of each image by itself, padded only "
        "to whole cells, instead of those of the padded batch. Its maps can then be cached.",
    ),
    "MODEL.BACKBONE.CACHE_GB": Key(
        8.0,
        "Maximum size of the cache of a PER_IMAGE backbone's maps, 10^9 bytes; further maps are "
        "computed each time. 0: no cache. No number depends on it.",
        at_least(0),
        role=Role.SPEED,
    ),
    "MODEL.BACKBONE.CACHE_DIR": Key(
        "",
        "Folder of the cache, which is kept for other runs. Empty: a folder in OUTPUT_DIR, removed "
        "at the end of the run, or one that the runs of a suite share.",
        role=Role.PLACE,
    ),
    "MODEL.CHANNELS_LAST": Key(
        False,
        "Whether to use the channels-last memory format (H, W, C) for feature maps and kernels; "
        "faster in mixed precision, with different rounding.",
        role=Role.SPEED,
    ),
    "DATASETS.VOC_DIR": Key(
        "",
        "Folder of a custom dataset in VOC layout (Annotations/ ImageSets/Main/ JPEGImages/). "
        "If set, DATASETS.TRAIN and TEST become <folder>_<split> and NUM_CLASSES follows.",
        role=Role.PLACE,
        data=True,
    ),
    "DATASETS.VOC_CLASSES": Key(
        [],
        "Class names of VOC_DIR, in order; empty: all names in its annotations, sorted.",
        model=True,
    ),
    "DATASETS.VOC_YEAR": Key(
        2007,
        "VOC's metric for VOC_DIR: 2007 = 11 points (as in the paper's tables), 2012 = area under "
        "the curve. Setting it sets VOC_METRIC voc.",
    ),
    "DATASETS.VOC_METRIC": Key(
        "voc",
        "Metric for VOC_DIR: voc, or coco = AP over ten IoU thresholds, for which difficult "
        "objects count as the others. Unless it or VOC_YEAR is set, a custom folder gets coco, as "
        "the other layouts do.",
        one_of("voc", "coco"),
    ),
    "DATASETS.YOLO_YAML": Key(
        "",
        "data.yaml of a custom dataset in YOLO layout. If set, DATASETS.TRAIN and TEST become "
        "<folder of the file>_train and _test (_val if there is none), and NUM_CLASSES follows.",
        role=Role.PLACE,
        data=True,
    ),
    "DATASETS.COCO_DIR": Key(
        "",
        "Folder of a custom dataset in COCO's format as Roboflow exports it: train/ valid/ test/, "
        "each with its images and _annotations.coco.json. If set, DATASETS.TRAIN and TEST become "
        "<folder>_train and _test (_valid if there is none), and NUM_CLASSES follows.",
        role=Role.PLACE,
        data=True,
    ),
    "DATASETS.COCO_TRAIN_JSON": Key(
        "",
        "Training annotation file of a custom dataset in COCO's JSON format. If it and "
        "COCO_TEST_JSON are set, they replace DATASETS.TRAIN and TEST, and NUM_CLASSES follows.",
        role=Role.PLACE,
        data=True,
    ),
    "DATASETS.COCO_TRAIN_ROOT": Key(
        "",
        "Folder of the images of COCO_TRAIN_JSON; empty: next to the file.",
        role=Role.PLACE,
        data=True,
    ),
    "DATASETS.COCO_TEST_JSON": Key(
        "",
        "Test annotation file of a custom dataset in COCO's JSON format.",
        role=Role.PLACE,
        data=True,
    ),
    "DATASETS.COCO_TEST_ROOT": Key(
        "",
        "Folder of the images of COCO_TEST_JSON; empty: next to the file.",
        role=Role.PLACE,
        data=True,
    ),
    "DATASETS.KEYPOINT_FLIP_PAIRS": Key(
        [],
        'Pairs of keypoints of a custom dataset to swap when an image is flipped, as (("a", '
        '"b"), …); a pair of one keypoint keeps it. Empty: pairs are matched by name, left and '
        "right.",
    ),
    "DATASETS.PART": Key(
        "",
        "Part of the training images to train on; empty: all. 10%: one of five subsets of a "
        "tenth, by the seed; 10%.3: the third. tune: all but a tenth, which replaces "
        "DATASETS.TEST. See detection/datasets/base.py.",
    ),
    "DATASETS.PART_INDEX": Key(
        "",
        "File of published subsets for DATASETS.PART, such as Unbiased Teacher's "
        "COCO_supervision.txt.",
        role=Role.PLACE,
        data=True,
    ),
    "INPUT.SEM_SEG_CROP_SIZE": Key(
        0,
        "Height of the crops for training semantic segmentation, px; 0 = the whole image.",
        at_least(0),
    ),
    "INPUT.SEM_SEG_CROP_ASPECT": Key(
        1.0, "Width of these crops divided by their height.", greater_than(0)
    ),
    "INPUT.SEM_SEG_SCALE_RANGE": Key(
        [1.0, 1.0],
        "Minimum and maximum ratio of the random scaling for semantic segmentation.",
        _RATIOS,
    ),
    "INPUT.SEM_SEG_SIZE": Key(
        0,
        "Shorter side of training images that SEM_SEG_SCALE_RANGE is relative to, px; the longer "
        "one is at most MAX_SIZE_TRAIN, likewise. 0: the image's own size, without a limit.",
        at_least(0),
    ),
    "INPUT.SEM_SEG_MAX_CLASS_SHARE": Key(
        1.0,
        "Share of a crop's labeled pixels above which one class fills it; then another crop is "
        "sampled, up to 10 times. 1: any crop is taken.",
        Range(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ),
    "INPUT.SEM_SEG_COLOR": Key(
        False,
        "Whether to distort brightness, contrast, saturation and hue of training images of "
        "semantic segmentation (detection/data/transforms.py).",
    ),
    "MODEL.SEM_SEG_HEAD.FEATURE_NORM": Key(
        False,
        "Whether the head's input maps are normalized over their channels, as by a transformer's "
        "final norm, without a learned scale.",
    ),
    "MODEL.SEM_SEG_HEAD.DROPOUT": Key(
        0.0,
        "Dropout of the last maps' channels before the classifier, 0 to below 1.",
        half_open_interval(0, 1),
    ),
    "MODEL.SEM_SEG_HEAD.AUXILIARY_WEIGHT": Key(
        0.4,
        "Weight of UPerHead's auxiliary loss, on the third map; 0: no auxiliary head.",
        at_least(0),
    ),
    "TEST.SEM_SEG_WINDOW": Key(
        0,
        "Side of the square windows in which semantic segmentation is tested, px; scores are "
        "averaged where windows overlap. 0: the whole image at once.",
        at_least(0),
    ),
    "TEST.SEM_SEG_STRIDE": Key(
        0,
        "Distance of neighboring windows, px; 0: as few windows as cover the image, evenly spaced.",
        at_least(0),
    ),
    "INPUT.LSJ.ENABLED": Key(
        False,
        "Whether to use large-scale jitter (Ghiasi et al. 2021, arXiv 2012.07177) instead of "
        "the training sizes: the image is flipped, resized to fit a square of SIZE px times a "
        "ratio from SCALE_RANGE, and cropped to the square; with masks, boxes are recomputed "
        "from the cropped masks.",
    ),
    "INPUT.LSJ.SIZE": Key(1024, "Side of the square, px.", at_least(1)),
    "INPUT.LSJ.SCALE_RANGE": Key(
        [0.1, 2.0], "Minimum and maximum ratio of the random scaling.", _RATIOS
    ),
    "INPUT.LSJ.PAD": Key(
        True,
        "Whether to fill the square where the image is smaller, with gray 128 (Detectron2's new "
        "baselines); False leaves that to the backbone's padding (ViTDet).",
    ),
    "TEST.LOGME": Key(
        False,
        "Whether to compute LogME of the initial backbone on the training images "
        "(detection/evaluation/logme.py), as a further metric.",
        role=Role.SPEED,
    ),
    "TEST.COCO_MAX_DETECTIONS": Key(
        100,
        "Maximum number of detections per class and image that COCO's metric counts, for boxes "
        "and masks; AP at another number is not comparable with COCO's (Roboflow's RF100-VL "
        "takes 500).",
        at_least(1),
    ),
    "TEST.SEM_SEG_REDUCED_SIZE": Key(
        0,
        "Side of the square that label maps and predictions of semantic segmentation are reduced "
        "to before they are compared, px; 0: the label maps' own size. With any other value mIoU "
        "cannot be compared with published ones: Franca's tables have 41.8 for DINOv2-L this way "
        "(100 px; valeoai/Franca#2), where DINOv2's have 47.7.",
        at_least(0),
    ),
    "INPUT.CORRUPTION": Key(
        "",
        "Corruption of the test images: a name from detection/data/corruptions.py and a "
        "severity 1..5, such as fog.3; empty: none.",
    ),
    "SOLVER.PRECISION": Key(
        "fp32",
        "Precision of the training. fp32; bf16: convolutions and matrix products in bfloat16 "
        "(autocast); auto: bf16 if the processor computes in it. SOLVER.AMP.ENABLED follows; if "
        "only that key is set, this one becomes bf16, or fp16 on a GPU with Detectron2, as "
        "Detectron2 does.",
        one_of("auto", "fp32", "bf16", "fp16"),
    ),
    "SOLVER.OPTIMIZER": Key(
        "SGD",
        "Optimizer: SGD, AdamW, or one registered in detection.modeling.optimizer.OPTIMIZERS.",
        resume=False,
    ),
    "SOLVER.BETAS": Key(
        (0.9, 0.999),
        "Betas of AdamW.",
        numbers(2, "two numbers from 0 to below 1", lambda beta: 0 <= beta < 1),
        resume=False,
    ),
    "SOLVER.LR_DECAY": Key(
        1.0,
        "Factor of the learning rate from each layer of the backbone to the one below it; 1: "
        "none. detection/modeling/optimizer.py defines the layers.",
        Range(lambda value: 0 < value <= 1, "above 0 and at most 1"),
        resume=False,
        tunable=True,
    ),
    "SOLVER.LR_DECAY_BY_STAGE": Key(
        False,
        "Whether every stage of a ConvNeXt is one layer of SOLVER.LR_DECAY, and every downsampling "
        "belongs to the stem, as in its UPerNet.",
        resume=False,
    ),
    "SOLVER.BACKBONE_LR_FACTOR": Key(
        1.0,
        "Factor of the learning rate of the backbone's parameters.",
        greater_than(0),
        resume=False,
        tunable=True,
    ),
    "SOLVER.POLY_LR_POWER": Key(
        0.9, "Power of WarmupPolyLR; 1: linear.", greater_than(0), resume=False
    ),
    "SOLVER.WEIGHT_DECAY_EMBED": Key(
        0.0,
        "Weight decay of position embeddings, Swin's tables of relative positions, tokens and "
        "layer scale, with AdamW.",
        at_least(0),
        resume=False,
    ),
    "SOLVER.TUNED": Key(
        "",
        "Grid that the learning rate was chosen from, set by `run_suite --tune`. The protocol "
        "contains the grid, not the chosen values.",
    ),
    "LOG.LOGGERS": Key(
        ("tensorboard",),
        "Loggers that receive the values of metrics.json: tensorboard, wandb, mlflow, or those "
        "registered in moco.engine.loggers.LOGGERS.",
        role=Role.PLACE,
    ),
    **{name: replace(key, model=True) for family in FAMILIES for name, key in family.keys.items()},
}
KEYS: Keys = {**DETECTRON2S, **OURS}


def protocol_sha256(config: Mapping[str, Any]) -> str:
    """Return the hash of the protocol, which is equal for all engines, seeds and weights of a task.

    Only values that differ from the defaults are hashed, so that a new key changes no hash.

    Args:
        config: Every key by its full name, and `DATA_KEY`, as in a run record.
    """
    defaults = defaults_of(KEYS)
    kept = differing({key: config[key] for key in defaults if key in config}, defaults)
    if DATA_KEY in config:
        kept[DATA_KEY] = config[DATA_KEY]
    return cfg_sha256(kept, (*names_of(KEYS, *NOT_PROTOCOL), *tuned_axes(kept)))


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
