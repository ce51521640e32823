"""YAML and overrides: what is accepted, what is refused, and what the refusal says."""

import pytest
from fvcore.common.config import CfgNode

from moco.common.cfgnode import (
    cfg_sha256,
    explicit_keys,
    flatten,
    load_cfg,
    read_yaml,
    same_value,
    split_assignments,
)


@pytest.fixture
def defaults():
    return CfgNode(
        {"SOLVER": {"BASE_LR": 0.03, "STEPS": (120, 160), "EPOCHS": 200}, "DATA": {"ROOT": ""}}
    )


def test_file_then_overrides(tmp_path, defaults):
    (tmp_path / "a.yaml").write_text("SOLVER:\n  BASE_LR: 0.1\n  EPOCHS: 10\n")
    cfg = load_cfg(defaults, tmp_path / "a.yaml", ["SOLVER.EPOCHS", "20", "DATA.ROOT", "/x y"])
    assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.EPOCHS, cfg.DATA.ROOT) == (0.1, 20, "/x y")
    assert defaults.SOLVER.EPOCHS == 200
    with pytest.raises(AttributeError):
        cfg.SOLVER.EPOCHS = 1


def test_base_files_are_merged_below(tmp_path, defaults):
    (tmp_path / "base.yaml").write_text("SOLVER: {BASE_LR: 0.1, STEPS: [1, 2]}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yaml").write_text("_BASE_: ../base.yaml\nSOLVER: {BASE_LR: 0.2}\n")
    cfg = load_cfg(defaults, tmp_path / "sub" / "a.yaml", [])
    assert cfg.SOLVER.BASE_LR == 0.2 and tuple(cfg.SOLVER.STEPS) == (1, 2)


@pytest.mark.parametrize("value", ["1", "1e-4", "1e4", "3e-05"])
def test_whole_and_exponent_numbers_are_floats(tmp_path, defaults, value):
    """YAML 1.1 reads 1e-4 as text and 1 as an integer."""
    (tmp_path / "a.yaml").write_text(f"SOLVER: {{BASE_LR: {value}}}\n")
    for cfg in (
        load_cfg(defaults, tmp_path / "a.yaml", []),
        load_cfg(defaults, None, ["SOLVER.BASE_LR", value]),
    ):
        assert cfg.SOLVER.BASE_LR == float(value) and isinstance(cfg.SOLVER.BASE_LR, float)


def test_assignments_are_pairs():
    args = ["DATA.ROOT=a=b", "SEED", "A=1", "SOLVER.STEPS=(1,2)", "data.root=", "x y=3"]
    assert split_assignments(args) == [
        "DATA.ROOT",
        "a=b",
        "SEED",
        "A=1",
        "SOLVER.STEPS",
        "(1,2)",
        "data.root",
        "",
        "x y=3",
    ]


def test_explicit_keys_come_from_file_bases_and_overrides(tmp_path):
    (tmp_path / "base.yaml").write_text("SOLVER: {BASE_LR: 0.1}\n")
    (tmp_path / "a.yaml").write_text("_BASE_: base.yaml\nSOLVER: {EPOCHS: 3}\n")
    keys = explicit_keys(tmp_path / "a.yaml", ["DATA.ROOT", "x"])
    assert keys == {"SOLVER.BASE_LR", "SOLVER.EPOCHS", "DATA.ROOT"}


def test_the_hash_is_of_what_is_kept(defaults):
    changed = load_cfg(defaults, None, ["DATA.ROOT", "elsewhere"])
    assert cfg_sha256(defaults) != cfg_sha256(changed)
    assert cfg_sha256(defaults, ["DATA.ROOT"]) == cfg_sha256(changed, ["DATA.ROOT"])
    assert cfg_sha256(defaults, ["DATA"]) == cfg_sha256(changed, ["DATA"])


def test_flatten_and_read_yaml_agree(tmp_path):
    (tmp_path / "a.yaml").write_text("A: {B: {C: 1}, D: []}\n")
    assert flatten(read_yaml(tmp_path / "a.yaml")) == {"A.B.C": 1, "A.D": []}


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "same"),
    [
        ([1, (2, 3)], (1, [2, 3]), 0.0, True),
        ((1,), (1, 2), 0.0, False),
        (1, 1.0, 0.0, True),
        (True, 1, 0.0, False),
        (None, 0, 0.0, False),
        ([103.53], [0.406 * 255], 1e-3, True),
        ([103.53], [103.55], 1e-3, False),
        ("BN", "GN", 0.0, False),
    ],
)
def test_same_value(a, b, tolerance, same):
    assert same_value(a, b, tolerance=tolerance) is same
