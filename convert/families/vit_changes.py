"""Changes of a vision transformer that a user requests: other sizes, folded LayerScale."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convert.families.base import Adapted
from convert.families.vit_architecture import PATCH_RULES, ViTArchitecture
from moco.common.errors import DataError, UserError

PATCHES, POSITIONS = "patch_embed.proj.weight", "pos_embed"
# Larger images are for the detector, which interpolates positions itself.
MAX_PATCH_PX, MAX_IMAGE_PX = 64, 1024


def adapt(
    architecture: ViTArchitecture, state: dict[str, Tensor], asked: Mapping[str, Any], where: str
) -> Adapted:
    """Resize patches and positions, then fold LayerScale, as far as the options request it.

    Patches of another size keep the grid, so the image size grows with them unless it is given,
    too. Raises UserError: sizes that do not fit, or no LayerScale; DataError: damaged tensors.
    """
    a, changes = architecture, []
    patch = _size("patch_size", asked, a.patch_size, MAX_PATCH_PX)
    rule = asked.get("patch_rule", PATCH_RULES[0])
    image = _size("image_size", asked, a.image_size // a.patch_size * patch, MAX_IMAGE_PX)
    if image % patch:
        raise UserError(f"--image-size {image}: is not a multiple of the patch size {patch}")
    if patch != a.patch_size:
        if rule not in RULES:
            raise UserError(f"--patch-rule: got {rule!r}, expected one of {', '.join(RULES)}")
        state = {**state, PATCHES: RULES[rule](_float32(state, PATCHES, where), patch)}
        changes.append(f"patches {a.patch_size} to {patch} px by {rule}")
    elif "patch_rule" in asked:
        raise UserError(f"--patch-rule: {where} keeps its patches; give --patch-size, too")
    old, new = a.image_size // a.patch_size, image // patch
    if new != old:
        positions = resize_positions(_float32(state, POSITIONS, where), new, a.class_position)
        state = {**state, POSITIONS: positions}
        changes.append(f"positions {old}x{old} to {new}x{new} by bicubic interpolation")
    a = dataclasses.replace(a, patch_size=patch, image_size=image)
    proof = (a, state)
    if asked.get("fold_layer_scale"):
        if not a.layer_scale:
            raise UserError(f"--fold-layer-scale: {where} has no LayerScale")
        a, state = dataclasses.replace(a, layer_scale=False), fold_layer_scale(state)
        changes.append("LayerScale folded")
    return Adapted(a, state, tuple(changes), proof)


def _size(name: str, asked: Mapping[str, Any], otherwise: int, largest: int) -> int:
    size: int = asked.get(name, otherwise)
    if name in asked and not 1 <= size <= largest:
        raise UserError(f"--{name.replace('_', '-')} {size}: expected 1..{largest} px")
    return size


def _float32(state: Mapping[str, Tensor], key: str, where: str) -> Tensor:
    if state[key].dtype != torch.float32:
        raise DataError(f"{where}: {key} is {state[key].dtype}, expected floating point")
    return state[key]


def resize_patches(kernel: Tensor, size: int) -> Tensor:
    """The kernel whose response to a resized patch is nearest to the old one's to the patch.

    PI-resize (FlexiViT, arXiv 2212.08013, Eq. 4): with the bilinear resize x -> B x it is
    (B^T)^+ w; where patches grow, the responses are equal. B is the Kronecker product of a matrix
    with itself, so its pseudo-inverse is that of theirs.

    kernel: (C, 3, p, p) -> (C, 3, size, size).
    """
    basis = torch.eye(kernel.shape[-1], dtype=torch.float64)[None]
    # (p, size): row i is the i-th unit vector, resized.
    resized = F.interpolate(basis, size=size, mode="linear", align_corners=False)[0]
    inverse = torch.linalg.pinv(resized)  # (size, p)
    return (inverse @ kernel.double() @ inverse.T).to(kernel.dtype)


def interpolate_patches(kernel: Tensor, size: int) -> Tensor:
    """The kernel as an image, bicubic: (C, 3, p, p) -> (C, 3, size, size)."""
    return F.interpolate(kernel, size=(size, size), mode="bicubic", align_corners=False)


def resize_positions(positions: Tensor, grid: int, class_position: bool) -> Tensor:
    """Positions for another square grid, as detectron2/modeling/backbone/utils.py, get_abs_pos.

    The class token's slot stays as it is. (1, n, C) -> (1, grid * grid + class_position, C).
    """
    first, rest = positions[:, : int(class_position)], positions[:, int(class_position) :]
    side = round(rest.shape[1] ** 0.5)
    grids = rest.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grids = F.interpolate(grids, size=(grid, grid), mode="bicubic", align_corners=False)
    return torch.cat([first, grids.flatten(2).transpose(1, 2)], dim=1).contiguous()


def fold_layer_scale(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same function without LayerScale: gamma * (W x + b) = (gamma W) x + gamma b.

    Deviation: what is fine-tuned has other parameters than the source, so the optimizer's steps
    and weight decay act on another network.

    Raises DataError: tensors whose shapes do not fit.
    """
    folded = {key: value for key, value in state.items() if not key.endswith(".gamma")}
    for scale, module in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
        for key in [key for key in state if key.endswith(f".{scale}.gamma")]:
            name, gamma = f"{key.removesuffix(f'{scale}.gamma')}{module}", state[key]
            for tensor in (f"{name}.weight", f"{name}.bias"):
                if tensor not in state:
                    continue  # the check of the whole network names it
                old = state[tensor]
                if old.shape[:1] != gamma.shape:
                    raise DataError(f"{key}: {list(gamma.shape)} does not fit {list(old.shape)}")
                folded[tensor] = (gamma[:, None] if old.dim() == 2 else gamma) * old
    return folded


RULES = dict(zip(PATCH_RULES, (resize_patches, interpolate_patches), strict=True))
