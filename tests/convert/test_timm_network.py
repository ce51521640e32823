"""timm's own networks as backbones: sizes, patches, frozen parts, names of other projects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import group_parameters
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from convert.convert_to_d2 import convert_file, main
from convert.families.timm import format_arguments, parse_arguments
from convert.modeling.timm_network import TimmNetwork, layers, network_maps, parts, resample_tensors
from convert.translate import TYPES_IN_TIMM
from convert.verify import build_backbone, read_converted
from moco.common.errors import DataError, UserError
from tests.oracles.resnets import as_if_trained

VIT: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 3}
SQUARE = {**VIT, "img_size": 64}


def state_of(name: str, **arguments: Any) -> dict[str, Tensor]:
    """Return the tensors of timm's network as if it was trained."""
    torch.manual_seed(0)
    return as_if_trained(timm.create_model(name, num_classes=3, **arguments)).state_dict()


@pytest.mark.parametrize(
    ("name", "arguments", "changed"),
    [
        ("beit_base_patch16_224", SQUARE, {"img_size": 128}),
        ("vit_relpos_small_patch16_224", SQUARE, {"img_size": 96}),
        ("eva02_tiny_patch14_224", {**VIT, "img_size": 56}, {"img_size": 64, "patch_size": 16}),
        ("vit_base_patch16_siglip_224", SQUARE, {"patch_size": 32, "img_size": 128}),
        ("mvitv2_tiny", {"img_size": 64}, {"img_size": 128}),
    ],
)
def test_other_sizes_are_those_of_timms_own_loader(
    name: str, arguments: dict[str, Any], changed: dict[str, Any]
) -> None:
    """Its network of another size is filled from the same tensors, and has equal maps."""
    torch.manual_seed(0)
    state = timm.create_model(name, **arguments).state_dict()
    theirs: Any = timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay={"state_dict": dict(state)},
        **{**arguments, **changed},
    ).eval()
    text, patch = format_arguments(arguments), changed.get("patch_size", 0)
    net = TimmNetwork(name, text)
    own = {key: state[key.removeprefix("net.")] for key in net.state_dict()}
    side = changed.get("img_size", 0)
    made = resample_tensors(name, text, own, side, patch)
    net = TimmNetwork(name, text, image_size=side, patch_size=patch)
    net.load_state_dict(made)
    image = torch.rand(1, 3, side, side)
    with torch.no_grad():
        expected = theirs.forward_intermediates(image, intermediates_only=True)
        for value, index in zip(net.eval()(image).values(), net.indices, strict=True):
            assert torch.equal(value, expected[index])


def test_positions_that_timms_loader_leaves_are_resampled_by_its_function() -> None:
    from timm.layers import resample_abs_pos_embed

    name = "hiera_tiny_224"
    text = format_arguments({"embed_dim": 24, "stages": [1, 1, 2, 1], "img_size": 64})
    state = TimmNetwork(name, text).state_dict()
    made = resample_tensors(name, text, state, 128, 0)
    key = "net.pos_embed"
    expected = resample_abs_pos_embed(state[key], [32, 32], num_prefix_tokens=0)
    assert torch.equal(made[key], expected)
    assert all(torch.equal(made[other], state[other]) for other in state if other != key)


def test_a_table_that_timm_does_not_resample() -> None:
    name = "mixer_s32_224"
    state = TimmNetwork(name).state_dict()
    with pytest.raises(UserError, match="does not resample its tables of 224 px; set MODEL"):
        resample_tensors(name, "", state, 320, 0)


@pytest.mark.parametrize(
    ("name", "strides", "sizes"),
    [
        ("regnety_002", [4, 8, 16, 32], "any"),
        ("hiera_tiny_224", [4, 8, 16, 32], "fixed"),
        ("mvitv2_tiny", [4, 8, 16, 32], "fixed"),  # on the meta device it takes any
        ("deit_tiny_patch16_224", [16], "dynamic"),
        ("eva02_tiny_patch14_224", [14], "dynamic"),
        ("beit_base_patch16_224", [16], "fixed"),
        ("xcit_nano_12_p8_224", [8], "any"),
        ("vit_small_patch32_224", [32], "dynamic"),
    ],
)
def test_maps_and_sizes(name: str, strides: list[int], sizes: str) -> None:
    maps = network_maps(name)
    assert ([*maps.strides.values()], maps.sizes) == (strides, sizes)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("levit_128s", "its maps have strides"),
        ("inception_v3", "does not take images of another size"),
        ("resnet_99", "no such network"),
    ],
)
def test_a_network_without_maps_for_a_pyramid(name: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        network_maps(name)


def test_nothing_is_downloaded(tmp_path: Path) -> None:
    """The ResNet below some vision transformers is fetched whenever timm loads weights."""
    torch.save(state_of("vit_small_resnet26d_224"), tmp_path / "a.pth")
    with pytest.raises(UserError, match="timm downloads a part of it"):
        convert_file(tmp_path / "a.pth", tmp_path / "b.pth", timm_model="vit_small_resnet26d_224")


@pytest.mark.parametrize(
    ("name", "arguments", "freeze_at"),
    [
        ("deit_tiny_patch16_224", VIT, 0),
        ("deit_tiny_patch16_224", VIT, 2),
        ("regnety_002", {}, 3),
        ("regnety_002", {}, -1),
        ("poolformer_s12", {}, -1),  # timm has no groups of it
    ],
)
def test_frozen_parts_are_timms_leading_groups(
    name: str, arguments: dict[str, Any], freeze_at: int
) -> None:
    net = TimmNetwork(name, format_arguments(arguments), freeze_at=freeze_at, drop_path=0.5).train()
    frozen = {key for key, parameter in net.net.named_parameters() if not parameter.requires_grad}
    every = {key for key, _ in net.net.named_parameters()}
    expected = every if freeze_at < 0 else set()
    if freeze_at > 0:
        whole: Any = timm.create_model(name, **arguments)
        groups = group_parameters(whole, whole.group_matcher(coarse=True))
        expected = every & {key for i in range(freeze_at) for key in groups[i]}
    assert frozen == expected
    for key, module in net.net.named_modules():
        own = {f"{key}.{name}".lstrip(".") for name, _ in module.named_parameters()}
        if own and key and own <= frozen:
            assert not any(each.training for each in module.modules()), key
        if own and not own & frozen:
            assert module.training, key
    net.eval()
    assert not any(module.training for module in net.modules())


def test_a_frozen_network_computes_the_same_while_it_is_trained() -> None:
    """Batch norm does not follow the images, and drop path drops nothing."""
    torch.manual_seed(0)
    net = TimmNetwork("regnety_002", freeze_at=-1, drop_path=0.5).train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    image = torch.rand(2, 3, 64, 96)
    first, second = net(image), net(image)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert not any(value.requires_grad for value in first.values())


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_recomputed_activations_have_equal_gradients(name: str) -> None:
    gradients = []
    for checkpoint_blocks in (False, True):
        torch.manual_seed(0)
        net = TimmNetwork(name, checkpoint_blocks=checkpoint_blocks).train()
        made = net(torch.rand(2, 3, 64, 96, generator=torch.manual_seed(1)))
        sum(value.square().sum() for value in made.values()).backward()
        gradients.append({key: p.grad for key, p in net.named_parameters()})
    assert all(torch.equal(value, gradients[1][key]) for key, value in gradients[0].items())


@pytest.mark.parametrize(
    ("name", "arguments"), [("deit_tiny_patch16_224", VIT), ("swinv2_tiny_window8_256", {})]
)
def test_layers_are_those_of_timms_own_layer_decay(name: str, arguments: dict[str, Any]) -> None:
    """`param_groups_layer_decay` has the head where detectors have all after the backbone."""
    net: Any = timm.create_model(name, num_classes=0, **arguments)
    net.prune_intermediate_layers(len(net.feature_info), prune_norm=True)
    of = layers(name, format_arguments(arguments))
    last = max(of.values()) + 1
    names = {parameter: key for key, parameter in net.named_parameters()}
    for group in param_groups_layer_decay(net, layer_decay=0.5):
        for parameter in group["params"]:
            scale = 0.5 ** (last - 1 - of[names[parameter]])
            assert group["lr_scale"] == pytest.approx(scale)
    assert len(parts(name, format_arguments(arguments))) >= 3


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        ("img_size=384", {"img_size": 384}),
        ("act_layer=relu img_size=[128,32]", {"act_layer": "relu", "img_size": [128, 32]}),
        (
            r'act_layer="a\u0020b" dynamic_img_size=true',
            {"act_layer": "a b", "dynamic_img_size": True},
        ),
    ],
)
def test_arguments_as_text(text: str, arguments: dict[str, Any]) -> None:
    assert parse_arguments(text) == arguments
    assert parse_arguments(format_arguments(arguments)) == arguments


@pytest.mark.parametrize("text", ["img_size", "{}", "checkpoint_path=/etc/passwd", "depth=1e9"])
def test_texts_that_are_no_arguments(text: str) -> None:
    with pytest.raises(UserError):
        parse_arguments(text)


def converted(file: Path, tmp_path: Path, **options: Any) -> tuple[str, nn.Module]:
    """Convert a file; return the report and the backbone."""
    report = convert_file(file, tmp_path / "out.pth", **options)
    found = read_converted(tmp_path / "out.pth")
    net = build_backbone(found.contract)
    net.load_state_dict(found.model, strict=False)
    return report.text(), net.eval()


@pytest.mark.slow
def test_as_timm_takes_the_network_from_its_family(tmp_path: Path) -> None:
    """The family drops the class token; timm's own network has it in every block."""
    name = "deit_tiny_patch16_224"
    net: Any = timm.create_model(name, num_classes=3).eval()
    net.load_state_dict(state_of(name))
    torch.save({"state_dict": net.state_dict(), "arch": name, "epoch": 1}, tmp_path / "a.pth")
    text, _ = converted(tmp_path / "a.pth", tmp_path)
    assert "ViT of 12 blocks" in text
    main([str(tmp_path / "a.pth"), str(tmp_path / "b.pth"), "--as", "timm"])
    text, backbone = converted(tmp_path / "a.pth", tmp_path, family="timm")
    assert "timm deit_tiny_patch16_224" in text and "without ViTDet's windows" in text
    assert "\nverified" in text and "\nassumed" not in text
    image = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        expected = net.forward_intermediates(image, intermediates_only=True)[-1]
        assert torch.equal(backbone(image)["last_feat"], expected)


def test_as_timm_needs_a_name(tmp_path: Path) -> None:
    torch.save(state_of("deit_tiny_patch16_224"), tmp_path / "a.pth")
    with pytest.raises(
        UserError, match=r"--as timm: .* names no network of timm; give --timm-model"
    ):
        convert_file(tmp_path / "a.pth", tmp_path / "out.pth", family="timm")


def test_without_a_recorded_name_nothing_is_verified(tmp_path: Path) -> None:
    """That timm equals timm says nothing of the name, which an option may guess."""
    state = state_of("regnety_002")
    torch.save(state, tmp_path / "a.pth")
    text, _ = converted(tmp_path / "a.pth", tmp_path, timm_model="regnety_002")
    assert "\nverified" not in text and "that it is timm's regnety_002" in text
    torch.save({"state_dict": state, "arch": "regnety_002", "epoch": 1}, tmp_path / "a.pth")
    text, _ = converted(tmp_path / "a.pth", tmp_path)
    assert "\nverified" in text and "\nassumed" not in text


def test_arguments_by_an_option(tmp_path: Path) -> None:
    state = state_of("beit_base_patch16_224", **SQUARE)
    torch.save(state, tmp_path / "a.pth")
    options = {"timm_model": "beit_base_patch16_224", "timm_arguments": format_arguments(SQUARE)}
    text, _ = converted(tmp_path / "a.pth", tmp_path, **options)
    assert "embed_dim=48" in text
    record = {"model": options["timm_model"], "model_kwargs": SQUARE}
    torch.save({"state_dict": state, "args": record}, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"--timm-arguments depth=3: .* args\.model .* depth=2"):
        convert_file(
            tmp_path / "a.pth", tmp_path / "out.pth", **{**options, "timm_arguments": "depth=3"}
        )
    assert "\nverified" in converted(tmp_path / "a.pth", tmp_path)[0]


def test_names_of_another_project_that_timms_loader_renames(tmp_path: Path) -> None:
    """Segment Anything's encoder, in the names of its own code."""
    name = "samvit_base_patch16"
    arguments = {**SQUARE, "depth": 4, "global_attn_indexes": [1]}
    state = state_of(name, **arguments)
    theirs = {
        f"image_encoder.{key.replace('mlp.fc', 'mlp.lin')}": value
        for key, value in state.items()
        if not key.startswith("head")
    }
    theirs["mask_decoder.iou_token.weight"] = torch.rand(4, 8)
    torch.save({"model": theirs}, tmp_path / "a.pth")
    options = {"timm_model": name, "timm_arguments": format_arguments(arguments)}
    text, backbone = converted(tmp_path / "a.pth", tmp_path, **options)
    assert "timm's own loader renamed" in text
    net: Any = timm.create_model(name, num_classes=3, **arguments).eval()
    net.load_state_dict(state)
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        expected = net.forward_intermediates(image, intermediates_only=True)[-1]
        assert torch.equal(backbone(image)["last_feat"], expected)


def test_names_of_efficientnet_pytorch_by_the_order_of_the_tensors(tmp_path: Path) -> None:
    """Their code pads as TensorFlow, which no tensor says."""
    state = state_of("tf_efficientnet_lite0")
    renamed = {f"_{key}": value for key, value in state.items()}
    torch.save(renamed, tmp_path / "a.pth")
    text, backbone = converted(tmp_path / "a.pth", tmp_path, timm_model="tf_efficientnet_lite0")
    assert "\nverified" not in text
    (assumed,) = [line for line in text.splitlines() if line.startswith("assumed")]
    assert "in order, the shapes of timm's tf_efficientnet_lite0" in assumed
    net: Any = timm.create_model("tf_efficientnet_lite0", num_classes=3).eval()
    net.load_state_dict(state)
    image = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        expected = net.forward_intermediates(image, intermediates_only=True)[-1]
        assert torch.equal(backbone(image)["res5"], expected)
    with pytest.raises(DataError, match=r"the shapes of timm's tf_efficientnet_lite0; give --timm"):
        convert_file(tmp_path / "a.pth", tmp_path / "b.pth")
    with pytest.raises(DataError, match="whose padding is TensorFlow's"):
        convert_file(tmp_path / "a.pth", tmp_path / "b.pth", timm_model="efficientnet_lite0")


def test_a_configuration_of_transformers_names_timms_network(tmp_path: Path) -> None:
    """Their names are in no converter of timm, and the message says what is."""
    torch.save({"beit.embeddings.cls_token": torch.rand(1, 1, 8)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "beit"}))
    with pytest.raises(DataError, match=r"describes a 'beit'; timm has it as beit\*"):
        convert_file(tmp_path / "pytorch_model.bin", tmp_path / "out.pth")


@pytest.mark.parametrize("pattern", sorted({*TYPES_IN_TIMM.values()}))
def test_timm_has_the_networks_of_these_types(pattern: str) -> None:
    assert timm.list_models(pattern)
