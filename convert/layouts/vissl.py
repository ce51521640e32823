"""VISSL, and PyContrast."""

from typing import Any

from convert.layouts.base import Layout

_VISSL_BACKBONE = "classy_state_dict/base_model/model/trunk/_feature_blocks."
_VISSL: dict[str, Any] = {
    # Also the loss's own (MoCo's queue, DINO's center) and its network's head.
    "dropped": {
        "queue": "queue*",
        "center of the loss": "center*",
        "head": "heads moco_encoder.heads.*",
        "teacher's head": "momentum_teacher.module.heads.*",
        "loss": "loss",
        "training record": "meters ema_meters",
    },
    "epoch": "train_phase_idx",
    "epoch_offset": 1,
}

LAYOUTS: tuple[Layout, ...] = (
    # facebookresearch/vissl@09270ed2 vissl/hooks/log_hooks.py:522 (the dict), models/
    # base_ssl_model.py:414 and backbones/resnext.py:144 (the names),
    # configs/config/pretrain/simclr/simclr_8node_resnet.yaml:34 (the pixels, as in all of
    # pretrain/; INPUT_TYPE "bgr" is not in the file). The loss holds MoCo's key encoder
    # (hooks/moco_hooks.py:58) and DINO's teacher (hooks/hook_utils.py:33-60), which VISSL's DINO
    # configs evaluate.
    Layout(
        "facebookresearch/vissl",
        {
            "teacher": "loss/momentum_teacher.module.trunk._feature_blocks.",
            "student": _VISSL_BACKBONE,
        },
        has=("momentum_teacher.",),
        **_VISSL,
    ),
    Layout(
        "facebookresearch/vissl",
        {"query": _VISSL_BACKBONE, "key": "loss/moco_encoder.trunk._feature_blocks."},
        has=("moco_encoder.",),
        **_VISSL,
    ),
    # log_hooks.py:504, SAVE_EMA_MODEL.
    Layout(
        "facebookresearch/vissl",
        {
            "base": _VISSL_BACKBONE,
            "ema": "classy_state_dict/ema_model/model/trunk/_feature_blocks.",
        },
        marks={"classy_state_dict/ema_model": ...},
        **_VISSL,
    ),
    Layout("facebookresearch/vissl", {"single": _VISSL_BACKBONE}, **_VISSL),
    # Others' networks in VISSL's names (converted_vissl_*.torch): extra_scripts/
    # convert_vissl_to_torchvision.py:46.
    Layout("facebookresearch/vissl (converted)", {"single": "model_state_dict/_feature_blocks."}),
    # HobbitLong/PyContrast@84f94ea pycontrast/learning/contrast_trainer.py:113 (the dict),
    # networks/build_backbone.py:16 and 59 (the names), datasets/util.py:235 (the pixels); its own
    # detection/convert_pretrained.py takes "model" unless told --ema.
    Layout(
        "HobbitLong/PyContrast",
        {"model": "model/encoder.", "ema": "model_ema/encoder."},
        {"head": "head*", "memory bank": "contrast"},
        has=("head.",),
    ),
    # CMC, build_backbone.py:89: one network sees L, the other ab, so neither takes RGB.
    Layout(
        "HobbitLong/PyContrast (CMC)",
        {"L": "model/encoder1.", "ab": "model/encoder2."},
        {"head": "head*", "memory bank": "contrast", "EMA network": "model_ema"},
        has=("head1.",),
    ),
)
