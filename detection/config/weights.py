"""MODEL.WEIGHTS: the values it takes, and the keys that the weights' input contract sets.

The value is `random`; a file written by `convert/convert_to_d2.py`; a checkpoint that it reads,
which is then converted in memory by the same functions and with the same proof; or what names one
of these elsewhere (moco/common/pretrained.py). Nothing else starts a training: an empty string or a
missing file is an error, because a network left at random under a real name is the worst result
there is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from convert.contract import IMAGENET_MEAN, IMAGENET_STD, InputContract
from convert.convert_to_d2 import convert_in_memory
from convert.read import digest, is_converted, read_file
from detection.config.keys import HONORED, TRANSFER
from detection.modeling.backbones import backbone_type
from moco.common.cfgnode import flatten, read_yaml, same_value
from moco.common.command import RANDOM, converter
from moco.common.errors import DataError, UserError, first_few
from moco.common.pretrained import find_remote, like, locate
from moco.common.shipped import CONFIGS, shown

if TYPE_CHECKING:
    from convert.prove import Converted

# What a network at random weights sees: torchvision's convention, as most weights have it.
TORCHVISION_INPUT: dict[str, Any] = {
    "INPUT.FORMAT": "RGB",
    "MODEL.PIXEL_MEAN": IMAGENET_MEAN,
    "MODEL.PIXEL_STD": IMAGENET_STD,
    "MODEL.RESNETS.STRIDE_IN_1X1": False,
}


def read_weights(weights: str, timm_model: str | None = None) -> Converted | None:
    """The backbone that MODEL.WEIGHTS names, or None for `random`.

    `timm_model`: as `BackboneType.timm_model` says.

    What a reader of the result has to know is in `Converted.notes`.

    Raises:
        UserError: an empty value, a whole detector, a name that cannot be fetched; DataError: a
            missing or damaged file, or one that convert/ does not recognize.
    """
    from convert.prove import read_converted

    check_weights(weights)
    if weights == RANDOM:
        return None
    found, objects = locate(weights), set[str]()
    raw = read_file(found.path, objects)
    if is_converted(raw):
        converted = read_converted(found.path, raw)
    else:
        converted = convert_in_memory(found.path, raw, objects, timm_model)
    return replace(converted, notes=(*found.notes, *converted.notes), path=found.path)


def check_weights(weights: str) -> None:
    """Whether there is something that `read_weights` could read; torch is not imported.

    Raises:
        UserError: an empty value, or what cannot be downloaded; DataError: a missing file.
    """
    give = (
        f"give a file from {converter()}, a checkpoint that it reads, a name that `moco-transfer "
        f"weights list` shows, or {RANDOM!r} for a random initialization"
    )
    if not weights:
        raise UserError(f"MODEL.WEIGHTS is empty; {give}")
    if weights != RANDOM and find_remote(weights) is None and not Path(weights).is_file():
        raise DataError(f"MODEL.WEIGHTS {weights}: no such file{like(weights)}; {give}")


def weights_sha256(weights: Converted | None) -> str | None:
    """Of the file that MODEL.WEIGHTS names; None: random."""
    return digest(weights.path) if weights and weights.path else None


def apply_contract(
    cfg: CfgNode,
    contract: InputContract,
    explicit: Collection[str],
    in_file: Collection[str] = (),
) -> None:
    """Set the keys that the weights fix (in place); keys that were set must already agree.

    Args:
        explicit: keys that were set. in_file: those of them that the task file set, not the user.

    Raises:
        UserError: naming the key, its value and the weights'.
    """
    values, owner = contract.d2_keys(), f"the weights (from {contract.source})"
    name = cfg.MODEL.BACKBONE.NAME
    if backbone_type(name).family != contract.family.name:
        task, _, _ = contract.architecture.example_task()
        raise UserError(
            f"MODEL.BACKBONE.NAME {name}: {owner} are a {contract.architecture}, which it cannot "
            f"hold; a task file for it: {shown(task)}"
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
    """`TORCHVISION_INPUT` for what the user left open (in place), so that every row of a table sees
    the same pixels."""
    values = dict(TORCHVISION_INPUT)
    if "INPUT.FORMAT" in explicit and cfg.INPUT.FORMAT == "BGR":
        values |= {key: values[key][::-1] for key in ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD")}
    if cfg.MODEL.RESNETS.DEPTH < 50:
        values["MODEL.RESNETS.RES2_OUT_CHANNELS"] = cfg.MODEL.RESNETS.STEM_OUT_CHANNELS
    open_keys = {key: value for key, value in values.items() if key not in explicit}
    apply_keys(cfg, open_keys, explicit, RANDOM)


def _task_files(key: str, value: Any, family: str) -> str:
    """Which task files of a family have this value of a key, by which they differ."""
    fitting = []
    known = {**HONORED, **TRANSFER}
    for path in sorted(CONFIGS.rglob("*.yaml")):
        keys = flatten(read_yaml(path))
        name = keys.get("MODEL.BACKBONE.NAME", known["MODEL.BACKBONE.NAME"])
        is_task = not path.name.startswith("Base-") and "DATASETS.TRAIN" in keys
        is_task = is_task and backbone_type(name).family == family
        if is_task and keys.get(key, known[key]) == value:
            fitting.append(shown(path.relative_to(CONFIGS)))
    if not fitting:
        return f"no task file is for it; set {key} {value}"
    return f"task files for it: {first_few(fitting)}"


def apply_keys(
    cfg: CfgNode,
    values: Mapping[str, Any],
    explicit: Collection[str],
    owner: str,
    in_file: Collection[str] = (),
) -> None:
    """Set `values` (in place), which `owner` needs; see `apply_contract`."""
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
