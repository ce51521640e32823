"""Resizing of a vision transformer's patches and positions.

Shapes: C channels, p px of a patch, H W and h w patches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Rules for resizing patches, the default first; see `resize_patches`.
PATCH_RULES = ("pseudo-inverse", "bicubic")
BICUBIC, ANTIALIASED, BILINEAR = "bicubic", "bicubic_antialiased", "bilinear_antialiased"
# Rules for resizing positions -> arguments of `interpolate`, Detectron2's (get_abs_pos) first.
POSITION_RULES: dict[str, dict[str, Any]] = {
    BICUBIC: {"mode": "bicubic"},
    ANTIALIASED: {"mode": "bicubic", "antialias": True},
    BILINEAR: {"mode": "bilinear", "antialias": True},
}


def resize_patches(kernel: Tensor, size: int) -> Tensor:
    """Resize the patch kernel by PI-resize: (C, 3, p, p) -> (C, 3, size, size).

    FlexiViT, arXiv 2212.08013, Eq. 4: with the bilinear resize x -> B x the kernel is (B^T)^+ w,
    whose response to a resized patch is closest to the old response; if patches grow, both are
    equal. B is the Kronecker product of a matrix with itself, so its pseudo-inverse is the
    product of that matrix's pseudo-inverse with itself.
    """
    import torch
    import torch.nn.functional as F

    basis = torch.eye(kernel.shape[-1], dtype=torch.float64)[None]
    # (p, size): row i is the resized i-th unit vector.
    resized = F.interpolate(basis, size=size, mode="linear", align_corners=False)[0]
    inverse = torch.linalg.pinv(resized)  # (size, p)
    return (inverse @ kernel.double() @ inverse.T).to(kernel.dtype)


def interpolate_patches(kernel: Tensor, size: int) -> Tensor:
    """Resize the patch kernel bicubically: (C, 3, p, p) -> (C, 3, size, size)."""
    import torch.nn.functional as F

    return F.interpolate(kernel, size=(size, size), mode="bicubic", align_corners=False)


def resize_positions(
    positions: Tensor, grid: int, class_position: bool, rule: str = BICUBIC
) -> Tensor:
    """Interpolate positions for another square grid; the class token's slot is kept.

    (1, n, C) -> (1, grid * grid + class_position, C).
    """
    import torch

    first, rest = positions[:, : int(class_position)], positions[:, int(class_position) :]
    side = round(rest.shape[1] ** 0.5)
    resized = resize_map(rest.unflatten(1, (side, side)), (grid, grid), rule)
    return torch.cat([first, resized.flatten(1, 2)], dim=1).contiguous()


def resize_map(positions: Tensor, size: tuple[int, int], rule: str) -> Tensor:
    """Interpolate a map of positions by one of `POSITION_RULES`, (1, H, W, C) -> (1, h, w, C)."""
    import torch.nn.functional as F

    resized = F.interpolate(positions.permute(0, 3, 1, 2), size, **POSITION_RULES[rule])
    return resized.permute(0, 2, 3, 1)


RULES = dict(zip(PATCH_RULES, (resize_patches, interpolate_patches), strict=True))
