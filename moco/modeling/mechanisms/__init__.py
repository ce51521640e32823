"""Contrastive mechanisms (the paper's Figure 2), one file each, and their registry.

A builder is registered under its value of MOCO.MECHANISM and called as
`builder(cfg, encoder, num_images)` with the configuration of the run, the query encoder and the
number of images in the dataset. Only the builders import torch, so that configurations can be
checked without it.
"""

from typing import TYPE_CHECKING

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from moco.modeling.encoder import Encoder
    from moco.modeling.mechanisms.base import Mechanism

MECHANISMS = Registry("MECHANISMS")


@MECHANISMS.register()
def momentum_queue(cfg: CfgNode, encoder: "nn.Module", num_images: int) -> "Mechanism":
    """Build MoCo: a queue of MOCO.K keys and a key encoder with momentum MOCO.M."""
    from moco.modeling.mechanisms.momentum_queue import MomentumQueue

    moco = cfg.MOCO
    return MomentumQueue(encoder, moco.DIM, moco.K, moco.M, moco.T)


@MECHANISMS.register()
def end_to_end(cfg: CfgNode, encoder: "nn.Module", num_images: int) -> "Mechanism":
    """Build the end-to-end mechanism, with one encoder if MOCO.SHARED_ENCODER."""
    from moco.modeling.mechanisms.end_to_end import EndToEnd

    return EndToEnd(encoder, cfg.MOCO.T, cfg.MOCO.SHARED_ENCODER)


@MECHANISMS.register()
def moco_v3(cfg: CfgNode, encoder: "Encoder", num_images: int) -> "Mechanism":
    """Build MoCo v3: a key encoder with momentum MOCO.M and heads of width MOCO.MLP_DIM."""
    from moco.modeling.archs import VITS
    from moco.modeling.mechanisms.moco_v3 import MoCoV3

    moco, vit = cfg.MOCO, cfg.MODEL.ARCH in VITS
    layers = 3 if vit else 2
    return MoCoV3(encoder, moco.DIM, moco.MLP_DIM, moco.M, moco.T, layers, predictor_norm=vit)


@MECHANISMS.register()
def memory_bank(cfg: CfgNode, encoder: "nn.Module", num_images: int) -> "Mechanism":
    """Build a memory bank with MOCO.K negatives per step, MOCO.BANK_MOMENTUM and MOCO.LOSS."""
    from moco.modeling.mechanisms.memory_bank import MemoryBank

    moco = cfg.MOCO
    return MemoryBank(
        encoder, moco.DIM, num_images, moco.K, moco.BANK_MOMENTUM, moco.T, moco.LOSS, cfg.SEED
    )
