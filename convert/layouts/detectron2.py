"""ResNets in Detectron2's names, and in those of Caffe2."""

from typing import Any

from convert.contract import FOLDED
from convert.layouts.base import Layout
from convert.recorded import caffe2_record

# MSRA's networks take BGR; their std is inside conv1 (detectron2/config/defaults.py, PIXEL_STD).
MSRA_MEAN = (103.53, 116.28, 123.675)
MSRA_STD = (1.0, 1.0, 1.0)

_D2_LAYOUT: dict[str, Any] = {
    "networks": {"single": "model/"},
    "dropped": {"head": "stem.fc.*"},
    "scheme": "detectron2",
}


def _caffe2(name: str, scheme: str) -> tuple[Layout, ...]:
    """Two rows: blobs at the top, and as Detectron2 also keeps them, under "model"."""
    return tuple(
        Layout(
            name,
            {"single": start},
            {
                "head": "fc1000_*",
                "momentum": "*_momentum",  # as detectron2/checkpoint/detection_checkpoint.py
                "convolution bias": "*_b",
            },
            marks={"__author__": author},
            scheme=scheme,
            recorded=caffe2_record,
            channel_order="BGR",
            mean=MSRA_MEAN,
            std=MSRA_STD,
            says={"stride_in_1x1": True},
        )
        for start, author in (("", None), ("model/", "Caffe2"))
    )


LAYOUTS: tuple[Layout, ...] = (
    # Converted for Detectron2 by these projects: OpenSelfSup@1db69ec and WXinlong/DenseCL@b64bbb6
    # benchmarks/detection/convert-pretrain-to-detectron2.py:30, mmselfsup@6faad81 tools/benchmarks/
    # detectron2/convert-pretrain-to-detectron2.py:31, PyContrast@84f94ea detection/
    # convert_pretrained.py:47, solo-learn@9187ea3 downstream/object_detection/
    # convert_model_to_detectron2.py:52; their pixels are in *_moco.yaml and *_infomin.yaml there.
    *(
        Layout(f"{name} (converted)", **_D2_LAYOUT, marks={"__author__": author})
        for name, author in (
            ("OpenSelfSup / DenseCL", "OpenSelfSup"),
            ("MMSelfSup", "MMSelfSup"),
            ("HobbitLong/PyContrast", "Yonglong"),
            ("vturrisi/solo-learn", "solo-learn"),
        )
    ),
    # detectron2 tools/convert-torchvision-to-d2.py, so detectron2://ImageNetPretrained/torchvision/;
    # its docstring gives colors, mean, std and the stride's place.
    Layout("detectron2/torchvision", **_D2_LAYOUT, marks={"__author__": "torchvision"}),
    # facebookresearch/moco@7397dfe detection/convert-pretrain-to-detectron2.py; what it belongs to
    # is in *_moco.yaml beside it.
    Layout("facebookresearch/moco (converted)", **_D2_LAYOUT, marks={"__author__": "MOCO"}),
    # detectron2://ImageNetPretrained/MSRA/: Caffe2's names with BN statistics (MODEL_ZOO.md, "we do
    # not fuse BatchNorm"; the keys are printed in detectron2#1688).
    *_caffe2("detectron2/MSRA", "caffe2"),
    # catalog://ImageNetPretrained/MSRA/ of Detectron: the statistics are folded into scale and bias
    # (detectron2/checkpoint/catalog.py: "only load them to a model with FrozenBN").
    *_caffe2("detectron/MSRA" + FOLDED, "caffe2 folded"),
)
