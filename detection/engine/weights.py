"""Weights into a detector: the input contract, the words a user writes, and proof of what landed.

`MODEL.WEIGHTS` is the word `random`; a file written by `convert/convert_to_d2.py`; a
checkpoint that it reads, which is then converted in memory by the same functions and with the same
proof; or Detectron2's name of a pre-trained backbone (`detectron2://ImageNetPretrained/…`).
Nothing else starts a training: an empty string or a missing file is an error, because a network
left at random under a real name is the worst result there is.

Names (the same in both engines): a converted key `stem.…` … `res4.…` lands on
`backbone.<key>`, and `res5.…` on `roi_heads.<key>` (C4, where res5 is the box head).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from convert.contract import InputContract
from convert.convert_to_d2 import convert_in_memory
from convert.files import is_converted, read_file
from moco.common.cfgnode import flatten, read_yaml
from moco.common.errors import DataError, UserError
from moco.common.files import PathLike, named_objects
from moco.common.unpickler import Inert

if TYPE_CHECKING:
    from torch import Tensor, nn

    from convert.verify import Converted

logger = logging.getLogger(__name__)

RANDOM = "random"
_WEIGHTS = (
    "a file from convert/convert_to_d2.py, a checkpoint that it reads, or the word "
    f"{RANDOM} for a random initialization"
)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

# Detectron2's names: the scheme and what its addresses start with (detectron2/utils/file_io.py,
# detectron2/checkpoint/catalog.py). Backbones stand under one folder, whole detectors beside it.
MODEL_ZOO = {
    "detectron2://": "https://dl.fbaipublicfiles.com/detectron2/",
    "catalog://": "https://dl.fbaipublicfiles.com/detectron/",
}
_BACKBONES = "ImageNetPretrained/"

# What torchvision's and MoCo's networks are trained with, 0..255, RGB. A random initialization
# gets the same, so that every row of a table sees the same pixels.
RGB_MEAN = (123.675, 116.280, 103.530)
RGB_STD = (58.395, 57.120, 57.375)

# Where a converted key may land, the first prefix that exists.
_PREFIXES = ("backbone.", "backbone.bottom_up.", "roi_heads.")
# The part of a detector that a backbone's file has to fill; roi_heads.res5.norm is the new BN.
_TRUNK = re.compile(r"^(backbone\.(bottom_up\.)?(stem|res\d)|roi_heads\.res5\.\d)")
_UNTRACKED = "num_batches_tracked"

# What a trained model needs beside its tensors: the keys of the contract and the head.
_TRAINED_KEYS = (
    "INPUT.FORMAT",
    "MODEL.PIXEL_MEAN",
    "MODEL.PIXEL_STD",
    "MODEL.RESNETS.STRIDE_IN_1X1",
    "MODEL.RESNETS.DEPTH",
    "MODEL.RESNETS.STEM",
    "MODEL.RESNETS.STEM_OUT_CHANNELS",
    "MODEL.RESNETS.RES2_OUT_CHANNELS",
    "MODEL.RESNETS.NUM_GROUPS",
    "MODEL.RESNETS.WIDTH_PER_GROUP",
    "MODEL.ROI_HEADS.NAME",
    "DATASETS.VOC_CLASSES",
)
_PIXEL_KEYS = _TRAINED_KEYS[:4]


@dataclass(frozen=True)
class Coverage:
    """What a detector's tensors hold after loading.

    Attributes:
        loaded: number of tensors equal to the file's.
        left_at_init: names of the tensors that start from scratch (RPN, extra norm, predictors).
    """

    loaded: int
    left_at_init: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"loaded": self.loaded, "left_at_init": list(self.left_at_init)}


@dataclass(frozen=True)
class EngineResult:
    """What an engine hands back.

    Attributes:
        metrics: canonical name (detection/evaluation/metrics.py) → value, AP in 0..100; may be NaN.
        iterations: number of the last iteration trained (`SOLVER.MAX_ITER`), 0 for evaluation.
        seconds: wall time of training and evaluation.
        coverage: None for random weights and for evaluation only.
    """

    metrics: dict[str, float]
    iterations: int
    seconds: float
    coverage: Coverage | None


def read_weights(weights: str) -> Converted | None:
    """The backbone that MODEL.WEIGHTS names, or None for the word `random`.

    What a reader of the result has to know is in `Converted.notes`.

    Raises:
        UserError: an empty value, a whole detector, a name that cannot be fetched; DataError: a
            missing or damaged file, or one that convert/ does not recognize.
    """
    from convert.verify import read_converted

    check_weights(weights)
    if weights == RANDOM:
        return None
    path = _resolve(weights) if "://" in weights else Path(weights)
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


def _resolve(name: str) -> Path:
    """A name with a scheme as a file on this machine."""
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
        from detection.d2.model_zoo import resolve_detectron2_name
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "detectron2":
            raise
        raise UserError(
            f"MODEL.WEIGHTS {name}: only Detectron2 can resolve this name, and it is not "
            f"installed; download {model_zoo_url(name)} and give the file's path"
        ) from error
    return resolve_detectron2_name(name)


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
    _apply(cfg, values, explicit, owner, in_file)


def apply_random(cfg: CfgNode, explicit: Collection[str]) -> None:
    """torchvision's convention for what the user left open (in place)."""
    rgb = cfg.INPUT.FORMAT == "RGB" or "INPUT.FORMAT" not in explicit
    step = 1 if rgb else -1
    values: dict[str, Any] = {
        "INPUT.FORMAT": "RGB",
        "MODEL.PIXEL_MEAN": list(RGB_MEAN[::step]),
        "MODEL.PIXEL_STD": list(RGB_STD[::step]),
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
    }
    if cfg.MODEL.RESNETS.DEPTH < 50:
        values["MODEL.RESNETS.RES2_OUT_CHANNELS"] = cfg.MODEL.RESNETS.STEM_OUT_CHANNELS
    open_keys = {key: value for key, value in values.items() if key not in explicit}
    _apply(cfg, open_keys, explicit, RANDOM)


def trained_config(opts: Sequence[str], *, resume: bool) -> Path:
    """The config.yaml beside the trained model that `--eval-only` names: the whole task is in it.

    Args:
        opts: `KEY VALUE` overrides.
        resume: the model is the last one in OUTPUT_DIR, not MODEL.WEIGHTS.

    Raises:
        UserError: there is none.
    """
    given = dict(zip(opts[::2], opts[1::2], strict=False))
    model = Path(given.get("MODEL.WEIGHTS", ""))
    folder = Path(given.get("OUTPUT_DIR", "")) if resume else model.parent
    key = "OUTPUT_DIR" if resume else "MODEL.WEIGHTS"
    if key not in given or not (folder / "config.yaml").is_file():
        raise UserError(
            f"--eval-only without --config-file takes the config.yaml beside the model, but {key} "
            f"is {given.get(key, 'not set')!r} and there is none; give --config-file, e.g. the "
            "config.yaml of the run that trained it"
        )
    return folder / "config.yaml"


def trained_keys(path: PathLike) -> dict[str, Any]:
    """What the run that trained a model says about it, from the config.yaml beside it."""
    config = Path(path).parent / "config.yaml"
    if not config.is_file():
        return {}
    flat = flatten(read_yaml(config))
    return {key: flat[key] for key in _TRAINED_KEYS if key in flat}


def apply_trained(cfg: CfgNode, trained: Mapping[str, Any], explicit: Collection[str]) -> None:
    """Set what belongs to a trained model (in place); see `trained_keys`.

    Raises:
        UserError: a contradiction, or nobody says how the model's pixels were normalized.
    """
    unknown = [key for key in _PIXEL_KEYS if key not in trained and key not in explicit]
    if unknown:
        raise UserError(
            f"{', '.join(unknown)}: not known for {cfg.MODEL.WEIGHTS}, which has no config.yaml "
            "beside it; use --config-file with the one of the run that trained it, or set the keys"
        )
    _apply(cfg, trained, explicit, f"the model {cfg.MODEL.WEIGHTS}")


def read_trained(path: PathLike) -> dict[str, Tensor]:
    """Tensors of a trained detector, `model_final.pth` of either engine, or another format.

    Raises:
        DataError: unreadable, or not a mapping of names to tensors.
    """
    import torch

    raw = read_file(path)
    model = raw.get("model", raw) if isinstance(raw, Mapping) else None
    if not isinstance(model, Mapping) or not model:
        raise DataError(f"{path}: not a trained detector; expected a mapping with key 'model'")
    if objects := [value.name for value in model.values() if isinstance(value, Inert)]:
        raise DataError(
            f"{path}: not a trained detector; it holds objects, made by {named_objects(objects)}"
        )
    try:
        return {str(name): torch.as_tensor(value) for name, value in model.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{path}: not a trained detector ({error})") from error


def load_trained(model: nn.Module, tensors: Mapping[str, Tensor], path: PathLike) -> None:
    """Load a whole trained detector, nothing missing, nothing left over.

    Raises:
        UserError: naming the first tensors that do not fit.
    """
    state = {key: value for key, value in model.state_dict().items() if _UNTRACKED not in key}
    found = {
        key: value
        for key, value in tensors.items()
        # Buffers of the image normalization, in models saved by older Detectron2.
        if _UNTRACKED not in key and key not in ("pixel_mean", "pixel_std")
    }
    problems = [f"{key} is missing" for key in sorted(set(state) - set(found))]
    problems += [f"{key} is unknown" for key in sorted(set(found) - set(state))]
    problems += [
        f"{key} is {tuple(found[key].shape)} instead of {tuple(state[key].shape)}"
        for key in sorted(set(found) & set(state))
        if found[key].shape != state[key].shape
    ]
    if problems:
        raise UserError(f"{path} does not fit this detector: {_some(problems)}")
    model.load_state_dict(found, strict=False)


def load_converted(model: nn.Module, converted: Mapping[str, Tensor]) -> Coverage:
    """Copy a converted backbone into a detector and check what it then holds.

    Raises:
        UserError: a tensor of the file has no place or another shape, or a tensor of the backbone
        is     not in the file.
    """
    state = model.state_dict()
    landed = landing_names(state, converted)
    wrong = [
        f"{key} is {tuple(converted[key].shape)}, {name} is {tuple(state[name].shape)}"
        for key, name in landed.items()
        if converted[key].shape != state[name].shape
    ]
    if wrong:
        raise UserError(f"MODEL.WEIGHTS does not fit this detector: {_some(wrong)}")
    model.load_state_dict({landed[key]: converted[key] for key in converted}, strict=False)
    return check_coverage(model.state_dict(), converted)


def landing_names(state: Collection[str], converted: Collection[str]) -> dict[str, str]:
    """Converted key → the detector's name for it.

    Raises:
        UserError: keys without a place.
    """
    landed, homeless = {}, []
    for key in converted:
        name = next((prefix + key for prefix in _PREFIXES if prefix + key in state), None)
        if name is None:
            homeless.append(key)
        else:
            landed[key] = name
    if homeless:
        raise UserError(f"MODEL.WEIGHTS: the detector has no place for {_some(homeless)}")
    return landed


def check_coverage(state: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> Coverage:
    """Compare a loaded detector with the file, tensor by tensor.

    Detectron2 only warns about a mismatch, so a bad file would become a random row with a name.

    Raises:
        UserError: a tensor that differs from the file's, or a backbone tensor the file does not
        have.
    """
    import torch

    landed = landing_names(state, converted)
    different = [
        name
        for key, name in landed.items()
        if not torch.equal(state[name].cpu(), converted[key].to(state[name].dtype).cpu())
    ]
    if different:
        raise UserError(f"after loading MODEL.WEIGHTS these tensors differ: {_some(different)}")
    rest = sorted(
        name for name in state if name not in set(landed.values()) and _UNTRACKED not in name
    )
    random = [name for name in rest if _TRUNK.match(name)]
    if random:
        raise UserError(f"MODEL.WEIGHTS leaves these at random: {_some(random)}")
    logger.info("%d tensors come from the weights, %d start from scratch", len(landed), len(rest))
    return Coverage(len(landed), tuple(rest))


def _task_files(depth: int) -> str:
    """Which task files are for such a ResNet."""
    fitting = []
    for path in sorted(CONFIGS.rglob("*.yaml")):
        keys = flatten(read_yaml(path))
        if "DATASETS.TRAIN" in keys and keys.get("MODEL.RESNETS.DEPTH", 50) == depth:
            fitting.append(f"configs/{path.relative_to(CONFIGS)}")
    if not fitting:
        return f"no task file is for it; set MODEL.RESNETS.DEPTH {depth}"
    return f"task files for it: {_some(fitting)}"


def _apply(
    cfg: CfgNode,
    values: Mapping[str, Any],
    explicit: Collection[str],
    owner: str,
    in_file: Collection[str] = (),
) -> None:
    known = flatten(cfg)
    for key, value in values.items():
        if key in explicit and not _same(known[key], value):
            who, fix = ("you set", "remove the key")
            if key in in_file:
                who, fix = ("the task file sets", "set it on the command line")
            raise UserError(
                f"{key}: {who} {known[key]!r}, but {owner} need {value!r}; "
                f"{fix} or use other weights"
            )
        cfg.merge_from_list([key, value])


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, float) or isinstance(theirs, float):
        return abs(ours - theirs) <= 1e-3  # e.g. 103.53 and 0.406 * 255
    return bool(ours == theirs)


def _some(items: list[str]) -> str:
    """The first items and how many more there are."""
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")
