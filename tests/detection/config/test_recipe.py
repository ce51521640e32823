"""Comparison of configurations with the recipes: shipped files match; each deviation is named."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from fvcore.common.config import CfgNode

from convert.contract import InputContract
from detection.config.keys import KEYS
from detection.config.recipe import FREE, Recipe, RecipeCheck, compare_with_recipe, load_recipes
from detection.config.task import default_task
from moco.common.cfgnode import flatten, load_cfg, read_yaml, same_value
from moco.common.keys import NOT_PROTOCOL, names_of
from tests.convert.test_contract import R50, changed
from tests.oracles.official_yaml import NAMES, write_official

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(
    path
    for folder in ("voc", "coco", "lvis", "cityscapes", "ade20k")
    for path in (ROOT / "configs" / folder).glob("*.yaml")
    if not path.name.startswith("Base-")
)
TASKS = [path for path in CONFIGS if not {"small", "quickstart"} & set(path.stem.split("_"))]
OWN = [path for path in CONFIGS if path not in TASKS]
RGB = {
    "INPUT.FORMAT": "RGB",
    "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
    "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
    "MODEL.RESNETS.STRIDE_IN_1X1": False,
}


def contract(**changes: Any) -> InputContract:
    return InputContract.from_fields(**changed(R50, **changes))


MSRA = contract(
    pixel_mean=(103.53, 116.28, 123.675),
    pixel_std=(1.0, 1.0, 1.0),
    channel_order="BGR",
    stride_in_1x1=True,
    source="detectron2/MSRA",
)


def resolved(path: Path, **changes: Any) -> dict[str, Any]:
    """Return a config's flat keys with random weights; __ in the name of a change is a dot."""
    flat = flatten(default_task())
    for key, value in flatten(read_yaml(path)).items():
        # yacs parses tuples from text.
        is_tuple = isinstance(value, str) and value.startswith("(")
        flat[key] = ast.literal_eval(value) if is_tuple else value
    flat |= {"MODEL.WEIGHTS": "random", **RGB}
    return flat | {key.replace("__", "."): value for key, value in changes.items()}


# With another value of these keys it is another model.
MODEL_KEYS = {
    "MODEL.META_ARCHITECTURE",
    "MODEL.ROI_HEADS.NAME",
    "MODEL.PROPOSAL_GENERATOR.NAME",
    "MODEL.RESNETS.DEPTH",
    "MODEL.RESNETS.NUM_GROUPS",
}


def identify(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def recipe_of(result: RecipeCheck) -> Recipe:
    return next(recipe for recipe in load_recipes() if recipe.name == result.recipe)


def keys_of(result: RecipeCheck) -> list[str]:
    return [line.split(":")[0] for line in result.deviations]


def backbone_of(path: Path) -> str:
    return resolved(path)["MODEL.BACKBONE.NAME"]


VOC_24K = ROOT / "configs" / "voc" / "faster_rcnn_R_50_C4_24k.yaml"
SPARK = ROOT / "configs" / "coco" / "mask_rcnn_R_50_FPN_1x_SparK.yaml"
FPN_1X = ROOT / "configs" / "coco" / "mask_rcnn_R_50_FPN_1x.yaml"
FROZEN_BN = ROOT / "configs" / "lvis" / "mask_rcnn_R_50_FPN_1x_frozen_bn.yaml"


@pytest.mark.parametrize("path", TASKS, ids=identify)
def test_the_configs_are_as_in_the_paper(path):
    result = compare_with_recipe(resolved(path), None)
    assert result.deviations == ()
    recipe = recipe_of(result)
    assert result.label == f"as in {recipe.of} ({recipe.name})"
    # The header of the file names the same table, section or protocol.
    header = " ".join(
        line.strip("# ") for line in path.read_text().splitlines() if line.startswith("#")
    )
    named = recipe.of.partition(" on ")[2] or recipe.of
    assert (recipe.name.split(",")[0] if recipe.of == "the paper" else named).lower() in (
        header.lower()
    )
    assert header.startswith("Not in the paper") == (recipe.of != "the paper")


def test_every_recipe_has_its_config():
    assert OWN
    found = [compare_with_recipe(resolved(path), None).recipe for path in TASKS]
    assert sorted(found) == sorted(recipe.name for recipe in load_recipes())


# With VOC's data instead of a custom dataset, a ResNet-50 differs from Table 2a of the paper.
ON_OWN_DATA = "faster_rcnn_R_50_FPN_small"


@pytest.mark.parametrize("path", [p for p in OWN if p.stem != ON_OWN_DATA], ids=identify)
def test_small_networks_and_own_data_are_no_task_of_the_paper(path):
    result = compare_with_recipe(resolved(path), None)
    assert result == RecipeCheck(None, "not a task of the paper", ())


@pytest.mark.parametrize(
    "changes",
    [
        {"DATASETS__TRAIN": ("my_train",), "DATASETS__TEST": ("my_test",)},
        {"MODEL__RESNETS__DEPTH": 18},
        {"MODEL__RESNETS__DEPTH": 101},
        {"MODEL__RESNETS__NUM_GROUPS": 32},
        {"MODEL__ROI_HEADS__NAME": "CascadeROIHeads"},
        {"MODEL__META_ARCHITECTURE": "SemanticSegmentor"},
    ],
)
def test_other_data_and_other_networks(changes):
    for path in (VOC_24K, FPN_1X):
        assert (
            compare_with_recipe(resolved(path, **changes), None).label == "not a task of the paper"
        )
    assert compare_with_recipe({}, None).recipe is None


def test_another_protocol_is_called_by_its_own_name():
    """A RetinaNet is compared with DetCo's recipe for its schedule."""
    path = ROOT / "configs" / "coco" / "retinanet_R_50_FPN_90k.yaml"
    longer = {"SOLVER__MAX_ITER": 180000, "SOLVER__STEPS": (120000, 160000)}
    assert (
        compare_with_recipe(resolved(path, **longer), None).label
        == "as in DetCo (COCO RetinaNet, 180k)"
    )
    frozen = compare_with_recipe(resolved(path, MODEL__BACKBONE__FREEZE_AT=2), None)
    assert frozen.label == "deviates from DetCo (COCO RetinaNet, 90k)"
    assert keys_of(frozen) == ["MODEL.BACKBONE.FREEZE_AT"]


def other(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list | tuple):
        return [*value, *value[-1:]] or [1]
    if value is None:
        return 0.0
    return f"{value}X" if isinstance(value, str) else value + 3


@pytest.mark.parametrize("path", TASKS, ids=identify)
@pytest.mark.slow
def test_a_changed_or_absent_key_is_the_only_deviation(path):
    cfg = resolved(path)
    recipe = recipe_of(compare_with_recipe(cfg, None))
    assert len(recipe.settings) > 25
    for key in [*recipe.settings, *RGB]:
        absent = compare_with_recipe(
            {name: value for name, value in cfg.items() if name != key}, None
        )
        assert keys_of(absent) == ([] if key == "MODEL.RESNETS.STEM" else [key])
        assert all(": got nothing, " in line for line in absent.deviations)
        result = compare_with_recipe(cfg | {key: other(cfg[key])}, None)
        if key in MODEL_KEYS:
            assert result.label == "not a task of the paper"
            continue
        if recipe_of(result) != recipe:  # which is as near, or what it was changed to
            assert len(keys_of(result)) <= 1
            continue
        assert keys_of(result) == [key], (key, result.deviations)
        # With a cosine schedule, recipes differ in the length alone.
        if key != "SOLVER.MAX_ITER" or "Cosine" not in cfg["SOLVER.LR_SCHEDULER_NAME"]:
            assert result.label == f"deviates from {recipe.of} ({recipe.name})"
        line = result.deviations[0]
        assert line.startswith(f"{key}: got ") and line.endswith(")"), line
        assert "\n" not in line


def test_a_recipe_of_others_cites_them_and_never_the_paper():
    spark = compare_with_recipe(resolved(SPARK), None)
    assert spark.label == "as in SparK (R50-FPN 4conv1fc, 1x)"
    sources = {setting.source for setting in recipe_of(spark).settings.values()}
    assert not [source for source in sources if "the paper" in source or "official MoCo" in source]
    line = compare_with_recipe(resolved(SPARK, SOLVER__BETAS=(0.9, 0.95)), None).deviations[0]
    assert line.endswith("expected [0.9, 0.999] (this project's default; SparK is silent)")
    # The paper's recipe with another optimizer is a deviation from the paper's task.
    adamw = compare_with_recipe(resolved(FPN_1X, SOLVER__OPTIMIZER="AdamW"), None)
    assert (adamw.recipe, keys_of(adamw)) == ("Table 5a", ["SOLVER.OPTIMIZER"])


def test_every_citation_is_used():
    tree = read_yaml(ROOT / "detection" / "config" / "recipes.yaml")
    values = [value for group in tree["groups"].values() for value in group.values()]
    values += [value for recipe in tree["recipes"] for value in recipe.get("values", {}).values()]
    assert {source for _, source in values} == set(tree["sources"])
    assert {name for recipe in tree["recipes"] for name in recipe["groups"]} == set(tree["groups"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MODEL.RPN.CONV_DIMS", [256, 256]),
        ("MODEL.LOAD_PROPOSALS", True),
        ("MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS", (1.0, 1.0, 1.0, 1.0)),
        ("MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION", 28),
        ("INPUT.SEM_SEG_CROP_SIZE", 513),
    ],
)
def test_a_change_of_a_key_that_the_recipe_does_not_list_is_a_deviation(key, value):
    cfg = resolved(ROOT / "configs" / "coco" / "mask_rcnn_R_50_C4_1x.yaml")
    default = cfg[key]
    result = compare_with_recipe(cfg | {key: value}, None)
    source = "Detectron2 default: detectron2/config/defaults.py"
    source = "this project's default" if key.startswith("INPUT.SEM_SEG") else source
    got, expected = (list(v) if isinstance(v, tuple) else v for v in (value, default))
    assert result.deviations == (
        f"{key}: got {got!r}, expected {expected!r} ({source}; the paper is silent)",
    )
    assert result.label == "deviates from the paper (Table 5c)"
    # An equal or absent value is no deviation.
    same = list(default) if isinstance(default, tuple) else default
    assert compare_with_recipe(cfg | {key: same}, contract()).deviations == ()
    assert compare_with_recipe({k: v for k, v in cfg.items() if k != key}, None).deviations == ()


# Keys that a recipe does not list are compared alike: one task per backbone is enough.
@pytest.mark.parametrize("path", {backbone_of(path): path for path in TASKS}.values(), ids=identify)
@pytest.mark.slow
def test_a_change_of_any_other_key_is_the_only_deviation_unless_it_is_free(path):
    cfg = resolved(path)
    listed = recipe_of(compare_with_recipe(cfg, None)).settings
    free = {*names_of(KEYS, *NOT_PROTOCOL), *FREE}
    assert not free & set(listed)
    for key in set(flatten(default_task())) - set(listed) - set(RGB):
        result = compare_with_recipe(cfg | {key: other(cfg[key])}, None)
        if key in MODEL_KEYS:
            assert result.label == "not a task of the paper"
        else:
            assert keys_of(result) == ([] if key in free else [key])


def test_deviations_cite_their_source():
    (freeze,) = compare_with_recipe(
        resolved(VOC_24K, MODEL__BACKBONE__FREEZE_AT=2), None
    ).deviations
    assert freeze.startswith(
        "MODEL.BACKBONE.FREEZE_AT: got 2, the paper has 0 (Sec. 4.2.1 and 4.2.2"
    )


def test_only_synchronized_bn_is_the_papers():
    for name in ("SyncBN", "nnSyncBN", "naiveSyncBN", "naiveSyncBN_N"):
        cfg = resolved(FPN_1X, MODEL__RESNETS__NORM=name, MODEL__FPN__NORM=name)
        assert compare_with_recipe(cfg, None).label == "as in the paper (Table 5a)"
    for name in ("BN", "FrozenBN", "GN"):
        result = compare_with_recipe(resolved(VOC_24K, MODEL__RESNETS__NORM=name), None)
        assert keys_of(result) == ["MODEL.RESNETS.NORM"]
        assert ("on one process that is the same" in result.deviations[0]) == (name == "BN")


def test_the_weights_decide_what_the_input_must_be():
    cfg = resolved(VOC_24K, MODEL__WEIGHTS="moco.pth")
    assert compare_with_recipe(cfg, contract()).deviations == ()
    result = compare_with_recipe(cfg, MSRA)
    assert keys_of(result) == list(RGB)
    assert result.deviations[0] == (
        "INPUT.FORMAT: got 'RGB', the weights need 'BGR' "
        "(contract of the detectron2/MSRA checkpoint)"
    )
    assert (
        compare_with_recipe(cfg | {key: MSRA.d2_keys()[key] for key in RGB}, MSRA).deviations == ()
    )
    # The contract of a trained model is unknown.
    bgr = cfg | {key: MSRA.d2_keys()[key] for key in RGB}
    assert compare_with_recipe(bgr | {"MODEL.WEIGHTS": "model_final.pth"}, None).deviations == ()
    assert keys_of(compare_with_recipe(bgr | {"MODEL.WEIGHTS": "random"}, None)) == list(RGB)


def test_means_are_compared_within_rounding():
    near = [0.485 * 255, 0.456 * 255, 0.406 * 255]
    assert (
        compare_with_recipe(resolved(VOC_24K, MODEL__PIXEL_MEAN=near), contract()).deviations == ()
    )
    far = [123.675, 116.28, 103.55]
    result = compare_with_recipe(resolved(VOC_24K, MODEL__PIXEL_MEAN=far), contract())
    assert keys_of(result) == ["MODEL.PIXEL_MEAN"]


def test_folded_batch_norm_is_wrong_where_it_is_trained():
    folded = contract(source="detectron/MSRA (BN folded)")
    (line,) = compare_with_recipe(resolved(VOC_24K), folded).deviations
    assert line.startswith("MODEL.WEIGHTS: got weights whose batch norm was folded")
    assert compare_with_recipe(resolved(FROZEN_BN), folded).deviations == ()


HALF = {
    "SOLVER__IMS_PER_BATCH": 8,
    "SOLVER__BASE_LR": 0.01,
    "SOLVER__MAX_ITER": 48000,
    "SOLVER__STEPS": (36000, 44000),
}


def test_half_the_batch_follows_the_rule_and_says_what_is_not_equivalent():
    for warm_up, more in ((100, []), (200, ["SOLVER.WARMUP_ITERS"])):
        cfg = resolved(VOC_24K, SOLVER__WARMUP_ITERS=warm_up, **HALF)
        result = compare_with_recipe(cfg, None)
        assert result.recipe == "Table 2b"
        assert set(keys_of(result)) == {*(k.replace("__", ".") for k in HALF), *more}
        assert all("; follows the linear scaling rule" in line for line in result.deviations)
        batch = next(line for line in result.deviations if "IMS_PER_BATCH" in line)
        assert batch.endswith(
            "but is not equivalent: BN statistics and gradients are averaged over fewer images "
            "(8 instead of 16)"
        )


@pytest.mark.parametrize("key", [key for key in HALF if "BATCH" not in key])
def test_half_of_the_rule_is_not_the_rule(key):
    changes = {k: v for k, v in HALF.items() if k != key}
    result = compare_with_recipe(resolved(VOC_24K, **changes), None)
    assert result.recipe == "Table 2b"
    assert not any("linear scaling" in line for line in result.deviations)


def test_a_larger_batch_and_frozen_bn():
    four = {"IMS_PER_BATCH": 64, "BASE_LR": 0.08, "MAX_ITER": 22500, "STEPS": (15000, 20000)}
    cfg = resolved(FROZEN_BN, **{f"SOLVER__{key}": value for key, value in four.items()})
    batch = next(
        line for line in compare_with_recipe(cfg, None).deviations if "IMS_PER_BATCH" in line
    )
    assert batch.endswith("the gradient is averaged over more images (64 instead of 16)")


def test_a_longer_schedule_is_the_other_recipe_unless_the_batch_explains_it():
    longer = {"SOLVER__MAX_ITER": 180000, "SOLVER__STEPS": (120000, 160000)}
    assert (
        compare_with_recipe(resolved(FPN_1X, **longer), None).label == "as in the paper (Table 5b)"
    )
    assert compare_with_recipe(resolved(FPN_1X, **HALF | longer), None).recipe == "Table 5a"


def official(folder: Path, name: str, moco: bool) -> CfgNode:
    file = f"{NAMES[name]}{'_moco' if moco else ''}.yaml"
    return load_cfg(default_task(), write_official(folder) / file, [])


@pytest.mark.parametrize(("name", "recipe"), [("voc", "Table 2b"), ("coco", "Table 5d")])
def test_the_official_files_are_as_in_the_paper(name, recipe, tmp_path):
    label = f"as in the paper ({recipe})"
    moco = compare_with_recipe(official(tmp_path, name, moco=True), contract())
    assert (moco.label, moco.deviations) == (label, ())
    supervised = compare_with_recipe(official(tmp_path, name, moco=False), MSRA)
    assert (supervised.label, supervised.deviations) == (label, ())
    # A mistake of users: MoCo's weights with the supervised file.
    mixed = compare_with_recipe(official(tmp_path, name, moco=False), contract())
    assert keys_of(mixed) == list(RGB)


def test_the_check_is_pure():
    cfg = load_cfg(default_task(), VOC_24K, ["MODEL.WEIGHTS", "random"])
    before = cfg.dump()
    assert compare_with_recipe(cfg, None) == compare_with_recipe(cfg, None)
    assert cfg.dump() == before


def test_cited_defaults_are_those_of_the_keys():
    settings = [item for recipe in load_recipes() for item in recipe.settings.items()]
    cited = [(k, s.value) for k, s in settings if s.source.startswith("Detectron2 default:")]
    assert cited and all(same_value(KEYS[key].default, value) for key, value in cited)


@pytest.mark.parametrize(("package", "number"), [("Detectron2", 7), ("DensePose", 2)])
@pytest.mark.detectron2
def test_what_is_cited_from_a_packages_files_is_there(package, number, detectron2):
    from detectron2.config import get_cfg

    module = pytest.importorskip(package.lower())
    root = Path(module.__file__).parent
    cited = re.compile(rf"(?:^|, ){package}: (configs/[^;)]+)")
    seen = set()
    for recipe in load_recipes():
        for key, setting in recipe.settings.items():
            if not (match := cited.search(setting.source)):
                continue
            files = [folder / match[1] for folder in (root.parent, root / "model_zoo")]
            file = next(filter(Path.is_file, files), None)
            if file is None:
                pytest.skip(f"this installation of {package} has no configs")
            cfg = get_cfg()
            if package == "DensePose":
                module.add_densepose_config(cfg)
            cfg.merge_from_file(str(file))
            assert same_value(flatten(cfg)[key], setting.value), (recipe.name, key, file)
            seen.add(file)
    assert len(seen) == number


def test_a_part_of_a_published_split_is_a_deviation():
    flat = resolved(FPN_1X)
    whole = {"coco_2017_train": 118287, "coco_2017_val": 5000}
    assert compare_with_recipe(flat, None, whole).deviations == ()
    part = compare_with_recipe(flat, None, whole | {"coco_2017_train": 100})
    assert part.label == "deviates from the paper (Table 5a)"
    (line,) = part.deviations
    assert line == "coco_2017_train: got 100 images, the published split has 118287"
    assert compare_with_recipe(flat, None, {"of_ones_own": 3}).deviations == ()
