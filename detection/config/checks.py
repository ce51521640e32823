"""Checks of a resolved task: values, constraints between keys, the data, and a resumed folder."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fvcore.common.config import CfgNode

from detection.config.keys import FIXED, LOOP_CHOICES, NOT_PROTOCOL
from detection.config.trained import config_in
from detection.data import corruptions
from detection.datasets.base import Split, object_counts, require_package
from detection.datasets.coco import PERSON_KEYPOINTS
from detection.datasets.coco_json import require_polygons
from detection.datasets.flips import pairs_note
from detection.modeling.layer_decay import LAYER_RULES, family_of
from detection.modeling.optimizer import OPTIMIZERS
from moco.common.cfgnode import flatten, same_value
from moco.common.errors import DataError, UserError, first_few
from moco.common.registry import lookup
from moco.engine.loggers import check_loggers

_SMALLEST = {
    "SOLVER.MAX_ITER": 1,
    "SOLVER.IMS_PER_BATCH": 1,
    "SOLVER.WARMUP_ITERS": 0,
    "SOLVER.CHECKPOINT_PERIOD": 1,
    "INPUT.SEM_SEG_CROP_SIZE": 0,
    "INPUT.LSJ.SIZE": 1,
    "SOLVER.WEIGHT_DECAY_EMBED": 0,
    "TEST.EVAL_PERIOD": 0,
    "TEST.PRECISE_BN.NUM_ITER": 1,
    "TEST.DETECTIONS_PER_IMAGE": 1,
    "TEST.COCO_MAX_DETECTIONS": 1,
    "DATALOADER.NUM_WORKERS": 0,
    "INPUT.MIN_SIZE_TEST": 0,
    "INPUT.MAX_SIZE_TRAIN": 1,
    "INPUT.MAX_SIZE_TEST": 1,
}
# What a resumed run cannot change: the checkpoint brings optimizer and schedule along.
_FIXED_BY_CHECKPOINT = (
    "SOLVER.BASE_LR",
    "SOLVER.IMS_PER_BATCH",
    "SOLVER.GAMMA",
    "SOLVER.STEPS",
    "SOLVER.WARMUP_FACTOR",
    "SOLVER.WARMUP_ITERS",
    "SOLVER.WARMUP_METHOD",
    "SOLVER.OPTIMIZER",
    "SOLVER.BETAS",
    "SOLVER.LR_DECAY",
    "SOLVER.WEIGHT_DECAY_EMBED",
    "SOLVER.LR_SCHEDULER_NAME",
    "SOLVER.BASE_LR_END",
)


def check_values(cfg: CfgNode) -> None:
    """Raise UserError for a value out of its range or in contradiction with another one."""
    if found := other_choice(cfg, FIXED, LOOP_CHOICES):
        key, value, names = found
        raise UserError(f"{key} {value}: this project has only {names} on both engines; change it")
    flat, solver, images = flatten(cfg), cfg.SOLVER, cfg.INPUT
    if images.CORRUPTION:
        corruptions.parse(images.CORRUPTION)
    check_loggers(cfg.LOG.LOGGERS)
    lookup(OPTIMIZERS, solver.OPTIMIZER, "SOLVER.OPTIMIZER")
    sizes = images.MIN_SIZE_TRAIN
    sizes = sizes if isinstance(sizes, list | tuple) else (sizes,)  # one number: in Detectron2
    by_range = images.MIN_SIZE_TRAIN_SAMPLING == "range"
    mean, std, betas = cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD, solver.BETAS
    steps, last = list(solver.STEPS), solver.MAX_ITER
    rising = steps == sorted(set(steps)) and all(0 < step < last for step in steps)
    ratios = "two ratios above 0, the lower one first"
    rules = [
        *((key, flat[key] >= least, f"at least {least}") for key, least in _SMALLEST.items()),
        ("SEED", cfg.SEED < 2**31, "less than 2**31"),
        ("SOLVER.BASE_LR", _finite(solver.BASE_LR) and solver.BASE_LR > 0, "more than 0"),
        (
            "SOLVER.BASE_LR_END",
            0 <= solver.BASE_LR_END <= solver.BASE_LR,
            f"0 to SOLVER.BASE_LR {solver.BASE_LR}",
        ),
        (
            "SOLVER.BETAS",
            len(betas) == 2 and all(_finite(beta) and 0 <= beta < 1 for beta in betas),
            "two numbers from 0 to below 1",
        ),
        ("SOLVER.LR_DECAY", 0 < solver.LR_DECAY <= 1, "above 0 and at most 1"),
        (
            "SOLVER.STEPS",
            rising or solver.LR_SCHEDULER_NAME == "WarmupCosineLR",
            f"rising iterations below SOLVER.MAX_ITER {last}; set both, e.g. SOLVER.STEPS "
            f"'({last * 3 // 4},)'",
        ),
        ("INPUT.FORMAT", images.FORMAT in ("RGB", "BGR"), "RGB or BGR"),
        (
            "INPUT.MIN_SIZE_TRAIN",
            len(sizes) > 0 and all(_finite(size) and size >= 1 for size in sizes),
            "sizes in pixels, e.g. (800,)",
        ),
        (
            "INPUT.MIN_SIZE_TRAIN",
            len(sizes) == 2 or not by_range,
            "the smallest and the largest size, because INPUT.MIN_SIZE_TRAIN_SAMPLING is range",
        ),
        ("INPUT.SEM_SEG_SCALE_RANGE", _is_range(images.SEM_SEG_SCALE_RANGE), ratios),
        ("INPUT.LSJ.SCALE_RANGE", _is_range(images.LSJ.SCALE_RANGE), ratios),
        ("MODEL.PIXEL_MEAN", len(mean) == 3 and all(map(_finite, mean)), "3 numbers of 0..255"),
        (
            "MODEL.PIXEL_STD",
            len(std) == 3 and all(_finite(value) and value > 0 for value in std),
            "3 numbers above 0",
        ),
    ]
    for key, fits, expected in rules:
        if not fits:
            raise UserError(f"{key}: got {flat[key]!r}, expected {expected}")
    if solver.LR_DECAY != 1 and family_of(cfg) is None:
        families = ", ".join(name for name, _ in LAYER_RULES)
        raise UserError(
            f"SOLVER.LR_DECAY {solver.LR_DECAY}: the layers of MODEL.BACKBONE.NAME "
            f"{cfg.MODEL.BACKBONE.NAME} are not known, only those of {families}; set it to 1.0"
        )
    keeps_empty = not cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
    for key, excluded in (
        ("INPUT.CROP.ENABLED", images.CROP.ENABLED),
        # Detectron2 looks for the masks of an image without an object.
        ("DATALOADER.FILTER_EMPTY_ANNOTATIONS", cfg.MODEL.MASK_ON and keeps_empty),
        ("MODEL.META_ARCHITECTURE", cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor"),
        ("MODEL.DENSEPOSE_ON", cfg.MODEL.get("DENSEPOSE_ON", False)),
    ):
        if images.LSJ.ENABLED and excluded:
            raise UserError(f"INPUT.LSJ.ENABLED True: not with {key} {flat[key]}; set one of them")


def other_choice(
    cfg: CfgNode, fixed: Mapping[str, Any], choices: Mapping[str, Sequence[Any]]
) -> tuple[str, Any, str] | None:
    """Return the first key whose value is none of its choices, the value, and the choices' names.

    Keys of `fixed` have one choice. None: there is no such key.
    """
    values = flatten(cfg)
    for key, allowed in {**{k: (v,) for k, v in fixed.items()}, **choices}.items():
        value = values.get(key, allowed[0])
        if not any(same_value(value, choice) for choice in allowed):
            return key, value, ", ".join(repr(c) if c == "" else str(c) for c in allowed)
    return None


def check_warmup(solver: CfgNode) -> None:
    """Raise UserError where the learning rate would never be SOLVER.BASE_LR."""
    cosine = solver.LR_SCHEDULER_NAME == "WarmupCosineLR"
    first = solver.MAX_ITER if cosine else min(solver.STEPS, default=solver.MAX_ITER)
    if solver.WARMUP_ITERS >= first:
        raise UserError(
            f"SOLVER.WARMUP_ITERS: got {solver.WARMUP_ITERS}, expected less than {first}, the "
            "first decay or the end; with it the learning rate would reach "
            f"{highest_rate(solver):g}, not SOLVER.BASE_LR {solver.BASE_LR:g}"
        )


def highest_rate(solver: CfgNode) -> float:
    """Return the highest learning rate of a training, that at the end of its warm-up.

    The rate rises to the schedule's value there, so that a decay within the warm-up scales all of
    it and the rate never reaches SOLVER.BASE_LR.
    """
    warmup, last = min(solver.WARMUP_ITERS, solver.MAX_ITER), solver.MAX_ITER
    if solver.LR_SCHEDULER_NAME == "WarmupCosineLR":
        share = (1 + math.cos(math.pi * warmup / last)) / 2
        return float(solver.BASE_LR_END + (solver.BASE_LR - solver.BASE_LR_END) * share)
    decays = sum(step <= warmup for step in solver.STEPS if warmup)
    return float(solver.BASE_LR * solver.GAMMA**decays)


def _is_range(ratios: Sequence[float]) -> bool:
    return len(ratios) == 2 and 0 < ratios[0] <= ratios[1]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def check_basic_blocks(cfg: CfgNode) -> None:
    """Raise UserError for what a backbone of basic blocks (ResNet-10, 18, 34) cannot have."""
    from convert.modeling.resnet import is_bottleneck  # imports torch

    resnets = cfg.MODEL.RESNETS
    if is_bottleneck(resnets.DEPTH):
        return
    for key, only in (
        ("RES2_OUT_CHANNELS", resnets.STEM_OUT_CHANNELS),
        ("NUM_GROUPS", 1),
        ("RES5_DILATION", 1),
    ):
        if resnets[key] != only:
            raise UserError(
                f"MODEL.RESNETS.{key} {resnets[key]}: the basic blocks of a ResNet-{resnets.DEPTH} "
                "keep the channels of the stem, have no groups and cannot be dilated; "
                f"set it to {only}"
            )
    if cfg.MODEL.ROI_HEADS.NAME == "Res5ROIHeads":
        # Its res5 is three bottlenecks whatever the backbone: R18 weights would load in part.
        raise UserError(
            "MODEL.ROI_HEADS.NAME Res5ROIHeads: its res5 is made of bottlenecks; with a "
            f"ResNet-{resnets.DEPTH} use Res5ROIHeadsExtraNorm"
        )


def check_box_head(cfg: CfgNode) -> None:
    """Raise UserError for keys of box heads that contradict each other (asserts of Detectron2)."""
    roi, box, cascade = (
        cfg.MODEL[name] for name in ("ROI_HEADS", "ROI_BOX_HEAD", "ROI_BOX_CASCADE_HEAD")
    )
    if box.USE_FED_LOSS and not box.USE_SIGMOID_CE:
        raise UserError(
            "MODEL.ROI_BOX_HEAD.USE_FED_LOSS True: needs USE_SIGMOID_CE; set both, or none"
        )
    if roi.NAME != "CascadeROIHeads":
        return
    if not box.CLS_AGNOSTIC_BBOX_REG:
        raise UserError(
            "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG False: the stages of CascadeROIHeads move a "
            "box without knowing its class; set it True"
        )
    ious, first = list(cascade.IOUS), roi.IOU_THRESHOLDS[0]
    if len(ious) != len(cascade.BBOX_REG_WEIGHTS) or ious[:1] != [first]:
        raise UserError(
            f"MODEL.ROI_BOX_CASCADE_HEAD.IOUS {ious}: expected one for each of the "
            f"{len(cascade.BBOX_REG_WEIGHTS)} BBOX_REG_WEIGHTS, the first one {first}, as "
            "MODEL.ROI_HEADS.IOU_THRESHOLDS"
        )


def check_splits(cfg: CfgNode, train: tuple[Split, ...], test: Split) -> list[str]:
    """Notes on the data.

    Raises:
        DataError: the splits do not fit each other or the model; nothing is learned or measured.
        UserError: a package that cuts masks is missing, or a loss needs what the training data do
            not say.
    """
    notes = []
    if train and cfg.INPUT.LSJ.ENABLED and cfg.MODEL.MASK_ON:
        require_package("shapely", "lsj", "INPUT.LSJ.ENABLED True: cutting masks needs")
    for split in {split.name: split for split in (*train, test)}.values():
        notes += [f"{split.name}: {note}" for note in split.notes]
        if split.classes != test.classes:
            raise DataError(
                f"{split.name} has the classes {first_few(split.classes)}, {test.name} has "
                f"{first_few(test.classes)}; they must be the same in the same order"
            )
    model = cfg.MODEL
    if model.ROI_BOX_HEAD.USE_FED_LOSS and train and "class_image_count" not in train[0].metadata:
        raise UserError(
            f"MODEL.ROI_BOX_HEAD.USE_FED_LOSS True: {train[0].name} does not say how many images "
            "each class is on, as lvis_v1_train does; set it False"
        )
    for split in train:
        for key, present, what in (
            ("MASK_ON", split.has_masks, "a mask"),
            ("KEYPOINT_ON", split.has_keypoints, "keypoints"),
        ):
            if model[key] and not present:
                raise DataError(
                    f"{split.name}: not every object has {what}, which MODEL.{key} needs; annotate "
                    f"them, or set MODEL.{key} False"
                )
        named = {"keypoint_names", "keypoint_flip_map"} <= split.metadata.keys()
        if model.KEYPOINT_ON and not named:
            raise UserError(
                f"{split.name}: MODEL.KEYPOINT_ON needs keypoint_names and keypoint_flip_map in "
                "its MetadataCatalog; set them there"
            )
        if model.MASK_ON and cfg.INPUT.MASK_FORMAT == "polygon" and not split.from_catalog:
            require_polygons(split)
    most, given = cfg.TEST.COCO_MAX_DETECTIONS, cfg.TEST.DETECTIONS_PER_IMAGE
    if test.evaluator_type == "coco" and given > most:
        notes.append(
            f"TEST.DETECTIONS_PER_IMAGE {given}: COCO's metric counts {most} of a class in an "
            "image and ignores the rest; TEST.COCO_MAX_DETECTIONS sets another number"
        )
    if model.KEYPOINT_ON and cfg.INPUT.RANDOM_FLIP == "horizontal":
        notes += [
            pairs_note(split)
            for split in train
            if not split.from_catalog and split.metadata["keypoint_names"] != PERSON_KEYPOINTS
        ]
    if test.evaluator_type != "sem_seg":
        notes += _absent_classes(train, test)
    trained = {record["file_name"] for split in train for record in split.records}
    shared = sum(record["file_name"] in trained for record in test.records)
    if shared:
        notes.append(f"{shared} of {len(test.records)} test images are also trained on")
    return notes


def _absent_classes(train: tuple[Split, ...], test: Split) -> list[str]:
    """Notes on classes that are not learned, or not measured; DataError if that is all of them."""
    notes = []
    learned = {name for split in train for name in object_counts(split)}
    if train and not learned:
        raise DataError(f"{train[0].name}: no annotated objects in the training split")
    unseen = [name for name in test.classes if name not in learned]
    if train and unseen:
        notes.append(f"no object to train on, so never detected: {first_few(unseen)}")
    if test.from_catalog:
        return notes  # its records need not have what its evaluator compares with
    measured = object_counts(test, measured=True)
    absent = [name for name in test.classes if name not in measured]
    if len(absent) == len(test.classes):
        raise DataError(f"{test.name}: no annotated objects in the test split to measure AP with")
    if absent:
        theirs = "; bbox/AP_detectron2 counts them, as Detectron2 does"
        notes.append(
            f"{test.name}: no object to test on: {first_few(absent)}; AP is the mean over the "
            f"other {len(measured)} classes{theirs * (test.evaluator_type == 'pascal_voc')}"
        )
    return notes


def changes_since(cfg: CfgNode) -> list[str]:
    """A note if the folder was begun under another configuration.

    Raises:
        UserError: the checkpoint would overrule the change (it holds optimizer and schedule), or
            the iterations done would count for something else.
    """
    before, now = config_in(cfg.OUTPUT_DIR), flatten(cfg)
    changed = [
        key
        for key in sorted(before.keys() & now.keys())
        if key not in NOT_PROTOCOL and not same_value(before[key], now[key])
    ]
    for key in changed:
        if key in _FIXED_BY_CHECKPOINT:
            raise UserError(
                f"--resume: {key} is {now[key]}, but {cfg.OUTPUT_DIR} was begun with "
                f"{before[key]}; keep it (and the number of processes, if "
                "SOLVER.REFERENCE_WORLD_SIZE scales it), or start from scratch in another folder"
            )
    return [f"resumed with other values of {', '.join(changed)}"] if changed else []
