"""Loading of a task: a YAML file with Detectron2's key names, resolved and checked before training.

Both engines take the same file and the same `KEY VALUE` overrides; keys.py lists all keys. An
unknown key raises an error that names the nearest one; so does a value that the engine does not
support.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from detection.config.checks import (
    check_pooled_norm,
    check_resumed_config,
    check_splits,
    check_values,
    check_warmup,
    shared_images_warning,
)
from detection.config.engines import find_engine
from detection.config.keys import DATA_KEY, KEYS, OURS
from detection.config.recipe import RecipeCheck, compare_with_recipe
from detection.config.resolve import (
    check_one_test,
    resolve_classes,
    resolve_device,
    resolve_metric,
    resolve_names,
    resolve_precision,
    resolve_seed,
    scale_to_processes,
)
from detection.config.trained import (
    CONFIG_NAME,
    apply_trained_config,
    check_resumed_weights,
    trained_file,
    training_data,
)
from detection.config.weights import (
    apply_contract,
    apply_random,
    check_weights,
    fit_to_detector,
    read_weights,
    weights_sha256,
)
from detection.datasets import find_source, known_sources, read_split
from detection.datasets.base import Split, base_name, small_test_warning
from detection.datasets.doctor import command as doctor_command
from detection.modeling.backbones import backbone_type, frozen_random
from detection.modeling.norms import process_norms
from moco.common.cfgnode import explicit_keys, flatten, load_cfg
from moco.common.errors import DataError
from moco.common.files import PathLike
from moco.common.keys import add_keys
from moco.common.pretrained import init_name
from moco.common.run import RECORD_NAME, read_record

if TYPE_CHECKING:
    from convert.verify import Converted


@dataclass(frozen=True)
class Task:
    """A task ready to run.

    Attributes:
        name: Name of the config file without its extension.
        engine: Name of the engine: detectron2 or embedded.
        cfg: Frozen configuration, with every key resolved (weights' contract, dataset, device,
            seed).
        init: `random`, or the name of the weights file without its extension.
        weights: Converted weights; None for random ones and for evaluation only.
        train: Training splits; empty for evaluation only.
        test: Test split.
        data: (name, annotations_sha256) of the training splits, then of the test split. For
            evaluation only, the splits that the model was trained on, if its record has them.
        recipe: Comparison of the configuration with the paper's.
        notes: Lines that a reader of the result has to know.
        warnings: Lines that each table of the result repeats.
        seed_sampled: Whether SEED was not set.
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
    warnings: tuple[str, ...]
    seed_sampled: bool


def default_task() -> CfgNode:
    """Return the defaults of Detectron2's keys and of this project's own.

    All keys of Detectron2 are included, so that its files load; `load_task` checks which of them
    the embedded engine supports.
    """
    cfg = CfgNode()
    add_keys(cfg, KEYS)
    return cfg


def add_transfer_config(cfg: CfgNode) -> None:
    """Add this project's own keys to Detectron2's config (in place), as its plugins do."""
    add_keys(cfg, OURS)


def resolved_config(task: Task) -> dict[str, Any]:
    """Return every key by its full name, and the hash of the annotations under `DATA_KEY`."""
    digest = hashlib.sha256()
    for name, sha256 in task.data:
        digest.update(f"{name} {sha256}\n".encode())
    return flatten(task.cfg) | {DATA_KEY: digest.hexdigest()}


@dataclass(frozen=True)
class Draft:
    """Task whose keys are checked, before its weights and data are read.

    Attributes:
        config_file: Task file; None: Detectron2's defaults.
        cfg: Configuration, in which the datasets are named; not frozen.
        explicit: Keys set in the task file or on the command line.
        overrides: Keys set on the command line.
        eval_only: Whether MODEL.WEIGHTS is a trained model.
        resume: Whether to continue the run in OUTPUT_DIR.
        notes: Lines that a reader of the result has to know.
    """

    config_file: PathLike | None
    cfg: CfgNode
    explicit: Collection[str]
    overrides: Collection[str]
    eval_only: bool
    resume: bool
    notes: tuple[str, ...] = ()


def draft_task(
    config_file: PathLike | None,
    opts: Sequence[str],
    defaults: CfgNode | None = None,
    *,
    eval_only: bool = False,
    resume: bool = False,
) -> Draft:
    """Read and check the keys of a task, and that its weights and data exist, without torch.

    Args:
        config_file: YAML with local `_BASE_`; None: Detectron2's defaults.
        opts: `KEY VALUE` overrides.
        defaults: Default of every key; None: `default_task()`.
        eval_only: Whether MODEL.WEIGHTS is a trained model.
        resume: Whether to continue the run in OUTPUT_DIR.

    Raises:
        UserError: See `load_task`.
        DataError: See `load_task`.
    """
    draft = _read_keys(config_file, opts, defaults or default_task(), eval_only, resume)
    cfg = draft.cfg
    with _doctor_named(cfg):
        notes = resolve_metric(cfg, draft.explicit, resume=resume)
        resolve_names(cfg, draft.overrides, eval_only=eval_only)
        check_one_test(cfg)
        sources = known_sources(cfg)
        for name in (*(() if eval_only else cfg.DATASETS.TRAIN), *cfg.DATASETS.TEST):
            if base_name(name) in sources and not find_source(name, cfg).present():
                read_split(name, cfg)  # Raises an error that names what is missing.
    return replace(draft, notes=tuple(notes))


def _read_keys(
    config_file: PathLike | None,
    opts: Sequence[str],
    defaults: CfgNode,
    eval_only: bool = False,
    resume: bool = False,
) -> Draft:
    """Read and check the keys of a task, whose datasets are not resolved."""
    explicit, overrides = explicit_keys(config_file, opts), explicit_keys(None, opts)
    cfg = load_cfg(defaults, config_file, opts)
    cfg.defrost()
    if eval_only:
        cfg.MODEL.WEIGHTS = str(trained_file(cfg, resume=resume))
        apply_trained_config(cfg, explicit)
    else:
        check_weights(cfg.MODEL.WEIGHTS)
    check_values(cfg)
    return Draft(config_file, cfg, explicit, overrides, eval_only, resume)


def load_task(
    config_file: PathLike | None,
    opts: Sequence[str],
    engine: str,
    *,
    eval_only: bool = False,
    resume: bool = False,
    num_processes: int = 1,
) -> Task:
    """Load a task: resolve its configuration and check everything that training depends on.

    Args:
        config_file: YAML with local `_BASE_`; None: Detectron2's defaults.
        opts: `KEY VALUE` overrides.
        engine: Name of the engine: detectron2 or embedded.
        eval_only: Whether MODEL.WEIGHTS is a trained model.
        resume: Whether to continue the run in OUTPUT_DIR; with `eval_only`, the model is its last
            checkpoint.
        num_processes: Number of processes on all machines; see `scale_to_processes`.

    Raises:
        UserError: If a key is unknown, or a value is out of range or contradicts another value,
            the weights' contract or the data.
        DataError: If a file is missing or damaged.
    """
    defaults = _engine_defaults(engine, explicit_keys(config_file, opts))
    draft = draft_task(config_file, opts, defaults, eval_only=eval_only, resume=resume)
    return complete_task(draft, engine, num_processes)


def complete_task(draft: Draft, engine: str, num_processes: int = 1) -> Task:
    """Read weights and data of a draft, and check the rest; arguments and errors as `load_task`."""
    runs_on, resume, eval_only = find_engine(engine), draft.resume, draft.eval_only
    cfg, weights, notes, sampled = _with_weights(draft, engine, num_processes)
    runs_on.check_config(cfg)
    notes += [*_norm_notes(cfg, num_processes), *draft.notes]
    with _doctor_named(cfg):
        runs_on.provide_datasets(cfg)
        train = () if eval_only else tuple(read_split(name, cfg) for name in cfg.DATASETS.TRAIN)
        test = read_split(cfg.DATASETS.TEST[0], cfg)
        resolve_classes(cfg, test, draft.explicit, draft.overrides)
        notes += check_splits(cfg, train, test)
    small = "" if test.from_catalog else small_test_warning(test)
    warnings = (small, shared_images_warning(train, test))
    runs_on.check_evaluator(test, cfg)
    cfg.freeze()
    if resume and not eval_only:
        check_resumed_weights(cfg, weights_sha256(weights))
        notes += check_resumed_config(cfg)
    num_images = {split.name: len(split.records) for split in (*train, test)}
    trained_on = [(split.name, split.annotations_sha256) for split in train]
    if eval_only and (found := training_data(Path(cfg.MODEL.WEIGHTS))) is not None:
        trained_on = found
    elif eval_only:
        notes.append(
            f"no {RECORD_NAME} next to the model names its training data, so the protocol in the "
            "record contains the test data only"
        )
    return Task(
        name=_task_name(draft.config_file, cfg.DATASETS.PART, "tuned" if cfg.SOLVER.TUNED else ""),
        engine=engine,
        cfg=cfg,
        init=init_name(cfg.MODEL.WEIGHTS),
        weights=weights,
        train=train,
        test=test,
        data=(*trained_on, (test.name, test.annotations_sha256)),
        recipe=compare_with_recipe(cfg, weights.contract if weights else None, num_images),
        notes=tuple(notes),
        warnings=tuple(filter(None, warnings)),
        seed_sampled=sampled,
    )


@contextmanager
def _doctor_named(cfg: CfgNode) -> Iterator[None]:
    """Add the doctor's command to an error of a custom dataset, which rarely has one error only."""
    try:
        yield
    except DataError as error:
        if doctor := doctor_command(cfg):
            raise DataError(f"{error}; to check all of it: {doctor}") from error
        raise


def resolve_without_data(
    config_file: PathLike | None, opts: Sequence[str], engine: str, num_processes: int
) -> CfgNode:
    """Resolve the keys of a training that do not depend on its data; raise as `load_task`."""
    defaults = _engine_defaults(engine, explicit_keys(config_file, opts))
    return _with_weights(_read_keys(config_file, opts, defaults), engine, num_processes)[0]


def weights_options(
    config_file: PathLike | None, opts: Sequence[str], engine: str
) -> dict[str, str]:
    """Return the options with which a task converts its weights; raise as `draft_task`."""
    defaults = _engine_defaults(engine, explicit_keys(config_file, opts))
    cfg = _read_keys(config_file, opts, defaults).cfg
    return backbone_type(cfg.MODEL.BACKBONE.NAME).options(cfg)


def _engine_defaults(engine: str, explicit: Collection[str]) -> CfgNode:
    return find_engine(engine).default_config(dense_pose="MODEL.DENSEPOSE_ON" in explicit)


def _with_weights(
    draft: Draft, engine: str, num_processes: int
) -> "tuple[CfgNode, Converted | None, list[str], bool]":
    """Return configuration, weights, notes, and if SEED was sampled; check what both changed."""
    explicit, eval_only, resume = draft.explicit, draft.eval_only, draft.resume
    cfg = _engine_defaults(engine, explicit)
    cfg.defrost()
    cfg.merge_from_other_cfg(draft.cfg)
    notes: list[str] = []
    weights = None
    if not eval_only:
        kind = backbone_type(cfg.MODEL.BACKBONE.NAME)
        weights = read_weights(cfg.MODEL.WEIGHTS, **kind.options(cfg))
        if weights is None:
            apply_random(cfg, explicit)
            notes += frozen_random(flatten(cfg))
        else:
            in_file = [key for key in explicit if key not in draft.overrides]
            apply_contract(cfg, weights.contract, explicit, in_file)
            weights = fit_to_detector(cfg, weights)
            notes += weights.notes
    resolve_device(cfg, explicit, num_processes)
    sampled = resolve_seed(cfg, resume=resume)
    if sampled:
        notes.append(f"SEED was not set; {cfg.SEED} was sampled")
    notes += resolve_precision(cfg, engine, explicit, eval_only=eval_only, resume=resume)
    if not eval_only:  # An evaluation keeps the schedule that the model was trained with.
        notes += scale_to_processes(cfg, num_processes)
        check_values(cfg)
        check_warmup(cfg.SOLVER)
        check_pooled_norm(cfg, num_processes)
    return cfg, weights, notes, sampled


def _norm_notes(cfg: CfgNode, num_processes: int) -> list[str]:
    """Return notes on norms that fall back to another one at this number of processes."""
    where = "one process" if num_processes == 1 else "on the CPU"
    names = {"BN": "plain BN"}
    return [
        f"{key} {flatten(cfg)[key]}: {where}, so this is {names.get(norm, norm)}"
        for key, norm in process_norms(cfg, num_processes).items()
    ]


def _task_name(config_file: PathLike | None, *variants: str) -> str:
    """Return the name of a task: the name of its file, then its variants (10% of the data → 10pct).

    For the config.yaml of a run, it is the name in the run's record.
    """
    path = Path(config_file or "defaults")
    record = path.with_name(RECORD_NAME)
    if path.name == CONFIG_NAME and record.is_file():
        return read_record(record).task
    return "_".join(filter(None, (path.stem, *variants))).replace("%", "pct")
