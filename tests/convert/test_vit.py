"""Vision transformers: recognized, converted with proof, or refused naming what is in the way."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert.contract import InputContract, Overrides
from convert.convert_to_d2 import convert_file
from convert.families.vit import FEATURE, ViTArchitecture, ViTFamily
from convert.initial_weights import read_initial_weights
from convert.inspect_file import inspect_file
from convert.modeling import vit as vit_network
from convert.modeling.vit_reference import effect_of_tokens
from convert.recognize import recognize
from convert.verify import Converted, check_features, read_converted
from detection.config.task import default_task
from detection.config.weights import apply_contract
from moco.common.errors import DataError, UserError
from moco.modeling.soundness import fixed_image
from tests.oracles.vit import Transcription

SMALL = ViTArchitecture(
    embed_dim=24,
    depth=2,
    num_heads=3,
    mlp_dim=72,
    patch_size=4,
    image_size=16,
    qkv_bias=True,
    layer_scale=False,
    class_position=True,
    layer_norm_eps=1e-6,
)

# As a file of `make_state` describes it.
FROM_FILE = dataclasses.replace(SMALL, class_token=True, final_norm=True)


def make_state(prefix: str = "", tokens: int = 1, **changes: Any) -> dict[str, Tensor]:
    """Return random tensors of a vision transformer with timm's names, and the rest of its file."""
    a = dataclasses.replace(SMALL, **changes)
    generator = torch.Generator().manual_seed(0)
    shapes = {key: value.shape for key, value in vit_network.ViT(a).state_dict().items()}
    shapes |= {"cls_token": (1, 1, a.embed_dim), "norm.weight": (a.embed_dim,)}
    shapes |= {"norm.bias": (a.embed_dim,), "head.weight": (5, a.embed_dim), "head.bias": (5,)}
    if tokens > 1:
        shapes["register_tokens"] = (1, tokens - 1, a.embed_dim)
    return {prefix + k: 0.3 * torch.randn(s, generator=generator) for k, s in shapes.items()}


@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_scale": True}, {"class_position": False}, {"qkv_bias": False}, {"num_heads": 12}],
    ids=str,
)
def test_the_converted_network_is_the_source(changes: dict[str, Any], tmp_path: Path) -> None:
    state = make_state(**changes)
    torch.save({"model": state}, tmp_path / "a.file")
    heads = changes.get("num_heads", 3)
    report = convert_file(tmp_path / "a.file", tmp_path / "out.pth", num_heads=heads)
    converted = read_converted(tmp_path / "out.pth")
    assert converted.contract.architecture == dataclasses.replace(FROM_FILE, **changes)
    assert report.dropped == {"class token": 1, "final norm": 2, "head": 2}
    assert report.features[FEATURE].stride == 4
    dropped = {"cls_token", "norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert converted.model.keys() == state.keys() - dropped
    assert all(torch.equal(value, state[key]) for key, value in converted.model.items())
    assert any("cls_token" in note and "%" in note for note in report.notes)
    assert "faster_rcnn_ViT_Ti_small" in report.next_command()


def backbone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a converted file, which has no class token alone."""
    return {k: v for k, v in state.items() if ViTFamily().to_detectron2(k) and k != "cls_token"}


def test_other_heads_are_other_features() -> None:
    """The proof can fail: the same tensors under another number of heads."""
    state = backbone(make_state())
    found = recognize(make_state(), "a.file", Overrides.from_options(num_heads=3), "0" * 64)
    other = dataclasses.replace(SMALL, num_heads=4)
    with pytest.raises(DataError, match="features differ"):
        check_features(state, other, Converted(state, found.contract), "a.file")


def test_the_effect_of_tokens_is_that_of_timms_class() -> None:
    import timm

    state = make_state()
    net = timm.models.vision_transformer.VisionTransformer(
        img_size=16,
        patch_size=4,
        num_classes=5,
        embed_dim=24,
        depth=2,
        num_heads=3,
        mlp_ratio=3,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    )
    net.load_state_dict(state)
    net.norm = nn.Identity()
    image = fixed_image((16, 16))
    with torch.no_grad():
        theirs = net.eval().forward_features(image)[:, 1:]
        tokens = state["cls_token"] + state["pos_embed"][:, :1]
        own = Transcription(SMALL, tokens)
        own.load_state_dict(backbone(state))
        mine = own(image).flatten(2).transpose(1, 2)
        alone = vit_network.ViT(SMALL)
        alone.load_state_dict(own.state_dict())
        without = alone(image)[FEATURE].flatten(2).transpose(1, 2)
    torch.testing.assert_close(mine, theirs)
    kept = backbone(state)
    text = effect_of_tokens(SMALL, kept, {"cls_token": state["cls_token"]})
    change = 100 * float((without - theirs).norm() / theirs.norm())
    assert change > 1
    assert f"{change:.3g} %" in text


def test_a_damaged_class_token_is_refused() -> None:
    kept = backbone(make_state())
    for token in (torch.ones(24), torch.full((1, 1, 24), float("nan"))):
        with pytest.raises(DataError, match="cls_token"):
            effect_of_tokens(SMALL, kept, {"cls_token": token})


def test_its_contract() -> None:
    found = recognize(make_state(), "a.file", Overrides.from_options(num_heads=3), "0" * 64)
    written = found.contract.to_dict()
    assert (written["version"], written["family"]) == (2, "vit")
    # A default is not written, so that fields can be added.
    its = {key: vars(FROM_FILE)[key] for key in written["architecture"]}
    assert written["architecture"] == its and "registers" not in its
    assert InputContract.from_dict(written) == found.contract
    for field, value in (("num_heads", 5), ("depth", 0), ("qkv_bias", 1), ("layer_norm_eps", 1)):
        with pytest.raises(DataError, match=field):
            InputContract.from_dict(
                {**written, "architecture": {**written["architecture"], field: value}}
            )


def test_what_else_is_done_with_a_file(tmp_path: Path) -> None:
    src, out = tmp_path / "a.file", tmp_path / "out.pth"
    torch.save(make_state(), src)
    assert "--num-heads" in inspect_file(src)
    convert_file(src, out, num_heads=3)
    text = inspect_file(out)
    assert "3 heads" in text
    assert "MODEL.VIT.EMBED_DIM 24" in text
    with pytest.raises(UserError, match="--num-heads 4"):
        convert_file(out, tmp_path / "again.safetensors", num_heads=4)
    convert_file(out, tmp_path / "again.safetensors")
    contract = read_converted(tmp_path / "again.safetensors").contract
    assert contract == read_converted(out).contract

    with pytest.raises(UserError, match="ViT"):
        apply_contract(default_task(), contract, ())
    with pytest.raises(UserError, match="of four times its width"):
        read_initial_weights(str(out))
