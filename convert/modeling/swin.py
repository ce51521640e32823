"""Swin Transformer (V1) with Detectron2's names, and its reference implementation.

Both engines train this `Swin`, which computes what Detectron2's own `SwinTransformer` does, bit by
bit. The reference is timm's own class, which shares no code with it.

Shapes: N images, C channels, H W pixels or cells, w side of a window in cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convert.families.base import FEATURES, stochastic_depth
from convert.families.swin import PATCH_PX, SwinArchitecture, verification_size
from convert.modeling.vit import from_windows, into_windows


def relative_position_index(window: int, device: torch.device) -> Tensor:
    """Return the row of the bias table for each pair of cells of a window: (w ** 4,)."""
    cells = torch.arange(window, device=device)
    offset = cells[:, None] - cells + window - 1  # of two rows or columns, from 0
    rows, columns = offset[:, None, :, None], offset[None, :, None, :]
    return ((2 * window - 1) * rows + columns).flatten()


def shift_mask(height: int, width: int, window: int, device: torch.device) -> Tensor:
    """Return -100 for pairs of cells that only the shift brings into one window, else 0.

    Returns:
        The mask (windows, w * w, w * w), for maps of H x W cells, which are whole windows.
    """
    parts = []
    for length in (height, width):
        cell = torch.arange(length, device=device)
        parts.append((cell >= length - window).int() + (cell >= length - window // 2).int())
    region = into_windows((3 * parts[0][:, None] + parts[1])[None, :, :, None], window)
    region = region.flatten(1)
    is_same = region[:, None] == region[:, :, None]
    return torch.zeros(is_same.shape, device=device).masked_fill(~is_same, -100.0)


class WindowAttention(nn.Module):
    """Self-attention within windows, with relative position biases: (windows, w * w, C) -> same."""

    def __init__(self, dim: int, num_heads: int, window: int, qkv_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * window - 1) ** 2, num_heads)
        )
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        # Before the other weights, as in Detectron2, so that random numbers have the same order.
        if not self.relative_position_bias_table.is_meta:
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Apply attention; `positions` and `mask` are those of the functions above."""
        windows, cells, dim = x.shape
        qkv = self.qkv(x).reshape(windows, cells, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = (q * (dim // self.num_heads) ** -0.5) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[positions].view(cells, cells, self.num_heads)
        scores = scores + bias.permute(2, 0, 1).contiguous()
        if mask is not None:
            scores = scores.view(-1, len(mask), self.num_heads, cells, cells) + mask[:, None]
            scores = scores.view(-1, self.num_heads, cells, cells)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Attention in windows, which may be shifted, and an MLP: (N, H * W, C) -> same."""

    def __init__(
        self, dim: int, num_heads: int, window: int, shift: int, qkv_bias: bool, drop_path: float
    ) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, num_heads, window, qkv_bias)
        self.drop_path = stochastic_depth(drop_path)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential()
        self.mlp.add_module("fc1", nn.Linear(dim, 4 * dim))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("fc2", nn.Linear(4 * dim, dim))

    def forward(
        self, x: Tensor, height: int, width: int, positions: Tensor, mask: Tensor
    ) -> Tensor:
        """Apply the block to maps padded to whole windows: (N, H * W, C) -> same."""
        y = self.norm1(x).view(len(x), height, width, -1)
        y = F.pad(y, (0, 0, 0, -width % self.window, 0, -height % self.window))
        rows, columns = y.shape[1:3]
        if self.shift:
            y = y.roll((-self.shift, -self.shift), (1, 2))
        y = into_windows(y, self.window).flatten(1, 2)
        y = self.attn(y, positions, mask if self.shift else None)
        y = from_windows(y.unflatten(1, (self.window, self.window)), (rows, columns))
        if self.shift:
            y = y.roll((self.shift, self.shift), (1, 2))
        x = x + self.drop_path(y[:, :height, :width].reshape(x.shape))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchMerging(nn.Module):
    """Norm and projection of 2 x 2 cells: (N, H * W, C) -> (N, H/2 * W/2, 2C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm = nn.LayerNorm(4 * dim)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        """Merge the cells, of maps padded to an even height and width."""
        n, _, dim = x.shape
        x = F.pad(x.view(n, height, width, dim), (0, 0, 0, width % 2, 0, height % 2))
        x = x.view(n, x.shape[1] // 2, 2, x.shape[2] // 2, 2, dim).permute(0, 1, 3, 4, 2, 5)
        return self.reduction(self.norm(x.reshape(n, -1, 4 * dim)))


class Stage(nn.Module):
    """Blocks, the odd ones of shifted windows, and the merging before the next stage, if any."""

    def __init__(
        self, a: SwinArchitecture, number: int, drop_path: Sequence[float], has_next: bool
    ) -> None:
        super().__init__()
        dim, heads, self.window = a.dims[number], a.num_heads[number], a.window_size
        self.blocks = nn.ModuleList(
            Block(dim, heads, self.window, j % 2 * (self.window // 2), a.qkv_bias, rate)
            for j, rate in enumerate(drop_path)
        )
        self.downsample = PatchMerging(dim) if has_next else None

    def forward(
        self, x: Tensor, height: int, width: int, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the map and the input of the next stage: (N, H * W, C), (N, H/2 * W/2, 2C)."""
        rows, columns = (side + -side % self.window for side in (height, width))
        mask = shift_mask(rows, columns, self.window, x.device)
        for block in self.blocks:
            x = block(x, height, width, positions, mask)
        return x, self.downsample(x, height, width) if self.downsample else x


class PatchEmbed(nn.Module):
    """Patch embedding and a norm: (N, 3, H, W) -> (N, H/4 * W/4, C), and the map's size."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, PATCH_PX, stride=PATCH_PX)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        """Embed the patches, of images padded to a multiple of the patch size."""
        x = F.pad(x, (0, -x.shape[3] % PATCH_PX, 0, -x.shape[2] % PATCH_PX))
        x = self.proj(x)
        return self.norm(x.flatten(2).transpose(1, 2)), x.shape[2], x.shape[3]


class Swin(nn.Module):
    """Swin backbone: (N, 3, H, W) normalized pixels -> {"res2", …, "res5": (N, C, h, w)}.

    Windows are partitioned and shifted at every size, as in the official detectors; the official
    classifier shifts none in a map of a single window.

    Args:
        architecture: Numbers of blocks, channels and heads, and the size of the windows.
        drop_path: Stochastic depth rate of the last block, 0..1, increasing linearly from 0.
        output_norms: Add a LayerNorm to every feature (`norm0` .. `norm3`). Classifiers have none;
            the official detectors learn them.
        freeze_at: Number of parts, of the patch embedding and the four stages, that are not
            trained.

    Attributes:
        strides: Strides of the features, by name.
        stage_channels: Channels of the features, by name.
    """

    size_divisibility = 32
    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]

    def __init__(
        self,
        architecture: SwinArchitecture,
        *,
        drop_path: float = 0.0,
        output_norms: bool = False,
        freeze_at: int = 0,
    ) -> None:
        super().__init__()
        a = architecture
        self.window = a.window_size
        rates = torch.linspace(0, drop_path, sum(a.depths), device="cpu").tolist()
        self.patch_embed = PatchEmbed(a.embed_dim)
        self.layers = nn.ModuleList()
        for i, depth in enumerate(a.depths):
            own, rates = rates[:depth], rates[depth:]
            self.layers.append(Stage(a, i, own, has_next=i + 1 < len(a.depths)))
        self.norms: Sequence[str] = [f"norm{i}" for i in range(4)] if output_norms else []
        for name, dim in zip(self.norms, a.dims, strict=False):
            self.add_module(name, nn.LayerNorm(dim))
        self.strides = {name: PATCH_PX * 2**i for i, name in enumerate(FEATURES)}
        self.stage_channels = dict(zip(FEATURES, a.dims, strict=True))
        for module in self.modules():
            if isinstance(module, nn.Linear) and not module.weight.is_meta:
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for part in (self.patch_embed, *self.layers)[:freeze_at]:
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the features of all stages."""
        features = self.stage_maps(x)
        for norm, name in zip(self.norms, FEATURES, strict=False):
            if name in features:
                rows = features[name].permute(0, 2, 3, 1)
                features[name] = self.get_submodule(norm)(rows).permute(0, 3, 1, 2)
        return {name: value.contiguous() for name, value in features.items()}

    def stage_maps(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the features before their norms; a caller may replace it by some of them."""
        x, height, width = self.patch_embed(x)
        positions, features = relative_position_index(self.window, x.device), {}
        for name, layer in zip(FEATURES, self.layers, strict=True):
            y, x = layer(x, height, width, positions)
            features[name] = y.view(len(y), height, width, -1).permute(0, 3, 1, 2)
            height, width = (height + 1) // 2, (width + 1) // 2
        return features


def reference(
    architecture: SwinArchitecture, classifier_px: tuple[int, int] | None = None
) -> nn.Module:
    """Build timm's own class without its head, for images of `verification_size`.

    The maps pass through the identities `res2` .. `res5`, channels first.

    Args:
        architecture: Architecture.
        classifier_px: Height and width of the images of a classifier, which does not shift in maps
            of a single window.
    """
    from timm.models import swin_transformer

    class Reference(swin_transformer.SwinTransformer):
        def forward(self, x: Tensor) -> Any:
            maps = self.forward_intermediates(x, intermediates_only=True)
            return [self.get_submodule(f)(y) for f, y in zip(FEATURES, maps, strict=True)]

    a = architecture
    # On the CPU, because it computes the indices of the bias tables.
    with torch.device("cpu"):
        net: Any = Reference(
            img_size=classifier_px or verification_size(a),
            num_classes=0,
            global_pool="",
            embed_dim=a.embed_dim,
            depths=a.depths,
            num_heads=a.num_heads,
            window_size=a.window_size,
            qkv_bias=a.qkv_bias,
            always_partition=classifier_px is None,
            weight_init="skip",
        )
    net.norm = net.head = nn.Identity()
    for feature in FEATURES:
        net.add_module(feature, nn.Identity())
    module: nn.Module = net
    return module


def classifier_features(
    architecture: SwinArchitecture, state: Mapping[str, Tensor], image: Tensor
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the stages of timm's networks, and their outputs (N, h, w, C) in a classifier."""
    net = reference(architecture, (image.shape[2], image.shape[3]))
    net.load_state_dict(dict(state), strict=True)
    maps: list[Tensor] = net.eval()(image)
    outputs = {name: y.permute(0, 2, 3, 1) for name, y in zip(FEATURES, maps, strict=True)}
    return {f"layers.{i}": name for i, name in enumerate(FEATURES)}, outputs
