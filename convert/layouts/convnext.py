"""Projects that mainly train ConvNeXts."""

from convert.families.base import USUAL
from convert.layouts.base import EMA_FIRST, ONE_MODEL, Layout

LAYOUTS: tuple[Layout, ...] = (
    # facebookresearch/ConvNeXt@048efce utils.py:447 (the dict, also ConvNeXt-V2's), models/
    # convnext.py:55 (the names), main.py, --imagenet_default_mean_and_std (the pixels).
    *(
        Layout(
            "facebookresearch/ConvNeXt",
            networks,
            marks=marks,
            scheme="official",
            epoch_offset=1,
        )
        for networks, marks in (EMA_FIRST, ONE_MODEL, ({"single": ""}, {}))
    ),
    # keyu-tian/SparK@a63e386 pretrain/utils/misc.py:146 (the dict), spark.py:33-77 (the names),
    # utils/imagenet.py:70 (the pixels): a ResNet of timm's, or a ConvNeXt in the official names.
    # What it saves without decoder is a plain state dict.
    *(
        Layout(
            "keyu-tian/SparK",
            {"single": "module/sparse_encoder.sp_cnn."},
            {
                "decoder": "dense_decoder.* densify_*",
                "mask tokens": "mask_tokens.*",
                "pixels": "imn_m imn_s norm_black",
                "training record": "config",
            },
            marks={"is_pretrain": True},
            scheme=scheme,
            epoch_offset=1,
        )
        for scheme in (USUAL, "official")
    ),
)
