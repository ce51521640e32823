"""Backbones by the name that MODEL.BACKBONE.NAME has in Detectron2; one file per family.

A backbone maps images (N, 3, H, W) to feature maps by name. It has their `strides` and their
`stage_channels` by the same names, and the `size_divisibility` that images are padded to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fvcore.common.registry import Registry
from torch import Tensor

BACKBONES = Registry("embedded backbones")


class Backbone(Protocol):
    """See the module."""

    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]
    size_divisibility: int

    def __call__(self, images: Tensor) -> dict[str, Tensor]: ...
