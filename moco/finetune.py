r"""End-to-end fine-tuning for classification (appendix): ImageNet, iNaturalist 2018.

    python -m benchmarks finetune --config-file configs/imagenet/finetune.yaml \
        --checkpoint output/pretrain/checkpoint_0199.pth.tar DATA.ROOT path/to/imagenet

`--checkpoint random` trains from scratch, with the learning rate SOLVER.RANDOM_LR.

From the paper: on ImageNet learning rate 0.03 (0.1 from scratch); on iNaturalist 2018 "the typical
ResNet implementation in PyTorch", 100 epochs, 0.025 (0.1 from scratch), divided by 10 at 70% and
90%. Other details follow pytorch/examples imagenet/main.py, taken to be that implementation: batch
256, momentum 0.9, weight decay 1e-4 on all parameters, torchvision's RandomResizedCrop(224) and
flip, torch's initialization of the new layer; and on ImageNet its division by 10 after every 30
epochs, over the 100 epochs of the paper's other classifiers.
"""

import sys
from functools import partial
from pathlib import Path

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moco.classification import classify
from moco.classification.config import Protocol

FINETUNE = Protocol(
    kind="finetune",
    frozen=False,
    head_std=None,
    defaults={
        "TASK": "finetune",
        "OUTPUT_DIR": "output/finetune",
        "SOLVER.BASE_LR": 0.03,
        "SOLVER.RANDOM_LR": 0.1,
        "SOLVER.WEIGHT_DECAY": 1e-4,
        "SOLVER.MILESTONES_EPOCHS": (30, 60, 90),
    },
    description="End-to-end fine-tuning for classification. Keys: moco/engine/keys.py.",
)


build_parser = partial(classify.build_parser, FINETUNE)
main = partial(classify.main, FINETUNE)


if __name__ == "__main__":
    from benchmarks.__main__ import cli

    cli("finetune")
