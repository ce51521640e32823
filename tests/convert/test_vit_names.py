"""Vision transformers in the names of their projects, against those projects' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert.backbone import load_backbone
from convert.contract import Overrides
from convert.convert_to_d2 import convert_file
from convert.families.vit import DETECTRON2, FEATURE, SCHEMES, ViTArchitecture
from convert.read import read_file
from convert.recognize import Recognition, recognize
from convert.verify import build_backbone, read_converted
from detection.config.weights import read_weights
from moco.common.errors import DataError, UserError
from moco.modeling.soundness import fixed_image
from tests.convert.test_vit import make_state
from tests.oracles import layouts_vit
from tests.oracles.layouts_vit import DEPTH, HEADS, IMAGE, MLP, PATCH, WIDTH
from tests.oracles.vit import Transcription

SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
}
MODELS = {
    "ViTModel": {"intermediate_size": MLP},
    "ViTForImageClassification": {"intermediate_size": MLP},
    "ViTMSNModel": {"intermediate_size": MLP},
    "IJepaModel": {"intermediate_size": MLP},
    "Dinov2Model": {"mlp_ratio": 2},
    "Dinov2WithRegistersModel": {"mlp_ratio": 2},
    "Dinov2Model, gated": {"mlp_ratio": 3, "use_swiglu_ffn": True},  # as the giant one
}


def last_map(architecture: ViTArchitecture, found: Recognition, image: Tensor) -> Tensor:
    """Patch tokens after the last block, of the whole network: with its class token, registers."""
    cls, registers = (
        found.tokens.get(name, torch.zeros(1, 0, architecture.embed_dim))
        for name in ("cls_token", "reg_token")
    )
    if architecture.class_position:
        cls = cls + found.state["pos_embed"][:, :1]
    net = Transcription(architecture, torch.cat([cls, registers], dim=1))
    net.load_state_dict({k: v for k, v in found.state.items() if k not in found.tokens})
    with torch.no_grad():
        features: Tensor = net(image).flatten(2).transpose(1, 2)
    return features


def hugging_face(name: str, folder: Path) -> nn.Module:
    """Save a network of transformers' own class with random weights by its own method."""
    transformers = pytest.importorskip("transformers")
    maker = getattr(transformers, name.partition(",")[0])
    net = layouts_vit.randomize(maker(maker.config_class(**SIZES, **MODELS[name])), 0).eval()
    net.save_pretrained(folder)
    module: nn.Module = net
    return module


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["save_pretrained", "torch.save"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_own_class_gives_the_same(name: str, saved: str, tmp_path: Path) -> None:
    net = hugging_face(name, tmp_path)
    src = tmp_path / "model.safetensors"
    if saved == "torch.save":
        src = tmp_path / "pytorch_model.bin"
        torch.save(net.state_dict(), src)
    report = convert_file(src, tmp_path / "out.pth")
    architecture = read_converted(tmp_path / "out.pth").contract.architecture
    assert report.contract.source == "huggingface/transformers"
    assert architecture.num_heads == HEADS
    assert architecture.layer_norm_eps == net.config.layer_norm_eps
    kept = "Registers" in name
    assert (architecture.tokens, architecture.registers) == (5 if kept else 0, 0)
    has_class = name != "IJepaModel"
    assert architecture.class_token == (has_class and not kept)
    for part in ("query", "key", "value") if saved != "torch.save" else ("q_proj", "k_proj"):
        assert any(f"{part}.bias" in note and "concatenated" in note for note in report.notes)
    assert any("%" in note for note in report.notes) == has_class

    found = recognize(read_file(src), "a.file", Overrides.from_options(num_heads=HEADS), "0" * 64)
    image = fixed_image((IMAGE, IMAGE))
    with torch.no_grad():
        states = net(image, output_hidden_states=True).hidden_states[-1]
    patches = states[:, has_class + 4 * kept :]
    torch.testing.assert_close(last_map(architecture, found, image), patches)


def transformers_state() -> dict[str, Tensor]:
    """Return the tensors of `make_state` in transformers' names."""
    scheme = SCHEMES["transformers"]
    state = {}
    for key, value in make_state().items():
        if "attn.qkv" in key:
            for part, word in zip(value.chunk(3), ("query", "key", "value"), strict=True):
                its = key.replace("blocks.", "encoder.layer.")
                state[its.replace("attn.qkv", f"attention.attention.{word}")] = part
        elif DETECTRON2.own(key):
            state[scheme.original(key)] = value
    return state


def test_parts_are_concatenated_and_named() -> None:
    found = recognize(transformers_state(), "a.file", Overrides.from_options(num_heads=3))
    expected = make_state()
    assert all(torch.equal(value, expected[key]) for key, value in found.state.items())
    (note,) = (note for note in found.notes if "concatenated" in note)
    words = [note.index(f"attention.{word}.bias") for word in ("query", "key", "value")]
    assert words == sorted(words) and "3 more" in note
    assert any("assuming LayerNorm eps 1e-12" in note for note in found.notes)
    state = transformers_state()
    del state["encoder.layer.1.attention.attention.key.bias"]
    found = recognize(state, "a.file", Overrides.from_options(num_heads=3), "0" * 64)
    assert "query.bias + " in found.named("blocks.1.attn.qkv.bias")  # and its shape is refused


def test_a_sidecar_has_heads_and_pixels(tmp_path: Path) -> None:
    src = tmp_path / "pytorch_model.bin"
    torch.save(transformers_state(), src)
    with pytest.raises(UserError, match="--num-heads"):
        convert_file(src, tmp_path / "out.pth")
    config = {"model_type": "vit", "hidden_size": 24, "num_attention_heads": 3}
    config |= {"layer_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(half))
    report = convert_file(src, tmp_path / "out.pth")
    assert report.contract.architecture.layer_norm_eps == 1e-5
    assert report.contract.pixels.mean == report.contract.pixels.std == (127.5, 127.5, 127.5)
    assert not report.warnings
    # timm's, next to its own names.
    torch.save(make_state(embed_dim=192, mlp_dim=8, depth=1), src)
    config = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"mean": [0.5] * 3}}
    config["pretrained_cfg"]["std"] = [0.25] * 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = convert_file(src, tmp_path / "out.pth")
    assert report.contract.architecture.num_heads == 3
    assert report.contract.pixels.std == (63.75, 63.75, 63.75)
    (tmp_path / "config.json").write_text('{"somebody": "else"}')
    with pytest.raises(UserError, match="--num-heads"):
        convert_file(src, tmp_path / "out.pth")


def test_in_memory_the_message_names_the_converter_or_the_argument(tmp_path: Path) -> None:
    torch.save({"model": make_state()}, tmp_path / "a.file")
    with pytest.raises(UserError, match=r"--num-heads.*convert the file first"):
        read_weights(str(tmp_path / "a.file"))
    with pytest.raises(UserError, match="give num_heads= as its training") as error:
        load_backbone(tmp_path / "a.file")
    assert "convert the file first" not in str(error.value) and "--" not in str(error.value)


@pytest.mark.parametrize("first_version", [False, True])
def test_torchvisions_own_class_gives_the_same(first_version: bool, tmp_path: Path) -> None:
    net = layouts_vit.torchvision_vit(0)
    state = net.state_dict()
    if first_version:
        for old, new in (("mlp.0.", "mlp.linear_1."), ("mlp.3.", "mlp.linear_2.")):
            state = {key.replace(old, new): value for key, value in state.items()}
    torch.save(state, tmp_path / "a.file")
    report = convert_file(tmp_path / "a.file", tmp_path / "out.pth", num_heads=HEADS)
    assert report.dropped == {"class token": 1, "final norm": 2, "head": 2}
    assert report.head == "linear head"
    assert any("cls_token" in note and "%" in note for note in report.notes)
    features: list[Tensor] = []
    net.encoder.layers.register_forward_hook(lambda *args: features.append(args[2]))
    image = fixed_image((IMAGE, IMAGE))
    with torch.no_grad():
        net(image)
    found = recognize(state, "a.file", Overrides.from_options(num_heads=HEADS), "0" * 64)
    mine = last_map(found.contract.architecture, found, image)
    torch.testing.assert_close(mine, features[0][:, 1:])


def test_blocks_in_chunks_and_other_names_of_layer_scale() -> None:
    expected = make_state(layer_scale=True)
    gamma = {k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v
             for k, v in expected.items()}  # fmt: skip
    for state in (layouts_vit.chunked(expected), gamma):
        found = recognize(state, "a.file", Overrides.from_options(num_heads=3), "0" * 64)
        assert found.contract.architecture.layer_scale
        assert all(torch.equal(value, expected[key]) for key, value in found.state.items())


def test_solo_learns_small_networks_have_heads_that_differ() -> None:
    with pytest.raises(UserError, match="--num-heads"):
        recognize(layouts_vit.solo_mae(384, 6), "a.file")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "encoder", "other"),
    [
        ("dino", "teacher", "student"),
        ("ibot", "teacher", "student"),
        ("mae", "single", None),
        ("msn example", "target", "anchor"),
    ],
)
def test_lightlys_own_modules(kind: str, encoder: str, other: str | None, tmp_path: Path) -> None:
    pytest.importorskip("lightly")
    layouts_vit.lightly(kind, 384, 6, tmp_path / "last.ckpt")
    raw = read_file(tmp_path / "last.ckpt")
    found = recognize(raw, "a.file", sha256="0" * 64)
    contract = found.contract
    assert (contract.source, contract.encoder) == ("lightly", encoder)
    assert contract.architecture.num_heads == 6
    assert not [note for note in found.notes if note.startswith("ignored")]
    last = ("layer_0.ln_1.bias", "blocks.0.norm1.bias")
    norms = [value for key, value in raw["state_dict"].items() if key.endswith(last)]
    assert any(torch.equal(found.state["blocks.0.norm1.bias"], norm) for norm in norms)
    if other:
        assert found.encoders == (encoder, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "option", "words"),
    [
        ("BeitModel", "", "lambda_[12].*BEiT"),
        ("BeitModel", "use_relative_position_bias", "table of relative positions, as BEiT's"),
        (
            "Data2VecVisionModel",
            "use_shared_relative_position_bias",
            "table of relative positions.* data2vec's, is not supported",
        ),
        ("DeiTModel", "", "distillation_token"),
    ],
)
def test_transformers_networks_that_are_refused(
    name: str, option: str, words: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    maker = getattr(transformers, name)
    options = {option: True} if option else {}
    net = maker(maker.config_class(**SIZES, intermediate_size=MLP, **options))
    layouts_vit.randomize(net, 0).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=words):
        convert_file(tmp_path / "model.safetensors", tmp_path / "out.pth")


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("is_metas", [False, True], ids=["timm", "dinov2"])
def test_gated_mlps_of_dinov2(registers: int, is_metas: bool, tmp_path: Path) -> None:
    """Timm's `vit_giant_patch14_dinov2` and its twin with registers, at a small width."""
    from timm.layers.mlp import SwiGLUPacked

    arguments = {"mlp_layer": SwiGLUPacked, "mlp_ratio": 2 * MLP / WIDTH, "init_values": 1e-5}
    arguments["act_layer"] = nn.SiLU
    net: Any = layouts_vit.timm_vit(
        0, **arguments, reg_tokens=registers, no_embed_class=True
    ).eval()
    state = net.state_dict()
    if is_metas:  # facebookresearch/dinov2 dinov2/layers/swiglu_ffn.py
        words = {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3", "reg_token": "register_tokens"}
        for old, new in words.items():
            state = {name.replace(old, new): value for name, value in state.items()}
    torch.save(state, tmp_path / "a.file")
    report = convert_file(tmp_path / "a.file", tmp_path / "out.pth", num_heads=HEADS)
    assert max(check.max_abs_diff for check in report.features.values()) < 1e-5
    converted = read_converted(tmp_path / "out.pth")
    a = converted.contract.architecture
    assert (a.swiglu, a.mlp_dim, a.tokens) == (True, MLP, 5 if registers else 0)
    own = build_backbone(converted.contract).eval()
    own.load_state_dict(converted.model)
    net.norm = nn.Identity()
    image = fixed_image((IMAGE, IMAGE))
    with torch.no_grad():
        maps = own(image)[FEATURE].flatten(2).transpose(1, 2)
        theirs = net.forward_features(image)[:, 1 + registers :]
    assert torch.allclose(maps, theirs, atol=1e-5) == bool(registers)  # else without class token
