"""A plain vision transformer of torch's functions alone, with the tokens before its patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convert.families.vit import ViTArchitecture
from convert.modeling.vit import ViT


class Transcription(nn.Module):
    """A vision transformer of torch's functions alone, with timm's names.

    `tokens`: (1, n, C), what comes before the patches, positions added.
    """

    def __init__(self, architecture: ViTArchitecture, tokens: Tensor | None = None) -> None:
        super().__init__()
        self.architecture, self.tokens = architecture, tokens
        for key, value in ViT(replace(architecture, tokens=0)).state_dict().items():
            *path, last = key.split(".")
            module: nn.Module = self
            for name in path:
                if not hasattr(module, name):
                    module.add_module(name, nn.Module())
                module = module.get_submodule(name)
            module.register_parameter(last, nn.Parameter(value))
        self.prefix = 0 if tokens is None else tokens.shape[1]

    def forward(self, image: Tensor) -> Tensor:
        a, p = self.architecture, self.state_dict()
        patches = p["patch_embed.proj.weight"], p.get("patch_embed.proj.bias")
        x = F.conv2d(image, *patches, stride=a.patch_size)
        x = x.flatten(2).transpose(1, 2) + p["pos_embed"][:, int(a.class_position) :]
        if self.tokens is not None:
            x = torch.cat([self.tokens, x], dim=1)
        if a.pre_norm:
            norm = p["norm_pre.weight"], p["norm_pre.bias"]
            x = F.layer_norm(x, (a.embed_dim,), *norm, a.layer_norm_eps)
        for i in range(a.depth):
            for norm, branch, scale in (
                ("norm1", self._attend, "ls1"),
                ("norm2", self._mlp, "ls2"),
            ):
                its = {
                    k.removeprefix(f"blocks.{i}."): v for k, v in p.items() if f"blocks.{i}." in k
                }
                weight, bias = its[f"{norm}.weight"], its[f"{norm}.bias"]
                y = F.layer_norm(x, (a.embed_dim,), weight, bias, a.layer_norm_eps)
                y = branch(y, its)
                x = x + y * its[f"{scale}.gamma"] if a.layer_scale else x + y
        x = x[:, self.prefix :]
        side = round(x.shape[1] ** 0.5)
        return x.transpose(1, 2).reshape(len(x), -1, side, side)

    def _attend(self, x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        qkv = F.linear(x, p["attn.qkv.weight"], p.get("attn.qkv.bias"))
        q, k, v = (
            part.unflatten(2, (self.architecture.num_heads, -1)).transpose(1, 2)
            for part in qkv.chunk(3, dim=2)
        )
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.linear(x, p["attn.proj.weight"], p["attn.proj.bias"])

    def _mlp(self, x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        x = F.linear(x, p["mlp.fc1.weight"], p["mlp.fc1.bias"])
        gate, *others = x.chunk(1 + self.architecture.swiglu, dim=2)
        activation = {
            "gelu": F.gelu,
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
        }[self.architecture.activation]
        x = F.silu(gate) * others[0] if others else activation(gate)
        return F.linear(x, p["mlp.fc2.weight"], p["mlp.fc2.bias"])
