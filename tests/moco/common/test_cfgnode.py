"""YAML and overrides: what is accepted, what is refused, and what the refusal says."""

import pytest
from fvcore.common.config import CfgNode

from moco.common.cfgnode import (
    cfg_sha256,
    explicit_keys,
    flatten,
    load_cfg,
    read_yaml,
    split_assignments,
)
from moco.common.errors import UserError


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SOLVER: {BASE_LRR: 0.1}", "unknown key SOLVER.BASE_LRR; the nearest is SOLVER.BASE_LR"),
        ("EPOCHS: 3", "unknown key EPOCHS; the nearest is SOLVER.EPOCHS"),
        ("SOLVER: {EPOCHS: many}", "SOLVER.EPOCHS expects int such as 200, got 'many'"),
        ("SOLVER: {BASE_LR: high}", "SOLVER.BASE_LR expects float"),
        ("SOLVER: 3", "SOLVER is a group of keys"),
        ("- a\n- b", "expected KEY: VALUE lines, got list"),
        ("a: [", "not valid YAML"),
        ("_BASE_: a.yaml", "does it name itself"),
        ("_BASE_: https://example.org/a.yaml", "is remote"),
        ("_BASE_: missing.yaml", "cannot be read"),
        ("_BASE_: 5", "got 5, expected a file's name"),
        ("_BASE_: ~", "got None, expected a file's name"),
        ("_BASE_: [1]", "got 1, expected a file's name"),
        ('_BASE_: "a\\0.yaml"', "embedded null byte"),
        (f"_BASE_: {'a' * 300}.yaml", "cannot be read"),
        ("SEED: 2020-99-99", "not valid YAML (month must be in 1..12)"),
        (f"SEED: {'9' * 5000}", "not valid YAML (Exceeds the limit"),
    ],
)
def test_what_is_refused(tmp_path, defaults, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_cfg(defaults, tmp_path / "a.yaml", [])
    assert message in str(caught.value) and ".yaml: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tagged",
    [
        "object/apply:os.system ['touch marker']",
        *("object/apply:eval ['1']", "tuple [3, 4]", "name:os.system", "object/new:eval ['1']"),
    ],
)
def test_a_python_tag_is_refused_with_its_line(tmp_path, monkeypatch, defaults, tagged):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(f"DATA:\n  ROOT: x\nSOLVER:\n  STEPS: !!python/{tagged}\n")
    with pytest.raises(UserError, match=rf"line 4: .*python/{tagged.split()[0]}"):
        load_cfg(defaults, tmp_path / "a.yaml", [])
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("SOLVER.LEARNING_RATE", "SOLVER.BASE_LR"),
        ("SOLVER.LR", "SOLVER.BASE_LR"),
        ("solver.base_lr", "SOLVER.BASE_LR"),
        ("data.rot", "DATA.ROOT"),
        ("moco.k", "MOCO.K"),
        ("SOLVER.IMS_PER_BATCH", "SOLVER.BATCH_SIZE"),
    ],
)
def test_the_key_that_was_meant(defaults, key, meant):
    defaults.MOCO = CfgNode({"K": 16, "M": 0.999, "T": 0.07})
    defaults.SOLVER.BATCH_SIZE = 256
    with pytest.raises(UserError) as caught:
        load_cfg(defaults, None, [key, "1"])
    assert f"unknown key {key}" in str(caught.value) and str(caught.value).endswith(f" {meant}")


def test_assignments_are_pairs():
    args = ["DATA.ROOT=a=b", "SEED", "A=1", "SOLVER.STEPS=(1,2)", "data.root=", "x y=3"]
    assert split_assignments(args) == [
        *("DATA.ROOT", "a=b", "SEED", "A=1", "SOLVER.STEPS", "(1,2)", "data.root", "", "x y=3"),
    ]


def test_python_configs_are_refused(tmp_path, defaults):
    (tmp_path / "a.py").write_text("SOLVER = 1")
    with pytest.raises(UserError, match=r"expected a \.yaml file"):
        load_cfg(defaults, tmp_path / "a.py", [])


def test_an_override_without_a_value_is_refused(defaults):
    with pytest.raises(UserError, match=r"'DATA\.ROOT' has no value"):
        load_cfg(defaults, None, ["DATA.ROOT"])


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


def test_aliases_that_multiply_are_refused(tmp_path, defaults):
    lines = ["a0: &a0 [1, 1]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    (tmp_path / "x.yaml").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"not valid YAML .*more than 100000 parts"):
        load_cfg(defaults, tmp_path / "x.yaml", [])


def test_merge_keys_that_multiply_are_refused(tmp_path, defaults):
    lines = ["a0: &a0 {b: 1, c: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 30)]
    (tmp_path / "x.yaml").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"not valid YAML .*merge keys .* more than 100000 values"):
        load_cfg(defaults, tmp_path / "x.yaml", [])


def test_deep_nesting_is_refused(tmp_path, defaults):
    for depth in (200, 100_000):
        (tmp_path / "x.yaml").write_text("A: " + "[" * depth + "]" * depth)
        with pytest.raises(UserError, match="not valid YAML"):
            load_cfg(defaults, tmp_path / "x.yaml", [])
