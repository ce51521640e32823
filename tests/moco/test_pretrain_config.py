from pathlib import Path

import pytest
import torch

from moco.augment import V1, V2
from moco.config import default_cfg, load_pretrain_cfg, pick_device
from moco.encoder import EncoderSpec, build_encoder
from moco.errors import UserError
from moco.pretrain_run import augmentation_from

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs" / "pretrain").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_builds(path):
    cfg = load_pretrain_cfg(path, [])
    with torch.device("meta"):
        spec = EncoderSpec(cfg.MODEL.ARCH, cfg.MODEL.STEM, cfg.MODEL.WIDTH)
        encoder = build_encoder(spec, cfg.MOCO.DIM, cfg.MOCO.MLP, cfg.MOCO.BN_SPLITS)
    assert encoder.state_dict()["conv1.weight"].shape[0] == 64 * cfg.MODEL.WIDTH
    assert augmentation_from(cfg).crop_px == cfg.AUG.CROP_PX
    head = path.read_text().split("\n\n")[0]
    assert "python -m moco.pretrain --config-file" in head


def test_the_papers_recipe_is_the_default():
    cfg = load_pretrain_cfg(ROOT / "configs/pretrain/moco_v1_r50_in1m_200ep.yaml", [])
    theirs = default_cfg()
    theirs.OUTPUT_DIR = cfg.OUTPUT_DIR
    assert cfg == theirs


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
        ("SOLVER.SCHEDULE linear", "SOLVER.SCHEDULE: got 'linear', choices are step, cosine"),
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
