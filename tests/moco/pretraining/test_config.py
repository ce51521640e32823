import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from moco.common.cfgnode import flatten
from moco.common.errors import UserError
from moco.data.augment import V1, V2
from moco.engine.device import pick_device
from moco.modeling.encoder import EncoderSpec, build_encoder
from moco.pretraining.config import default_cfg, load_pretrain_cfg, scale_to_batch
from moco.pretraining.run import augmentation_from

ROOT = Path(__file__).resolve().parents[3]
KEY = re.compile(r"[A-Z]+\.[A-Z_]+|OUTPUT_DIR")
RECIPES = sorted((ROOT / "configs" / "pretrain").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_builds(path):
    cfg = load_pretrain_cfg(path, [])
    with torch.device("meta"):
        spec = EncoderSpec(cfg.MODEL.ARCH, cfg.MODEL.STEM, cfg.MODEL.WIDTH)
        encoder = build_encoder(spec, cfg.MOCO.DIM, cfg.MOCO.MLP, cfg.MOCO.BN_SPLITS)
    assert encoder.state_dict()["conv1.weight"].shape[0] == 64 * cfg.MODEL.WIDTH
    assert augmentation_from(cfg).crop_px == cfg.AUG.CROP_PX


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_head_of_a_recipe_says_what_to_expect(path):
    head = path.read_text().split("\n\n")[0]
    labels = re.findall(r"^# (Source|Command|Expected|Cost): +\S", head, flags=re.MULTILINE)
    assert labels == ["Source", "Command", "Expected", "Cost"]
    command = " ".join(head.split("Command:")[1].split("Expected:")[0].split())
    assert "-m moco.pretrain" in command
    assert f"--config-file configs/pretrain/{path.name}" in command.replace("\\ # ", "")
    assert "DATA.ROOT " in command
    words = command.replace("\\ #", "").split()
    opts = [word for key, value in pairwise(words) if KEY.fullmatch(key) for word in (key, value)]
    load_pretrain_cfg(path, [opt.strip('"') for opt in opts])  # the command's keys, too


def test_the_papers_recipe_is_the_default():
    cfg = load_pretrain_cfg(ROOT / "configs/pretrain/moco_v1_r50_in1m_200ep.yaml", [])
    theirs = default_cfg()
    theirs.OUTPUT_DIR = cfg.OUTPUT_DIR
    theirs.SOLVER.REFERENCE_BATCH_SIZE = 256
    assert cfg == theirs


@pytest.mark.parametrize(
    "name, changes",
    [
        ("moco_v1_rx50_in1m_200ep", {"MODEL.ARCH": "resnext50_32x8d"}),
        ("moco_v1_r50w2x_in1m_200ep", {"MODEL.WIDTH": 2.0}),
        ("moco_v1_r50w4x_in1m_200ep", {"MODEL.WIDTH": 4.0}),
        ("ablation_momentum_r50_in1m", {"MOCO.K": 4096}),
        (
            "ablation_memory_bank_r50_in1m",
            {"MOCO.MECHANISM": "memory_bank", "MOCO.SHUFFLE_BN": False},
        ),
        (
            "ablation_memory_bank_nce_r50_in1m",
            {
                "MOCO.MECHANISM": "memory_bank",
                "MOCO.LOSS": "nce",
                "MOCO.K": 4096,
                "MOCO.SHUFFLE_BN": False,
            },
        ),
        (
            "ablation_end_to_end_r50_in1m",
            {"MOCO.MECHANISM": "end_to_end", "MOCO.K": 1024, "SOLVER.BATCH_SIZE": 1024},
        ),
    ],
)
def test_recipes_of_the_paper_differ_in_what_they_are_about(name, changes):
    base = flatten(load_pretrain_cfg(ROOT / "configs/pretrain/moco_v1_r50_in1m_200ep.yaml", []))
    mine = flatten(load_pretrain_cfg(ROOT / f"configs/pretrain/{name}.yaml", []))
    different = {key: mine[key] for key in mine if mine[key] != base[key]}
    assert different.pop("OUTPUT_DIR") == f"output/{name}"
    assert different == changes


def test_learning_rates_of_the_papers_large_batches():
    """Sec. 4.1: linear scaling for end-to-end; sec. 4: 0.12 for IG-1B, as it is."""
    for name, max_iters in (("ablation_end_to_end_r50_in1m", 0), ("moco_v1_r50_ig1b", 1_250_000)):
        cfg = load_pretrain_cfg(ROOT / f"configs/pretrain/{name}.yaml", [])
        solver, _ = scale_to_batch(cfg)
        assert cfg.SOLVER.BATCH_SIZE == 1024
        assert solver.BASE_LR == pytest.approx(0.12)
        assert solver.MAX_ITERS == max_iters
    assert (solver.SCHEDULE, solver.GAMMA, solver.DECAY_EVERY_ITERS) == (
        "exponential",
        0.9,
        62_500,
    )


def test_augmentations_are_the_published_ones():
    assert augmentation_from(load_pretrain_cfg(None, [])) == V1
    v2 = load_pretrain_cfg(ROOT / "configs/pretrain/moco_v2_r50_in1m_200ep.yaml", [])
    assert augmentation_from(v2) == V2
    assert augmentation_from(load_pretrain_cfg(None, ["AUG.KIND", "v2"])) == V2


def test_keys_that_are_set_win_over_the_kinds():
    aug = load_pretrain_cfg(None, ["AUG.KIND", "v2", "AUG.HUE", "0.3"]).AUG
    assert (aug.HUE, aug.BLUR_PROB, aug.JITTER_PROB) == (0.3, 0.5, 0.8)


@pytest.mark.parametrize(
    "opts, message",
    [
        ("MOCO.K 100", r"MOCO.K: got 100, expected at least SOLVER.BATCH_SIZE \(256\)"),
        ("MOCO.BN_SPLITS 7", "MOCO.BN_SPLITS: 7 does not divide .*smaller divisor is 4"),
        ("MOCO.BN_SPLITS 256", "at most 128"),
        ("MOCO.M 1.0", "MOCO.M: got 1.0, expected 0 <= m < 1"),
        ("MOCO.T 0", "MOCO.T: got 0.0, expected a temperature > 0"),
        ("SOLVER.MAX_EPOCHS 160", "MILESTONES_EPOCHS: 160 is never reached"),
        ("SOLVER.MILESTONES_EPOCHS (9,3)", "rising whole numbers"),
        ("SOLVER.SCHEDULE linear", "SOLVER.SCHEDULE: got 'linear', .* cosine"),
        ("MODEL.ARCH resnet51", "MODEL.ARCH: got 'resnet51', choices are resnet10"),
        ("AUG.KIND v3", "AUG.KIND: got 'v3', choices are v1, v2"),
        ("AUG.CROP_SCALE (0.5,0.2)", "AUG.CROP_SCALE: got .* 0 < low <= high <= 1"),
        ("AUG.CROP_SCALE (0.5,)", "AUG.CROP_SCALE: got .* expected 2 numbers"),
        ("AUG.HUE 0.6", "AUG.HUE: got 0.6, expected 0 to 0.5"),
        ("AUG.STD (1,1,0)", "AUG.STD: .* > 0"),
        ("CHECKPOINT.KEEP 1", "CHECKPOINT.KEEP: got 1, expected >= 2"),
        ("SOLVER.BATCHSIZE 8", "unknown key SOLVER.BATCHSIZE; the nearest is SOLVER.BATCH_SIZE"),
    ],
)
def test_contradictions_are_named(opts, message):
    with pytest.raises(UserError, match=message):
        load_pretrain_cfg(None, opts.split())


def test_milestones_do_not_matter_to_a_cosine():
    load_pretrain_cfg(None, ["SOLVER.SCHEDULE", "cosine", "SOLVER.MAX_EPOCHS", "10"])


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="choices are auto, cpu"):
        pick_device("tpu")
    with pytest.raises(UserError, match="cuda:99 is not here"):
        pick_device("cuda:99")
