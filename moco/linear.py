"""Linear classification on frozen features (sec. 4.1): how linearly separable are the classes?

    python -m benchmarks linear --config-file configs/imagenet/linear.yaml \\
        --checkpoint output/pretrain/checkpoint_0199.pth.tar DATA.ROOT path/to/imagenet

A fully-connected layer and softmax are trained on the globally pooled features; 1-crop top-1 on the
validation images. The network is in evaluation mode, so that BN's statistics stay, too; that it is
bitwise identical to the one before is asserted after each epoch.

From the paper: 100 epochs, learning rate 30, weight decay 0. From the official main_lincls.py,
where the paper is silent: batch 256, momentum 0.9, times 0.1 after 60 and 80 epochs, initial
weights normal with std 0.01 and bias 0, torchvision's RandomResizedCrop(224) and flip.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moco.classification import classify
from moco.classification.config import Protocol

if TYPE_CHECKING:
    from moco.engine.weights import Reader

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
    description="Linear classification on frozen features. Keys: moco/classification/config.py.",
)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    return classify.build_parser(LINEAR)


def main(argv: Sequence[str], read: "Reader") -> None:
    """The command `moco-transfer linear`."""
    classify.main(LINEAR, argv, read)
