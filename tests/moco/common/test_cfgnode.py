"""Configuration files and overrides; what they refuse is in tests/refusals."""

import pytest
from fvcore.common.config import CfgNode

from moco.common.cfgnode import cfg_sha256, explicit_keys, load_cfg, same_value, split_assignments


@pytest.fixture
def defaults():
    return CfgNode(
        {"SOLVER": {"BASE_LR": 0.03, "STEPS": (120, 160), "EPOCHS": 200}, "DATA": {"ROOT": ""}}
    )


def test_bases_then_the_file_then_overrides(tmp_path, defaults):
    (tmp_path / "base.yaml").write_text("SOLVER: {BASE_LR: 0.1, STEPS: [1, 2]}\n")
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "a.yaml"
    file.write_text("_BASE_: ../base.yaml\nSOLVER: {BASE_LR: 0.2, EPOCHS: 10}\n")
    overrides = ["SOLVER.EPOCHS", "20", "DATA.ROOT", "/x y"]
    cfg = load_cfg(defaults, file, overrides)
    assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.EPOCHS, cfg.DATA.ROOT) == (0.2, 20, "/x y")
    assert tuple(cfg.SOLVER.STEPS) == (1, 2)
    names = {"SOLVER.BASE_LR", "SOLVER.STEPS", "SOLVER.EPOCHS", "DATA.ROOT"}
    assert explicit_keys(file, overrides) == names
    assert defaults.SOLVER.EPOCHS == 200
    with pytest.raises(AttributeError):
        cfg.SOLVER.EPOCHS = 1


@pytest.mark.parametrize("value", ["1", "1e-4", "1e4", "3e-05"])
def test_integers_and_exponents_are_floats(tmp_path, defaults, value):
    """YAML 1.1 reads 1e-4 as text and 1 as an integer."""
    (tmp_path / "a.yaml").write_text(f"SOLVER: {{BASE_LR: {value}}}\n")
    for cfg in (
        load_cfg(defaults, tmp_path / "a.yaml", []),
        load_cfg(defaults, None, ["SOLVER.BASE_LR", value]),
    ):
        assert cfg.SOLVER.BASE_LR == float(value) and isinstance(cfg.SOLVER.BASE_LR, float)


def test_assignments_are_pairs():
    args = ["DATA.ROOT=a=b", "SEED", "A=1", "SOLVER.STEPS=(1,2)", "data.root=", "x y=3"]
    pairs = "DATA.ROOT|a=b|SEED|A=1|SOLVER.STEPS|(1,2)|data.root||x y=3"
    assert "|".join(split_assignments(args)) == pairs


def test_excluded_keys_are_not_hashed(defaults):
    changed = load_cfg(defaults, None, ["DATA.ROOT", "elsewhere"])
    assert cfg_sha256(defaults) != cfg_sha256(changed)
    assert cfg_sha256(defaults, ["DATA.ROOT"]) == cfg_sha256(changed, ["DATA.ROOT"])
    assert cfg_sha256(defaults, ["DATA"]) == cfg_sha256(changed, ["DATA"])


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
