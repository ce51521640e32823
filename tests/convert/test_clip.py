"""Image towers of CLIP, open_clip and SigLIP, in their own, transformers' and timm's names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert.contract import InputContract, Overrides
from convert.convert_to_d2 import convert_file
from convert.families.vit_names import CLIP_MEAN, CLIP_STD, HALF
from convert.initial_weights import encoder_spec
from convert.modeling.timm_network import named_facts
from convert.read import read_file
from convert.recognize import Recognition, recognize
from convert.verify import read_converted
from moco.common.errors import DataError, UserError
from moco.modeling.soundness import fixed_image
from tests.convert.test_vit_names import SIZES, last_map
from tests.oracles.layouts_vit import (
    HEADS,
    IMAGE,
    MLP,
    PATCH,
    ClipTower,
    randomize,
    timm_vit,
    two_towers,
)

PIXELS = fixed_image((IMAGE, IMAGE))
VISION = {**SIZES, "intermediate_size": MLP}
TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 9}
TEXT |= {"num_attention_heads": 2, "max_position_embeddings": 8, "bos_token_id": 0}
TEXT |= {"eos_token_id": 1, "pad_token_id": 2}
NAFLEX = {**VISION, "num_patches": (IMAGE // PATCH) ** 2}
MODELS = {
    "CLIPVisionModel": VISION,
    "CLIPVisionModelWithProjection": {**VISION, "hidden_act": "gelu"},
    "CLIPModel": {"vision_config": VISION, "text_config": TEXT},
    "MetaClip2VisionModel": VISION,
    "SiglipVisionModel": VISION,
    "SiglipModel": {"vision_config": VISION, "text_config": TEXT},
    "Siglip2VisionModel": NAFLEX,
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "quick_gelu": lambda: _Quick(),
}


class _Quick(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def clip(activation: str = "quick_gelu") -> ClipTower:
    """Return a tower with random weights."""
    tower = ClipTower(ACTIVATIONS[activation]())
    randomize(tower, 0)
    return tower.eval()


def found_in(state: dict[str, Any], **options: Any) -> Recognition:
    return recognize(
        state, "a.file", Overrides.from_options(**{"num_heads": HEADS, **options}), "0" * 64
    )


def check_features(found: Recognition, tokens: Tensor) -> None:
    """Assert that the whole network computes these tokens of patches."""
    mine = last_map(found.contract.architecture, found, PIXELS)
    torch.testing.assert_close(mine, tokens, rtol=1e-5, atol=1e-5)


def as_patches(image: Tensor) -> dict[str, Tensor]:
    """Return what NaFlex takes: patches (1, n, pixels), row by row, and the grid's size."""
    grid = IMAGE // PATCH
    patches = image.reshape(1, 3, grid, PATCH, grid, PATCH).permute(0, 2, 4, 3, 5, 1)
    mask = torch.ones(1, grid * grid, dtype=torch.long)
    shapes = torch.tensor([[grid, grid]])
    patches = patches.reshape(1, grid * grid, -1)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_own_class_gives_the_same(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    maker = getattr(transformers, name)
    net = randomize(maker(maker.config_class(**MODELS[name])), 0).eval()
    net.save_pretrained(tmp_path)
    report = convert_file(tmp_path / "model.safetensors", tmp_path / "out.pth")
    a = read_converted(tmp_path / "out.pth").contract.architecture
    is_clip = "clip" in name.lower()
    config = getattr(net.config, "vision_config", net.config)
    assert (a.num_heads, a.layer_norm_eps) == (HEADS, config.layer_norm_eps)
    assert a.activation == config.hidden_act.replace("pytorch_", "")
    assert (a.pre_norm, a.patch_bias, a.class_position) == (is_clip, not is_clip, is_clip)
    pixels = report.contract.pixels
    assert (pixels.mean, pixels.std) == ((CLIP_MEAN, CLIP_STD) if is_clip else (HALF, HALF))
    assert not report.warnings
    assert not [note for note in report.notes if note.startswith("ignored")]
    assert ("text tower" in report.dropped) == (name in ("CLIPModel", "SiglipModel"))
    assert report.dropped.get("attention pool", 0) == (0 if is_clip else 11)

    state = read_file(tmp_path / "model.safetensors")
    found = found_in(state, activation=a.activation)
    tower = getattr(net, "vision_model", net)
    inputs = as_patches(PIXELS) if "Siglip2" in name else {"pixel_values": PIXELS}
    with torch.no_grad():
        states = tower(**inputs, output_hidden_states=True).hidden_states[-1]
    check_features(found, states[:, int(is_clip) :])


def test_activations_of_openais_names_have_to_be_known(tmp_path: Path) -> None:
    for activation in ACTIVATIONS:
        tower = clip(activation)
        state = two_towers(tower)
        with pytest.raises(UserError, match=r"a\.file: .*several activations.*give --activation"):
            found_in(state)
        found = found_in(state, activation=activation)
        a = found.contract.architecture
        assert (a.activation, a.pre_norm, a.patch_bias) == (activation, True, False)
        assert (a.layer_norm_eps, a.class_position) == (1e-5, True)
        assert found.dropped == {
            "class token": 1,
            "final norm": 2,
            "projection": 1,
            "text tower": 7,
            "temperature": 1,
        }
        with torch.no_grad():
            check_features(found, tower(PIXELS)[:, 1:])
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}},
               tmp_path / "a.file")  # fmt: skip
    report = convert_file(tmp_path / "a.file", tmp_path / "out.pth", num_heads=3, activation="gelu")
    assert report.contract.source == "openai/CLIP or open_clip"
    assert report.contract.pixels.mean == CLIP_MEAN


def test_openais_own_file_is_known_by_the_sizes_in_it() -> None:
    """torch.jit.load(FILE).state_dict(), as the message on its TorchScript advises."""
    tower = clip()
    state = {k: v.half() for k, v in two_towers(tower).items()}
    state |= {key: torch.tensor(7) for key in ("input_resolution", "context_length", "vocab_size")}
    found = found_in(state)
    assert found.contract.source == "openai/CLIP"
    assert found.contract.architecture.activation == "quick_gelu"
    assert found.dropped["sizes"] == 3
    assert not [note for note in found.notes if note.startswith("ignored")]


def test_heads_are_those_of_open_clips_widths() -> None:
    names = {1280: 16, 256: 4}  # ViT-H's are of 80 channels, not 64
    for width, heads in names.items():
        tower = ClipTower(nn.GELU(), width, heads)
        randomize(tower, 0)
        found = recognize(two_towers(tower), "a.file", Overrides.from_options(activation="gelu"))
        assert found.contract.architecture.num_heads == heads


@pytest.mark.parametrize("kind", ["CLIP", "SigLIP"])
def test_timms_own_class_gives_the_same(kind: str) -> None:
    if kind == "CLIP":
        net = timm_vit(0, pre_norm=True, act_layer="quick_gelu", norm_layer=_norm)
    else:
        net = timm_vit(0, class_token=False, global_pool="map", act_layer="gelu_tanh")
    state = {f"visual.trunk.{key}": value for key, value in net.state_dict().items()}
    state |= {"text.a.weight": torch.ones(3), "visual.head.proj.weight": torch.ones(3, 3)}
    with pytest.raises(UserError, match="--activation"):
        found_in(state)
    activation = "quick_gelu" if kind == "CLIP" else "gelu_tanh"
    found = found_in(state, activation=activation)
    a, pixels = found.contract.architecture, found.contract.pixels
    assert (a.pre_norm, a.activation) == (kind == "CLIP", activation)
    assert (pixels.mean, pixels.std) == ((CLIP_MEAN, CLIP_STD) if a.pre_norm else (HALF, HALF))
    assert not [note for note in found.notes if note.startswith("ignored")]
    last: list[Tensor] = []
    net.eval().get_submodule("blocks").register_forward_hook(lambda *args: last.append(args[2]))
    with torch.no_grad():
        net(PIXELS)
    check_features(found, last[0][:, int(a.class_position) :])


def _norm(width: int, **_: Any) -> nn.Module:
    return nn.LayerNorm(width, eps=1e-5)


@pytest.mark.slow
def test_timms_names_say_the_activation(tmp_path: Path) -> None:
    import timm

    name = "vit_xsmall_patch16_clip_224"
    net = randomize(timm.create_model(name), 0)
    torch.save(net.state_dict(), tmp_path / "a.bin")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    for options in ({}, {"activation": "quick_gelu"}):
        report = convert_file(tmp_path / "a.bin", tmp_path / "out.pth", **options)
        a = report.contract.architecture
        assert (a.num_heads, a.layer_norm_eps) == (4, 1e-5)
        assert a.activation == options.get("activation", "gelu")
        assert not report.assumed
        assert any("timm's own network of that name agrees" in note for note in report.notes)


def test_timms_activations_of_names_and_tags() -> None:
    for size in ("16", "32"):
        facts = named_facts({"": f"vit_base_patch{size}_siglip_256"}, {}, "v2_webli")
        activation = "gelu_tanh" if size == "32" else "gelu"
        assert facts == {"timm": 12, "activation": activation, "layer_norm_eps": 1e-6}
    # timm has a second network for those whose training had QuickGELU.
    for tag in ("openai", "laion2b"):
        facts = named_facts({"": "vit_base_patch16_clip_224"}, {}, tag)
        assert facts["activation"] == "gelu"
        assert ("trained_with" in facts) == (tag == "openai")


def write_open_clip(folder: Path, **changes: Any) -> Path:
    """Write a file in open_clip's names and its configuration."""
    torch.save(two_towers(clip("quick_gelu")), folder / "open_clip_pytorch_model.bin")
    tower = {"image_size": IMAGE, "width": 24, "patch_size": PATCH, "head_width": 8}
    network = {"quick_gelu": True, "vision_cfg": {**tower, **changes}, "text_cfg": {}}
    pixels = {"mean": [0.5] * 3, "std": [0.25] * 3}
    config = {"model_cfg": network, "preprocess_cfg": pixels}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder / "open_clip_pytorch_model.bin"


def test_open_clips_configuration(tmp_path: Path) -> None:
    report = convert_file(write_open_clip(tmp_path), tmp_path / "out.pth")
    a, pixels = report.contract.architecture, report.contract.pixels
    assert (a.activation, a.num_heads) == ("quick_gelu", 3)
    assert (pixels.mean, pixels.std) == ((127.5,) * 3, (63.75,) * 3)
    assert not report.assumed
    for changes, reason in (
        ({"width": 32}, r"open_clip_config\.json next to it has width 32, but its tensors"),
        (
            {"act_kwargs": {"approximate": "tanh"}},
            "has act_kwargs a dict, but its tensors have none",
        ),
        ({"head_width": -1}, r"open_clip_config\.json: head_width: got -1"),
        ({"layers": 3}, "has layers 3, but its tensors have 2"),
        ({"mlp_ratio": 3.0}, r"has mlp_ratio 3\.0, but its tensors have 2"),
        ({"no_ln_pre": True}, "has no_ln_pre True, but its tensors have False"),
        ({"ls_init_value": 0.1}, "has ls_init_value"),
        ({"qk_norm": True}, "has qk_norm True"),
        ({"norm_kwargs": {"eps": 1e-6}}, "has norm_kwargs a dict"),
        ({"a_new_key": 0}, "has 'a_new_key' 0, whose effect is not known here"),
        ({"timm_model_name": "vit_base_patch16_siglip_224", "qk_norm": True}, "has 'qk_norm' True"),
        (
            {"timm_model_name": "vit_base_patch16_siglip_224"},
            "is not a plain ViT of 2 blocks",
        ),
    ):
        with pytest.raises(DataError, match=reason):
            convert_file(write_open_clip(tmp_path, **changes), tmp_path / "out.pth")


def hugging_face(**config: Any) -> tuple[dict[str, Tensor], str]:
    """Return a CLIP in transformers' names, as its version 4 wrote it, and its configuration."""
    transformers = pytest.importorskip("transformers")
    net = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION))
    state = {f"vision_model.{k}": v for k, v in randomize(net, 0).state_dict().items()}
    state["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    return state, json.dumps({"model_type": "clip", "vision_config": config})


@pytest.mark.slow
def test_a_configuration_without_an_activation_means_the_class_default(tmp_path: Path) -> None:
    src = tmp_path / "pytorch_model.bin"
    state, config = hugging_face()
    torch.save(state, src)
    with pytest.raises(UserError, match="--activation"):
        convert_file(src, tmp_path / "out.pth", num_heads=HEADS)
    (tmp_path / "config.json").write_text(config)
    report = convert_file(src, tmp_path / "out.pth", num_heads=HEADS)
    assert report.contract.architecture.activation == "quick_gelu"
    assert report.dropped["numbers of positions"] == 1
    # An image of 19 px has 4 whole patches of 4 px.
    for changes, reason in (
        ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new', but the networks here have gelu, q"),
        ({"hidden_act": ["gelu"]}, "hidden_act: got a list"),
        ({"image_size": 20}, "image_size 20, but its tensors have 16"),
        ({"image_size": 19}, ""),
    ):
        (tmp_path / "config.json").write_text(hugging_face(**changes)[1])
        if reason:
            with pytest.raises(DataError, match=reason):
                convert_file(src, tmp_path / "out.pth", num_heads=HEADS)
        else:
            convert_file(src, tmp_path / "out.pth", num_heads=HEADS)


@pytest.mark.parametrize("kind", ["core", "spatial"])
def test_a_perception_encoder_in_timms_names_is_refused(kind: str) -> None:
    """Its positions are rotary as well, which is in no tensor."""
    import timm

    net = timm.create_model(f"vit_pe_{kind}_tiny_patch16_{'384' if kind == 'core' else '512'}")
    with pytest.raises(DataError, match=r"norm_pre\.weight.*Perception Encoder.*rotary"):
        recognize(
            net.state_dict(), "a.file", Overrides.from_options(num_heads=3, activation="gelu")
        )
    state = two_towers(clip()) | {"visual.attn_pool.probe": torch.ones(1, 1, 24)}
    with pytest.raises(DataError, match=r"attn_pool\.probe.*Perception Encoder.*rotary"):
        found_in(state, activation="gelu")


def test_its_contract_and_older_ones() -> None:
    found = found_in(two_towers(clip()), activation="quick_gelu")
    written = found.contract.to_dict()
    assert InputContract.from_dict(written) == found.contract
    words = found.contract.convention()
    assert "activation quick_gelu, a norm before the blocks, no bias of patches" in words
    keys = found.contract.d2_keys()
    names = ("ACTIVATION", "PRE_NORM", "PATCH_BIAS")
    assert [keys[f"MODEL.VIT.{name}"] for name in names] == ["quick_gelu", True, False]
    for name in ("activation", "pre_norm", "patch_bias"):
        del written["architecture"][name]
    plain = dataclasses.replace(
        found.contract.architecture, activation="gelu", pre_norm=False, patch_bias=True
    )
    assert InputContract.from_dict(written).architecture == plain
    written["architecture"]["activation"] = "relu"
    with pytest.raises(DataError, match="activation: got 'relu', expected one of gelu, quick_gelu"):
        InputContract.from_dict(written)
    with pytest.raises(UserError, match="exact GELU"):
        encoder_spec(found.contract.architecture)
