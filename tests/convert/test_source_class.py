"""Folders of transformers, compared with its own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.convert_to_d2 import convert_file, convert_in_memory
from moco.common.errors import DataError
from tests.convert.test_facts import CONFIGURATIONS, randomize

pytestmark = pytest.mark.slow


def saved(folder: Path, kind: str, around: str = "", **changes: Any) -> Path:
    """Save a network as transformers does; `around` names a class that has it inside."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = CONFIGURATIONS.get(kind, CONFIGURATIONS["clip_vision_model"])
    config = transformers.CONFIG_MAPPING[kind](**{**sizes, **changes})
    torch.manual_seed(0)
    make = getattr(transformers, around) if around else transformers.MODEL_MAPPING[type(config)]
    randomize(make(config)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "around", "by"),
    [
        *((kind, "", "") for kind in CONFIGURATIONS),
        *((kind, "", "") for kind in ("vit_msn", "ijepa", "siglip_vision_model")),
        ("chinese_clip_vision_model", "", "ChineseCLIPVisionModel"),
        ("vit", "ViTForImageClassification", "ViTModel"),
        ("dinov2", "Dinov2ForImageClassification", "Dinov2Model"),
        ("dinov2", "Dinov2Backbone", "Dinov2Model"),
        ("swin", "SwinForImageClassification", "SwinModel"),
        ("resnet", "ResNetForImageClassification", "ResNetModel"),
    ],
)
def test_it_is_verified_by_its_own_class(kind: str, around: str, by: str, tmp_path: Path) -> None:
    report = convert_file(saved(tmp_path / "in", kind, around), tmp_path / "out.pth")
    [note] = [note for note in report.notes if note.startswith("compared with ")]
    assert by in note and "itself, run on one image" in note
    assert report.is_verified and "eps" not in report.assumed
    assert note in str(convert_in_memory(tmp_path / "in").notes)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dinov2", {"use_swiglu_ffn": True, "mlp_ratio": 4}),
        ("dinov3_vit", {"use_gated_mlp": True, "hidden_act": "silu"}),
        ("dinov3_vit", {"key_bias": True}),
        ("swin", {"qkv_bias": False}),
        ("resnet", {"layer_type": "basic", "depths": [2, 2, 2, 2]}),
        ("resnet", {"downsample_in_bottleneck": True}),
    ],
)
def test_variants_of_a_kind(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    report = convert_file(saved(tmp_path / "in", kind, **changes), tmp_path / "out.pth")
    assert report.is_verified and any(note.startswith("compared with ") for note in report.notes)


def test_a_class_that_computes_other_features_refuses_the_file(tmp_path: Path) -> None:
    """As a release of transformers might: here its norms have another epsilon than recorded."""
    transformers: Any = pytest.importorskip("transformers")
    folder = saved(tmp_path / "in", "vit")
    old = transformers.ViTModel.__init__

    def changed(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config.layer_norm_eps = 0.1
        old(self, config, *args, **kwargs)

    verdict = "transformers' ViTModel: has the tensors of a ViT of 2 blocks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.ViTModel, "__init__", changed)
        with pytest.raises(DataError, match=verdict):
            convert_file(folder, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_a_configuration_names_no_code(tmp_path: Path) -> None:
    """Attributes that choose kernels, files or classes do not reach transformers."""
    folder = saved(tmp_path / "in", "vit")
    record = folder / "config.json"
    config = json.loads(record.read_text())
    config["pooler_output_size"] = 1 << 40
    config["attn_implementation"] = config["_attn_implementation"] = "nobody/no-such-kernel"
    record.write_text(json.dumps(config))
    report = convert_file(folder, tmp_path / "out.pth")
    assert any(note.startswith("compared with ViTModel") for note in report.notes)
    record.write_text(json.dumps({**config, "auto_map": {"AutoModel": "code.Model"}}))
    with pytest.raises(DataError, match="has 'auto_map' a dict, whose effect is not known"):
        convert_file(folder, tmp_path / "out.pth")


def test_a_network_that_is_not_verified_says_why(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(**CONFIGURATIONS["vit"])
    randomize(transformers.ViTMAEModel(config)).save_pretrained(tmp_path / "in")
    report = convert_file(tmp_path / "in", tmp_path / "out.pth")
    assert any(note.startswith("not verified by the module: two runs") for note in report.notes)


def test_a_network_inside_another_one(tmp_path: Path) -> None:
    """Depth-Anything has a DINOv2 below `backbone.`, described in `backbone_config`."""
    transformers: Any = pytest.importorskip("transformers")
    inner = transformers.Dinov2Config(**CONFIGURATIONS["dinov2"], out_indices=[1, 2])
    sizes = {"neck_hidden_sizes": [8, 8], "fusion_hidden_size": 8, "reassemble_factors": [1, 1]}
    config = transformers.DepthAnythingConfig(
        backbone_config=inner, reassemble_hidden_size=24, head_in_index=-1, **sizes
    )
    torch.manual_seed(0)
    net = transformers.DepthAnythingForDepthEstimation(config)
    randomize(net).save_pretrained(tmp_path / "in")
    report = convert_file(tmp_path / "in", tmp_path / "out.pth", encoder="backbone")
    assert any(note.startswith("compared with Dinov2Model") for note in report.notes), report.notes


def test_a_sound_folder_of_another_kind_is_refused_by_its_type(tmp_path: Path) -> None:
    """Its lists are no damage."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1])
    transformers.SegformerModel(config).save_pretrained(tmp_path / "in")
    with pytest.raises(DataError, match=r"unknown layout .*next to it describes a 'segformer'"):
        convert_file(tmp_path / "in", tmp_path / "out.pth")
