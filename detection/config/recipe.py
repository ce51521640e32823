"""Is this configuration the paper's, or another published protocol? `recipes.yaml` has them.

The check is pure. It works for any configuration with Detectron2's keys, also for one that is not
this project's, such as the official MoCo YAML files. It finds the recipe by the names of the
datasets, the architecture and the schedule: the one from which the configuration deviates least.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from convert.contract import InputContract
from detection.config.keys import DETECTRON2_ONLY, FIXED, HONORED, NOT_PROTOCOL, TRANSFER
from detection.config.weights import TORCHVISION_INPUT
from detection.datasets.base import official_counts
from detection.modeling.backbones import backbone_type
from detection.modeling.backbones.base import BACKBONE_TYPES
from moco.common.cfgnode import flatten, read_yaml, same_value
from moco.common.command import RANDOM

_ARCHITECTURE = "MODEL.META_ARCHITECTURE"
_BACKBONE = "MODEL.BACKBONE.NAME"
# A recipe has to agree with a configuration in all but one of these to be meant at all, and in the
# architecture, where there is one.
_IDENTITY = (
    _ARCHITECTURE,
    _BACKBONE,
    "MODEL.ROI_HEADS.NAME",
    "MODEL.SEM_SEG_HEAD.NAME",
)
# What makes a detector another model than the paper's, and not one that deviates from it → values
# that count as the paper's besides those of its recipes.
_MODEL: dict[str, tuple[Any, ...]] = {
    "MODEL.META_ARCHITECTURE": (),
    "MODEL.ROI_HEADS.NAME": ("Res5ROIHeads",),  # C4 without the extra BN
    "MODEL.PROPOSAL_GENERATOR.NAME": (),
    "MODEL.RESNETS.DEPTH": (),
    "MODEL.RESNETS.NUM_GROUPS": (),
}
PAPER = "the paper"
_DATASETS = ("DATASETS.TRAIN", "DATASETS.TEST")
_BATCH = "SOLVER.IMS_PER_BATCH"
_NORM = "MODEL.RESNETS.NORM"
# What a recipe need not list and what may be set freely all the same, besides NOT_PROTOCOL (which
# has all that only the weights' contract decides): how a run is watched, how fast it is, and what
# is read for custom datasets only.
_FREE = (
    "TEST.EVAL_PERIOD",
    "TEST.EXPECTED_RESULTS",
    "VIS_PERIOD",
    "VERSION",
    "CUDNN_BENCHMARK",
    "SOLVER.PRECISION",  # compared as SOLVER.AMP.ENABLED
    "DATASETS.VOC_CLASSES",
    "DATASETS.VOC_YEAR",
)
_ABSENT = object()
# Where the key is missing, Detectron2 alone builds this.
_WITHOUT_KEY = {"MODEL.RESNETS.STEM": "imagenet"}


@dataclass(frozen=True)
class Setting:
    """What a key has in a recipe, and who says so."""

    value: Any
    source: str

    def __str__(self) -> str:
        owner = "the paper has" if self.source.startswith("the paper") else "expected"
        return f"{owner} {_text(self.value)} ({self.source.removeprefix('the paper, ')})"


@dataclass(frozen=True)
class Recipe:
    """One task of the paper, or of the work that `of` names: `settings` by Detectron2's keys."""

    name: str
    settings: Mapping[str, Setting]
    of: str = PAPER


@dataclass(frozen=True)
class RecipeCheck:
    """How a configuration compares with the paper, or with the protocol that it is nearest to.

    Attributes:
        recipe: which task, e.g. `Table 2b`; None: no task of the paper or of a protocol here.
        label: one line for the record.
        deviations: one line each, starting with the key.
    """

    recipe: str | None
    label: str
    deviations: tuple[str, ...]


NOT_A_TASK = RecipeCheck(None, "not a task of the paper", ())


def check(
    cfg: Mapping[str, Any],
    contract: InputContract | None,
    num_images: Mapping[str, int] | None = None,
) -> RecipeCheck:
    """Compare a resolved configuration with the published recipe for its task.

    Args:
        cfg: a CfgNode (or nested mapping) with Detectron2's keys; keys may be absent.
        contract: of the weights; None for a random initialization, and where it is not known
            (MODEL.WEIGHTS is then not `random`, and the input is not checked).
        num_images: dataset → number of its images; a part of a published split is a deviation.
    """
    flat = {**_WITHOUT_KEY, **flatten(cfg)}
    candidates = [recipe for recipe in load_recipes() if _is_meant(flat, recipe)]
    if not candidates or _is_another_model(flat):
        return NOT_A_TASK
    compared = [(recipe, *_compare(flat, recipe)) for recipe in candidates]
    recipe, _, lines = min(compared, key=lambda item: item[1])  # the first of equal ones
    lines += _check_input(flat, contract)
    for name, number in (num_images or {}).items():
        official, _ = official_counts(name)
        if official and number != official:
            lines.append(f"{name}: got {number} images, the published split has {official}")
    label = f"{'deviates from' if lines else 'as in'} {recipe.of} ({recipe.name})"
    return RecipeCheck(recipe.name, label, tuple(lines))


@cache
def _data() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("recipes.yaml"))


@cache
def load_recipes() -> tuple[Recipe, ...]:
    """All recipes.

    Raises:
        KeyError: an entry of the file has no known group or source.
    """
    recipes = []
    for entry in _data()["recipes"]:
        values: dict[str, Any] = {}
        for group in entry["groups"]:
            values |= _data()["groups"][group]
        values |= entry.get("values", {})
        of, sources = entry.get("of", PAPER), _data()["sources"]
        settings = {
            key: Setting(value, _of(sources[source], of)) for key, (value, source) in values.items()
        }
        recipes.append(Recipe(entry["name"], settings, of))
    return tuple(recipes)


def _of(source: str, of: str) -> str:
    return source.replace(f"{PAPER} is silent", f"{of} is silent")


def _alternatives() -> dict[str, list[str]]:
    """Names of one thing, by the name that the recipes have for it."""
    names: dict[str, list[str]] = _data()["alternatives"]
    return names


@cache
def _defaults() -> dict[str, Setting]:
    """Every key that makes an experiment another one, with its default."""
    owned = (("Detectron2's", HONORED | DETECTRON2_ONLY | FIXED), ("this project's", TRANSFER))
    return {
        key: Setting(value, f"{owner} default; {PAPER} is silent")
        for owner, values in owned
        for key, value in values.items()
        if key not in NOT_PROTOCOL and key not in _FREE
    }


def _is_meant(flat: Mapping[str, Any], recipe: Recipe) -> bool:
    """Whether the recipe is about this configuration's data, kind of network and its family."""
    architecture = recipe.settings[_ARCHITECTURE].value
    if flat.get(_ARCHITECTURE, architecture) != architecture:
        return False
    name, family = flat.get(_BACKBONE, ""), backbone_type(recipe.settings[_BACKBONE].value).family
    if name in BACKBONE_TYPES and backbone_type(name).family != family:
        return False
    shared = any(set(flat.get(key, ())) & set(recipe.settings[key].value) for key in _DATASETS)
    identity = [key for key in _IDENTITY if key in recipe.settings]
    other = [key for key in identity if not _equal(flat.get(key), recipe.settings[key].value)]
    return shared and len(other) <= 1


def _is_another_model(flat: Mapping[str, Any]) -> bool:
    """Whether the detector is of a kind that no recipe has: Cascade, R101."""
    for key, also in _MODEL.items():
        known = [r.settings[key].value for r in load_recipes() if key in r.settings]
        if key in flat and flat[key] not in (*known, *also):
            return True
    return False


def _compare(flat: Mapping[str, Any], recipe: Recipe) -> tuple[int, list[str]]:
    """How far a configuration is from a recipe, and the lines that say where."""
    different = {
        key: setting
        for key, setting in recipe.settings.items()
        if not _equal(flat.get(key, _ABSENT), setting.value)
    }
    # What a recipe does not list has to be as it always is, where the configuration has it.
    different |= {
        key: Setting(setting.value, _of(setting.source, recipe.of))
        for key, setting in _defaults().items()
        if key in flat and key not in recipe.settings and not _equal(flat[key], setting.value)
    }
    scaled = _linearly_scaled(flat, recipe) & set(different)
    lines = []
    for key, setting in different.items():
        line = f"{key}: got {_text(flat.get(key, _ABSENT))}, {setting}"
        if key in scaled:
            line += "; follows the linear scaling rule"
            if key == _BATCH:
                line += _not_equivalent(flat[_BATCH], setting.value, recipe)
        elif key.endswith(".NORM") and flat.get(key) == "BN" and setting.value in _alternatives():
            line += "; on one process that is the same"
        lines.append(line)
    # What one change of the batch explains counts once, else half the batch at twice the length
    # would be taken for the longer schedule.
    return len(different) - max(0, len(scaled) - 1), lines


def _not_equivalent(got: int, batch: int, recipe: Recipe) -> str:
    text = "the gradient is averaged"
    if recipe.settings[_NORM].value in _alternatives():
        text = "BN statistics and gradients are averaged"
    few = "fewer" if got < batch else "more"
    return f", but is not equivalent: {text} over {few} images ({got} instead of {batch})"


def _linearly_scaled(flat: Mapping[str, Any], recipe: Recipe) -> set[str]:
    """The solver's keys, if all follow another batch as Goyal et al. 2017 (arXiv 1706.02677) do.

    The learning rate is multiplied with the batch, durations are divided; the warm-up may stay.
    """
    expected = {key: setting.value for key, setting in recipe.settings.items()}
    got = flat.get(_BATCH)
    if not isinstance(got, int) or got < 1 or got == expected[_BATCH]:
        return set()
    ratio = got / expected[_BATCH]

    def divided(key: str) -> bool:
        # Durations are whole numbers: rounded to one, either way.
        theirs, ours = flat.get(key), expected[key]
        if not isinstance(ours, list | tuple):
            theirs, ours = [theirs], [ours]
        if not isinstance(theirs, list | tuple) or len(theirs) != len(ours):
            return False
        numbers = all(isinstance(value, int | float) for value in theirs)
        return numbers and all(abs(a - b / ratio) <= 1 for a, b in zip(theirs, ours, strict=True))

    if not _equal(flat.get("SOLVER.BASE_LR"), expected["SOLVER.BASE_LR"] * ratio):
        return set()
    if not (divided("SOLVER.MAX_ITER") and divided("SOLVER.STEPS")):
        return set()
    warm_up = {"SOLVER.WARMUP_ITERS"} if divided("SOLVER.WARMUP_ITERS") else set()
    return {_BATCH, "SOLVER.BASE_LR", "SOLVER.MAX_ITER", "SOLVER.STEPS"} | warm_up


def _check_input(flat: Mapping[str, Any], contract: InputContract | None) -> list[str]:
    """Lines where the pixels or the stride are not what the weights were trained with."""
    if contract is not None:
        owner = f"the weights need {{}} (contract of the {contract.source} checkpoint)"
        keys = contract.d2_keys()
        needed = {key: keys[key] for key in TORCHVISION_INPUT if key in keys}
    elif flat.get("MODEL.WEIGHTS") == RANDOM:
        owner = (
            "expected {} (docs/deviations.md: a random initialization sees what MoCo's rows see)"
        )
        needed = TORCHVISION_INPUT
    else:
        return []
    lines = [
        f"{key}: got {_text(flat.get(key, _ABSENT))}, {owner.format(_text(value))}"
        for key, value in needed.items()
        if not _equal(flat.get(key, _ABSENT), value, tolerance=1e-3)
    ]
    if contract is not None and contract.bn_folded and flat.get(_NORM) != "FrozenBN":
        lines.append(
            "MODEL.WEIGHTS: got weights whose batch norm was folded into scale and bias, the paper "
            "fine-tunes networks with their batch norm (detectron2/checkpoint/catalog.py: such "
            "weights are wrong for a BN that is trained)"
        )
    return lines


def _equal(ours: Any, theirs: Any, tolerance: float = 1e-9) -> bool:
    """`same_value`, where names of one thing are one name."""
    if isinstance(theirs, str) and theirs in _alternatives():
        return ours in _alternatives()[theirs]
    return same_value(ours, theirs, tolerance=tolerance)


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, str) and value in _alternatives():
        return f"{value} ({', '.join(_alternatives()[value])})"
    return repr(list(value) if isinstance(value, tuple) else value)
