"""A task: a YAML file in Detectron2's own key names, resolved and checked before anything heavy.

The same file and the same `KEY VALUE` overrides serve both engines; all keys are in keys.py. An
unknown key is an error that names the nearest one, and so is a value that the engine cannot honor.
"""

import hashlib
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from detection.config.keys import DETECTRON2_ONLY, HONOURED, NOT_PROTOCOL, TRANSFER
from detection.config.recipe import RecipeCheck, check
from detection.datasets import custom_names, folder_sources, known, read_split
from detection.datasets.base import Split, object_counts
from detection.datasets.coco_json import require_polygons
from detection.datasets.doctor import command as doctor_command
from detection.engine.weights import (
    RANDOM,
    apply_contract,
    apply_random,
    apply_trained,
    check_weights,
    init_name,
    read_weights,
    trained_keys,
)
from detection.evaluation.evaluators import build_evaluator
from detection.modeling.norms import process_norms
from moco.common.cfgnode import cfg_sha256, explicit_keys, flatten, load_cfg, read_yaml
from moco.common.errors import DataError, UserError
from moco.common.files import PathLike
from moco.common.run import RECORD_NAME, read_record

if TYPE_CHECKING:
    from convert.verify import Converted

ENGINES = ("detectron2", "embedded")
# What a resumed run cannot change: the checkpoint brings optimizer and schedule along.
_FIXED_BY_CHECKPOINT = (
    "SOLVER.BASE_LR",
    "SOLVER.IMS_PER_BATCH",
    "SOLVER.GAMMA",
    "SOLVER.STEPS",
    "SOLVER.WARMUP_FACTOR",
    "SOLVER.WARMUP_ITERS",
    "SOLVER.WARMUP_METHOD",
)
# Keys that evaluation alone does not use.
_OF_TRAINING = (
    "SOLVER.",
    "DATALOADER.",
    "DATASETS.TRAIN",
    "INPUT.MIN_SIZE_TRAIN",
    "INPUT.MAX_SIZE_TRAIN",
    "INPUT.RANDOM_FLIP",
    "INPUT.CROP.",
    "INPUT.SEM_SEG_",
    "MODEL.BACKBONE.FREEZE_AT",
)
CONFIG_NAME = "config.yaml"
DATA_KEY = "DATASETS.ANNOTATIONS_SHA256"  # in a record; not a key that a user sets


@dataclass(frozen=True)
class Task:
    """A task ready to run.

    Attributes:
        name: the config file's name without ending.
        cfg: every key resolved (weights' contract, dataset, device, seed), frozen.
        init: `random` or the weights file's name without ending.
        weights: the converted file, None for random and for evaluation only.
        train: the training splits, empty for evaluation only.
        data: (name, annotations_sha256) of the training splits, then of the test split; for
            evaluation only those that the model was trained on, as far as its record has them.
        recipe: how the configuration compares with the paper's.
        notes: what a reader of the result has to know.
        imports: modules of the user's own code, imported before (`--import`).
    """

    name: str
    engine: str
    cfg: CfgNode
    init: str
    weights: "Converted | None"
    train: tuple[Split, ...]
    test: Split
    data: tuple[tuple[str, str], ...]
    recipe: RecipeCheck
    notes: tuple[str, ...]
    imports: tuple[str, ...] = ()


def default_task() -> CfgNode:
    """Detectron2's keys with its default values, and this project's own.

    All keys of Detectron2 are there, so that its files load; which of them the embedded engine can
    change is checked in `load_task`.
    """
    return _tree({**HONOURED, **DETECTRON2_ONLY, **TRANSFER})


def add_transfer_config(cfg: CfgNode) -> None:
    """Add this project's own keys to Detectron2's config (in place), as its plugins do.

    For one's own train_net.py: `cfg = get_cfg(); add_transfer_config(cfg)`.
    """
    for key, value in TRANSFER.items():
        *parents, name = key.split(".")
        node = cfg
        for parent in parents:
            node = node[parent]
        node[name] = list(value) if isinstance(value, list) else value


def protocol_sha256(config: Mapping[str, Any]) -> str:
    """Hash of the experiment: equal for the two engines, the seeds and the weights of one task.

    Args:
        config: from `resolved_config`.
    """
    task_keys = flatten(default_task())
    kept = {key: value for key, value in config.items() if key in task_keys or key == DATA_KEY}
    return cfg_sha256(kept, NOT_PROTOCOL)


def resolved_config(task: Task) -> dict[str, Any]:
    """Every key, flat, and under `DATA_KEY` what the names of the datasets stand for."""
    digest = hashlib.sha256()
    for name, sha256 in task.data:
        digest.update(f"{name} {sha256}\n".encode())
    return flatten(task.cfg) | {DATA_KEY: digest.hexdigest()}


def check_early(
    config_file: PathLike | None,
    opts: Sequence[str],
    *,
    eval_only: bool = False,
    resume: bool = False,
) -> CfgNode | None:
    """What can be checked in a moment, before torch and the engine are imported.

    Keys and their values, the file of the weights, and that the data are there;
    `load_task` checks them again, and everything else.

    Returns:
        The keys as they are set; None for DensePose, whose keys only its engine knows.

    Raises:
        UserError, DataError: as `load_task`.
    """
    given = explicit_keys(None, opts)
    if "MODEL.DENSEPOSE_ON" in explicit_keys(config_file, opts):
        return None
    cfg = load_cfg(default_task(), config_file, opts)
    _check_values(cfg)
    if eval_only:
        _trained_file(cfg, resume)
    else:
        check_weights(cfg.MODEL.WEIGHTS)
    cfg.defrost()
    needed = ("TEST",) if eval_only else ("TRAIN", "TEST")
    _resolve_names(cfg, given, needed)
    sources = known(cfg)
    for name in (name for key in needed for name in cfg.DATASETS[key]):
        if name in sources and not sources[name].present():
            read_split(name, cfg)  # says what is missing
    return cfg


def load_task(
    config_file: PathLike | None,
    opts: Sequence[str],
    engine: str,
    *,
    eval_only: bool = False,
    resume: bool = False,
    num_processes: int = 1,
) -> Task:
    """Resolve and check everything that can be wrong before training.

    Args:
        config_file: YAML with local `_BASE_`; None: Detectron2's defaults.
        opts: `KEY VALUE` overrides.
        engine: one of `ENGINES`.
        eval_only: MODEL.WEIGHTS is a trained model; with `resume` it is the folder's last one.
        num_processes: over all machines; see `scale_to_processes`.

    Raises:
        UserError: unknown keys, values out of range or in contradiction with each other, with the
            weights' contract or with the data; DataError: files missing or damaged.
    """
    explicit = explicit_keys(config_file, opts)
    cfg = load_cfg(_defaults(engine, explicit), config_file, opts)
    cfg.defrost()
    given = explicit_keys(None, opts)
    notes: list[str] = []

    weights = None
    if eval_only:
        cfg.MODEL.WEIGHTS = str(_trained_file(cfg, resume))
        apply_trained(cfg, trained_keys(cfg.MODEL.WEIGHTS), explicit)
        _apply_training(cfg)
    else:
        weights = read_weights(cfg.MODEL.WEIGHTS)
        if weights is None:
            apply_random(cfg, explicit)
        else:
            apply_contract(cfg, weights.contract, explicit, explicit - given)
            notes += weights.notes

    _resolve_device(cfg, explicit, num_processes)
    _resolve_seed(cfg, resume, notes)
    if not eval_only:  # the schedule that a model was trained with stays what it was
        notes += scale_to_processes(cfg, num_processes)
    _check_values(cfg)
    notes += _check_engine(cfg, engine, num_processes)
    needed = ("TEST",) if eval_only else ("TRAIN", "TEST")
    with _pointing_to_the_doctor(cfg):
        _resolve_names(cfg, given, needed)
        if engine == "detectron2":
            from detection.d2.catalog import offer

            offer(cfg)
        train = () if eval_only else tuple(read_split(name, cfg) for name in cfg.DATASETS.TRAIN)
        test = read_split(cfg.DATASETS.TEST[0], cfg)
        _resolve_classes(cfg, test, explicit, given)
        notes += _check_splits(cfg, train, test)
    # Both say now what they could not do at the end of a training.
    if test.evaluator_type == "densepose":
        from detection.d2.densepose import fetch_surface

        fetch_surface()
    elif test.from_catalog:
        from detection.d2.catalog import check_evaluator

        check_evaluator(test)
    else:
        build_evaluator(test, cfg, Path(cfg.OUTPUT_DIR))
    cfg.freeze()
    if resume and not eval_only:
        notes += _changes_since(cfg)
    num_images = {split.name: len(split.records) for split in (*train, test)}
    recipe = check(cfg, weights.contract if weights else None, num_images)
    name = _task_name(Path(config_file)) if config_file else "defaults"
    init = init_name(cfg.MODEL.WEIGHTS)
    trained_on = [(split.name, split.annotations_sha256) for split in train]
    if eval_only:
        trained_on = _trained_data(Path(cfg.MODEL.WEIGHTS), notes)
    data = (*trained_on, (test.name, test.annotations_sha256))
    return Task(name, engine, cfg, init, weights, train, test, data, recipe, tuple(notes))


def _task_name(config_file: Path) -> str:
    """The file's name; that of the run for the config.yaml that a run left beside its record."""
    record = config_file.with_name(RECORD_NAME)
    if config_file.name == CONFIG_NAME and record.is_file():
        return read_record(record).task
    return config_file.stem


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


def _defaults(engine: str, explicit: Collection[str]) -> CfgNode:
    dense_pose = "MODEL.DENSEPOSE_ON" in explicit
    if engine == "embedded":
        if dense_pose:
            raise UserError(
                "MODEL.DENSEPOSE_ON: the embedded engine has no DensePose; use --engine detectron2 "
                "with Detectron2's DensePose project installed"
            )
        return default_task()
    from detection.d2 import transfer_defaults

    return transfer_defaults(dense_pose=dense_pose)


def check_basic_blocks(cfg: CfgNode) -> None:
    """Raise UserError for what a backbone of basic blocks (ResNet-10, 18, 34) cannot have."""
    depth, dilation = cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES5_DILATION
    if dilation != 1:
        raise UserError(
            f"MODEL.RESNETS.RES5_DILATION {dilation}: the basic blocks of a ResNet-{depth} cannot "
            "be dilated; use a ResNet-50 or deeper"
        )
    if cfg.MODEL.ROI_HEADS.NAME == "Res5ROIHeads":
        # Its res5 is three bottlenecks whatever the backbone: R18 weights would load in part.
        raise UserError(
            "MODEL.ROI_HEADS.NAME Res5ROIHeads: its res5 is made of bottlenecks; with a "
            f"ResNet-{depth} use Res5ROIHeadsExtraNorm"
        )


def _check_engine(cfg: CfgNode, engine: str, num_processes: int) -> list[str]:
    """What one engine has and the other has not; notes on what it does its own way."""
    if engine == "embedded":
        from detection.embedded.supported import check_supported

        check_supported(cfg)
    else:
        from detection.d2.config import check_transfer_config

        check_transfer_config(cfg)
    where = "one process" if num_processes == 1 else "on the CPU"
    names = {"BN": "plain BN"}
    return [
        f"{key} {flatten(cfg)[key]}: {where}, so this is {names.get(norm, norm)}"
        for key, norm in process_norms(cfg, num_processes).items()
    ]


def _trained_file(cfg: CfgNode, resume: bool) -> Path:
    """The trained model that --eval-only means."""
    pointer = Path(cfg.OUTPUT_DIR) / "last_checkpoint"
    if resume:
        if not pointer.is_file():
            raise DataError(f"{pointer} is missing, so there is no last checkpoint to evaluate")
        path = pointer.parent / Path(pointer.read_text().strip()).name
    else:
        path = Path(cfg.MODEL.WEIGHTS)
    if cfg.MODEL.WEIGHTS in ("", RANDOM) and not resume:
        raise UserError(
            f"MODEL.WEIGHTS is {cfg.MODEL.WEIGHTS!r}; --eval-only needs a trained model such as "
            "OUTPUT_DIR/model_final.pth, or --resume for the folder's last one"
        )
    if not path.is_file():
        raise DataError(f"MODEL.WEIGHTS {path}: no such file; expected a trained model")
    return path


def _apply_training(cfg: CfgNode) -> None:
    """How the model was trained (in place), from the config.yaml beside it.

    Evaluation does not need these keys, but its record is of that training's protocol.
    """
    config = Path(cfg.MODEL.WEIGHTS).with_name(CONFIG_NAME)
    if not config.is_file():
        return
    trained, known = flatten(read_yaml(config)), flatten(cfg)
    for key in known.keys() & trained.keys():
        if key == "SEED" or (key.startswith(_OF_TRAINING) and key not in NOT_PROTOCOL):
            cfg.merge_from_list([key, trained[key]])


def _trained_data(model: Path, notes: list[str]) -> list[tuple[str, str]]:
    """(name, annotations_sha256) of what a model was trained on, by the record beside it."""
    record = model.with_name(RECORD_NAME)
    if record.is_file():
        data = read_record(record).provenance.get("data")
        if isinstance(data, list) and all(isinstance(x, list) and len(x) == 2 for x in data):
            return [(str(name), str(sha256)) for name, sha256 in data[:-1]]
    notes.append(
        f"no {RECORD_NAME} beside the model names its training data, so the record's protocol "
        "knows the test data alone"
    )
    return []


def _resolve_device(cfg: CfgNode, explicit: Collection[str], num_processes: int) -> None:
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


def _resolve_seed(cfg: CfgNode, resume: bool, notes: list[str]) -> None:
    """A run has a seed, so that it can be repeated: the user's, the folder's, or a new one."""
    if cfg.SEED >= 0:
        return
    earlier = Path(cfg.OUTPUT_DIR) / CONFIG_NAME
    if resume and earlier.is_file():
        cfg.SEED = int(read_yaml(earlier).get("SEED", -1))
    if cfg.SEED < 0:
        cfg.SEED = int.from_bytes(os.urandom(4), "little") >> 1
        notes.append(f"SEED was not set; {cfg.SEED} was drawn")


def _check_values(cfg: CfgNode) -> None:
    """Ranges, and constraints between keys."""
    solver = cfg.SOLVER
    for key, smallest in (
        ("SOLVER.MAX_ITER", 1),
        ("SOLVER.IMS_PER_BATCH", 1),
        ("SOLVER.WARMUP_ITERS", 0),
        ("SOLVER.CHECKPOINT_PERIOD", 1),
        ("INPUT.SEM_SEG_CROP_SIZE", 0),
        ("TEST.EVAL_PERIOD", 0),
        ("TEST.PRECISE_BN.NUM_ITER", 1),
        ("TEST.DETECTIONS_PER_IMAGE", 1),
        ("DATALOADER.NUM_WORKERS", 0),
        ("INPUT.MIN_SIZE_TEST", 0),
        ("INPUT.MAX_SIZE_TRAIN", 1),
        ("INPUT.MAX_SIZE_TEST", 1),
    ):
        value = flatten(cfg)[key]
        if value < smallest:
            raise UserError(f"{key}: got {value}, expected at least {smallest}")
    if cfg.SEED >= 2**31:
        raise UserError(f"SEED: got {cfg.SEED}, expected less than 2**31")
    if not (math.isfinite(solver.BASE_LR) and solver.BASE_LR > 0):
        raise UserError(f"SOLVER.BASE_LR: got {solver.BASE_LR}, expected more than 0")
    steps = list(solver.STEPS)
    if steps != sorted(set(steps)) or any(not 0 < step < solver.MAX_ITER for step in steps):
        raise UserError(
            f"SOLVER.STEPS: got {tuple(steps)}, expected rising iterations below SOLVER.MAX_ITER "
            f"{solver.MAX_ITER}; set both, e.g. SOLVER.STEPS '({solver.MAX_ITER * 3 // 4},)'"
        )
    low, high = cfg.INPUT.SEM_SEG_SCALE_RANGE
    if not 0 < low <= high:
        raise UserError(
            f"INPUT.SEM_SEG_SCALE_RANGE: got {[low, high]}, expected two ratios above 0, the lower "
            "one first"
        )
    if cfg.INPUT.FORMAT not in ("RGB", "BGR"):
        raise UserError(f"INPUT.FORMAT: got {cfg.INPUT.FORMAT!r}, choices are RGB, BGR")
    sizes, sampling = cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING
    sizes = sizes if isinstance(sizes, list | tuple) else (sizes,)  # one number: in Detectron2
    if not sizes or not all(_finite(size) and size >= 1 for size in sizes):
        raise UserError(f"INPUT.MIN_SIZE_TRAIN: got {sizes}, expected sizes in pixels, e.g. (800,)")
    if sampling == "range" and len(sizes) != 2:
        raise UserError(
            f"INPUT.MIN_SIZE_TRAIN: got {sizes}, expected the smallest and the largest size, "
            "because INPUT.MIN_SIZE_TRAIN_SAMPLING is range"
        )
    for key, lowest in (("PIXEL_MEAN", "0"), ("PIXEL_STD", "more than 0")):
        values = list(cfg.MODEL[key])
        if (
            len(values) != 3
            or not all(map(_finite, values))
            or (key == "PIXEL_STD" and min(values) <= 0)
        ):
            raise UserError(f"MODEL.{key}: got {values}, expected 3 numbers, {lowest} to 255")


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _resolve_names(cfg: CfgNode, given: Collection[str], needed: Sequence[str]) -> None:
    """DATASETS.TRAIN and TEST (in place).

    `given`: keys of the command line, `needed`: TRAIN, TEST or both. A dataset of the user's
    own replaces that of the YAML file, but not what stands on the command line.
    """
    datasets = cfg.DATASETS
    own = custom_names(cfg)
    if own and datasets.VOC_DIR:
        raise UserError("DATASETS.VOC_DIR and DATASETS.COCO_*_JSON are both set; keep one of them")
    for key, name in own.items():
        if f"DATASETS.{key}" not in given:
            datasets[key] = (name,)
    if own and [key for key in needed if key not in own]:
        missing = " and ".join(f"DATASETS.COCO_{key}_JSON" for key in needed if key not in own)
        raise UserError(f"{missing} is not set, but the other one is; set both")
    if datasets.VOC_DIR:
        sources = {source.name: source for source in folder_sources(datasets)}
        splits = {source.split: source.name for source in sources.values()}
        for key in needed:
            names = tuple(datasets[key])
            if names and all(name in sources for name in names):
                continue
            if names and f"DATASETS.{key}" in given:
                raise UserError(
                    f"DATASETS.{key}: {', '.join(names)} is not in DATASETS.VOC_DIR "
                    f"{datasets.VOC_DIR}; choices are {', '.join(sources)}"
                )
            datasets[key] = (_default_splits(datasets.VOC_DIR, splits, needed)[key],)
        datasets.VOC_CLASSES = list(next(iter(sources.values())).classes)
    elif list(datasets.VOC_CLASSES):
        raise UserError("DATASETS.VOC_CLASSES belongs to DATASETS.VOC_DIR; set both or none")
    if "TRAIN" in needed and not datasets.TRAIN:
        raise UserError(
            "DATASETS.TRAIN is empty; name a dataset, or set DATASETS.VOC_DIR or "
            "DATASETS.COCO_TRAIN_JSON"
        )
    if len(datasets.TEST) != 1:
        raise UserError(
            f"DATASETS.TEST: got {tuple(datasets.TEST)}, expected one dataset, because a run is "
            "one number of a table"
        )


@contextmanager
def _pointing_to_the_doctor(cfg: CfgNode) -> Iterator[None]:
    """What is wrong with a custom dataset is rarely wrong in one place."""
    try:
        yield
    except DataError as error:
        if doctor := doctor_command(cfg):
            raise DataError(f"{error}; to check all of it: {doctor}") from error
        raise


def _resolve_classes(
    cfg: CfgNode, test: Split, explicit: Collection[str], given: Collection[str]
) -> None:
    """NUM_CLASSES (in place) follows the dataset, unless it was set and contradicts it.

    `explicit`: keys set anywhere, `given`: on the command line.
    """
    semantic = test.evaluator_type == "sem_seg"
    if semantic != (cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor"):
        raise UserError(
            f"MODEL.META_ARCHITECTURE {cfg.MODEL.META_ARCHITECTURE} does not fit {test.name}, "
            f"whose metric is {test.evaluator_type}"
        )
    head = "SEM_SEG_HEAD" if semantic else "ROI_HEADS"
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        head = "RETINANET"
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


def _default_splits(folder: str, names: Mapping[str, str], needed: Sequence[str]) -> dict[str, str]:
    """Training and test split that do not overlap, from what the folder has."""
    for train, test in (("trainval", "test"), ("train", "test"), ("train", "val")):
        chosen = {"TRAIN": train, "TEST": test}
        if all(chosen[key] in names for key in needed):
            return {key: names[chosen[key]] for key in needed}
    raise DataError(
        f"DATASETS.VOC_DIR {folder}: ImageSets/Main has {', '.join(names)}; expected trainval or "
        "train, and test or val (or name the splits in DATASETS.TRAIN and DATASETS.TEST)"
    )


def _check_splits(cfg: CfgNode, train: tuple[Split, ...], test: Split) -> list[str]:
    """Notes on the data; an error where training could not start."""
    notes = []
    for split in {split.name: split for split in (*train, test)}.values():
        notes += [f"{split.name}: {note}" for note in split.notes]
        if split.classes != test.classes:
            raise DataError(
                f"{split.name} has the classes {_some(split.classes)}, {test.name} has "
                f"{_some(test.classes)}; they must be the same in the same order"
            )
    model = cfg.MODEL
    for split in train:
        for key, wanted, present in (
            ("MASK_ON", model.MASK_ON, split.has_masks),
            ("KEYPOINT_ON", model.KEYPOINT_ON, split.has_keypoints),
        ):
            if wanted and not present:
                what = "a mask" if key == "MASK_ON" else "keypoints"
                raise DataError(
                    f"{split.name}: not every object has {what}, which MODEL.{key} needs; annotate "
                    f"them, or set MODEL.{key} False"
                )
        if model.MASK_ON and cfg.INPUT.MASK_FORMAT == "polygon" and not split.from_catalog:
            require_polygons(split)
    if test.evaluator_type != "sem_seg":
        notes += _absent_classes(train, test)
    trained = {record["file_name"] for split in train for record in split.records}
    shared = sum(record["file_name"] in trained for record in test.records)
    if shared:
        notes.append(f"{shared} of {len(test.records)} test images are also trained on")
    return notes


def _absent_classes(train: tuple[Split, ...], test: Split) -> list[str]:
    """Notes on classes that are not learned, or not measured.

    Raises:
        DataError: none is learned, or none is measured.
    """
    notes = []
    learned = {name for split in train for name in object_counts(split)}
    if train and not learned:
        raise DataError(f"{train[0].name}: no annotated objects in the training split")
    unseen = [name for name in test.classes if name not in learned]
    if train and unseen:
        notes.append(f"no object to train on, so never detected: {_some(unseen)}")
    if test.from_catalog:
        return notes  # its records need not have what its evaluator compares with
    measured = object_counts(test, measured=True)
    absent = [name for name in test.classes if name not in measured]
    if len(absent) == len(test.classes):
        raise DataError(f"{test.name}: no annotated objects in the test split to measure AP with")
    if absent:
        theirs = "; bbox/AP_detectron2 counts them, as Detectron2 does"
        notes.append(
            f"{test.name}: no object to test on: {_some(absent)}; AP is the mean over the other "
            f"{len(measured)} classes{theirs * (test.evaluator_type == 'pascal_voc')}"
        )
    return notes


def _some(names: Sequence[str]) -> str:
    """The first names and how many there are."""
    return ", ".join(names[:5]) + (f", ... ({len(names)})" if len(names) > 5 else "")


def _changes_since(cfg: CfgNode) -> list[str]:
    """A note if the folder was begun under another configuration.

    Raises:
        UserError: the checkpoint would overrule the change (it holds optimizer and schedule), or
            the iterations done would count for something else.
    """
    earlier = Path(cfg.OUTPUT_DIR) / CONFIG_NAME
    if not earlier.is_file():
        return []
    before, now = flatten(read_yaml(earlier)), flatten(cfg)
    changed = [
        key
        for key in sorted(set(before) & set(now))
        if key not in NOT_PROTOCOL and _plain(before[key]) != _plain(now[key])
    ]
    for key in changed:
        if key in _FIXED_BY_CHECKPOINT:
            raise UserError(
                f"--resume: {key} is {_plain(now[key])}, but {cfg.OUTPUT_DIR} was begun with "
                f"{_plain(before[key])}; keep it (and the number of processes, if "
                "SOLVER.REFERENCE_WORLD_SIZE scales it), or start from scratch in another folder"
            )
    return [f"resumed with other values of {', '.join(changed)}"] if changed else []


def _plain(value: Any) -> Any:
    """Tuples as lists, at any depth."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _tree(flat: Mapping[str, Any]) -> CfgNode:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, name = key.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return CfgNode(nested).clone()
