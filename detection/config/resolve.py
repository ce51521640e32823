"""Fill in a task's unset keys: device, precision, schedule, seed, datasets, number of classes."""

import os
from collections.abc import Collection, Mapping, Sequence

from fvcore.common.config import CfgNode

from detection.config.trained import read_run_config
from detection.datasets import (
    custom_keys,
    custom_names,
    data_sources,
    folder_sources,
    roboflow_sources,
)
from detection.datasets.base import (
    TUNE,
    Source,
    Split,
    apply_part,
    base_name,
    choose_splits,
    splits_expected,
)
from detection.datasets.voc import LISTS, check_trainval
from moco.common.errors import DataError, UserError
from moco.common.files import expand_home
from moco.common.shipped import display_name


def resolve_device(cfg: CfgNode, explicit: Collection[str], num_processes: int) -> None:
    """Set MODEL.DEVICE in place where it is not set, or auto: cuda if there is a GPU, else cpu.

    Raises:
        UserError: If the device does not exist, or several processes have no GPU.
    """
    from moco.engine.device import pick_device

    if "MODEL.DEVICE" in explicit and cfg.MODEL.DEVICE != "auto":
        pick_device(cfg.MODEL.DEVICE, "MODEL.DEVICE")
        return
    cfg.MODEL.DEVICE = pick_device("auto").type
    if num_processes > 1 and cfg.MODEL.DEVICE == "cpu":
        raise UserError(
            f"{num_processes} processes (--num-gpus or torchrun) need one GPU each, but torch sees "
            "none; set MODEL.DEVICE cpu to let them share the CPU"
        )


def resolve_precision(
    cfg: CfgNode, engine: str, explicit: Collection[str], *, eval_only: bool, resume: bool
) -> list[str]:
    """Set SOLVER.PRECISION and the keys that follow from it, in place.

    A resumed run keeps the precision that it was started with, also on another processor.

    Returns:
        Notes on what `auto` chose, and on a precision that this processor only emulates.

    Raises:
        UserError: If fp16 is set without Detectron2 on a GPU.
    """
    import torch

    from moco.engine.device import auto_precision, has_fast_bf16, slow_bf16_warning

    solver, device, notes = cfg.SOLVER, torch.device(cfg.MODEL.DEVICE), []
    has_fp16 = engine == "detectron2" and device.type == "cuda"
    if solver.PRECISION == "auto":
        before = read_run_config(cfg.OUTPUT_DIR) if resume else {}
        fast = has_fast_bf16(device)
        solver.PRECISION = auto_precision(fast, before)
        why = f"{cfg.MODEL.DEVICE} {'has' if fast else 'does not have'} fast bf16"
        if "SOLVER.PRECISION" in before:
            why = "as the run was started"
        notes.append(f"SOLVER.PRECISION auto: {solver.PRECISION}, {why}")
    elif solver.PRECISION == "fp32" and solver.AMP.ENABLED:
        solver.PRECISION = "fp16" if has_fp16 else "bf16"
    if solver.PRECISION == "bf16" and not eval_only and not has_fast_bf16(device):
        notes.append(slow_bf16_warning(cfg.MODEL.DEVICE))
    if solver.PRECISION == "bf16" and "MODEL.CHANNELS_LAST" not in explicit:
        cfg.MODEL.CHANNELS_LAST = True
    if solver.PRECISION == "fp16" and not has_fp16 and not eval_only:
        raise UserError(
            "SOLVER.PRECISION fp16 is available only with Detectron2 on a GPU; set bf16"
        )
    solver.AMP.ENABLED = solver.PRECISION != "fp32"
    return notes


def scale_to_processes(cfg: CfgNode, num_processes: int) -> list[str]:
    """Scale batch size, learning rate and schedule in place, as Detectron2 does; return notes.

    The rule is that of `DefaultTrainer.auto_scale_workers`: each process keeps its batch size, the
    learning rate is proportional to the total batch size (Goyal et al. 2017), and durations in
    iterations are divided, so that the number of epochs stays. With SOLVER.REFERENCE_WORLD_SIZE 0
    nothing changes.

    Raises:
        UserError: If the batch cannot be divided among the reference's processes.
    """
    solver, test = cfg.SOLVER, cfg.TEST
    reference = solver.REFERENCE_WORLD_SIZE
    if reference in (0, num_processes):
        return []
    if reference < 0 or solver.IMS_PER_BATCH % reference:
        raise UserError(
            f"SOLVER.REFERENCE_WORLD_SIZE: got {reference}, expected a divisor of "
            f"SOLVER.IMS_PER_BATCH {solver.IMS_PER_BATCH}"
        )
    before = (solver.IMS_PER_BATCH, solver.BASE_LR, solver.MAX_ITER)
    scale = num_processes / reference
    solver.IMS_PER_BATCH = round(solver.IMS_PER_BATCH * scale)
    solver.BASE_LR = solver.BASE_LR * scale
    solver.MAX_ITER = round(solver.MAX_ITER / scale)
    solver.WARMUP_ITERS = round(solver.WARMUP_ITERS / scale)
    solver.STEPS = tuple(round(step / scale) for step in solver.STEPS)
    solver.CHECKPOINT_PERIOD = max(1, round(solver.CHECKPOINT_PERIOD / scale))
    test.EVAL_PERIOD = round(test.EVAL_PERIOD / scale)
    solver.REFERENCE_WORLD_SIZE = num_processes
    return [
        f"scaled from {reference} to {num_processes} processes: batch {before[0]} -> "
        f"{solver.IMS_PER_BATCH}, learning rate {before[1]:g} -> {solver.BASE_LR:g}, iterations "
        f"{before[2]} -> {solver.MAX_ITER}, steps {tuple(solver.STEPS)}, warm-up "
        f"{solver.WARMUP_ITERS}",
        f"not equivalent after scaling: BN sees {solver.IMS_PER_BATCH} images at once instead of "
        f"{before[0]}, and the rule for the learning rate holds approximately",
    ]


def resolve_seed(cfg: CfgNode, *, resume: bool) -> bool:
    """Set SEED in place to the user's, the resumed run's, or a sampled one; return if sampled."""
    if cfg.SEED >= 0:
        return False
    if resume and (seed := read_run_config(cfg.OUTPUT_DIR).get("SEED", -1)) >= 0:
        cfg.SEED = seed
        return False
    cfg.SEED = int.from_bytes(os.urandom(4), "little") >> 1
    return True


def resolve_metric(cfg: CfgNode, explicit: Collection[str], *, resume: bool) -> list[str]:
    """Set DATASETS.VOC_METRIC in place: a custom folder has COCO's AP, as in the other layouts.

    The key keeps its value if it was set, or DATASETS.VOC_YEAR, which belongs to VOC's metric. A
    resumed run keeps the metric that it was started with.

    Args:
        cfg: Configuration.
        explicit: Keys set in the task file or on the command line.
        resume: Whether to continue the run in OUTPUT_DIR.

    Returns:
        A note if the resumed run keeps VOC's metric.
    """
    key = "DATASETS.VOC_METRIC"
    if not cfg.DATASETS.VOC_DIR or not {key, "DATASETS.VOC_YEAR"}.isdisjoint(explicit):
        return []
    before = read_run_config(cfg.OUTPUT_DIR) if resume else {}
    cfg.DATASETS.VOC_METRIC = before.get(key, "coco")
    return [f"{key} voc: as the run was started"] if cfg.DATASETS.VOC_METRIC == "voc" else []


def resolve_names(cfg: CfgNode, overrides: Collection[str], *, eval_only: bool) -> None:
    """Set DATASETS.TRAIN and TEST in place; for an evaluation TEST only.

    A custom dataset replaces the YAML file's, but not the command line's; then DATASETS.PART is
    applied.

    Args:
        cfg: Configuration.
        overrides: Keys set on the command line.
        eval_only: Whether nothing is trained.

    Raises:
        UserError: If keys contradict each other, or a part or a subset of an index file does not
            exist.
        DataError: If a custom folder lacks the splits.
    """
    datasets = cfg.DATASETS
    needed = ("TEST",) if eval_only else ("TRAIN", "TEST")
    own = custom_names(cfg)
    files = {"COCO_TRAIN_JSON": "COCO_*_JSON", "COCO_TEST_JSON": "COCO_*_JSON"}
    kinds = list(dict.fromkeys(files.get(key, key) for key in custom_keys(datasets)))
    if len(kinds) > 1:
        both = " and ".join(f"DATASETS.{kind}" for kind in kinds[:2])
        raise UserError(f"{both} are both set; keep one of them")
    for key, name in own.items():
        kept = datasets[key] and base_name(datasets[key][0]) in own.values()
        if f"DATASETS.{key}" not in overrides and not kept:
            datasets[key] = (name,)
    if own and (missing := [f"DATASETS.COCO_{key}_JSON" for key in needed if key not in own]):
        raise UserError(f"{' and '.join(missing)} is not set, but the other one is; set both")
    if datasets.VOC_DIR:
        voc = folder_sources(datasets)
        splits: dict[str, Source] = {source.split: source for source in voc}
        _resolve_splits(cfg, overrides, needed, "VOC_DIR", splits, LISTS)
        datasets.VOC_CLASSES = list(voc[0].classes)
    elif list(datasets.VOC_CLASSES):
        raise UserError("DATASETS.VOC_CLASSES belongs to DATASETS.VOC_DIR; set both or none")
    elif datasets.YOLO_YAML:
        splits = {source.split: source for source in data_sources(datasets)}
        _resolve_splits(cfg, overrides, needed, "YOLO_YAML", splits, "it")
    elif datasets.COCO_DIR:
        splits = {source.split: source for source in roboflow_sources(datasets)}
        _resolve_splits(cfg, overrides, needed, "COCO_DIR", splits, "it")
    if not eval_only and not datasets.TRAIN:
        raise UserError(
            "DATASETS.TRAIN is empty; name a dataset, set DATASETS.VOC_DIR, DATASETS.YOLO_YAML, "
            "DATASETS.COCO_DIR or DATASETS.COCO_TRAIN_JSON, or give a task that does, e.g. "
            "--config-file " + display_name("voc/faster_rcnn_R_18_C4_small")
        )
    if datasets.PART_INDEX and datasets.PART in ("", TUNE):
        raise UserError(
            "DATASETS.PART_INDEX names subsets of DATASETS.PART; set that to one, e.g. 10%.3"
        )
    if datasets.PART and not eval_only:
        train, test = apply_part(datasets.TRAIN, datasets.TEST, datasets.PART)
        datasets.TRAIN, datasets.TEST = tuple(train), tuple(test)


def check_one_test(cfg: CfgNode) -> None:
    """Raise UserError unless DATASETS.TEST names one dataset, after `resolve_names`."""
    if len(cfg.DATASETS.TEST) != 1:
        raise UserError(
            f"DATASETS.TEST: got {tuple(cfg.DATASETS.TEST)}, expected one dataset, because a run "
            "is one number of a table"
        )


def _resolve_splits(
    cfg: CfgNode,
    overrides: Collection[str],
    needed: Sequence[str],
    own: str,
    splits: Mapping[str, Source],
    where: str,
) -> None:
    """Set DATASETS.TRAIN and TEST in place from the splits that the key `own` of DATASETS names.

    Args:
        cfg: Configuration.
        overrides: Keys set on the command line.
        needed: Keys to set, TRAIN and TEST.
        own: Key of DATASETS.
        splits: Source of each split by its short name, such as train.
        where: What has the splits, for errors.
    """
    datasets, names = cfg.DATASETS, {source.name for source in splits.values()}
    for key in needed:
        set_to = tuple(datasets[key])
        if set_to and all(base_name(name) in names for name in set_to):
            continue
        if set_to and f"DATASETS.{key}" in overrides:
            raise UserError(
                f"DATASETS.{key}: {', '.join(set_to)} is not in DATASETS.{own} {datasets[own]}; "
                f"choices are {', '.join(sorted(names))}"
            )
        present = [split for split, source in splits.items() if source.present()]
        if not (chosen := choose_splits(present, needed)):
            for source in (each for split, each in splits.items() if split not in present):
                source.read()  # Raises an error that names what is missing.
            error = splits_expected(where, present, datasets[own])
            raise DataError(f"DATASETS.{own} {datasets[own]}: {error}")
        if chosen[key] == "trainval":
            check_trainval(expand_home(datasets[own]) / LISTS)
        datasets[key] = (splits[chosen[key]].name,)


def resolve_classes(
    cfg: CfgNode, test: Split, explicit: Collection[str], overrides: Collection[str]
) -> None:
    """Set the head's NUM_CLASSES in place to the dataset's number of classes.

    Args:
        cfg: Configuration.
        test: Test split.
        explicit: Keys set in the task file or on the command line.
        overrides: Keys set on the command line.

    Raises:
        UserError: If the key was set to another number, or the architecture does not fit the
            dataset.
    """
    semantic = test.evaluator_type == "sem_seg"
    architecture = cfg.MODEL.META_ARCHITECTURE
    if semantic != (architecture == "SemanticSegmentor"):
        raise UserError(
            f"MODEL.META_ARCHITECTURE {architecture} does not fit {test.name}, "
            f"whose metric is {test.evaluator_type}"
        )
    heads = {"SemanticSegmentor": "SEM_SEG_HEAD", "RetinaNet": "RETINANET"}
    head = heads.get(architecture, "ROI_HEADS")
    node, key = cfg.MODEL[head], f"MODEL.{head}.NUM_CLASSES"
    own = bool(custom_keys(cfg.DATASETS) or test.from_catalog)
    num_classes = len(test.classes)
    if key not in (overrides if own else explicit):
        node.NUM_CLASSES = num_classes
    elif node.NUM_CLASSES != num_classes:
        raise UserError(
            f"{key}: got {node.NUM_CLASSES}, but {test.name} has {num_classes} classes; remove the "
            "key"
        )
