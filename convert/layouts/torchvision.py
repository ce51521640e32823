"""timm and torchvision, with which networks of every family are trained."""

from convert.families.base import USUAL
from convert.layouts.base import EMA_FIRST, ONE_MODEL, Layout
from convert.recorded import timm_arguments

LAYOUTS: tuple[Layout, ...] = (
    # huggingface/pytorch-image-models@aa4b585 timm/utils/checkpoint_saver.py:90 and, of a task,
    # timm/task/task.py:207; EMA first as in timm/models/_helpers.py:120; pixels: timm/models/
    # resnet.py:801. Epochs are numbered from 0 (train.py:1197).
    *(
        Layout(
            "timm",
            networks,
            {"training record": "task_state task_state_ema"},
            marks={"version": 2, "arch": ..., **marks},
            epoch_offset=1,
            recorded=timm_arguments,
            any_network=True,
        )
        for networks, marks in (
            ({"ema": "state_dict_ema/", "model": "state_dict/"}, {"state_dict_ema": ...}),
            ({"single": "state_dict/"}, {}),
        )
    ),
    # pytorch/vision@017e9b9 references/classification/train.py, main() (the dict; EMA is what
    # --test-only evaluates), utils.py, ExponentialMovingAverage; pixels: presets.py.
    *(
        Layout(
            "torchvision references",
            networks,
            {"EMA counter": "n_averaged*"},
            marks={"lr_scheduler": ..., "args": ..., **marks},
            scheme=scheme,
            epoch_offset=1,
        )
        for scheme in (USUAL, "torchvision")
        for networks, marks in (EMA_FIRST, ONE_MODEL)
    ),
    # torchvision/models/resnet.py: net.state_dict(), with or without fc.
    Layout(
        "torchvision",
        {"single": ""},
        families=("resnet",),
        any_network=True,
        note="names and shapes are torchvision's and say nothing about pixels or strides; dilated, "
        "anti-aliased and caffe-style networks have the same ones",
    ),
    # torchvision/models/convnext.py, as above.
    Layout("torchvision", {"single": ""}, scheme="torchvision", any_network=True),
)
