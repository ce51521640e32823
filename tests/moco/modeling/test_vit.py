import math
from dataclasses import asdict
from functools import partial

import pytest
import torch
from torch import nn

from moco.common.errors import UserError
from moco.modeling.archs import VITS, ViTSpec, build_spec
from moco.modeling.vit import ViT, sincos_positions

MICRO = ViTSpec("vit_micro", 32)


def test_is_timms_network_tensor_by_tensor():
    import timm

    arch = VITS["vit_micro"]
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=32,
        patch_size=arch.patch_size,
        embed_dim=arch.embed_dim,
        depth=arch.depth,
        num_heads=arch.num_heads,
        num_classes=0,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    )
    torch.manual_seed(0)
    ours = ViT(MICRO)
    for p in ours.parameters():
        nn.init.normal_(p, std=0.1)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs.eval()(x), rtol=1e-4, atol=1e-5)


def test_positions_are_sines_and_cosines_of_row_and_column():
    """build_2d_sincos_position_embedding of the official vits.py, one number at a time."""
    grid, dim = 3, 8
    expected = torch.zeros(grid * grid, dim)
    for row in range(grid):
        for column in range(grid):
            for i in range(2):
                w = 1 / 10000 ** (i / 2)
                waves = (math.sin(row * w), math.cos(row * w))
                waves += (math.sin(column * w), math.cos(column * w))
                for quarter, value in enumerate(waves):
                    expected[row * grid + column, 2 * quarter + i] = value
    torch.testing.assert_close(sincos_positions(grid, dim), expected)


def test_initial_weights():
    """The official vits.py: bounds of Xavier's distribution, with q, k and v apart."""
    torch.manual_seed(0)
    vit, dim = ViT(MICRO), 128
    for weight, bound in (
        (vit.blocks[0].attn.qkv.weight, math.sqrt(6 / (dim + dim))),
        (vit.blocks[0].attn.proj.weight, math.sqrt(6 / (dim + dim))),
        (vit.blocks[0].mlp.fc1.weight, math.sqrt(6 / (dim + 4 * dim))),
        (vit.patch_embed.proj.weight, math.sqrt(6 / (3 * 16**2 + dim))),
    ):
        assert 0.99 * bound < float(weight.detach().abs().max()) <= bound
    assert not vit.blocks[0].attn.qkv.bias.any() and not vit.patch_embed.proj.bias.any()
    assert 0 < float(vit.cls_token.detach().abs().max()) < 1e-5
    assert not vit.pos_embed.requires_grad and not vit.pos_embed[0, 0].any()


def test_specs():
    assert build_spec("vit_small", "imagenet", 1.0, 224) == ViTSpec("vit_small")
    assert ViTSpec.of_shape(384, 12, 12, 16, 96) == ViTSpec("vit_small", 96)
    assert ViTSpec(**asdict(MICRO)) == MICRO
    with pytest.raises(UserError, match=r"6 heads.* vit_small"):
        ViTSpec.of_shape(384, 12, 6, 16, 224)
    with pytest.raises(UserError, match="vit_huge"):
        ViTSpec("vit_huge")
    with pytest.raises(UserError, match=r"EVAL\.CROP_PX: got 48.* 32 px"):
        MICRO.check_image(48, "EVAL.CROP_PX")
    MICRO.check_image(32, "EVAL.CROP_PX")
