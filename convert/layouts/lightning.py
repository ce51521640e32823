"""Modules of Lightning: solo-learn and lightly."""

from typing import Any

from convert.families.base import USUAL
from convert.families.vit import TORCHVISION
from convert.layouts.base import Layout, beside

# What Lightning's trainer writes: pytorch_lightning 2.6.6 trainer/connectors/
# checkpoint_connector.py, dump_checkpoint, and callbacks/weight_averaging.py, on_save_checkpoint
# (the averaged weights are in "state_dict"). Its "epoch" is the current one, finished or not.
_LIGHTNING: dict[str, Any] = {
    "marks": {"pytorch-lightning_version": ...},
    "epoch": "loops/fit_loop/epoch_progress/current/processed",
}
_LIGHTNING_DROPPED = {
    "weights before averaging": "current_model_state",
    "training record": "averaging_state",
}

_SOLO_DROPPED = _LIGHTNING_DROPPED | beside(
    "classifier momentum_classifier projector momentum_projector head momentum_head prototypes "
    "decoder",
    predictor="predictor*",
    loss="dino_loss_func.*",
    queue="queue*",
    memory_bank="local_memory_*",
    transformer="transformer_encoder.*",
    position_code="pos_enc.*",
)
_LIGHTLY_DROPPED = _LIGHTNING_DROPPED | beside(
    "local_projection_head key_projection_head teacher_projection_head student_projection_head "
    "anchor_projection_head teacher_head student_head prediction_head decoder",
    projection_head="projection_head*",
    heads_of_classes_and_patches="teacher_*_head.* student_*_head.*",
    prototypes="prototypes*",
    mask_token="*mask_token",
    classifier="online_classifier.*",
    loss="criterion* *_criterion.*",
    groups="smog.*",
)


def _lightly(has: str = "projection_head", **networks: str) -> tuple[Layout, ...]:
    """A LightningModule under the schemes of its backbone: choice of --encoder -> prefix."""
    # "4.0.conv1.weight" is layer1 of torchvision's ResNet and layer3 of lightly's own, so lightly's
    # comes first. MaskedVisionTransformer{TIMM,Torchvision} (lightly/models/modules) call theirs
    # `vit`; masked_autoencoder.py's MAEBackbone is torchvision's own class.
    return tuple(
        Layout(
            "lightly",
            {choice: f"state_dict/{prefix}{inner}" for choice, prefix in networks.items()},
            _LIGHTLY_DROPPED,
            has=tuple(has.split()),
            scheme=scheme,
            # Of benchmarks/imagenet/vitb16 and of examples/pytorch_lightning/msn.py.
            says={"num_heads": {384: 6, 768: 12}},
            **_LIGHTNING,
        )
        for inner, scheme in (
            ("", USUAL),
            ("", "lightly"),
            ("", "numbered"),
            ("vit.", USUAL),
            ("vit.", TORCHVISION),
            ("", TORCHVISION),
        )
    )


LAYOUTS: tuple[Layout, ...] = (
    # vturrisi/solo-learn@9187ea3 solo/methods/base.py:193,210,643 (the names; "encoder" in
    # older checkpoints, main_linear.py:76), pixels: solo/data/pretrain_dataloader.py:206. Only the
    # online network is transferred (downstream/object_detection/convert_model_to_detectron2.py).
    *(
        Layout(
            "vturrisi/solo-learn",
            {"online": f"state_dict/{word}.", "momentum": f"state_dict/momentum_{word}."},
            _SOLO_DROPPED,
            has=("classifier.", beside),
            says={
                "no_3x3_stem": "solo-learn's CIFAR networks pad their 3x3 stem by 2 pixels "
                "(solo/methods/base.py:204), this backbone by 1: the features would be others",
                # Of solo/backbones/vit/: its MoCo v3 and MAE of widths 192 and 384 have 12, too.
                "num_heads": {768: 12, 1024: 16, 1280: 16},
            },
            **_LIGHTNING,
        )
        for word in ("backbone", "encoder")
        for beside in ("projector.", f"momentum_{word}.", "decoder.decoder_pred.")
    ),
    # lightly-ai/lightly@e8d317f; pixels: lightly/transforms/utils.py:1. benchmarks/imagenet/
    # resnet50/{dino.py:33,byol.py:27,mocov2.py:32} keep torchvision's names,
    # examples/pytorch_lightning/{moco.py:26,dino.py:33} have nn.Sequential's numbers.
    *_lightly(
        "teacher_backbone. student_backbone.",
        teacher="teacher_backbone.",
        student="student_backbone.",
    ),
    *_lightly("student_backbone.", teacher="backbone.", student="student_backbone."),
    *_lightly("teacher_backbone.", online="backbone.", teacher="teacher_backbone."),
    *_lightly("key_backbone.", query="backbone.", key="key_backbone."),
    *_lightly("backbone_momentum.", online="backbone.", momentum="backbone_momentum."),
    # examples/pytorch_lightning/msn.py and mae.py; benchmarks/imagenet/vitb16/{mae,ibot,dinov2}.py.
    *_lightly("anchor_backbone.", target="backbone.", anchor="anchor_backbone."),
    *_lightly(single="backbone."),
    *_lightly("decoder.", single="backbone."),
)
