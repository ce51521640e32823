"""OpenMMLab's frameworks and what came from them: OpenSelfSup, MMSelfSup, mmpretrain, DenseCL."""

import dataclasses

from convert.layouts.base import Layout, beside
from convert.recorded import mm_configuration

# What is beside a backbone in OpenSelfSup, MMSelfSup and mmpretrain. The modules of a list
# (encoder_q = [backbone, neck]) have a second name there.
_MM_DROPPED = beside(
    "neck head memory_bank",
    queue="queue*",
    class_weights="loss_weight*",
    list_of_the_encoder="encoder.*",
    EMA_counter="steps*",
    training_record="message_hub meta",
    schedule="param_schedulers",
)


def _mm(name: str, has: tuple[str, ...] = (), **networks: str) -> Layout:
    """A training checkpoint of mmcv's or mmengine's runner: choice of --encoder -> prefix."""
    dropped = {}
    if "backbone." not in networks.values():
        dropped["second name of the encoder"] = "backbone.*"
    # Beside a list's backbone: encoder_q.1. or encoder_k.module.1. is its neck, encoder_k.steps a
    # counter of the average.
    for choice, prefix in networks.items():
        if prefix.endswith(".0."):
            dropped[f"{choice} neck"] = prefix.replace(".0.", ".1.") + "*"
            dropped[f"{choice} EMA counter"] = prefix.split(".", 1)[0] + ".steps*"
    return Layout(
        name,
        {choice: f"state_dict/{prefix}" for choice, prefix in networks.items()},
        {**dropped, **_MM_DROPPED},
        has=has,
        marks={"meta": ...},
        epoch="meta/epoch",
        recorded=mm_configuration,
    )


LAYOUTS: tuple[Layout, ...] = (
    # WXinlong/DenseCL@b64bbb6 openselfsup/models/densecl.py:28; pixels: configs/selfsup/densecl/
    # densecl_imagenet_200ep.py:31. Every list's backbone has the second name "backbone.".
    _mm("WXinlong/DenseCL", ("queue2",), query="encoder_q.0.", key="encoder_k.0."),
    # open-mmlab/OpenSelfSup@1db69ec openselfsup/models/{moco.py:42,byol.py:35} and
    # open-mmlab/mmselfsup@6faad81 (0.x) mmselfsup/models/algorithms/mocov3.py:37; pixels:
    # configs/selfsup/moco/r50_v2.py:30; stride: openselfsup/models/backbones/resnet.py:298.
    _mm("OpenSelfSup / MMSelfSup 0.x", query="encoder_q.0.", key="encoder_k.0."),
    _mm("OpenSelfSup / MMSelfSup 0.x", online="online_net.0.", target="target_net.0."),
    _mm("OpenSelfSup / MMSelfSup 0.x", base="base_encoder.0.", momentum="momentum_encoder.0."),
    # open-mmlab/mmselfsup@80bb3f4 (1.x) mmselfsup/models/algorithms/{moco.py:65,byol.py:55,
    # mocov3.py:55}, open-mmlab/mmpretrain@ee7f2e8 mmpretrain/models/selfsup/{moco.py:65,byol.py:55,
    # mocov3.py:180}; the dict: open-mmlab/mmengine@2543429 mmengine/runner/runner.py:2229; pixels:
    # configs/_base_/datasets/imagenet_bs32_mocov2.py:6.
    *(
        _mm(
            "MMSelfSup 1.x / mmpretrain",
            (f"{average}.",),
            **{choice: "backbone.", other: f"{average}.module.0."},
        )
        for choice, other, average in (
            ("query", "key", "encoder_k"),
            ("online", "target", "target_net"),
            ("base", "momentum", "momentum_encoder"),
        )
    ),
    # mmengine/hooks/ema_hook.py:165 and 215: the EMA weights are in "state_dict", the trained ones
    # in "ema_state_dict".
    dataclasses.replace(
        _mm("mmpretrain", single="backbone."),
        networks={"ema": "state_dict/backbone.", "model": "ema_state_dict/backbone."},
        marks={"meta": ..., "ema_state_dict": ...},
    ),
    # Every other algorithm of these projects, and their classifiers: mmpretrain's pixels are
    # configs/_base_/datasets/imagenet_bs32.py:6, its stride mmpretrain/models/backbones/
    # resnet.py:486.
    _mm("OpenSelfSup / MMSelfSup / mmpretrain", single="backbone."),
    # What their tools/extract_backbone_weights.py write, of OpenSelfSup@1db69ec:19,
    # WXinlong/DenseCL@b64bbb6 and mmselfsup@6faad81 tools/model_converters/.
    *(
        Layout(f"{name} (extracted)", {"single": "state_dict/"}, marks={"author": author})
        for name, author in (
            ("OpenSelfSup", "OpenSelfSup"),
            ("MMSelfSup", "MMSelfSup"),
            ("WXinlong/DenseCL", "DenseCL"),
        )
    ),
)
