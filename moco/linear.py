r"""Linear classification on frozen features (sec. 4.1), a measure of their linear separability.

    python -m benchmarks linear --config-file configs/imagenet/linear.yaml \
        --checkpoint output/pretrain/checkpoint_0199.pth.tar DATA.ROOT path/to/imagenet

A fully-connected layer and softmax are trained on the globally pooled features and evaluated by
1-crop top-1 on the validation images. The backbone is in evaluation mode, so that BN's statistics
do not change either; after each epoch, it is checked to be bitwise identical to the initial
backbone.

From the paper: 100 epochs, learning rate 30, weight decay 0. From the official main_lincls.py,
for details not in the paper: batch 256, momentum 0.9, decay by 0.1 after 60 and 80 epochs, initial
weights normal with std 0.01 and bias 0, torchvision's RandomResizedCrop(224) and flip.
"""

import sys
from functools import partial
from pathlib import Path

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moco.classification import classify
from moco.classification.config import Protocol

LINEAR = Protocol(
    kind="linear",
    frozen=True,
    head_std=0.01,
    defaults={
        "TASK": "linear",
        "OUTPUT_DIR": "output/linear",
        "SOLVER.BASE_LR": 30.0,
        "SOLVER.WEIGHT_DECAY": 0.0,
        "SOLVER.MILESTONES_EPOCHS": (60, 80),
    },
    description="Linear classification on frozen features. Keys: moco/engine/keys.py.",
)


build_parser = partial(classify.build_parser, LINEAR)
main = partial(classify.main, LINEAR)


if __name__ == "__main__":
    from benchmarks.__main__ import cli

    cli("linear")
