"""Vision transformers in the names of their projects, beside those projects' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert.contract import Given
from convert.convert_to_d2 import convert_file, convert_in_memory
from convert.families.vit import OBSTACLES, SCHEMES, ViTArchitecture, known
from convert.prove import read_converted
from convert.read import read_file
from convert.translate import Recognized, recognize
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
}


def last_map(architecture: ViTArchitecture, found: Recognized, image: Tensor) -> Tensor:
    """Patch tokens after the last block, of the whole network: with its class token, registers."""
    cls, registers = (
        found.tokens.get(name, torch.zeros(1, 0, architecture.embed_dim))
        for name in ("cls_token", "register_tokens")
    )
    if architecture.class_position:
        cls = cls + found.state["pos_embed"][:, :1]
    net = Transcription(architecture, torch.cat([cls, registers], dim=1))
    net.load_state_dict(found.state)
    with torch.no_grad():
        features: Tensor = net(image).flatten(2).transpose(1, 2)
    return features


def hugging_face(name: str, folder: Path) -> nn.Module:
    """A network of transformers' own class with random weights, saved by its own method."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    maker = getattr(transformers, name)
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
    assert (architecture.num_heads, architecture.mlp_dim) == (HEADS, MLP)
    assert architecture.layer_norm_eps == net.config.layer_norm_eps
    assert architecture.registers == (4 if "Registers" in name else 0)
    assert architecture.class_token == (name != "IJepaModel")
    for part in ("query", "key", "value") if saved != "torch.save" else ("q_proj", "k_proj"):
        assert any(f"{part}.bias" in note and "concatenated" in note for note in report.notes)
    assert any("%" in note for note in report.notes) == architecture.class_token

    found = recognize(read_file(src), "a.file", Given.of(num_heads=HEADS), "0" * 64)
    image = fixed_image((IMAGE, IMAGE))
    with torch.no_grad():
        states = net(image, output_hidden_states=True).hidden_states[-1]
    patches = states[:, architecture.class_token + architecture.registers :]
    torch.testing.assert_close(last_map(architecture, found, image), patches)


def transformers_state() -> dict[str, Tensor]:
    """What `make_state` has, in transformers' names."""
    scheme = SCHEMES["transformers"]
    state = {}
    for key, value in make_state().items():
        if "attn.qkv" in key:
            for part, word in zip(value.chunk(3), ("query", "key", "value"), strict=True):
                its = key.replace("blocks.", "encoder.layer.")
                state[its.replace("attn.qkv", f"attention.attention.{word}")] = part
        elif known(key):
            state[scheme.original(key)] = value
    return state


def test_parts_are_concatenated_and_named() -> None:
    found = recognize(transformers_state(), "a.file", Given.of(num_heads=3))
    expected = make_state()
    assert all(torch.equal(value, expected[key]) for key, value in found.state.items())
    (note,) = (note for note in found.notes if "concatenated" in note)
    words = [note.index(f"attention.{word}.bias") for word in ("query", "key", "value")]
    assert words == sorted(words) and "3 more" in note
    assert any("eps 1e-12 is assumed" in note for note in found.notes)
    state = transformers_state()
    del state["encoder.layer.1.attention.attention.key.bias"]
    found = recognize(state, "a.file", Given.of(num_heads=3), "0" * 64)
    assert "query.bias + " in found.named("blocks.1.attn.qkv.bias")  # and its shape is refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 32}, "hidden_size 32"),
        ({"patch_size": 8}, "patch_size 8"),
        ({"image_size": [16, 32]}, "image_size"),
        ({"hidden_act": "quick_gelu"}, "hidden_act"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps"),
        ({"num_attention_heads": -1}, "num_attention_heads"),
        ("[1]", "config.json"),
        ("{", "config.json"),
        ("[" * 100_000, "config.json"),
        (" " * 2_000_000, "config.json"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_configuration_beside_that_does_not_fit(change: Any, words: str, tmp_path: Path) -> None:
    torch.save(transformers_state(), tmp_path / "pytorch_model.bin")
    config = {"model_type": "vit", "hidden_size": 24, "num_attention_heads": 3}
    text = change if isinstance(change, str) else json.dumps({**config, **change})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=words):
        convert_file(tmp_path / "pytorch_model.bin", tmp_path / "out.pth")


def test_what_is_beside_says_heads_and_pixels(tmp_path: Path) -> None:
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
    # timm's, beside its own names.
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


def test_in_memory_the_message_names_the_converter(tmp_path: Path) -> None:
    torch.save({"model": make_state()}, tmp_path / "a.file")
    with pytest.raises(UserError, match=r"--num-heads.*convert the file first"):
        convert_in_memory(tmp_path / "a.file")


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
    found = recognize(state, "a.file", Given.of(num_heads=HEADS), "0" * 64)
    mine = last_map(found.contract.architecture, found, image)
    torch.testing.assert_close(mine, features[0][:, 1:])


def test_torchvisions_builders_have_known_heads() -> None:
    state = layouts_vit.torchvision_vit(0, 768, 12).state_dict()
    found = recognize(state, "a.file", sha256="0" * 64)
    assert found.contract.architecture.num_heads == 12


def test_blocks_in_chunks_and_other_names_of_layer_scale() -> None:
    expected = make_state(layer_scale=True)
    gamma = {k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v
             for k, v in expected.items()}  # fmt: skip
    for state in (layouts_vit.chunked(expected), gamma):
        found = recognize(state, "a.file", Given.of(num_heads=3), "0" * 64)
        assert found.contract.architecture.layer_scale
        assert all(torch.equal(value, expected[key]) for key, value in found.state.items())


@pytest.mark.parametrize(
    ("kind", "width", "source", "heads", "dropped"),
    [
        ("ibot", 384, "bytedance/ibot", 6, {"head", "loss", "student encoder"}),
        ("msn", 384, "facebookresearch/msn", 6, {"projection head", "prototypes"}),
        ("dinov2", 384, "facebookresearch/dinov2", 6, {"head", "mask token"}),
        ("chunks", 384, "facebookresearch/dinov2", 6, {"head", "mask token"}),
        ("solo", 768, "vturrisi/solo-learn", 12, {"classifier", "decoder"}),
    ],
)
def test_projects(kind: str, width: int, source: str, heads: int, dropped: set[str]) -> None:
    raw = {
        "ibot": layouts_vit.ibot,
        "msn": layouts_vit.msn,
        "dinov2": lambda *sizes: layouts_vit.dinov2(*sizes, in_chunks=False),
        "chunks": lambda *sizes: layouts_vit.dinov2(*sizes, in_chunks=True),
        "solo": layouts_vit.solo_mae,
    }[kind](width, heads)
    found = recognize(raw, "a.file", sha256="0" * 64)
    assert (found.contract.source, found.contract.architecture.num_heads) == (source, heads)
    assert dropped <= found.dropped.keys()
    assert not [note for note in found.notes if note.startswith("ignored")]
    assert not found.warnings
    seed = {"ibot": 1, "msn": 1, "solo": 0}.get(kind, 1)
    net = layouts_vit.timm_vit(seed, width, heads, init_values=1e-5 if "dinov2" in source else None)
    for key, value in found.state.items():
        assert torch.equal(value, net.state_dict()[key]), key
    others = [choice for choice in found.encoders if choice != found.contract.encoder]
    for choice in others:
        other = recognize(raw, "a.file", Given(encoder=choice), "0" * 64)
        assert not torch.equal(other.state["pos_embed"], found.state["pos_embed"])


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
    pytest.importorskip("lightly", reason="the test extra has it")
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


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("blocks.0.attn.relative_position_bias_table", "BEiT"),
        ("blocks.1.attn.q_bias", "BEiT"),
        ("rope_embed.periods", "rotary"),
        ("blocks.0.attn.qkv.bias_mask", "masked"),
        ("blocks.0.mlp.w12.weight", "gated"),
        ("dist_token", "distillation"),
        ("norm_pre.weight", ""),  # CLIP's: of no row of OBSTACLES
    ],
)
def test_what_stands_in_the_way_is_named_with_its_reason(key: str, reason: str) -> None:
    state = {f"backbone.{name}": value for name, value in make_state().items()}
    with pytest.raises(DataError, match=f"{key}.*{reason}"):
        recognize({**state, f"backbone.{key}": torch.ones(3)}, "a.file", Given.of(num_heads=3))
    assert any(reason in text for text in OBSTACLES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("BeitModel", "lambda_1.*BEiT"),
        ("DINOv3ViTModel", "rotary.*position_embeddings"),
        ("DeiTModel", "distillation_token"),
    ],
)
def test_transformers_networks_that_are_refused(name: str, words: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    maker = getattr(transformers, name)
    net = maker(maker.config_class(**SIZES, intermediate_size=MLP))
    layouts_vit.randomize(net, 0).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=words):
        convert_file(tmp_path / "model.safetensors", tmp_path / "out.pth")


def test_timms_dinov3_is_refused_for_its_positions() -> None:
    import timm

    net = timm.create_model("vit_small_patch16_dinov3", img_size=32)
    with pytest.raises(DataError, match=r"pos_embed.*rotary"):
        recognize(net.state_dict(), "a.file", Given.of(num_heads=6))
