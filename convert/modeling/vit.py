"""The ViT backbone in Detectron2's layout, without Detectron2, and its reference.

Parameter names, the order of creation and the arithmetic of `ViT` follow
detectron2/modeling/backbone/vit.py; the embedded detection engine trains this very class. The
reference is timm's own class, which shares nothing with `ViT`.

Shapes: N images, C channels, H W pixels, h w patches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convert.families.base import stochastic_depth
from convert.families.vit import FEATURE, ViTArchitecture
from moco.common.errors import DataError
from moco.modeling import soundness


class LayerScale(nn.Module):
    """A learned factor for each channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Attention(nn.Module):
    """Multi-head attention among all places of a map, (N, h, w, C) -> (N, h, w, C).

    Args:
        rel_pos_grid: > 0: with decomposed relative positions (arXiv 2112.01526, Eq. 4) of a square
            map of this side; for another one they are interpolated. They start at 0.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, rel_pos_grid: int = 0) -> None:
        super().__init__()
        self.num_heads, self.has_rel_pos = num_heads, rel_pos_grid > 0
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        if self.has_rel_pos:
            shape = 2 * rel_pos_grid - 1, dim // num_heads
            self.rel_pos_h = nn.Parameter(torch.zeros(shape))
            self.rel_pos_w = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, _ = x.shape
        qkv = self.qkv(x).reshape(n, h * w, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, n * self.num_heads, h * w, -1).unbind(0)
        weights = (q * self.scale) @ k.transpose(-2, -1)
        if self.has_rel_pos:
            at = q.unflatten(1, (h, w))
            rows = torch.einsum("bhwc,hkc->bhwk", at, relative_positions(self.rel_pos_h, h))
            columns = torch.einsum("bhwc,wkc->bhwk", at, relative_positions(self.rel_pos_w, w))
            weights = weights.view(-1, h, w, h, w) + rows[..., None] + columns[..., None, :]
            weights = weights.view(-1, h * w, h * w)
        x = (weights.softmax(dim=-1) @ v).view(n, self.num_heads, h, w, -1)
        y: Tensor = self.proj(x.permute(0, 2, 3, 1, 4).reshape(n, h, w, -1))
        return y


def relative_positions(table: Tensor, size: int) -> Tensor:
    """(2 S - 1, C), of the distances 1 - S .. S - 1 -> (size, size, C), of query and key."""
    if len(table) != 2 * size - 1:
        table = F.interpolate(table.T[None], size=2 * size - 1, mode="linear")[0].T
    place = torch.arange(size, device=table.device)
    return table[place[:, None] - place + size - 1]


def into_windows(x: Tensor, side: int) -> Tensor:
    """(N, h, w, C) -> (windows, side, side, C), with 0 at the right and bottom where needed."""
    n, h, w, c = x.shape
    if h % side or w % side:
        x = F.pad(x, (0, 0, 0, -w % side, 0, -h % side))
    x = x.view(n, -(-h // side), side, -(-w // side), side, c)
    return x.transpose(2, 3).reshape(-1, side, side, c)


def from_windows(windows: Tensor, size: tuple[int, int]) -> Tensor:
    """The inverse of `into_windows`; `size`: h and w."""
    h, w = size
    side, c = windows.shape[2:]
    x = windows.view(-1, -(-h // side), -(-w // side), side, side, c).transpose(2, 3)
    return x.flatten(3, 4).flatten(1, 2)[:, :h, :w].contiguous()


class Block(nn.Module):
    """Attention and MLP, each with a norm before and a shortcut around.

    Args:
        window_size: side of the windows that attention is within; 0: it is global.
        rel_pos_grid: see `Attention`.
        drop_path: probability to leave out a branch of an image.
    """

    def __init__(
        self,
        a: ViTArchitecture,
        window_size: int = 0,
        rel_pos_grid: int = 0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.window_size = window_size
        self.norm1 = nn.LayerNorm(a.embed_dim, eps=a.layer_norm_eps)
        self.attn = Attention(a.embed_dim, a.num_heads, a.qkv_bias, rel_pos_grid)
        self.ls1 = LayerScale(a.embed_dim) if a.layer_scale else nn.Identity()
        self.drop_path = stochastic_depth(drop_path)
        self.norm2 = nn.LayerNorm(a.embed_dim, eps=a.layer_norm_eps)
        self.mlp = nn.Sequential()
        self.mlp.add_module("fc1", nn.Linear(a.embed_dim, a.mlp_dim))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("fc2", nn.Linear(a.mlp_dim, a.embed_dim))
        self.ls2 = LayerScale(a.embed_dim) if a.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        if self.window_size:
            windows = self.attn(into_windows(y, self.window_size))
            y = from_windows(windows, (x.shape[1], x.shape[2]))
        else:
            y = self.attn(y)
        x = x + self.drop_path(self.ls1(y))
        y = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))
        return y


def run_blocks(
    blocks: Iterable[nn.Module], x: Tensor, checkpoint_blocks: bool, out_blocks: Sequence[int]
) -> dict[str, Tensor]:
    """Features of the map x (N, h, w, C), each (N, C, h, w); the arguments are those of `ViT`."""
    features = {}
    for i, block in enumerate(blocks):
        if checkpoint_blocks and torch.is_grad_enabled():
            x = checkpoint(block, x, use_reentrant=False)
        else:
            x = block(x)
        if i in out_blocks:
            features[f"block{i}"] = x.permute(0, 3, 1, 2)
    return features or {FEATURE: x.permute(0, 3, 1, 2)}


class ViT(nn.Module):
    """A vision transformer: normalized pixels (N, 3, H, W) -> {"last_feat": (N, C, h, w)}.

    H and W are multiples of the patches' side. `strides` and `stage_channels` are the feature's.
    Under a seed it starts as Detectron2's class does. The arguments beside the architecture are
    what a detector adds; without them it is the network of the pre-training.

    Args:
        window_size: side of the windows of attention, in patches; 0: it is global in all blocks.
        global_blocks: those whose attention is global all the same.
        rel_pos_grid: > 0: with relative positions; in global blocks for a map of this side.
        drop_path: of the last block, rising linearly from 0 at the first; 0..1.
        checkpoint_blocks: whether blocks are computed again in the backward pass.
        out_blocks: indices of the blocks whose maps are the features, not the last one's:
            "block0" is the first's.
    """

    def __init__(
        self,
        architecture: ViTArchitecture,
        *,
        window_size: int = 0,
        global_blocks: Collection[int] = (),
        rel_pos_grid: int = 0,
        drop_path: float = 0.0,
        checkpoint_blocks: bool = False,
        out_blocks: Sequence[int] = (),
    ) -> None:
        super().__init__()
        a = architecture
        self.class_position = a.class_position
        self.checkpoint_blocks, self.out_blocks = checkpoint_blocks, tuple(out_blocks)
        names = [f"block{i}" for i in out_blocks] or [FEATURE]
        self.strides = dict.fromkeys(names, a.patch_size)
        self.stage_channels = dict.fromkeys(names, a.embed_dim)
        self.patch_embed = nn.Sequential()
        proj = nn.Conv2d(3, a.embed_dim, a.patch_size, stride=a.patch_size)
        self.patch_embed.add_module("proj", proj)
        self.grid = a.image_size // a.patch_size
        positions = self.grid**2 + a.class_position
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, a.embed_dim))
        self.blocks = nn.Sequential()
        for i, rate in enumerate(torch.linspace(0, drop_path, a.depth, device="cpu").tolist()):
            window = 0 if i in global_blocks else window_size
            rel_pos = rel_pos_grid and (window or rel_pos_grid)
            self.blocks.append(Block(a, window, rel_pos, rate))
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def positions(self, size: tuple[int, int]) -> Tensor:
        """The position embedding of h x w patches, (1, h, w, C), interpolated where needed."""
        x = self.pos_embed[:, int(self.class_position) :].unflatten(1, (self.grid, self.grid))
        if size != (self.grid, self.grid):
            x = F.interpolate(x.permute(0, 3, 1, 2), size, mode="bicubic").permute(0, 2, 3, 1)
        return x

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        x = x + self.positions((x.shape[1], x.shape[2]))
        return run_blocks(self.blocks, x, self.checkpoint_blocks, self.out_blocks)


class _AsMap(nn.Module):
    """Tokens of a square grid as a map, (N, prefix + h w, C) -> (N, C, h, w)."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, self.prefix :]
        side = round(x.shape[1] ** 0.5)
        return x.transpose(1, 2).reshape(len(x), -1, side, side)


def reference(
    architecture: ViTArchitecture, class_token: bool = False, registers: int = 0
) -> nn.Module:
    """Build timm's own class, whose class token and registers have no position to be added.

    The output of its `norm` is the map after the last block, before any final norm.
    """
    a = architecture
    from timm.models.vision_transformer import VisionTransformer

    net: Any = VisionTransformer(
        img_size=a.image_size,
        patch_size=a.patch_size,
        num_classes=0,
        global_pool="",
        embed_dim=a.embed_dim,
        depth=a.depth,
        num_heads=a.num_heads,
        mlp_ratio=cast(float, Fraction(a.mlp_dim, a.embed_dim)),  # without rounding
        qkv_bias=a.qkv_bias,
        init_values=1.0 if a.layer_scale else None,
        class_token=class_token,
        reg_tokens=registers,
        no_embed_class=True,
        norm_layer=partial(nn.LayerNorm, eps=a.layer_norm_eps),
    )
    if a.class_position:
        net.register_load_state_dict_pre_hook(_drop_class_position)
    net.norm = _AsMap(class_token + registers)
    module: nn.Module = net
    return module


def _drop_class_position(module: nn.Module, state: dict[str, Tensor], *_: Any) -> None:
    state["pos_embed"] = state["pos_embed"][:, 1:]


def _with_tokens(
    architecture: ViTArchitecture, state: Mapping[str, Tensor], tokens: Mapping[str, Tensor]
) -> nn.Module:
    """Return the reference with these tensors, eval mode; raises DataError for unfit tokens.

    Args:
        tokens: class token and registers by their names, (1, n, C).
    """
    whole, registers = dict(state), []
    for name, value in tokens.items():
        if value.dim() != 3 or (len(value), value.shape[2]) != (1, architecture.embed_dim):
            raise DataError(
                f"{name}: got shape {list(value.shape)}, expected [1, n, {architecture.embed_dim}]"
            )
        if problem := soundness.problem(name, value):
            raise DataError(f"{name}: {problem}")
        if name == "cls_token":
            first = state["pos_embed"][:, :1] if architecture.class_position else 0
            whole["cls_token"] = value + first
        else:
            registers.append(value)
    if registers:
        whole["reg_token"] = torch.cat(registers, dim=1)
    count = sum(value.shape[1] for value in registers)
    with torch.device("meta"):
        net = reference(architecture, "cls_token" in whole, count)
    net.load_state_dict(whole, strict=True, assign=True)
    return net.eval()


def source_features(
    architecture: ViTArchitecture,
    state: Mapping[str, Tensor],
    tokens: Mapping[str, Tensor],
    image: Tensor,
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the last block of timm's networks, and what comes out of a plain one's.

    Args:
        tokens: class token and registers, by their names.
    """
    net: Any = _with_tokens(architecture, state, tokens)
    net.norm = nn.Identity()
    return {f"blocks.{architecture.depth - 1}": "tokens"}, {"tokens": net(image)}


def effect_of_tokens(
    architecture: ViTArchitecture, state: Mapping[str, Tensor], tokens: Mapping[str, Tensor]
) -> str:
    """Measure how the last map of one image changes without class token and registers.

    Args:
        tokens: these, by their names.

    Raises:
        DataError: another shape, or not finite.
    """
    image = soundness.fixed_image((architecture.image_size, architecture.image_size))
    with torch.no_grad():
        maps = [_with_tokens(architecture, state, its)(image) for its in ({}, tokens)]
    change = float((maps[0] - maps[1]).norm() / maps[1].norm())
    largest = float((maps[0] - maps[1]).abs().max())
    names = " and ".join(tokens)
    return (
        f"{names}: a detector has no place for it; without it the last map of one image changes by "
        f"{100 * change:.3g} % (norm of the difference; largest {largest:.3g})"
    )
