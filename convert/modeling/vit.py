"""ViT backbone in Detectron2's layout, without Detectron2, for both engines.

Parameter names, the order of creation and the arithmetic of `ViT` follow
detectron2/modeling/backbone/vit.py, as far as that has them.

Shapes: N images, C channels, H W pixels, h w patches, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convert.families.base import stochastic_depth
from convert.families.vit import FEATURE, GELU, ViTArchitecture, periods, resize_map


class LayerScale(nn.Module):
    """Learned factor for each channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels: (N, h, w, C) -> same."""
        return x * self.gamma


class QuickGELU(nn.Module):
    """OpenAI's approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to every element."""
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    GELU: nn.GELU,
    "quick_gelu": QuickGELU,
    "gelu_tanh": partial(nn.GELU, "tanh"),
}


class GatedSiLU(nn.Module):
    """First half of the channels through SiLU, times the second half: (…, 2 C) -> (…, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Gate the channels."""
        gate, x = x.chunk(2, dim=-1)
        return F.silu(gate) * x


class RotaryPositions(nn.Module):
    """DINOv3's rotary positions: angles 2 pi y / period and 2 pi x / period, for every head.

    The coordinates of a map are between -1 and 1 on both axes, whatever its size.

    Args:
        head_dim: Channels of a head.
    """

    periods: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("periods", periods(head_dim))

    def forward(self, size: tuple[int, int], window: int = 0, factor: float = 1.0) -> Tensor:
        """Compute cosines and sines of a map's positions.

        Args:
            size: Height and width of the map.
            window: Side of the attention windows; 0 for one window that is the whole map.
            factor: Factor of the coordinates.

        Returns:
            (2, windows, positions, head_dim); 0 where a window is padded.
        """
        device = self.periods.device
        y, x = ((torch.arange(n, device=device) + 0.5) / n * 2 - 1 for n in size)
        y, x = (2 * math.pi * factor * at[:, None] / self.periods for at in (y, x))
        angles = torch.cat([y[:, None].expand(*size, -1), x.expand(*size, -1)], dim=-1)
        table = torch.stack([angles.cos(), angles.sin()]).tile(2)
        windows = into_windows(table, window) if window else table
        return windows.unflatten(0, (2, -1)).flatten(2, 3)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate pairs of channels (i, i + C / 2) of patches, after the tokens before them.

    Args:
        x: (…, images x windows, heads, tokens + positions, C).
        table: Output of `RotaryPositions`.
    """
    prefix = x.shape[-2] - table.shape[2]
    patches = x[..., prefix:, :].unflatten(-4, (-1, table.shape[1]))
    a, b = patches.chunk(2, dim=-1)
    cos, sin = table[:, :, None]
    rotated = (patches * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype).flatten(-5, -4)
    return torch.cat([x[..., :prefix, :], rotated], dim=-2)


class Attention(nn.Module):
    """Multi-head attention over tokens and all positions of a map, (N, T + h w, C) -> same.

    Args:
        dim: Number of channels.
        num_heads: Number of attention heads.
        qkv_bias: Use a bias in queries, keys and values.
        rel_pos_grid: If > 0, use decomposed relative positions (arXiv 2112.01526, Eq. 4) of a
            square map of this side, interpolated for other sizes. They start at 0, and there are
            no tokens.
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

    def forward(
        self, x: Tensor, size: tuple[int, int], rotary: Tensor | None = None, copies: int = 1
    ) -> Tensor:
        """Apply attention.

        Args:
            x: Tokens and positions.
            size: Height h and width w of the map.
            rotary: Output of `RotaryPositions`, or None without rotary positions.
            copies: Number of windows with copies of the tokens; each copy counts as the 1 / copies
                part of a token.
        """
        n, length, _ = x.shape
        h, w = size
        qkv = self.qkv(x).reshape(n, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if rotary is not None:
            qkv = torch.cat([rotate(qkv[:2], rotary), qkv[2:]])
        q, k, v = qkv.reshape(3, n * self.num_heads, length, -1).unbind(0)
        weights = (q * self.scale) @ k.transpose(-2, -1)
        if copies > 1 and length > h * w:
            weights[..., : length - h * w] -= math.log(copies)
        if self.has_rel_pos:
            at = q.unflatten(1, (h, w))
            rows = torch.einsum("bhwc,hkc->bhwk", at, relative_positions(self.rel_pos_h, h))
            columns = torch.einsum("bhwc,wkc->bhwk", at, relative_positions(self.rel_pos_w, w))
            weights = weights.view(-1, h, w, h, w) + rows[..., None] + columns[..., None, :]
            weights = weights.view(-1, h * w, h * w)
        x = (weights.softmax(dim=-1) @ v).view(n, self.num_heads, length, -1)
        y: Tensor = self.proj(x.transpose(1, 2).reshape(n, length, -1))
        return y


def relative_positions(table: Tensor, size: int) -> Tensor:
    """Gather relative positions of query and key: (2 S - 1, C) -> (size, size, C).

    The table has a row for each distance 1 - S .. S - 1, and is interpolated if `size` is not S.
    """
    if len(table) != 2 * size - 1:
        table = F.interpolate(table.T[None], size=2 * size - 1, mode="linear")[0].T
    place = torch.arange(size, device=table.device)
    return table[place[:, None] - place + size - 1]


def into_windows(x: Tensor, side: int) -> Tensor:
    """Split a map into windows, zero-padded: (N, h, w, C) -> (windows, side, side, C)."""
    n, h, w, c = x.shape
    if h % side or w % side:
        x = F.pad(x, (0, 0, 0, -w % side, 0, -h % side))
    x = x.view(n, -(-h // side), side, -(-w // side), side, c)
    return x.transpose(2, 3).reshape(-1, side, side, c)


def from_windows(windows: Tensor, size: tuple[int, int]) -> Tensor:
    """Join windows to a map of this size (h, w); inverse of `into_windows`."""
    h, w = size
    side, c = windows.shape[2:]
    x = windows.view(-1, -(-h // side), -(-w // side), side, side, c).transpose(2, 3)
    return x.flatten(3, 4).flatten(1, 2)[:, :h, :w].contiguous()


class Block(nn.Module):
    """Transformer block: attention and MLP, each with a norm before and a shortcut around.

    Args:
        a: Architecture.
        window_size: Side of the attention windows; 0 for global attention.
        rel_pos_grid: See `Attention`.
        drop_path: Probability to drop a branch for an image.
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
        hidden = 2 * a.mlp_dim if a.swiglu else a.mlp_dim
        self.mlp.add_module("fc1", nn.Linear(a.embed_dim, hidden))
        self.mlp.add_module("act", GatedSiLU() if a.swiglu else ACTIVATIONS[a.activation]())
        self.mlp.add_module("fc2", nn.Linear(a.mlp_dim, a.embed_dim))
        self.ls2 = LayerScale(a.embed_dim) if a.layer_scale else nn.Identity()

    def forward(self, x: Tensor, size: tuple[int, int], rotary: Tensor | None = None) -> Tensor:
        """Apply the block: tokens and a map's positions (N, T + h w, C) -> same."""
        y = self.norm1(x)
        if self.window_size:
            y = self._attend_in_windows(y, size, rotary)
        else:
            y = self.attn(y, size, rotary)
        x = x + self.drop_path(self.ls1(y))
        y = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))
        return y

    def _attend_in_windows(self, x: Tensor, size: tuple[int, int], rotary: Tensor | None) -> Tensor:
        """Apply attention in windows, each with a copy of the tokens, and average the copies.

        Deviation: DINOv3's own detector treats each window as an image, with tokens and coordinates
        of the window.

        A window has fewer keys than the map, so that a token would draw more attention there.
        Therefore a copy counts as a fraction of a token. Where tokens draw much attention, as
        trained ones do, features then stay closer to those without windows than with copies that
        count fully, tokens in global blocks alone, or none; docs/guides/finetuning.md has the
        numbers.
        """
        side, prefix = self.window_size, x.shape[1] - size[0] * size[1]
        windows = into_windows(x[:, prefix:].unflatten(1, size), side).flatten(1, 2)
        count = len(windows) // len(x)
        if prefix:
            copies = x[:, :prefix].repeat_interleave(count, dim=0)
            windows = torch.cat([copies, windows], dim=1)
        windows = self.attn(windows, (side, side), rotary, count)
        y = from_windows(windows[:, prefix:].unflatten(1, (side, side)), size).flatten(1, 2)
        if prefix:
            tokens = windows[:, :prefix].unflatten(0, (len(x), -1)).mean(dim=1)
            y = torch.cat([tokens, y], dim=1)
        return y


class ViT(nn.Module):
    """Vision transformer: normalized pixels (N, 3, H, W) -> {"last_feat": (N, C, h, w)}.

    H and W are multiples of the patch size. Under a seed, the initial weights are those of
    Detectron2's class. With the default arguments the network is that of the pre-training.

    Args:
        architecture: Architecture of the pre-training, with the number of tokens.
        window_size: Side of the attention windows, in patches; 0 for global attention in all
            blocks.
        global_blocks: Indices of blocks with global attention.
        rel_pos_grid: If > 0, use relative positions, in global blocks for a map of this side.
        drop_path: Stochastic depth rate of the last block, 0..1, increasing linearly from 0.
        checkpoint_blocks: Recompute activations of blocks in the backward pass.
        out_blocks: Indices of blocks whose maps are the features, e.g. "block0", instead of the
            last one's.
        rope_rescale: If > 0, multiply the coordinates of rotary positions by a random number in
            each block while training, log-uniform between 1 / N and N, as DINOv3's pre-training.

    Attributes:
        strides: Strides of the features, by name.
        stage_channels: Channels of the features, by name.
    """

    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]
    pos_embed: nn.Parameter
    cls_token: nn.Parameter
    reg_token: nn.Parameter

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
        rope_rescale: float = 0.0,
    ) -> None:
        super().__init__()
        a = architecture
        self.class_position, self.num_tokens = a.class_position and not a.rotary, a.tokens
        self.checkpoint_blocks, self.out_blocks = checkpoint_blocks, tuple(out_blocks)
        self.rope_rescale = rope_rescale
        names = [f"block{i}" for i in out_blocks] or [FEATURE]
        self.strides = dict.fromkeys(names, a.patch_size)
        self.stage_channels = dict.fromkeys(names, a.embed_dim)
        self.patch_embed = nn.Sequential()
        proj = nn.Conv2d(3, a.embed_dim, a.patch_size, stride=a.patch_size, bias=a.patch_bias)
        self.patch_embed.add_module("proj", proj)
        self.grid, self.position_rule = a.image_size // a.patch_size, a.position_rule
        embeddings = {} if a.rotary else {"pos_embed": self.grid**2 + a.class_position}
        if a.tokens:
            embeddings |= {"cls_token": 1}
        if a.tokens > 1:
            embeddings |= {"reg_token": a.tokens - 1}
        for name, count in embeddings.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(1, count, a.embed_dim)))
        self.rope = RotaryPositions(a.embed_dim // a.num_heads) if a.rotary else None
        norm = nn.LayerNorm(a.embed_dim, eps=a.layer_norm_eps) if a.pre_norm else nn.Identity()
        self.norm_pre = norm
        self.blocks = nn.Sequential()
        for i, rate in enumerate(torch.linspace(0, drop_path, a.depth, device="cpu").tolist()):
            window = 0 if i in global_blocks else window_size
            rel_pos = rel_pos_grid and (window or rel_pos_grid)
            self.blocks.append(Block(a, window, rel_pos, rate))
        for parameter in self.embeddings().values():
            nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def embeddings(self) -> dict[str, nn.Parameter]:
        """Return position embedding and tokens, as far as there are any, by name."""
        return dict(self.named_parameters(recurse=False))

    def positions(self, size: tuple[int, int]) -> Tensor:
        """Return the position embedding of h x w patches, (1, h, w, C), interpolated if needed."""
        x = self.pos_embed[:, int(self.class_position) :].unflatten(1, (self.grid, self.grid))
        if size != (self.grid, self.grid):
            x = resize_map(x, size, self.position_rule)
        return x

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the features of the last block, or of those in `out_blocks`."""
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        size = x.shape[1], x.shape[2]
        if self.rope is None:
            x = x + self.positions(size)
        x = x.flatten(1, 2)
        if self.num_tokens:
            first = self.cls_token + (self.pos_embed[:, :1] if self.class_position else 0)
            tokens = torch.cat([first, self.reg_token], dim=1) if self.num_tokens > 1 else first
            x = torch.cat([tokens.expand(len(x), -1, -1), x], dim=1)
        x = self.norm_pre(x)
        features, tables = {}, self._rotary(size)
        for i, (block, table) in enumerate(zip(self.blocks, tables, strict=True)):
            if self.checkpoint_blocks and torch.is_grad_enabled():
                x = checkpoint(block, x, size, table, use_reentrant=False)
            else:
                x = block(x, size, table)
            if i in self.out_blocks:
                features[f"block{i}"] = self._as_map(x, size)
        return features or {FEATURE: self._as_map(x, size)}

    def _as_map(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return x[:, self.num_tokens :].unflatten(1, size).permute(0, 3, 1, 2)

    def _rotary(self, size: tuple[int, int]) -> Iterator[Tensor | None]:
        """Yield the table of each block, see `RotaryPositions`."""
        tables: dict[int, Tensor] = {}
        for block in self.blocks:
            window = cast(Block, block).window_size
            if self.rope is None:
                yield None
            elif self.rope_rescale and self.training:
                at = torch.empty(()).uniform_(-1, 1)
                yield self.rope(size, window, self.rope_rescale ** float(at))
            else:
                if window not in tables:
                    tables[window] = self.rope(size, window)
                yield tables[window]
