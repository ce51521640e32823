"""Checks of a resolved task: values, constraints between keys, data, and the resumed run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fvcore.common.config import CfgNode

from detection.config.keys import DETECTRON2S, KEYS
from detection.config.trained import read_run_config
from detection.data import corruptions
from detection.datasets.base import (
    Split,
    object_counts,
    require_package,
    why_unusable,
)
from detection.datasets.coco import PERSON_KEYPOINTS, pairs_note, require_polygons
from detection.modeling.norms import process_norms
from detection.modeling.optimizer import LAYER_RULES, OPTIMIZERS, family_with_rule, parameter_layer
from moco.common.cfgnode import flatten, same_value
from moco.common.errors import DataError, UserError, first_few, lookup
from moco.common.keys import NOT_PROTOCOL, check_keys, names_of
from moco.engine.loggers import check_loggers


def check_values(cfg: CfgNode) -> None:
    """Raise UserError for a value that is out of range or contradicts another one."""
    choices = {name: key.range.choices for name, key in DETECTRON2S.items() if key.range}
    if found := find_invalid_choice(cfg, choices):
        key, value, names = found
        raise UserError(f"{key}: got {value}, but both engines support only {names}")
    flat, solver, images = flatten(cfg), cfg.SOLVER, cfg.INPUT
    if images.CORRUPTION:
        corruptions.parse_corruption(images.CORRUPTION)
    check_loggers(cfg.LOG.LOGGERS)
    lookup(OPTIMIZERS, solver.OPTIMIZER, "SOLVER.OPTIMIZER")
    check_keys(cfg, KEYS)
    steps, last = list(solver.STEPS), solver.MAX_ITER
    rising = steps == sorted(set(steps)) and all(0 < step < last for step in steps)
    sizes, by_range = images.MIN_SIZE_TRAIN, images.MIN_SIZE_TRAIN_SAMPLING == "range"
    for key, fits, expected in (
        (
            "SOLVER.BASE_LR_END",
            0 <= solver.BASE_LR_END <= solver.BASE_LR,
            f"0 to SOLVER.BASE_LR {solver.BASE_LR}",
        ),
        (
            "SOLVER.STEPS",
            rising or solver.LR_SCHEDULER_NAME != "WarmupMultiStepLR",
            f"rising iterations below SOLVER.MAX_ITER {last}; set both, e.g. SOLVER.STEPS "
            f"'({last * 3 // 4},)'",
        ),
        (
            "INPUT.MIN_SIZE_TRAIN",
            not by_range or (not isinstance(sizes, int) and len(sizes) == 2),
            "the smallest and the largest size, because INPUT.MIN_SIZE_TRAIN_SAMPLING is range",
        ),
    ):
        if not fits:
            raise UserError(f"{key}: got {flat[key]!r}, expected {expected}")
    if solver.LR_DECAY != 1 and family_with_rule(cfg) is None:
        families = ", ".join(name for name, _ in LAYER_RULES)
        raise UserError(
            f"SOLVER.LR_DECAY {solver.LR_DECAY}: the layers of MODEL.BACKBONE.NAME "
            f"{cfg.MODEL.BACKBONE.NAME} are unknown; only {families} support it; set it to 1.0"
        )
    if solver.LR_DECAY != 1 and cfg.MODEL.TIMM.NAME:
        try:
            parameter_layer("", cfg)
        except UserError as error:  # timm has no parameter groups of the network
            raise UserError(f"SOLVER.LR_DECAY {solver.LR_DECAY}: {error}; set it to 1.0") from error
    if solver.LR_DECAY_BY_STAGE and family_with_rule(cfg) != "convnext":
        raise UserError(
            "SOLVER.LR_DECAY_BY_STAGE True: only ConvNeXts have layers by stage, not "
            f"MODEL.BACKBONE.NAME {cfg.MODEL.BACKBONE.NAME}; set it to False"
        )
    window, stride = cfg.TEST.SEM_SEG_WINDOW, cfg.TEST.SEM_SEG_STRIDE
    if stride > window:
        raise UserError(
            f"TEST.SEM_SEG_STRIDE {stride}: expected at most TEST.SEM_SEG_WINDOW {window}, so that "
            "the windows cover the image"
        )
    keeps_empty = not cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
    for key, excluded in (
        ("INPUT.CROP.ENABLED", images.CROP.ENABLED),
        # Detectron2's mapper fails on an image without masks.
        ("DATALOADER.FILTER_EMPTY_ANNOTATIONS", cfg.MODEL.MASK_ON and keeps_empty),
        ("MODEL.META_ARCHITECTURE", cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor"),
        ("MODEL.DENSEPOSE_ON", cfg.MODEL.get("DENSEPOSE_ON", False)),
    ):
        if images.LSJ.ENABLED and excluded:
            raise UserError(
                f"INPUT.LSJ.ENABLED True cannot be combined with {key} {flat[key]}; change one"
            )


def find_invalid_choice(
    cfg: CfgNode, choices: Mapping[str, Sequence[Any]]
) -> tuple[str, Any, str] | None:
    """Return the first key with a value that is not among its choices, the value, and the choices.

    Keys without choices may have any value. None: every value is allowed.
    """
    values = flatten(cfg)
    for key, allowed in choices.items():
        value = values.get(key)
        if allowed and key in values and not any(same_value(value, choice) for choice in allowed):
            return key, value, ", ".join(repr(c) if c == "" else str(c) for c in allowed)
    return None


def check_warmup(solver: CfgNode) -> None:
    """Raise UserError if the learning rate would never reach SOLVER.BASE_LR."""
    by_steps = solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR"
    first = min(solver.STEPS, default=solver.MAX_ITER) if by_steps else solver.MAX_ITER
    if solver.WARMUP_ITERS >= first:
        raise UserError(
            f"SOLVER.WARMUP_ITERS: got {solver.WARMUP_ITERS}, expected less than {first}, the "
            "first decay or the end; with it the learning rate would reach "
            f"{highest_learning_rate(solver):g}, not SOLVER.BASE_LR {solver.BASE_LR:g}"
        )


def check_pooled_norm(cfg: CfgNode, num_processes: int) -> None:
    """Raise UserError if UPerHead's batch norm would get a single value per channel.

    One of its maps is pooled to one cell per image.
    """
    key, head = "MODEL.SEM_SEG_HEAD.NORM", cfg.MODEL.SEM_SEG_HEAD
    if cfg.MODEL.META_ARCHITECTURE != "SemanticSegmentor" or head.NAME != "UPerHead":
        return
    norm = process_norms(cfg, num_processes).get(key, head.NORM)
    if norm == "BN" and cfg.SOLVER.IMS_PER_BATCH == num_processes:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {cfg.SOLVER.IMS_PER_BATCH}: got 1 image per process, expected 2 "
            f"or more, because {key} {head.NORM} of UPerHead normalizes maps of one cell; set it "
            f"to {2 * num_processes} or more, or {key} to GN"
        )


def highest_learning_rate(solver: CfgNode) -> float:
    """Return the highest learning rate of a training, which is reached at the end of the warm-up.

    The warm-up ends at the value of the schedule. If the schedule decays within the warm-up, the
    rate never reaches SOLVER.BASE_LR.
    """
    warmup, last = min(solver.WARMUP_ITERS, solver.MAX_ITER), solver.MAX_ITER
    if solver.LR_SCHEDULER_NAME == "WarmupCosineLR":
        share = (1 + math.cos(math.pi * warmup / last)) / 2
        return float(solver.BASE_LR_END + (solver.BASE_LR - solver.BASE_LR_END) * share)
    if solver.LR_SCHEDULER_NAME == "WarmupPolyLR":
        return float(solver.BASE_LR * (1 - warmup / last) ** solver.POLY_LR_POWER)
    decays = sum(step <= warmup for step in solver.STEPS if warmup)
    return float(solver.BASE_LR * solver.GAMMA**decays)


def check_basic_blocks(cfg: CfgNode) -> None:
    """Raise UserError for options that basic blocks (ResNet-10, 18, 34) do not support."""
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
        # Its res5 consists of three bottlenecks with every backbone, so that R18 weights would load
        # only in part.
        raise UserError(
            "MODEL.ROI_HEADS.NAME Res5ROIHeads: its res5 is made of bottlenecks; with a "
            f"ResNet-{resnets.DEPTH} use Res5ROIHeadsExtraNorm"
        )


def check_box_head(cfg: CfgNode) -> None:
    """Raise UserError for contradicting keys of box heads, which Detectron2 only asserts."""
    roi, box, cascade = (
        cfg.MODEL[name] for name in ("ROI_HEADS", "ROI_BOX_HEAD", "ROI_BOX_CASCADE_HEAD")
    )
    if box.USE_FED_LOSS and not box.USE_SIGMOID_CE:
        raise UserError(
            "MODEL.ROI_BOX_HEAD.USE_FED_LOSS True needs USE_SIGMOID_CE True; set both or none"
        )
    if roi.NAME != "CascadeROIHeads":
        return
    if not box.CLS_AGNOSTIC_BBOX_REG:
        raise UserError(
            "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG False: the stages of CascadeROIHeads refine "
            "boxes independently of their classes; set it True"
        )
    ious, first = list(cascade.IOUS), roi.IOU_THRESHOLDS[0]
    if len(ious) != len(cascade.BBOX_REG_WEIGHTS) or ious[:1] != [first]:
        raise UserError(
            f"MODEL.ROI_BOX_CASCADE_HEAD.IOUS {ious}: expected one for each of the "
            f"{len(cascade.BBOX_REG_WEIGHTS)} BBOX_REG_WEIGHTS, the first one {first}, as "
            "MODEL.ROI_HEADS.IOU_THRESHOLDS"
        )


def check_splits(cfg: CfgNode, train: tuple[Split, ...], test: Split) -> list[str]:
    """Check the splits of a task, and return notes on them.

    Raises:
        DataError: If the splits do not fit each other or the model, or have no annotated objects.
        UserError: If the package that crops masks is missing, or the training data lack what a
            loss needs.
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
            f"MODEL.ROI_BOX_HEAD.USE_FED_LOSS True: {train[0].name} does not record the number of "
            "images of each class, as lvis_v1_train does; set it False"
        )
    for split in train:
        for key, present, what in (
            ("MASK_ON", split.has_masks, "a mask"),
            ("KEYPOINT_ON", split.has_keypoints, "keypoints"),
        ):
            if model[key] and not present:
                reason = f"not every object has {what}, which MODEL.{key} needs"
                if key == "KEYPOINT_ON" and split.unused_keypoints:
                    reason = f"keypoints are not used, because {split.unused_keypoints}"
                raise DataError(f"{split.name}: {reason}; annotate them, or set MODEL.{key} False")
        named = {"keypoint_names", "keypoint_flip_map"} <= split.metadata.keys()
        if model.KEYPOINT_ON and not named:
            raise UserError(
                f"{split.name}: MODEL.KEYPOINT_ON needs keypoint_names and keypoint_flip_map in "
                "its MetadataCatalog; set them there"
            )
        if model.MASK_ON and cfg.INPUT.MASK_FORMAT == "polygon" and not split.from_catalog:
            require_polygons(split)
    most, kept = cfg.TEST.COCO_MAX_DETECTIONS, cfg.TEST.DETECTIONS_PER_IMAGE
    if test.evaluator_type == "coco" and kept > most:
        notes.append(
            f"TEST.DETECTIONS_PER_IMAGE {kept}: COCO's metric counts {most} of a class in an "
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
    return notes


def shared_images_warning(train: tuple[Split, ...], test: Split) -> str:
    """Return a warning about test images that are training images, too, or ""."""
    trained = {record["file_name"] for split in train for record in split.records}
    shared = sum(record["file_name"] in trained for record in test.records)
    if not shared:
        return ""
    return (
        f"{shared} of {len(test.records)} test images are also training images: AP says how well "
        "they were learned, not how well other images are detected"
    )


def _absent_classes(train: tuple[Split, ...], test: Split) -> list[str]:
    """Return notes on classes without training or test objects; DataError if none has any."""
    notes = []
    learned = {name for split in train for name in object_counts(split)}
    lacks = [why for split in train if (why := why_unusable(split))]
    if train and len(lacks) == len(train):
        raise DataError(f"{train[0].name}: {lacks[0]}, so nothing can be trained")
    unseen = [name for name in test.classes if name not in learned]
    if train and unseen:
        notes.append(f"classes without training objects, so never detected: {first_few(unseen)}")
    if test.from_catalog:
        return notes  # Its records need not contain the ground truth of its evaluator.
    measured = object_counts(test, measured=True)
    absent = [name for name in test.classes if name not in measured]
    if why := why_unusable(test, measured=True):
        raise DataError(
            f"{test.name}: {why}, so nothing can be tested; name another split in DATASETS.TEST"
        )
    if absent:
        is_voc = test.evaluator_type == "pascal_voc"
        note = "; bbox/AP_detectron2 counts them, as Detectron2 does" if is_voc else ""
        notes.append(
            f"{test.name}: classes without test objects: {first_few(absent)}; AP is the mean over "
            f"the other {len(measured)} classes{note}"
        )
    return notes


def check_resumed_config(cfg: CfgNode) -> list[str]:
    """Return a note if the resumed run was started with another configuration.

    Raises:
        UserError: If the checkpoint, which holds optimizer and schedule, would override the change,
            or the iterations done would have another meaning.
    """
    before, now = read_run_config(cfg.OUTPUT_DIR), flatten(cfg)
    free = names_of(KEYS, *NOT_PROTOCOL)
    changed = [
        key
        for key in sorted(before.keys() & now.keys())
        if key not in free and not same_value(before[key], now[key])
    ]
    for key in changed:
        if not KEYS[key].resume:
            raise UserError(
                f"--resume: {key} is {now[key]}, but {cfg.OUTPUT_DIR} was started with "
                f"{before[key]}; keep it (and the number of processes, if "
                "SOLVER.REFERENCE_WORLD_SIZE scales it), or start from scratch in another folder"
            )
    return [f"resumed with other values of {', '.join(changed)}"] if changed else []
