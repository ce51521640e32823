"""Comparison of a configuration with the recipes of the paper and of later work in `recipes.yaml`.

The check reads only its arguments and the recipes. It works for any configuration with Detectron2's
keys, such as the official MoCo YAML files. Among the recipes that share datasets and architecture
with the configuration, it selects the one that the configuration deviates least from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from convert.contract import InputContract
from detection.config.keys import DETECTRON2S, KEYS
from detection.config.weights import TORCHVISION_INPUT
from detection.datasets.base import official_counts
from detection.modeling.backbones import backbone_type
from detection.modeling.backbones.base import BACKBONE_TYPES
from moco.common.cfgnode import flatten, read_own_yaml, same_value
from moco.common.command import RANDOM
from moco.common.keys import Role, names_of

_ARCHITECTURE = "MODEL.META_ARCHITECTURE"
_BACKBONE = "MODEL.BACKBONE.NAME"
# A recipe is a candidate if it differs from the configuration in at most one of these keys, and not
# in the architecture if the configuration sets one.
_IDENTITY = (
    _ARCHITECTURE,
    _BACKBONE,
    "MODEL.ROI_HEADS.NAME",
    "MODEL.SEM_SEG_HEAD.NAME",
)
# Keys that make a detector another model, not a deviation from a recipe → values that count as the
# recipes' in addition to those in the file.
_MODEL: dict[str, tuple[Any, ...]] = {
    "MODEL.META_ARCHITECTURE": (),
    "MODEL.ROI_HEADS.NAME": ("Res5ROIHeads",),  # C4 without the extra BN.
    "MODEL.PROPOSAL_GENERATOR.NAME": (),
    "MODEL.RESNETS.DEPTH": (),
    "MODEL.RESNETS.NUM_GROUPS": (),
}
# Keys that may be set although a recipe does not list them.
FREE = (
    *("VERSION", "VIS_PERIOD", "CUDNN_BENCHMARK", "TEST.EVAL_PERIOD", "TEST.EXPECTED_RESULTS"),
    *("DATASETS.VOC_CLASSES", "DATASETS.VOC_YEAR", "DATASETS.VOC_METRIC"),
    "SOLVER.PRECISION",  # SOLVER.AMP.ENABLED is compared instead
)
PAPER = "the paper"
_DATASETS = ("DATASETS.TRAIN", "DATASETS.TEST")
_BATCH = "SOLVER.IMS_PER_BATCH"
_NORM = "MODEL.RESNETS.NORM"
_ABSENT = object()
# Configurations without the key are plain Detectron2's, which builds this stem.
_WITHOUT_KEY = {"MODEL.RESNETS.STEM": "imagenet"}


@dataclass(frozen=True)
class Setting:
    """Value of a key in a recipe, with its source."""

    value: Any
    source: str

    def __str__(self) -> str:
        owner = "the paper has" if self.source.startswith("the paper") else "expected"
        return f"{owner} {_text(self.value)} ({self.source.removeprefix('the paper, ')})"


@dataclass(frozen=True)
class Recipe:
    """Settings of one task in the paper, or in the work that `of` names, by Detectron2's keys."""

    name: str
    settings: Mapping[str, Setting]
    of: str = PAPER


@dataclass(frozen=True)
class RecipeCheck:
    """Comparison of a configuration with the nearest recipe.

    Attributes:
        recipe: Name of the recipe, e.g. `Table 2b`; None: no recipe matches.
        label: One line for the run record.
        deviations: One line per deviation, which starts with the key.
    """

    recipe: str | None
    label: str
    deviations: tuple[str, ...]


NOT_A_TASK = RecipeCheck(None, "not a task of the paper", ())


def compare_with_recipe(
    cfg: Mapping[str, Any],
    contract: InputContract | None,
    num_images: Mapping[str, int] | None = None,
) -> RecipeCheck:
    """Compare a resolved configuration with the published recipe for its task.

    Args:
        cfg: CfgNode (or nested mapping) with Detectron2's keys; keys may be absent.
        contract: Input contract of the weights. None for a random initialization or an unknown
            contract; MODEL.WEIGHTS is then not `random`, and the input is not checked.
        num_images: Number of images of each dataset; fewer or more than in the published split is
            a deviation.
    """
    flat = {**_WITHOUT_KEY, **flatten(cfg)}
    candidates = [recipe for recipe in load_recipes() if _is_meant(flat, recipe)]
    if not candidates or _is_another_model(flat, _family(candidates[0])):
        return NOT_A_TASK
    defaults = _defaults()
    compared = [(recipe, *_compare(flat, recipe, defaults)) for recipe in candidates]
    recipe, _, lines = min(compared, key=lambda item: item[1])  # Ties go to the first one.
    lines += _check_input(flat, contract)
    for name, number in (num_images or {}).items():
        official, _ = official_counts(name)
        if official and number != official:
            lines.append(f"{name}: got {number} images, the published split has {official}")
    label = f"{'deviates from' if lines else 'as in'} {recipe.of} ({recipe.name})"
    return RecipeCheck(recipe.name, label, tuple(lines))


@cache
def _data() -> dict[str, Any]:
    return read_own_yaml(Path(__file__).with_name("recipes.yaml"))


@cache
def load_recipes() -> tuple[Recipe, ...]:
    """Return all recipes of `recipes.yaml`.

    Raises:
        KeyError: If an entry of the file names an unknown group or source.
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
    """Return the synonyms of each name that the recipes use."""
    names: dict[str, list[str]] = _data()["alternatives"]
    return names


def _defaults() -> dict[str, Setting]:
    """Return the default of every key that a recipe implies where it does not list the key."""
    theirs, ours = _data()["sources"]["d2"], f"this project's default; {PAPER} is silent"
    return {
        name: Setting(KEYS[name].default, theirs if name in DETECTRON2S else ours)
        for name in names_of(KEYS, Role.PROTOCOL)
        if name not in FREE
    }


def _is_meant(flat: Mapping[str, Any], recipe: Recipe) -> bool:
    """Return whether the recipe matches the configuration's data, architecture and family."""
    architecture = recipe.settings[_ARCHITECTURE].value
    if flat.get(_ARCHITECTURE, architecture) != architecture:
        return False
    name = flat.get(_BACKBONE, "")
    if name in BACKBONE_TYPES and backbone_type(name).family != _family(recipe):
        return False
    shared = any(set(flat.get(key, ())) & set(recipe.settings[key].value) for key in _DATASETS)
    identity = [key for key in _IDENTITY if key in recipe.settings]
    other = [key for key in identity if not _equal(flat.get(key), recipe.settings[key].value)]
    return shared and len(other) <= 1


def _family(recipe: Recipe) -> str:
    return backbone_type(recipe.settings[_BACKBONE].value).family


def _is_another_model(flat: Mapping[str, Any], family: str) -> bool:
    """Return whether no recipe of a family has such a detector, for example Cascade or R101."""
    recipes = [recipe for recipe in load_recipes() if _family(recipe) == family]
    for key, also in _MODEL.items():
        known = [r.settings[key].value for r in recipes if key in r.settings]
        if key in flat and flat[key] not in (*known, *also):
            return True
    return False


def _compare(
    flat: Mapping[str, Any], recipe: Recipe, defaults: Mapping[str, Setting]
) -> tuple[int, list[str]]:
    """Return the distance of a configuration from a recipe, and a line per deviation."""
    different = {
        key: setting
        for key, setting in recipe.settings.items()
        if not _equal(flat.get(key, _ABSENT), setting.value)
    }
    # A key of the configuration that the recipe does not list must have its default.
    different |= {
        key: Setting(setting.value, _of(setting.source, recipe.of))
        for key, setting in defaults.items()
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
    # All keys that a change of the batch size explains count once; otherwise half the batch size at
    # twice the length would match the longer schedule.
    return len(different) - max(0, len(scaled) - 1), lines


def _not_equivalent(got: int, batch: int, recipe: Recipe) -> str:
    text = "the gradient is averaged"
    if recipe.settings[_NORM].value in _alternatives():
        text = "BN statistics and gradients are averaged"
    few = "fewer" if got < batch else "more"
    return f", but is not equivalent: {text} over {few} images ({got} instead of {batch})"


def _linearly_scaled(flat: Mapping[str, Any], recipe: Recipe) -> set[str]:
    """Return the keys of SOLVER that follow the linear scaling rule of Goyal et al. 2017.

    By that rule (arXiv 1706.02677) the learning rate is proportional to the batch size and
    durations are inversely proportional to it; the warm-up may stay. The set is empty unless all
    other keys follow the rule.
    """
    expected = {key: setting.value for key, setting in recipe.settings.items()}
    got = flat.get(_BATCH)
    if not isinstance(got, int) or got < 1 or got == expected[_BATCH]:
        return set()
    ratio = got / expected[_BATCH]

    def divided(key: str) -> bool:
        # Durations are integers, which may be rounded up or down.
        actual, value = flat.get(key), expected[key]
        if not isinstance(value, list | tuple):
            actual, value = [actual], [value]
        if not isinstance(actual, list | tuple) or len(actual) != len(value):
            return False
        numbers = all(isinstance(value, int | float) for value in actual)
        return numbers and all(abs(a - b / ratio) <= 1 for a, b in zip(actual, value, strict=True))

    if not _equal(flat.get("SOLVER.BASE_LR"), expected["SOLVER.BASE_LR"] * ratio):
        return set()
    if not (divided("SOLVER.MAX_ITER") and divided("SOLVER.STEPS")):
        return set()
    warm_up = {"SOLVER.WARMUP_ITERS"} if divided("SOLVER.WARMUP_ITERS") else set()
    return {_BATCH, "SOLVER.BASE_LR", "SOLVER.MAX_ITER", "SOLVER.STEPS"} | warm_up


def _check_input(flat: Mapping[str, Any], contract: InputContract | None) -> list[str]:
    """Return a line per key in which pixels or stride differ from those of pre-training."""
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


def _equal(value: Any, expected: Any, tolerance: float = 1e-9) -> bool:
    """Compare two values by `same_value`, with synonyms equal."""
    if isinstance(expected, str) and expected in _alternatives():
        return value in _alternatives()[expected]
    return same_value(value, expected, tolerance=tolerance)


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, str) and value in _alternatives():
        return f"{value} ({', '.join(_alternatives()[value])})"
    return repr(list(value) if isinstance(value, tuple) else value)
