"""What the user left open in a task: device, precision, schedule, seed, data, number of classes."""

import os
from collections.abc import Collection, Sequence

from fvcore.common.config import CfgNode

from detection.config.trained import config_in
from detection.datasets import custom_names, folder_sources, parts
from detection.datasets.base import Split
from detection.datasets.voc import choose_splits, lists_expected
from moco.common.errors import DataError, UserError
from moco.common.shipped import shown

PRECISIONS = ("auto", "fp32", "bf16", "fp16")


def resolve_device(cfg: CfgNode, explicit: Collection[str], num_processes: int) -> None:
    """MODEL.DEVICE (in place): cuda where there is one, else cpu, unless it was set."""
    import torch

    available = torch.cuda.is_available()
    if "MODEL.DEVICE" not in explicit:
        if num_processes > 1 and not available:
            raise UserError(
                f"{num_processes} processes (--num-gpus or torchrun) train on as many GPUs, but "
                "torch sees no GPU; set MODEL.DEVICE cpu to let them share the CPU"
            )
        cfg.MODEL.DEVICE = "cuda" if available else "cpu"
    kind = cfg.MODEL.DEVICE.split(":")[0]
    if kind not in ("cuda", "cpu"):
        raise UserError(f"MODEL.DEVICE: got {cfg.MODEL.DEVICE!r}, choices are cuda, cuda:N, cpu")
    if kind == "cuda" and not available:
        raise UserError("MODEL.DEVICE is cuda, but torch sees no GPU; set MODEL.DEVICE cpu")


def resolve_precision(
    cfg: CfgNode, engine: str, explicit: Collection[str], *, eval_only: bool, resume: bool
) -> list[str]:
    """SOLVER.PRECISION and the keys that follow from it (in place); a note on what `auto` chose, or
    on a choice that this processor can only emulate.

    A resumed run keeps the precision that it was begun with, also on another processor.
    """
    import torch

    from moco.engine.device import has_fast_bf16, slow_bf16

    solver, device, notes = cfg.SOLVER, torch.device(cfg.MODEL.DEVICE), []
    theirs = engine == "detectron2" and device.type == "cuda"
    if solver.PRECISION == "auto":
        begun = config_in(cfg.OUTPUT_DIR) if resume else {}
        fast = has_fast_bf16(device)
        solver.PRECISION, why = ("bf16", "has") if fast else ("fp32", "does not have")
        why = f"{cfg.MODEL.DEVICE} {why} fast bf16"
        if "SOLVER.PRECISION" in begun:
            solver.PRECISION, why = begun["SOLVER.PRECISION"], "as the run was begun"
        notes.append(f"SOLVER.PRECISION auto: {solver.PRECISION}, {why}")
    elif solver.PRECISION == "fp32" and solver.AMP.ENABLED:
        solver.PRECISION = "fp16" if theirs else "bf16"
    if solver.PRECISION not in PRECISIONS:
        choices = ", ".join(PRECISIONS)
        raise UserError(f"SOLVER.PRECISION: got {solver.PRECISION!r}, choices are {choices}")
    if solver.PRECISION == "bf16" and not eval_only and not has_fast_bf16(device):
        notes.append(slow_bf16(cfg.MODEL.DEVICE))
    if solver.PRECISION == "bf16" and "MODEL.CHANNELS_LAST" not in explicit:
        cfg.MODEL.CHANNELS_LAST = True
    if solver.PRECISION == "fp16" and not theirs and not eval_only:
        raise UserError("SOLVER.PRECISION fp16: only with Detectron2 on a GPU; set bf16")
    solver.AMP.ENABLED = solver.PRECISION != "fp32"
    return notes


def scale_to_processes(cfg: CfgNode, num_processes: int) -> list[str]:
    """Scale batch, learning rate and schedule (in place) as Detectron2 does, and say so.

    The rule is that of `DefaultTrainer.auto_scale_workers`: the batch of each process stays, the
    learning rate follows the whole batch (Goyal et al. 2017), and the durations in iterations are
    divided, so that the number of epochs stays. With SOLVER.REFERENCE_WORLD_SIZE 0 nothing changes.

    Raises:
        UserError: the batch cannot be divided among the reference's processes.
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


def resolve_seed(cfg: CfgNode, *, resume: bool) -> list[str]:
    """SEED (in place): the user's, the folder's, or a new one, and then a note that says so."""
    if cfg.SEED >= 0:
        return []
    if resume and (seed := config_in(cfg.OUTPUT_DIR).get("SEED", -1)) >= 0:
        cfg.SEED = seed
        return []
    cfg.SEED = int.from_bytes(os.urandom(4), "little") >> 1
    return [f"SEED was not set; {cfg.SEED} was sampled"]


def resolve_names(cfg: CfgNode, given: Collection[str], *, eval_only: bool) -> None:
    """DATASETS.TRAIN and TEST (in place); of an evaluation TEST alone.

    A custom dataset replaces that of the YAML file, but not what is on the command line; then
    DATASETS.PART takes its part.

    Args:
        given: keys of the command line.

    Raises:
        UserError: keys that contradict each other, no such part, or an index file without a subset.
        DataError: a custom folder without such splits.
    """
    datasets = cfg.DATASETS
    needed = ("TEST",) if eval_only else ("TRAIN", "TEST")
    own = custom_names(cfg)
    if own and datasets.VOC_DIR:
        raise UserError("DATASETS.VOC_DIR and DATASETS.COCO_*_JSON are both set; keep one of them")
    for key, name in own.items():
        kept = datasets[key] and parts.base_name(datasets[key][0]) in own.values()
        if f"DATASETS.{key}" not in given and not kept:
            datasets[key] = (name,)
    if own and (missing := [f"DATASETS.COCO_{key}_JSON" for key in needed if key not in own]):
        raise UserError(f"{' and '.join(missing)} is not set, but the other one is; set both")
    if datasets.VOC_DIR:
        _resolve_voc_folder(cfg, given, needed)
    elif list(datasets.VOC_CLASSES):
        raise UserError("DATASETS.VOC_CLASSES belongs to DATASETS.VOC_DIR; set both or none")
    if not eval_only and not datasets.TRAIN:
        raise UserError(
            "DATASETS.TRAIN is empty; name a dataset, set DATASETS.VOC_DIR or "
            "DATASETS.COCO_TRAIN_JSON, or give a task that does, e.g. --config-file "
            + shown("voc/faster_rcnn_R_18_C4_small")
        )
    if datasets.PART_INDEX and datasets.PART in ("", parts.TUNE):
        raise UserError("DATASETS.PART_INDEX: names subsets of DATASETS.PART; set it as 10%.3")
    if datasets.PART and not eval_only:
        train, test = parts.with_part(datasets.TRAIN, datasets.TEST, datasets.PART)
        datasets.TRAIN, datasets.TEST = tuple(train), tuple(test)


def check_one_test(cfg: CfgNode) -> None:
    """Raise UserError unless DATASETS.TEST names one dataset, after `resolve_names`."""
    if len(cfg.DATASETS.TEST) != 1:
        raise UserError(
            f"DATASETS.TEST: got {tuple(cfg.DATASETS.TEST)}, expected one dataset, because a run "
            "is one number of a table"
        )


def _resolve_voc_folder(cfg: CfgNode, given: Collection[str], needed: Sequence[str]) -> None:
    """DATASETS.TRAIN, TEST and VOC_CLASSES (in place) from the splits of DATASETS.VOC_DIR."""
    datasets = cfg.DATASETS
    sources = {source.name: source for source in folder_sources(datasets)}
    for key in needed:
        names = tuple(datasets[key])
        if names and all(parts.base_name(name) in sources for name in names):
            continue
        if names and f"DATASETS.{key}" in given:
            raise UserError(
                f"DATASETS.{key}: {', '.join(names)} is not in DATASETS.VOC_DIR "
                f"{datasets.VOC_DIR}; choices are {', '.join(sources)}"
            )
        splits = {source.split: source.name for source in sources.values()}
        if not (chosen := choose_splits(splits, needed)):
            raise DataError(f"DATASETS.VOC_DIR {datasets.VOC_DIR}: {lists_expected(splits)}")
        datasets[key] = (splits[chosen[key]],)
    datasets.VOC_CLASSES = list(next(iter(sources.values())).classes)


def resolve_classes(
    cfg: CfgNode, test: Split, explicit: Collection[str], given: Collection[str]
) -> None:
    """NUM_CLASSES (in place) follows the dataset, unless it was set and contradicts it.

    Args:
        explicit: keys set anywhere.
        given: keys of the command line.
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
    own = bool(cfg.DATASETS.VOC_DIR or custom_names(cfg) or test.from_catalog)
    num_classes = len(test.classes)
    if key not in (given if own else explicit):
        node.NUM_CLASSES = num_classes
    elif node.NUM_CLASSES != num_classes:
        raise UserError(
            f"{key}: got {node.NUM_CLASSES}, but {test.name} has {num_classes} classes; remove the "
            "key"
        )
