"""Reading of MODEL.WEIGHTS, and the keys that the weights' input contract sets.

The value is `random`; a file written by `convert/convert_to_d2.py`; a checkpoint that it reads,
which is then converted in memory by the same functions and with the same proof; or a name or URL of
one of these (moco/common/pretrained.py). An empty string or a missing file is an error: otherwise a
randomly initialized network would be evaluated under the name of real weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from convert.contract import IMAGENET_MEAN, IMAGENET_STD, InputContract
from convert.convert_to_d2 import convert_in_memory
from convert.read import digests, find_file, is_converted, read_file
from convert.write import write
from detection.config.keys import KEYS
from detection.modeling.backbones import backbone_type, check_backbone
from moco.common.cfgnode import flatten, read_yaml, same_value
from moco.common.command import RANDOM, convert_first, converter
from moco.common.errors import DataError, UserError, first_few
from moco.common.keys import add_keys, defaults_of
from moco.common.pretrained import find_remote, init_name, similar_names_hint
from moco.common.shipped import CONFIGS, display_name

if TYPE_CHECKING:
    from convert.verify import Converted

# Input of a randomly initialized network: torchvision's convention, which most weights follow.
TORCHVISION_INPUT: dict[str, Any] = {
    "INPUT.FORMAT": "RGB",
    "MODEL.PIXEL_MEAN": IMAGENET_MEAN,
    "MODEL.PIXEL_STD": IMAGENET_STD,
    "MODEL.RESNETS.STRIDE_IN_1X1": False,
}


def read_weights(weights: str, **options: str) -> Converted | None:
    """Read the backbone that MODEL.WEIGHTS names; None for `random`.

    `Converted.notes` holds what a reader of the result has to know.

    Args:
        weights: Value of MODEL.WEIGHTS.
        options: See `BackboneType.options`.

    Raises:
        UserError: If the value is empty, names a whole detector, or cannot be downloaded.
        DataError: If the file is missing, damaged, or not recognized by convert/.
    """
    from convert.verify import read_converted

    check_weights(weights)
    if weights == RANDOM:
        return None
    found, objects = find_file(weights), set[str]()
    raw = read_file(found.path, objects)
    if is_converted(raw):
        converted = read_converted(found.path, raw)
    else:
        try:
            converted = convert_in_memory(found.path, raw, objects, **options)
        except UserError as error:
            if not error.option:  # MODEL.WEIGHTS takes none
                raise
            raise type(error)(f"{error}; {convert_first()}") from error
    return replace(
        converted,
        notes=(*found.notes, *converted.notes),
        origin=(*found.notes, *converted.origin),
        path=found.path,
    )


def check_weights(weights: str) -> None:
    """Check that MODEL.WEIGHTS names something that `read_weights` can read, without torch.

    Raises:
        UserError: If the value is empty or cannot be downloaded.
        DataError: If the file is missing.
    """
    give = (
        f"give a file from {converter()}, a checkpoint that it reads, a name that `moco-transfer "
        f"weights list` shows, or {RANDOM!r} for a random initialization"
    )
    if not weights:
        raise UserError(f"MODEL.WEIGHTS is empty; {give}")
    if weights != RANDOM and find_remote(weights) is None and not Path(weights).exists():
        raise DataError(
            f"MODEL.WEIGHTS {weights}: no such file{similar_names_hint(weights)}; {give}"
        )
    if weights != RANDOM and init_name(weights) == RANDOM:
        raise UserError(
            f"MODEL.WEIGHTS {weights}: would be called {RANDOM!r} in a table, as if it had no "
            "weights; rename the file"
        )


def fit_to_detector(cfg: CfgNode, weights: Converted) -> Converted:
    """Return weights with tensors for the sizes of images and patches in a detector.

    Raises:
        UserError: If they cannot be resampled.
    """
    contract = weights.contract
    family = contract.family
    model, change = family.resample(contract.architecture, weights.model, cfg.MODEL)
    if not change:
        return weights
    return replace(
        weights,
        model=dict(model),
        contract=replace(contract, source=f"{contract.source} ({change})"),
        notes=(*weights.notes, f"changed for this detector: {change}"),
    )


def weights_sha256(weights: Converted | None) -> str | None:
    """Return the SHA-256 of the checkpoint that a run starts from; None for random weights.

    It is that of the file that MODEL.WEIGHTS names, or of the source that `convert_once` recorded.
    """
    if weights is None or weights.path is None:
        return None
    return weights.sha256 or digests(weights.path)[0]


def convert_once(weights: str, folder: Path, sha256: str | None, **options: str) -> str:
    """Convert a checkpoint into a file for many runs, unless an earlier call has.

    Args:
        weights: Value of MODEL.WEIGHTS.
        folder: Folder of the file, whose name is that of the weights.
        sha256: SHA-256 of the checkpoint; None for random.
        options: See `BackboneType.options`; each set of options has a file of its own.

    Returns:
        The value of MODEL.WEIGHTS with which runs are equal, but do not convert and verify again:
        the path of the file, or `weights` for random and for a converted file.

    Raises:
        UserError: See `read_weights`.
        DataError: See `read_weights`.
    """
    if sha256 is None:
        return weights
    key = hashlib.sha256(json.dumps([sha256, options], sort_keys=True).encode()).hexdigest()
    path = folder / key[:8] / f"{init_name(weights)}.pth"
    if path.is_file():
        return str(path)
    converted = read_weights(weights, **options)
    if converted is None or not converted.origin:
        return weights
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, converted, "detectron2", sha256)
    return str(path)


def apply_contract(
    cfg: CfgNode,
    contract: InputContract,
    explicit: Collection[str],
    in_file: Collection[str] = (),
) -> None:
    """Set the keys that the weights' contract determines, in place.

    Args:
        cfg: Configuration.
        contract: Input contract of the weights.
        explicit: Keys that were set; they have to agree with the contract.
        in_file: Keys that only the task file sets, not the command line.

    Raises:
        UserError: If a key that was set contradicts the contract.
    """
    values, owner = contract.d2_keys(), f"the weights (from {contract.source})"
    name = cfg.MODEL.BACKBONE.NAME
    if backbone_type(name).family != contract.family.name:
        task, _, _ = contract.architecture.example_task()
        raise UserError(
            f"MODEL.BACKBONE.NAME {name}: {owner} are a {contract.architecture}, which it cannot "
            f"hold; a task file for it: {display_name(task)}"
        )
    key, network = contract.architecture.task_key()
    needed, got = values[key], flatten(cfg)[key]
    if key in in_file and got != needed:
        raise UserError(
            f"{key}: the task file is for a {network.format(got)}, but {owner} are a "
            f"{network.format(needed)}; {_task_files(key, needed, contract.family.name)}"
        )
    apply_keys(cfg, values, explicit, owner, in_file)


def apply_random(cfg: CfgNode, explicit: Collection[str]) -> None:
    """Set unset keys to `TORCHVISION_INPUT` in place, so that all inits see equal pixels."""
    values = dict(TORCHVISION_INPUT)
    if "INPUT.FORMAT" in explicit and cfg.INPUT.FORMAT == "BGR":
        values |= {key: values[key][::-1] for key in ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD")}
    if cfg.MODEL.RESNETS.DEPTH < 50:
        values["MODEL.RESNETS.RES2_OUT_CHANNELS"] = cfg.MODEL.RESNETS.STEM_OUT_CHANNELS
    open_keys = {key: value for key, value in values.items() if key not in explicit}
    apply_keys(cfg, open_keys, explicit, RANDOM)


def _task_files(key: str, value: Any, family: str) -> str:
    """Format the names of a family's task files with this value of a key."""
    fitting = [display_name(path.relative_to(CONFIGS)) for path, _ in _tasks(key, value, family)]
    if not fitting:
        return f"no task file is for it; set {key} {value}"
    return f"task files for it: {first_few(fitting)}"


def _tasks(key: str, value: Any, family: str) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return a family's task files with this value of a key, and the keys that each sets."""
    found: list[tuple[Path, Mapping[str, Any]]] = []
    known = defaults_of(KEYS)
    for path in sorted(CONFIGS.glob("*/*.yaml")):
        if path.parent.name in ("pretrain", "suites"):
            continue
        keys = flatten(read_yaml(path))
        name = keys.get("MODEL.BACKBONE.NAME", known["MODEL.BACKBONE.NAME"])
        is_task = "DATASETS.TRAIN" in keys and backbone_type(name).family == family
        if is_task and keys.get(key, known[key]) == value:
            found.append((path, keys))
    return found


def fitting_tasks(contract: InputContract) -> list[str]:
    """Return `folder/name` of each shipped task that takes weights with this contract."""
    defaults, fitting = CfgNode(), []
    add_keys(defaults, KEYS)
    key, _ = contract.architecture.task_key()
    for path, keys in _tasks(key, contract.d2_keys()[key], contract.family.name):
        cfg = defaults.clone()
        for name in keys.keys() & KEYS.keys():  # others are those of Detectron2's DensePose
            cfg.merge_from_list([name, keys[name]])
        try:
            apply_contract(cfg, contract, keys, keys)
            check_backbone(cfg)
        except UserError:
            continue
        fitting.append(path.relative_to(CONFIGS).with_suffix("").as_posix())
    return fitting


def apply_keys(
    cfg: CfgNode,
    values: Mapping[str, Any],
    explicit: Collection[str],
    owner: str,
    in_file: Collection[str] = (),
) -> None:
    """Set the keys that `owner` needs in place; see `apply_contract`."""
    known = flatten(cfg)
    for key, value in values.items():
        if key in explicit and not same_value(known[key], value, tolerance=1e-3):
            who, fix = ("you set", "remove the key")
            if key in in_file:
                who, fix = ("the task file sets", "set it on the command line")
            raise UserError(
                f"{key}: {who} {known[key]!r}, but {owner} need {value!r}; "
                f"{fix} or use other weights"
            )
        cfg.merge_from_list([key, value])
