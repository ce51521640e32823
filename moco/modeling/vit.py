"""Plain vision transformer (arXiv 2010.11929) as the encoder of MoCo v3.

Tensor names are timm's (timm/models/vision_transformer.py), so that other projects' converters can
read the checkpoints.

N images, H W image size in pixels, C channels of a token, L tokens, h w patches.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.modeling.archs import VITS, ViTSpec

LAYER_NORM_EPS = 1e-6  # timm's and MoCo v3's


class PatchEmbed(nn.Module):
    """Patch embedding by a convolution, (N, 3, H, W) → (N, h w, C)."""

    def __init__(self, dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens of the patches, row by row."""
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention, (N, L, C) → (N, L, C)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every token to all tokens."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """MLP with one hidden layer and GELU, (N, L, C) → (N, L, C)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token separately."""
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm transformer block of attention and MLP, (N, L, C) → (N, L, C)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of attention and MLP to the tokens."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Vision transformer without classifier: images (N, 3, H, W) → class token (N, C).

    The position embedding consists of fixed 2-D sines and cosines. The initialization is that of
    MoCo v3 (arXiv 2104.02057, sec. 4, and its vits.py): Xavier uniform, with queries, keys and
    values as separate matrices and the patch projection as one matrix; biases are 0.
    """

    head_name: ClassVar[str] = "head"

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        arch = VITS[spec.arch]
        self.feature_dim = dim = arch.embed_dim
        grid = spec.image_size // arch.patch_size
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        positions = sincos_positions(grid, dim)
        self.pos_embed = nn.Parameter(torch.cat([torch.zeros(1, dim), positions])[None])
        self.pos_embed.requires_grad_(False)
        self.patch_embed = PatchEmbed(dim, arch.patch_size)
        self.blocks = nn.Sequential(*(Block(dim, arch.num_heads) for _ in range(arch.depth)))
        self.norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.head: nn.Module = nn.Identity()
        self._initialize()

    def forward(self, x: Tensor) -> Tensor:
        """Return the class token after the last norm, passed through `head`."""
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                fan_out, *fan_in = module.weight.shape
                outputs = fan_out // 3 if fan_out == 3 * fan_in[0] else fan_out  # q, k, v
                bound = math.sqrt(6 / (outputs + math.prod(fan_in)))
                nn.init.uniform_(module.weight, -bound, bound)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.cls_token, std=1e-6)


def sincos_positions(grid: int, dim: int) -> Tensor:
    """Return the position embedding (grid * grid, dim) of patches, row by row.

    A quarter of the channels each are sine and cosine of the row, sine and cosine of the column,
    at frequencies from 1 down to 1/10000, in the order of facebookresearch/moco-v3 vits.py. `dim`
    must be a multiple of 4.
    """
    frequencies = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    angles = torch.arange(grid, dtype=torch.float64)[:, None] * frequencies  # (grid, dim / 4)
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)  # (grid, dim / 2)
    waves = waves.to(torch.get_default_dtype())
    rows = waves[:, None].expand(-1, grid, -1)
    columns = waves[None].expand(grid, -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)
