"""Checkpoints that lightly, Lightning and timm write themselves, of tiny networks."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet as tv

from tests.oracles.layouts import DIM, EPOCH
from tests.oracles.resnets import headless, randomize


def lightly(kind: str, path: Path) -> dict[str, tv.ResNet]:
    """Write a checkpoint of a LightningModule of lightly's with its real heads; the networks.

    lightly-ai/lightly@e8d317f: "simclr", "mocov2", "byol", "dino" and "swav" as benchmarks/
    imagenet/resnet50/<kind>.py, "<kind> example" as examples/pytorch_lightning/<kind>.py. There the
    backbone is nn.Sequential(*list(resnet.children())[:-1]).
    """
    from lightly.loss import DINOLoss, NTXentLoss
    from lightly.models import modules
    from lightly.utils.benchmarking import KNNClassifier, OnlineLinearClassifier

    one, other = headless(seed=0), headless(seed=1)
    moco = functools.partial(modules.MoCoProjectionHead, 64, 64, DIM)
    dino = functools.partial(modules.DINOProjectionHead, 64, 16, 8, DIM)
    byol = functools.partial(modules.BYOLProjectionHead, 64, 16, DIM)
    smog = functools.partial(modules.heads.SMoGProjectionHead, 64, 16, DIM)
    # The encoders' names and their networks; then the parts in the module's order.
    networks, parts = {
        "moco example": lambda: (  # moco.py:25-34
            {"online": one, "momentum": other},
            {"backbone": _children(one), "projection_head": moco()}
            | {"backbone_momentum": _children(other), "projection_head_momentum": moco()}
            | {"criterion": NTXentLoss(memory_bank_size=(32, DIM))},
        ),
        "dino example": lambda: (  # dino.py:33-41
            {"teacher": one, "student": other},
            {"student_backbone": _children(other), "student_head": dino(freeze_last_layer=1)}
            | {"teacher_backbone": _children(one), "teacher_head": dino()},
        ),
        "smog example": lambda: (  # smog.py:28-48
            {"online": one, "momentum": other},
            {"backbone": _children(one), "projection_head": smog()}
            | {"prediction_head": modules.heads.SMoGPredictionHead(DIM, 16, DIM)}
            | {"backbone_momentum": _children(other), "projection_head_momentum": smog()}
            | {"smog": modules.heads.SMoGPrototypes(torch.randn(4, DIM), 0.99)},
        ),
        "vicregl example": lambda: (  # vicregl.py:25-28
            {"single": one},
            {"backbone": _children(one)}
            | {"projection_head": modules.BarlowTwinsProjectionHead(64, 16, DIM)}
            | {"local_projection_head": modules.heads.VicRegLLocalProjectionHead(64, 16, DIM)},
        ),
        "swav": lambda: (  # swav.py:29-47
            {"single": one},
            {"backbone": one, "projection_head": modules.SwaVProjectionHead(64, 16, DIM)}
            | {"prototypes": modules.SwaVPrototypes(DIM, 4)},
        ),
        "simclr": lambda: (  # simclr.py:27-41
            {"single": one},
            {"backbone": one, "projection_head": modules.SimCLRProjectionHead(64, 64, DIM)}
            | {"criterion": NTXentLoss(temperature=0.1)},
        ),
        "mocov2": lambda: (  # mocov2.py:30-42
            {"query": one, "key": other},
            {"backbone": one, "projection_head": moco()}
            | {"key_backbone": other, "key_projection_head": moco()}
            | {"criterion": NTXentLoss(temperature=0.2, memory_bank_size=(32, DIM))},
        ),
        "byol": lambda: (  # byol.py:25-34
            {"online": one, "teacher": other},
            {"backbone": one, "projection_head": byol()}
            | {"prediction_head": modules.BYOLPredictionHead(DIM, 16, DIM)}
            | {"teacher_backbone": other, "teacher_projection_head": byol()},
        ),
        "dino": lambda: (  # dino.py:31-39
            {"teacher": one, "student": other},
            {"backbone": one, "projection_head": dino()}
            | {"student_backbone": other, "student_projection_head": dino()}
            | {"criterion": DINOLoss(output_dim=DIM)},
        ),
    }[kind]()
    if "example" not in kind:
        parts["online_classifier"] = OnlineLinearClassifier(feature_dim=64, num_classes=16)
    if kind == "simclr":
        parts["knn_classifier"] = KNNClassifier(None, 16, 2, 0.1, 0, 1)
    write_lightning(lightning_module(parts), path)
    return networks


def lightly_own_resnet(path: Path) -> nn.Module:
    """Lightly's own ResNet (lightly/models/resnet.py) as its tutorials number it; the network."""
    from lightly.models import ResNetGenerator
    from lightly.models.modules import SimCLRProjectionHead

    torch.manual_seed(0)
    net = ResNetGenerator("resnet-18", width=0.125)
    randomize(net)
    backbone = nn.Sequential(*list(net.children())[:-1], nn.AdaptiveAvgPool2d(1))
    parts = {"backbone": backbone, "projection_head": SimCLRProjectionHead(64, 64, DIM)}
    write_lightning(lightning_module(parts), path)
    return net


def lightning_module(parts: Mapping[str, nn.Module], hyper_parameters: Any = None) -> Any:
    """Build a real LightningModule of these children, whose loss is the first one's mean output."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)
            if hyper_parameters is not None:
                self.save_hyperparameters(hyper_parameters)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            output: Tensor = next(iter(self.children()))(batch)
            return output.mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    return Module()


def write_lightning(module: Any, path: Path, *, fit: bool = False, **trainer: Any) -> None:
    """Let the real Trainer write its checkpoint, after three steps of training if `fit`."""
    import pytorch_lightning as pl

    run = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path.parent,
        **trainer,
    )
    if fit:
        run.fit(module, torch.utils.data.DataLoader(torch.randn(6, 3, 32, 32), batch_size=2))
    else:
        run.strategy.connect(module)
    run.save_checkpoint(path)


def timm_saver(folder: Path, *, ema: bool) -> tuple[Path, dict[str, nn.Module]]:
    """Timm's real CheckpointSaver, as its train.py calls it: the file and the networks."""
    import timm
    from timm.models.resnet import BasicBlock, ResNet
    from timm.utils import CheckpointSaver, ModelEmaV3

    def network(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = ResNet(BasicBlock, (2, 2, 2, 2), num_classes=16, channels=(8, 16, 32, 64))
        randomize(net)
        return net

    assert timm.__version__
    net, average = network(0), network(1)
    saver = CheckpointSaver(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        args=argparse.Namespace(model="resnet18", lr=0.1),
        model_ema=ModelEmaV3(average) if ema else None,
        checkpoint_dir=str(folder),
        recovery_dir=str(folder),
    )
    saver.save_checkpoint(EPOCH - 1, metric=71.5)  # numbered from 0
    networks = {"ema": average, "model": net} if ema else {"single": net}
    return folder / "last.pth.tar", networks


def _children(net: nn.Module) -> nn.Sequential:
    return nn.Sequential(*list(net.children())[:-1])
