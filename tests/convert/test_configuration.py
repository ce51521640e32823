"""Configurations next to weights: pixels, facts, and what contradicts the tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.suites.folder import SuiteFolder, hash_inits
from convert.convert_to_d2 import convert_file
from convert.metadata import CheckpointMetadata, read_sidecar
from moco.common.errors import DataError, UserError
from moco.common.pretrained import LocalWeights
from tests.convert.test_vit import make_state
from tests.oracles.resnets import make_resnet

VIT = {"model_type": "vit", "hidden_size": 24, "num_attention_heads": 3}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}


def write(folder: Path, config: Any, processor: Any = None, name: str = "config.json") -> Path:
    """Write a configuration next to a file that need not exist."""
    (folder / name).write_text(json.dumps(config))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder / "model.safetensors"


def read(folder: Path, *contents: Any) -> CheckpointMetadata:
    recorded = read_sidecar(write(folder, *contents))
    assert recorded is not None
    return recorded


@pytest.mark.parametrize(
    ("processor", "mean", "std", "order"),
    [
        (HALF, 127.5, 63.75, None),
        ({**HALF, "do_rescale": True, "rescale_factor": 1 / 255}, 127.5, 63.75, None),
        ({**HALF, "rescale_factor": 1 / 127.5}, 63.75, 31.875, None),
        ({"image_mean": [127] * 3, "image_std": [64] * 3, "do_rescale": False}, 127, 64, None),
        ({**HALF, "do_normalize": False}, 0, 255, None),
        ({"do_normalize": False, "do_rescale": False}, 0, 1, None),
        ({**HALF, "do_flip_channel_order": True}, 127.5, 63.75, "BGR"),
        ({"do_normalize": True}, None, None, None),
    ],
)
def test_steps_of_an_image_processor(
    processor: Any, mean: Any, std: Any, order: Any, tmp_path: Path
) -> None:
    """The pixels of which the network's input is (pixel - mean) / std."""
    recorded = read(tmp_path, VIT, processor)
    for got, one in ((recorded.mean, mean), (recorded.std, std)):
        assert got == (None if one is None else pytest.approx((one,) * 3))
    assert recorded.channel_order == order
    if std is not None and mean is not None:
        pixel = 200.0
        step = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1
        value = pixel * step
        if processor.get("do_normalize", True):
            value = (value - processor["image_mean"][0]) / processor["image_std"][0]
        assert recorded.mean is not None and recorded.std is not None
        assert (pixel - recorded.mean[0]) / recorded.std[0] == pytest.approx(value, rel=1e-5)


def test_a_processor_of_images_and_text_is_read_first(tmp_path: Path) -> None:
    """As transformers 5 reads both files, image_processing_base.py, get_image_processor_dict."""
    file = tmp_path / "processor_config.json"
    file.write_text(json.dumps({"image_processor": HALF, "processor_class": "CLIPProcessor"}))
    other = {"image_mean": [0.1] * 3, "image_std": [0.1] * 3}
    recorded = read(tmp_path, VIT, other)
    assert recorded.mean == (127.5,) * 3 and "processor_config.json" in recorded.note
    file.write_text(json.dumps({"processor_class": "CLIPProcessor"}))  # transformers 4's
    assert read(tmp_path, VIT, other).mean == (25.5,) * 3


@pytest.mark.slow
def test_a_processor_as_transformers_saves_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", "5")
    images = transformers.CLIPImageProcessor(image_mean=[0.5] * 3, image_std=[0.25] * 3)
    (tmp_path / "vocab.json").write_text('{"<|startoftext|>": 0, "<|endoftext|>": 1}')
    (tmp_path / "merges.txt").write_text("#version\n")
    tokens = transformers.CLIPTokenizer.from_pretrained(tmp_path)
    transformers.CLIPProcessor(images, tokens).save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    recorded = read(tmp_path, VIT)
    assert (recorded.mean, recorded.std) == ((127.5,) * 3, (63.75,) * 3)


def test_a_network_of_images_and_text_has_its_facts_in_a_part(tmp_path: Path) -> None:
    vision = {"hidden_size": 24, "num_attention_heads": 3, "hidden_act": "quick_gelu"}
    clip = {"model_type": "clip", "text_config": {"hidden_size": 8}, "vision_config": vision}
    recorded = read(tmp_path, {**clip, "hidden_size": 512}, HALF)
    assert recorded.facts == {"model_type": "clip_vision_model", **vision}
    assert recorded.metadata["num_attention_heads"] == 3 and recorded.mean == (127.5,) * 3
    own = {**clip, "vision_config": {**vision, "model_type": "siglip_vision_model"}}
    assert read(tmp_path, own).facts["model_type"] == "siglip_vision_model"


def test_the_configuration_of_open_clip(tmp_path: Path) -> None:
    vision = {"image_size": 224, "layers": 12, "width": 768, "patch_size": 32}
    config: dict[str, Any] = {
        "model_cfg": {"embed_dim": 512, "quick_gelu": True, "vision_cfg": vision},
        "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]},
    }
    write(tmp_path, config, name="open_clip_config.json")
    write(tmp_path, VIT)  # transformers', of another file in the same folder
    recorded = read_sidecar(tmp_path / "open_clip_model.safetensors")
    assert recorded is not None and recorded.mean == (127.5,) * 3 and recorded.std == (63.75,) * 3
    assert recorded.metadata == {"num_attention_heads": 12, "hidden_act": "quick_gelu"}
    assert recorded.facts == {**vision, "quick_gelu": True}
    config["model_cfg"]["vision_cfg"] = {"timm_model_name": "vit_base_patch16_224"}
    write(tmp_path, config, name="open_clip_config.json")
    recorded = read_sidecar(tmp_path / "open_clip_pytorch_model.bin")
    assert recorded is not None and recorded.arch == "vit_base_patch16_224"
    config["model_cfg"]["vision_cfg"] = {"width": "wide"}
    write(tmp_path, config, name="open_clip_config.json")
    with pytest.raises(DataError, match=r"open_clip_config\.json: width: got 'wide'"):
        read_sidecar(tmp_path / "open_clip_model.safetensors")


@pytest.mark.parametrize("value", [{"a": 1}, [[1]], [], -1, 1 << 40, float("nan")])
@pytest.mark.parametrize(
    "name", ["model_type", "num_attention_heads", "hidden_act", "layer_norm_eps"]
)
def test_a_used_fact_of_another_type_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"config\.json: {name}: got .*, expected "):
        read(tmp_path, {"model_type": "vit", name: value})


@pytest.mark.parametrize("value", ["x", {"a": 1}, [[1]], [], -1, 1 << 40, float("nan"), False])
@pytest.mark.parametrize("name", ["hidden_size", "image_size", "mlp_ratio", "depths", "new_key"])
def test_a_compared_fact_of_another_type_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    reason = "whose effect is not known" if name in ("depths", "new_key") else "but its tensors"
    with pytest.raises(DataError, match=rf"config\.json next to it has '?{name}'? .*{reason}"):
        convert_file(vit(tmp_path, **{name: value}), tmp_path / "out.pth")


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        ({**HALF, "rescale_factor": 0}, "rescale_factor: got 0"),
        ({**HALF, "rescale_factor": "1"}, "rescale_factor: got '1'"),
        ({**HALF, "offset": True}, "offset"),
        ({"image_mean": [0.5, 0.5], "image_std": [1, 1, 1]}, "image_mean: got"),
    ],
)
def test_an_image_processor_that_is_refused(processor: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"preprocessor_config\.json: .*{words}"):
        read(tmp_path, VIT, processor)


def vit(folder: Path, **config: Any) -> Path:
    """Write a vision transformer in timm's names with transformers' configuration."""
    file = write(folder, VIT | config)
    save_file(make_state(), file)
    return file


def resnet(folder: Path, **config: Any) -> Path:
    file = write(folder, {"model_type": "resnet"} | config)
    save_file({k: v.contiguous() for k, v in make_resnet(50).state_dict().items()}, file)
    return file


@pytest.mark.parametrize(
    ("make", "config", "words"),
    [
        (
            vit,
            {"model_type": "convnext"},
            "describes a 'convnext', but its tensors are those of plain vis",
        ),
        (vit, {"num_hidden_layers": 24}, "has num_hidden_layers 24, but its tensors have 2"),
        (vit, {"intermediate_size": 99}, "has intermediate_size 99, but its tensors have"),
        (vit, {"num_register_tokens": 4}, "has num_register_tokens 4, but its tensors have 0"),
        (vit, {"patch_size": 32}, "has patch_size 32, but its"),
        (vit, {"image_size": [224, 224]}, r"has image_size \[224, 224\], but its"),
        (vit, {"hidden_size": 48}, "has hidden_size 48, but its"),
        (vit, {"hidden_act": "relu"}, "has hidden_act 'relu', but"),
        (resnet, {"depths": [3, 4, 23, 3]}, r"has depths \[3, 4, 23, 3\], but its tensors have"),
        (resnet, {"hidden_act": "gelu"}, "has hidden_act 'gelu', but its tensors have relu"),
        (resnet, {"downsample_in_bottleneck": True}, "has downsample_in_bottleneck True"),
        (resnet, {"model_type": "vit"}, "describes a 'vit', but its tensors are those of ResNets"),
    ],
)
def test_a_contradiction_is_refused(make: Any, config: Any, words: str, tmp_path: Path) -> None:
    file = make(tmp_path, **config)
    with pytest.raises(DataError, match=rf"config\.json next to it {words}"):
        convert_file(file, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_an_unknown_kind_of_network_is_refused(tmp_path: Path) -> None:
    reason = "describes a 'mine', which is not supported; its tensors are .*: remove that file"
    with pytest.raises(DataError, match=rf"config\.json next to it {reason}"):
        convert_file(vit(tmp_path, model_type="mine"), tmp_path / "out.pth")
    assert convert_file(vit(tmp_path), tmp_path / "out.pth")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "clip", "vision_config": {"model_type": ["vit"]}},
        {"model_type": "x", "encoder": {"model_type": {}}},
        {"model_type": "timm_backbone"},
        {"model_type": "timm_backbone", "backbone": 3},
        {"model_type": "timm_backbone", "backbone": "vit_tiny_patch16_224", "output_stride": 8},
    ],
)
def test_a_strange_configuration_is_refused(config: Any, tmp_path: Path) -> None:
    save_file(make_state(), write(tmp_path, config))
    with pytest.raises(UserError):
        convert_file(tmp_path / "model.safetensors", tmp_path / "out.pth")


def test_a_copy_has_its_configuration_beside_it(tmp_path: Path) -> None:
    file = vit(tmp_path, layer_norm_eps=1e-5)
    copy = file.rename(tmp_path / "copy.safetensors")
    (tmp_path / "config.json").rename(tmp_path / "copy.safetensors.config.json")
    report = convert_file(copy, tmp_path / "out.pth")
    assert report.contract.architecture.layer_norm_eps == 1e-5


def test_a_suite_copies_it_with_the_weights(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    file = vit(tmp_path / "hub", layer_norm_eps=1e-5)
    inits = hash_inits({"mine": LocalWeights(file, "")})
    copies = SuiteFolder(tmp_path / "suite").copy_weights(inits)
    report = convert_file(copies["mine"], tmp_path / "out.pth")
    assert report.contract.architecture.layer_norm_eps == 1e-5


@pytest.mark.slow
def test_a_folder_as_transformers_writes_it(tmp_path: Path) -> None:
    """A network in shards, and its image processor."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 32}
    config = transformers.ViTConfig(
        **sizes, num_hidden_layers=3, image_size=64, layer_norm_eps=1e-5
    )
    net = transformers.ViTModel(config)
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.rand_like(parameter)
    net.save_pretrained(tmp_path, max_shard_size="40KB")
    transformers.ViTImageProcessor(image_std=[0.25] * 3).save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    report = convert_file(tmp_path, tmp_path / "out.pth")
    assert len(report.contract.source_parts) > 2
    assert (
        report.contract.pixels.mean == (127.5,) * 3 and report.contract.pixels.std == (63.75,) * 3
    )
    assert report.contract.architecture.layer_norm_eps == 1e-5
    with pytest.raises(UserError, match="--num-heads 5"):
        convert_file(tmp_path, tmp_path / "out.pth", num_heads=5)
    assert convert_file(tmp_path, tmp_path / "out.pth", num_heads=3)
    with pytest.raises(UserError, match=r"--num-heads 2: .* next to it records 3; leave"):
        convert_file(tmp_path, tmp_path / "out.pth", num_heads=2)
    with pytest.raises(UserError, match=r"--activation quick_gelu: .* it records gelu; leave"):
        convert_file(tmp_path, tmp_path / "out.pth", activation="quick_gelu")
    write(tmp_path, {**VIT, "hidden_act": "relu"})
    with pytest.raises(UserError, match=r"--activation gelu: .* it records 'relu'; leave"):
        convert_file(tmp_path, tmp_path / "out.pth", activation="gelu")
