"""MODEL.WEIGHTS: the values it takes, and the keys that the weights' input contract sets.

The value is `random`; a file written by `convert/convert_to_d2.py`; a checkpoint that it reads,
which is then converted in memory by the same functions and with the same proof; or Detectron2's
name of a pre-trained backbone (`detectron2://ImageNetPretrained/…`). Nothing else starts a
training: an empty string or a missing file is an error, because a network left at random under a
real name is the worst result there is.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from convert.contract import IMAGENET_MEAN, IMAGENET_STD, InputContract
from convert.convert_to_d2 import convert_in_memory
from convert.files import is_converted, read_file
from detection.config.keys import same_value
from moco.common.cfgnode import flatten, read_yaml
from moco.common.command import RANDOM
from moco.common.errors import DataError, UserError, first_few
from moco.common.shipped import CONFIGS, shown

if TYPE_CHECKING:
    from convert.verify import Converted

_WEIGHTS = (
    "a file from convert/convert_to_d2.py, a checkpoint that it reads, or "
    f"{RANDOM!r} for a random initialization"
)

# Detectron2's names: the scheme and what its addresses start with (detectron2/utils/file_io.py,
# detectron2/checkpoint/catalog.py). Backbones are in one folder, whole detectors beside it.
MODEL_ZOO = {
    "detectron2://": "https://dl.fbaipublicfiles.com/detectron2/",
    "catalog://": "https://dl.fbaipublicfiles.com/detectron/",
}
_BACKBONES = "ImageNetPretrained/"


def read_weights(weights: str) -> Converted | None:
    """The backbone that MODEL.WEIGHTS names, or None for `random`.

    What a reader of the result has to know is in `Converted.notes`.

    Raises:
        UserError: an empty value, a whole detector, a name that cannot be fetched; DataError: a
            missing or damaged file, or one that convert/ does not recognize.
    """
    from convert.verify import read_converted

    check_weights(weights)
    if weights == RANDOM:
        return None
    path = resolve_name(weights) if "://" in weights else Path(weights)
    objects: set[str] = set()
    raw = read_file(path, objects)
    if is_converted(raw):
        return read_converted(path, raw)
    return convert_in_memory(path, raw, objects)


def check_weights(weights: str) -> None:
    """Whether there is something that `read_weights` could read; torch is not imported.

    Raises:
        UserError: an empty value; DataError: a missing file.
    """
    if not weights:
        raise UserError(f"MODEL.WEIGHTS is empty; give {_WEIGHTS}")
    if weights != RANDOM and "://" not in weights and not Path(weights).is_file():
        raise DataError(f"MODEL.WEIGHTS {weights}: no such file; give {_WEIGHTS}")


def init_name(weights: str) -> str:
    """What a result calls its initialization: a short name from the value of MODEL.WEIGHTS.

    `random`; the last two parts of Detectron2's names (two of them end in `R-50.pkl`); else
    the file's name without its endings.
    """
    name = Path(weights).name
    for ending in (".tar", ".pth", ".pkl", ".pt", ".safetensors"):
        name = name.removesuffix(ending)
    return f"{Path(weights).parent.name}_{name}" if _scheme(weights) else name


def model_zoo_url(name: str) -> str:
    """The address behind a `detectron2://` or `catalog://` name, for people."""
    scheme = _scheme(name)
    ending = "" if name.endswith(".pkl") else ".pkl"
    return MODEL_ZOO[scheme] + name.removeprefix(scheme) + ending


def _scheme(weights: str) -> str:
    return next((scheme for scheme in MODEL_ZOO if weights.startswith(scheme)), "")


def resolve_name(name: str) -> Path:
    """The file behind Detectron2's name of a pre-trained backbone, from the cache or downloaded.

    Raises:
        UserError: another address, a whole detector, or a name that cannot be fetched.
    """
    scheme = _scheme(name)
    if not scheme:
        raise UserError(
            f"MODEL.WEIGHTS {name}: this address is not read; download the file and give its path, "
            f"or a name such as detectron2://{_BACKBONES}MSRA/R-50.pkl"
        )
    if not name.removeprefix(scheme).startswith(_BACKBONES):
        raise UserError(
            f"MODEL.WEIGHTS {name}: a whole detector, not a pre-trained backbone; training starts "
            f"from {scheme}{_BACKBONES}…, a file, or {RANDOM}"
        )
    try:
        model_zoo = importlib.import_module("detection.d2.model_zoo")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "detectron2":
            raise
        raise UserError(
            f"MODEL.WEIGHTS {name}: only Detectron2 can resolve this name, and it is not "
            f"installed; download {model_zoo_url(name)} and give the file's path"
        ) from error
    path: Path = model_zoo.resolve_detectron2_name(name)
    return path


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
    depth, key = values["MODEL.RESNETS.DEPTH"], "MODEL.RESNETS.DEPTH"
    if key in in_file and cfg.MODEL.RESNETS.DEPTH != depth:
        raise UserError(
            f"{key}: the task file is for a ResNet-{cfg.MODEL.RESNETS.DEPTH}, but {owner} are a "
            f"ResNet-{depth}; {_task_files(depth)}"
        )
    apply_keys(cfg, values, explicit, owner, in_file)


def apply_random(cfg: CfgNode, explicit: Collection[str]) -> None:
    """torchvision's convention for what the user left open (in place).

    As of most pre-trained weights, so that every row of a table sees the same pixels.
    """
    rgb = cfg.INPUT.FORMAT == "RGB" or "INPUT.FORMAT" not in explicit
    step = 1 if rgb else -1
    values: dict[str, Any] = {
        "INPUT.FORMAT": "RGB",
        "MODEL.PIXEL_MEAN": list(IMAGENET_MEAN[::step]),
        "MODEL.PIXEL_STD": list(IMAGENET_STD[::step]),
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
    }
    if cfg.MODEL.RESNETS.DEPTH < 50:
        values["MODEL.RESNETS.RES2_OUT_CHANNELS"] = cfg.MODEL.RESNETS.STEM_OUT_CHANNELS
    open_keys = {key: value for key, value in values.items() if key not in explicit}
    apply_keys(cfg, open_keys, explicit, RANDOM)


def _task_files(depth: int) -> str:
    """Which task files are for such a ResNet."""
    fitting = []
    for path in sorted(CONFIGS.rglob("*.yaml")):
        keys = flatten(read_yaml(path))
        if "DATASETS.TRAIN" in keys and keys.get("MODEL.RESNETS.DEPTH", 50) == depth:
            fitting.append(shown(path.relative_to(CONFIGS)))
    if not fitting:
        return f"no task file is for it; set MODEL.RESNETS.DEPTH {depth}"
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
