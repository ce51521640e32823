"""Keys of pre-training: the recipes, what is refused, and scaling to another batch."""

import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from moco.common.cfgnode import flatten
from moco.common.errors import UserError
from moco.engine.device import pick_device
from moco.pretrain import parse_args
from moco.pretraining.config import (
    check_processes,
    default_cfg,
    load_pretrain_cfg,
    scale_to_batch,
)
from moco.pretraining.run import _build, augmentations_from
from tests.oracles.augmentations import V1, V2, V3

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "pretrain"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
BANK = {"MOCO.MECHANISM": "memory_bank", "MOCO.SHUFFLE_BN": False}
KEY = re.compile(r"[A-Z]+\.[A-Z_]+|OUTPUT_DIR")


def cfg(line, file=None):
    return load_pretrain_cfg(file, line.split())


def test_recipes_have_names():
    for name in ("small_r18", "pretrain/small_r18.yaml"):
        assert parse_args(["--config-file", name]).config_file == str(CONFIGS / "small_r18.yaml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_builds_and_says_what_to_expect(path):
    loaded = cfg("", path)
    with torch.device("meta"):
        model, _ = _build(loaded, 10, world_size=1)
    if loaded.MODEL.ARCH.startswith("resnet"):
        assert model.encoder_q.conv1.weight.shape[0] == 64 * loaded.MODEL.WIDTH
    head = path.read_text().split("\n\n")[0]
    labels = re.findall(r"^# (Source|Command|Expected|Cost): +\S", head, flags=re.MULTILINE)
    assert labels == ["Source", "Command", "Expected", "Cost"]
    assert ("\n# Faster: " in head) == (loaded.SOLVER.PRECISION == "fp32")
    command = " ".join(head.split("Command:")[1].split("Expected:")[0].split()).replace("\\ #", "")
    assert "-m benchmarks pretrain " in command and "DATA.ROOT " in command
    assert f"--config-file configs/pretrain/{path.name}" in " ".join(command.split())
    opts = [
        w for key, value in pairwise(command.split()) if KEY.fullmatch(key) for w in (key, value)
    ]
    load_pretrain_cfg(path, [opt.strip('"') for opt in opts])  # the command's keys, too


def test_the_papers_recipe_is_the_default_but_for_its_precision():
    paper = cfg("", CONFIGS / "moco_v1_r50_in1m_200ep.yaml")
    theirs = default_cfg()
    theirs.OUTPUT_DIR = paper.OUTPUT_DIR
    theirs.SOLVER.REFERENCE_BATCH_SIZE = 256
    theirs.SOLVER.PRECISION = "fp32"
    assert paper == theirs


@pytest.mark.parametrize(
    "name, changes",
    [
        ("moco_v1_rx50_in1m_200ep", {"MODEL.ARCH": "resnext50_32x8d"}),
        ("moco_v1_r50w2x_in1m_200ep", {"MODEL.WIDTH": 2.0}),
        ("moco_v1_r50w4x_in1m_200ep", {"MODEL.WIDTH": 4.0}),
        ("ablation_momentum_r50_in1m", {"MOCO.K": 4096}),
        ("ablation_memory_bank_r50_in1m", BANK),
        ("ablation_memory_bank_nce_r50_in1m", {**BANK, "MOCO.LOSS": "nce", "MOCO.K": 4096}),
        (
            "ablation_end_to_end_r50_in1m",
            {"MOCO.MECHANISM": "end_to_end", "MOCO.K": 1024, "SOLVER.BATCH_SIZE": 1024},
        ),
    ],
)
def test_recipes_of_the_paper_differ_in_what_they_are_about(name, changes):
    base = flatten(cfg("", CONFIGS / "moco_v1_r50_in1m_200ep.yaml"))
    mine = flatten(cfg("", CONFIGS / f"{name}.yaml"))
    different = {key: mine[key] for key in mine if mine[key] != base[key]}
    assert different.pop("OUTPUT_DIR") == f"output/{name}"
    assert different == changes


@pytest.mark.parametrize(
    "name, iters, schedule",
    [
        ("ablation_end_to_end_r50_in1m", 0, ("step", 0.1, 62500 / 4)),
        ("moco_v1_r50_ig1b", 1_250_000, ("exponential", 0.9, 62_500)),
    ],
)
def test_learning_rates_of_the_papers_large_batches(name, iters, schedule):
    """Sec. 4.1: linear scaling for end-to-end; sec. 4: 0.12 for IG-1B, as it is."""
    solver, _ = scale_to_batch(cfg("", CONFIGS / f"{name}.yaml"))
    assert solver.BATCH_SIZE == 1024 and solver.BASE_LR == pytest.approx(0.12)
    assert solver.MAX_ITERS == iters
    assert (solver.SCHEDULE, solver.GAMMA, solver.DECAY_EVERY_ITERS) == schedule


@pytest.mark.parametrize(
    ("name", "rate", "decay", "warmup_epochs", "m", "T"),
    [
        ("r50_in1m_100ep", 0.6, 1e-6, 10, 0.99, 1.0),
        ("r50_in1m_300ep", 0.3, 1e-6, 10, 0.99, 1.0),
        ("r50_in1m_1000ep", 0.3, 1.5e-6, 10, 0.996, 1.0),
        ("vit_s_in1m_300ep", 1.5e-4, 0.1, 40, 0.99, 0.2),
        ("vit_b_in1m_300ep", 1.5e-4, 0.1, 40, 0.99, 0.2),
    ],
)
def test_recipes_of_moco_v3_are_those_of_its_commands(name, rate, decay, warmup_epochs, m, T):
    """The official CONFIG.md: the rate is for 256 images."""
    loaded = cfg("", CONFIGS / f"moco_v3_{name}.yaml")
    solver, notes = scale_to_batch(loaded)
    assert solver.BASE_LR == pytest.approx(rate * 4096 / 256) and notes == []
    assert (solver.WARMUP_ITERS, solver.WARMUP_EPOCHS) == (0, warmup_epochs)
    assert (solver.WEIGHT_DECAY, loaded.MOCO.M, loaded.MOCO.T) == (decay, m, T)
    assert name.endswith(f"_{solver.MAX_EPOCHS}ep") and loaded.MOCO.SYMMETRIC
    vit = name.startswith("vit")
    assert solver.OPTIMIZER == ("adamw" if vit else "lars")
    assert (loaded.MODEL.FREEZE_PATCH_EMBED, loaded.MODEL.ZERO_INIT_RESIDUAL) == (vit, not vit)
    assert loaded.AUG.CROP_SCALE == (0.08 if vit else 0.2, 1.0)


def test_augmentations_are_the_published_ones():
    assert augmentations_from(cfg("")) == (V1, V1)
    assert augmentations_from(cfg("", CONFIGS / "moco_v2_r50_in1m_200ep.yaml")) == (V2, V2)
    assert augmentations_from(cfg("AUG.KIND v2")) == (V2, V2)
    assert augmentations_from(cfg("", CONFIGS / "moco_v3_r50_in1m_100ep.yaml")) == V3
    vit = tuple(replace(view, crop_scale=(0.08, 1.0)) for view in V3)
    assert augmentations_from(cfg("", CONFIGS / "moco_v3_vit_b_in1m_300ep.yaml")) == vit
    aug = cfg("AUG.KIND v2 AUG.HUE 0.3").AUG  # keys that are set win over the kind's
    assert (aug.HUE, aug.BLUR_PROB, aug.JITTER_PROB) == (0.3, 0.5, 0.8)


def test_linear_rule():
    """Half the batch has half the rate and twice the steps, and notes name what still differs."""
    solver, (rate, rest) = scale_to_batch(
        cfg(
            "SOLVER.BATCH_SIZE 128 SOLVER.REFERENCE_BATCH_SIZE 256 SOLVER.BASE_LR 0.03 "
            "SOLVER.MAX_ITERS 1000 SOLVER.WARMUP_ITERS 10 SOLVER.DECAY_EVERY_ITERS 50"
        )
    )
    assert solver.BASE_LR == pytest.approx(0.015)
    assert (solver.MAX_ITERS, solver.WARMUP_ITERS, solver.DECAY_EVERY_ITERS) == (2000, 20, 100)
    assert "0.015 instead of 0.03" in rate
    for difference in ("16 images a group", "512 steps instead of 256", "m 0.999"):
        assert difference in rest
    for reference in (0, 64):
        keys = f"SOLVER.BATCH_SIZE 64 SOLVER.REFERENCE_BATCH_SIZE {reference} SOLVER.MAX_ITERS 7"
        solver, notes = scale_to_batch(cfg(keys))
        assert (solver.BASE_LR, solver.MAX_ITERS, notes) == (0.03, 7, [])


@pytest.mark.parametrize(
    ("opts", "world_size", "key"),
    [
        ("", 3, "SOLVER.BATCH_SIZE: got 256"),
        ("MOCO.BN_SPLITS 2", 4, "MOCO.BN_SPLITS: got 2"),
        ("SOLVER.ACCUMULATE 4", 4, "MOCO.BN_SPLITS: got 8"),
        ("", 1, None),
        ("", 8, None),
        ("SOLVER.ACCUMULATE 4", 2, None),
        ("SOLVER.ACCUMULATE 8", 1, None),
        ("MOCO.BN_SPLITS 1", 4, None),
    ],
)
def test_the_batch_is_divided_among_processes_or_refused(opts, world_size, key):
    with pytest.raises(UserError, match=key) if key else nullcontext():
        check_processes(cfg(opts), world_size)


def test_devices(monkeypatch):
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="use cuda,"):
        pick_device("cuda:0")
