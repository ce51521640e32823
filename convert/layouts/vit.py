"""Self-supervised projects that mainly train vision transformers."""

from convert.families.base import USUAL
from convert.layouts.base import Layout, beside

LAYOUTS: tuple[Layout, ...] = (
    # facebookresearch/dino@7c446df main_dino.py:278 (the dict), :431 (the pixels), utils.py:606
    # (the names); eval_linear.py:264 takes the teacher. Its dino_resnet50_pretrain.pth
    # (hubconf.py:91) is torchvision's without fc.
    Layout(
        "facebookresearch/dino",
        {"teacher": "teacher/backbone.", "student": "student/backbone."},
        {"head": "head.*", "loss": "dino_loss"},
        marks={"dino_loss": ...},
        says={"num_heads": {192: 3, 384: 6, 768: 12}},  # vision_transformer.py
    ),
    # facebookresearch/mae models_mae.py (the names, the heads), util/misc.py, save_model (the
    # dict), main_pretrain.py (the pixels). A file without the decoder is a plain state dict.
    Layout(
        "facebookresearch/mae",
        {"single": "model/"},
        {"decoder": "decoder_*"},
        has=("decoder_pred.", "mask_token"),
        epoch_offset=1,
        says={"num_heads": {768: 12, 1024: 16, 1280: 16}},
    ),
    # bytedance/ibot@564f363 main_ibot.py, train_ibot (the dict) and DataAugmentationiBOT (the
    # pixels), models/vision_transformer.py (the names); evaluation/eval_linear.py, the teacher.
    Layout(
        "bytedance/ibot",
        {"teacher": "teacher/backbone.", "student": "student/backbone."},
        {"head": "head.*", "loss": "ibot_loss"},
        marks={"ibot_loss": ...},
        says={"num_heads": {192: 3, 384: 6, 768: 12, 1024: 16}},
    ),
    # facebookresearch/msn@db0d572 src/msn_train.py, save_checkpoint (the dict) and init_model (the
    # head), src/deit.py (the names), src/data_manager.py, make_transforms (the pixels);
    # linear_eval.py, load_pretrained, takes the target encoder.
    Layout(
        "facebookresearch/msn",
        {"target": "target_encoder/", "anchor": "encoder/"},
        {"projection head": "fc.* pred.*", "prototypes": "prototypes", "optimizer": "opt"},
        marks={"target_encoder": ..., "prototypes": ...},
        says={"num_heads": {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16}},
    ),
    # facebookresearch/dinov2@02eb93a dinov2/train/train.py, do_test (teacher_checkpoint.pth),
    # train/ssl_meta_arch.py and models/vision_transformer.py (the names), data/transforms.py (the
    # pixels).
    *(
        Layout(
            "facebookresearch/dinov2",
            {"teacher": "teacher/backbone."},
            beside("dino_head ibot_head"),
            has=("dino_head.",),
            scheme=scheme,
            says={"num_heads": {384: 6, 768: 12, 1024: 16}},
            families=("vit",),
        )
        for scheme in (USUAL, "chunked")
    ),
)
