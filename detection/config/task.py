"""A task: a YAML file in Detectron2's own key names, resolved and checked before anything heavy.

The same file and the same `KEY VALUE` overrides serve both engines; all keys are in keys.py. An
unknown key is an error that names the nearest one, and so is a value that the engine cannot honor.
"""

import copy
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from detection.config.checks import (
    changes_since,
    check_splits,
    check_values,
    check_warmup,
)
from detection.config.engines import find_engine
from detection.config.keys import DATA_KEY, DEFAULTS, TRANSFER
from detection.config.recipe import RecipeCheck, check
from detection.config.resolve import (
    check_one_test,
    resolve_classes,
    resolve_device,
    resolve_names,
    resolve_precision,
    resolve_seed,
    scale_to_processes,
)
from detection.config.trained import (
    CONFIG_NAME,
    apply_trained,
    check_resumed_weights,
    trained_file,
    training_data,
)
from detection.config.weights import (
    apply_contract,
    apply_random,
    check_weights,
    read_weights,
    weights_sha256,
)
from detection.datasets import find_source, known, read_split
from detection.datasets.base import Split
from detection.datasets.doctor import command as doctor_command
from detection.datasets.parts import base_name
from detection.modeling.backbones import backbone_type, frozen_random
from detection.modeling.norms import process_norms
from moco.common.cfgnode import explicit_keys, flatten, load_cfg
from moco.common.errors import DataError
from moco.common.files import PathLike
from moco.common.pretrained import init_name
from moco.common.run import RECORD_NAME, read_record

if TYPE_CHECKING:
    from convert.prove import Converted


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


def default_task() -> CfgNode:
    """Detectron2's keys with its default values, and this project's own.

    All keys of Detectron2 are there, so that its files load; which of them the embedded engine can
    change is checked in `load_task`.
    """
    cfg = CfgNode()
    _add_keys(cfg, DEFAULTS)
    return cfg


def add_transfer_config(cfg: CfgNode) -> None:
    """Add this project's own keys to Detectron2's config (in place), as its plugins do."""
    _add_keys(cfg, TRANSFER)


def _add_keys(cfg: CfgNode, keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        *parents, name = key.split(".")
        node = cfg
        for parent in parents:
            # Of the same class: Detectron2 merges no YAML into another.
            node = node.setdefault(parent, type(cfg)())
        node[name] = copy.deepcopy(value)


def resolved_config(task: Task) -> dict[str, Any]:
    """Every key, flat, and under `DATA_KEY` the hash of the datasets' contents."""
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
    check_values(cfg)
    if eval_only:
        trained_file(cfg, resume=resume)
    else:
        check_warmup(cfg.SOLVER)
        check_weights(cfg.MODEL.WEIGHTS)
    cfg.defrost()
    resolve_names(cfg, given, eval_only=eval_only)
    check_one_test(cfg)
    sources = known(cfg)
    for name in (*(() if eval_only else cfg.DATASETS.TRAIN), *cfg.DATASETS.TEST):
        if base_name(name) in sources and not find_source(name, cfg).present():
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
        engine: detectron2 or embedded.
        eval_only: MODEL.WEIGHTS is a trained model; with `resume` it is the folder's last one.
        num_processes: over all machines; see `scale_to_processes`.

    Raises:
        UserError: unknown keys, values out of range or in contradiction with each other, with the
            weights' contract or with the data; DataError: files missing or damaged.
    """
    runs_on, given = find_engine(engine), explicit_keys(None, opts)
    cfg, weights, explicit, notes = _before_data(
        config_file, opts, engine, eval_only, resume, num_processes
    )
    runs_on.check_config(cfg)
    notes += _norm_notes(cfg, num_processes)
    try:
        resolve_names(cfg, given, eval_only=eval_only)
        check_one_test(cfg)
        runs_on.provide_datasets(cfg)
        train = () if eval_only else tuple(read_split(name, cfg) for name in cfg.DATASETS.TRAIN)
        test = read_split(cfg.DATASETS.TEST[0], cfg)
        resolve_classes(cfg, test, explicit, given)
        notes += check_splits(cfg, train, test)
    except DataError as error:  # what is wrong with a custom dataset is rarely wrong in one place
        if doctor := doctor_command(cfg):
            raise DataError(f"{error}; to check all of it: {doctor}") from error
        raise
    runs_on.check_evaluator(test, cfg)
    cfg.freeze()
    if resume and not eval_only:
        check_resumed_weights(cfg, weights_sha256(weights))
        notes += changes_since(cfg)
    num_images = {split.name: len(split.records) for split in (*train, test)}
    trained_on = [(split.name, split.annotations_sha256) for split in train]
    if eval_only and (found := training_data(Path(cfg.MODEL.WEIGHTS))) is not None:
        trained_on = found
    elif eval_only:
        notes.append(
            f"no {RECORD_NAME} beside the model names its training data, so the record's protocol "
            "knows the test data alone"
        )
    return Task(
        name=_task_name(config_file, cfg.DATASETS.PART, "tuned" if cfg.SOLVER.TUNED else ""),
        engine=engine,
        cfg=cfg,
        init=init_name(cfg.MODEL.WEIGHTS),
        weights=weights,
        train=train,
        test=test,
        data=(*trained_on, (test.name, test.annotations_sha256)),
        recipe=check(cfg, weights.contract if weights else None, num_images),
        notes=tuple(notes),
    )


def keys_without_data(
    config_file: PathLike | None, opts: Sequence[str], engine: str, num_processes: int
) -> CfgNode:
    """Resolve every key of a training that does not depend on its data; raises as `load_task`."""
    return _before_data(config_file, opts, engine, False, False, num_processes)[0]


def _before_data(
    config_file: PathLike | None,
    opts: Sequence[str],
    engine: str,
    eval_only: bool,
    resume: bool,
    num_processes: int,
) -> "tuple[CfgNode, Converted | None, Collection[str], list[str]]":
    """The keys, the weights, the keys that were set anywhere, and notes."""
    runs_on = find_engine(engine)
    explicit, given = explicit_keys(config_file, opts), explicit_keys(None, opts)
    defaults = runs_on.default_config(dense_pose="MODEL.DENSEPOSE_ON" in explicit)
    cfg = load_cfg(defaults, config_file, opts)
    cfg.defrost()
    notes: list[str] = []

    weights = None
    if eval_only:
        cfg.MODEL.WEIGHTS = str(trained_file(cfg, resume=resume))
        apply_trained(cfg, explicit)
    else:
        kind = backbone_type(cfg.MODEL.BACKBONE.NAME)
        weights = read_weights(cfg.MODEL.WEIGHTS, kind.timm_model(cfg))
        if weights is None:
            apply_random(cfg, explicit)
            notes += frozen_random(flatten(cfg))
        else:
            apply_contract(cfg, weights.contract, explicit, explicit - given)
            notes += weights.notes

    resolve_device(cfg, explicit, num_processes)
    notes += resolve_seed(cfg, resume=resume)
    notes += resolve_precision(cfg, engine, explicit, eval_only=eval_only, resume=resume)
    if not eval_only:  # the schedule that a model was trained with stays what it was
        notes += scale_to_processes(cfg, num_processes)
    check_values(cfg)
    if not eval_only:
        check_warmup(cfg.SOLVER)
    return cfg, weights, explicit, notes


def _norm_notes(cfg: CfgNode, num_processes: int) -> list[str]:
    """Notes on norms that this number of processes computes in another way."""
    where = "one process" if num_processes == 1 else "on the CPU"
    names = {"BN": "plain BN"}
    return [
        f"{key} {flatten(cfg)[key]}: {where}, so this is {names.get(norm, norm)}"
        for key, norm in process_norms(cfg, num_processes).items()
    ]


def _task_name(config_file: PathLike | None, *variants: str) -> str:
    """The file's name, and what makes another task of it (10% of the data → 10pct); that of the run
    for the config.yaml that a run left beside its record."""
    path = Path(config_file or "defaults")
    record = path.with_name(RECORD_NAME)
    if path.name == CONFIG_NAME and record.is_file():
        return read_record(record).task
    return "_".join(filter(None, (path.stem, *variants))).replace("%", "pct")
