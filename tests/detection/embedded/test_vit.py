"""Vision transformers in the embedded engine: weights, windows, frozen and checkpointed blocks.

Equality with Detectron2 is in tests/detection/parity/.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert.contract import InputContract
from convert.modeling.vit import (
    Attention,
    Block,
    RotaryPositions,
    ViT,
    from_windows,
    into_windows,
    relative_positions,
)
from convert.verify import target_tensors
from detection.config.task import default_task
from detection.config.weights import apply_contract
from detection.embedded.model import build_model
from detection.engine.weights import load_converted
from detection.modeling.backbones import backbone_type
from detection.modeling.backbones.vit import architecture, build_vit, ends_of_quarters
from moco.common.errors import UserError
from tests.oracles import tiny_detector as tiny

VIT = "MODEL.VIT."


def file_for(keys: dict[str, Any]) -> dict[str, Tensor]:
    """Return random tensors with the names and shapes of a converted file for this task."""
    generator = torch.Generator().manual_seed(0)
    contract = contract_for(keys)
    shapes = {name: x.shape for name, x in target_tensors(contract).items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def contract_for(keys: dict[str, Any]) -> InputContract:
    fields = vars(architecture(tiny.task(keys).MODEL))
    pixels = {"pixel_mean": [1.0, 2.0, 3.0], "pixel_std": [4.0, 5.0, 6.0], "channel_order": "RGB"}
    return InputContract.from_fields(
        **pixels,
        family="vit",
        architecture=fields,
        source="a test",
        source_sha256="0" * 64,
        encoder="single",
    )


@pytest.mark.parametrize("pyramid", [tiny.VIT_SFP, tiny.VIT_FPN], ids=["sfp", "fpn"])
def test_no_tensor_lands_in_a_pyramid_as_wide_as_the_transformer(pyramid: dict) -> None:
    """With 256 channels everywhere, a suffix and a shape would fit other layers as well."""
    wide = {"MODEL.VIT.EMBED_DIM": 256, "MODEL.FPN.OUT_CHANNELS": 256, "MODEL.FPN.NORM": "LN"}
    keys = {**pyramid, **wide}
    kind = backbone_type(keys["MODEL.BACKBONE.NAME"])
    model, tensors = build_model(tiny.task(keys)), file_for(keys)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    coverage = load_converted(model, tensors, kind)
    after = model.state_dict()
    assert coverage.loaded == len(tensors)
    for name, x in tensors.items():
        assert torch.equal(after[f"backbone.net.{name}"], x)
    rest = set(after) - {f"backbone.net.{name}" for name in tensors}
    assert any(name.endswith(".norm.weight") and len(after[name]) == 256 for name in rest)
    assert all(torch.equal(before[name], after[name]) for name in rest)
    # Relative positions are no part of a file; whatever is one has to be there.
    assert "backbone.net.blocks.0.attn.rel_pos_h" in coverage.left_at_init
    final = {"norm.weight": torch.ones(256), "norm.bias": torch.ones(256)}
    with pytest.raises(UserError, match=r"no tensors for norm\.weight"):
        load_converted(model, {**tensors, **final}, kind)
    del tensors["blocks.3.mlp.fc2.bias"]
    with pytest.raises(UserError, match=r"at random: backbone\.net\.blocks\.3\.mlp\.fc2\.bias"):
        load_converted(model, tensors, kind)


def test_the_contract_describes_the_network_or_names_a_task_that_can() -> None:
    changes = {f"{VIT}LAYER_SCALE": True, f"{VIT}LAYER_NORM_EPS": 1e-12, f"{VIT}QKV_BIAS": False}
    contract = contract_for({**tiny.VIT_SFP, **changes})
    cfg = default_task()
    with pytest.raises(UserError, match=r"BACKBONE\.NAME build_resnet_backbone.*ViT_Ti_small"):
        apply_contract(cfg, contract, ())
    cfg.MODEL.BACKBONE.NAME = "build_vit_fpn_backbone"
    apply_contract(cfg, contract, ())
    assert architecture(cfg.MODEL) == contract.architecture
    wrong = f"{VIT}EMBED_DIM"
    cfg.merge_from_list([wrong, 768])
    with pytest.raises(UserError, match=rf"{wrong}: the task file is for a ViT of width 768"):
        apply_contract(cfg, contract, {wrong}, {wrong})


def test_windows_are_cut_and_joined() -> None:
    x = torch.randn(2, 7, 11, 3)
    windows = into_windows(x, 4)
    assert windows.shape == (2 * 2 * 3, 4, 4, 3)
    assert torch.equal(windows[4], torch.nn.functional.pad(x[0, 4:, 4:8], (0, 0, 0, 0, 0, 1)))
    assert torch.equal(from_windows(windows, (7, 11)), x)


@pytest.mark.parametrize(("window", "reached"), [(3, 9), (0, 36)])
def test_attention_reaches_its_window_or_the_whole_map(window: int, reached: int) -> None:
    block = Block(architecture(tiny.task(tiny.VIT_SFP).MODEL), window)
    x = torch.randn(1, 6, 6, 32)
    changed = x.clone()
    changed[0, 4, 1, 0] += 10  # of all channels, the norm would take it away
    with torch.no_grad():
        maps = [block(its.flatten(1, 2), (6, 6)).unflatten(1, (6, 6)) for its in (x, changed)]
        places = (maps[0] != maps[1]).any(dim=-1)
    assert int(places.sum()) == reached
    assert bool(places[0, 3:, :3].all())


def test_relative_positions_by_hand() -> None:
    table = torch.arange(5.0)[:, None]  # of the distances -2 .. 2
    expected = torch.tensor([[2.0, 1.0, 0.0], [3.0, 2.0, 1.0], [4.0, 3.0, 2.0]])
    assert torch.equal(relative_positions(table, 3)[..., 0], expected)
    wider = relative_positions(table, 5)[..., 0]
    assert torch.equal(wider.diagonal(), torch.full((5,), 2.0))
    torch.testing.assert_close(wider, (4 - wider).T)  # as the table, odd around its middle


def test_ends_of_quarters() -> None:
    assert ends_of_quarters(12) == (2, 5, 8, 11)
    assert ends_of_quarters(24) == (5, 11, 17, 23)
    assert ends_of_quarters(5) == (0, 1, 2, 4)


def test_checkpointed_blocks_have_the_same_gradients() -> None:
    samples = tiny.images([(101, 133), (90, 64)], seed=2)
    gradients = []
    for checkpointed in (False, True):
        keys = {**tiny.VIT_FPN, "MODEL.MASK_ON": False, f"{VIT}CHECKPOINT_BLOCKS": checkpointed}
        torch.manual_seed(0)
        model = build_model(tiny.task(keys))
        calls: list[int] = []
        count = calls.append
        model.backbone.net.blocks[1].mlp.register_forward_hook(lambda *_, add=count: add(1))
        torch.manual_seed(1)
        sum(model(samples).values()).backward()
        assert len(calls) == 1 + checkpointed
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(x, gradients[1][name]) for name, x in gradients[0].items())
    assert gradients[0]["backbone.net.pos_embed"].abs().sum() > 0


def test_frozen_parts_do_not_learn() -> None:
    for freeze_at, frozen in ((0, set()), (1, {"embed"}), (3, {"embed", "0", "1"})):
        cfg = tiny.task({**tiny.VIT_SFP, "MODEL.BACKBONE.FREEZE_AT": freeze_at})
        for name, parameter in build_vit(ViT, cfg.MODEL).named_parameters():
            part = "embed" if "embed" in name else name.split(".")[1]
            assert parameter.requires_grad == (part not in frozen), name


def test_windows_have_the_maps_coordinates_and_copies_of_the_tokens() -> None:
    """A block with windows is one without, of each window with its part of the map's table."""
    a = architecture(tiny.task(tiny.DINO).MODEL)
    torch.manual_seed(0)
    block, rope = Block(a, 3), RotaryPositions(8)
    tokens, image = torch.randn(2, a.tokens, 32), torch.randn(2, 6, 9, 32)
    x = torch.cat([tokens, image.flatten(1, 2)], dim=1)
    with torch.no_grad():
        block.attn.proj.weight.copy_(torch.randn(32, 32))
        its = block(x, (6, 9), rope((6, 9), 3))
        y = block.norm1(x)
        parts = y[:, a.tokens :].unflatten(1, (6, 9))
        table, results = rope((6, 9)).unflatten(2, (6, 9)), []
        for i, j in itertools.product((0, 3), (0, 3, 6)):
            window = parts[:, i : i + 3, j : j + 3].flatten(1, 2)
            at = table[:, :, i : i + 3, j : j + 3].flatten(2, 3)
            one = torch.cat([y[:, : a.tokens], window], dim=1)
            results.append(block.attn(one, (3, 3), at, copies=6))
        mean = torch.stack(results)[:, :, : a.tokens].mean(dim=0)
        for i, result in enumerate(results):
            part = parts[:, i // 3 * 3 :, i % 3 * 3 :]
            part[:, :3, :3] = result[:, a.tokens :].unflatten(1, (3, 3))
        expected = x + block.ls1(torch.cat([mean, parts.flatten(1, 2)], dim=1))
        expected = expected + block.ls2(block.mlp(block.norm2(expected)))
    torch.testing.assert_close(its, expected)


def test_copies_of_a_token_count_as_one() -> None:
    """Less attention to copies is more to everything else: as if that were there as often."""
    attention = Attention(32, 4, qkv_bias=True)
    nn.init.normal_(attention.qkv.weight)
    tokens, patches = torch.randn(2, 3, 32), torch.randn(2, 4, 32)
    with torch.no_grad():
        its = attention(torch.cat([tokens, patches], dim=1), (2, 2), copies=5)
        expected = attention(torch.cat([tokens, *[patches] * 5], dim=1), (10, 2))[:, :7]
    torch.testing.assert_close(its, expected)


def test_one_window_is_global_attention() -> None:
    a = architecture(tiny.task(tiny.DINO).MODEL)
    torch.manual_seed(0)
    whole, windows = (ViT(a, window_size=side).eval() for side in (0, 6))
    windows.load_state_dict(whole.state_dict())
    image = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        assert torch.equal(whole(image)["last_feat"], windows(image)["last_feat"])


def test_coordinates_are_rescaled_only_while_training_and_in_each_block_anew() -> None:
    torch.manual_seed(0)
    net = ViT(architecture(tiny.task(tiny.DINO).MODEL), rope_rescale=2.0)
    plain = ViT(architecture(tiny.task(tiny.DINO).MODEL))
    tables = list(net._rotary((4, 4)))
    assert not any(torch.equal(tables[0], other) for other in tables[1:])
    # The slowest period: an angle of less than a right one.
    factors = [t[1, 0, 0, 1].asin() / plain.rope((4, 4))[1, 0, 0, 1].asin() for t in tables]
    assert all(0.5 <= factor <= 2 for factor in factors)
    net.eval()
    same = [*net._rotary((4, 4)), *plain._rotary((4, 4))]
    assert all(torch.equal(table, plain.rope((4, 4))) for table in same)


def test_tokens_are_left_out_unless_they_are_kept() -> None:
    kind = backbone_type(tiny.DINO["MODEL.BACKBONE.NAME"])
    tensors = file_for(tiny.DINO)
    assert {
        "cls_token",
        "reg_token",
        "rope.periods",
    } <= tensors.keys() and "pos_embed" not in tensors
    kept, left = (
        build_model(tiny.task({**tiny.DINO, f"{VIT}KEEP_TOKENS": keep})) for keep in (True, False)
    )
    assert load_converted(kept, tensors, kind).loaded == len(tensors)
    assert load_converted(left, tensors, kind).loaded == len(tensors) - 2
    names = set(kept.state_dict()) - set(left.state_dict())
    assert names == {f"backbone.net.{name}" for name in ("cls_token", "reg_token")}
    del tensors["reg_token"]
    with pytest.raises(UserError, match=r"at random: backbone\.net\.reg_token"):
        load_converted(kept, tensors, kind)
