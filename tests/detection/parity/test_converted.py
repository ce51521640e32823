"""Features of detectors built from a converted file, against the source network.

The source network is the family's reference implementation: torchvision's or timm's own class.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert import verify
from convert.contract import Overrides
from convert.convert_to_d2 import convert_file
from convert.modeling.reference import TOLERANCE, reference_features
from convert.read import read_file
from convert.translate import translate
from detection.config.engines import find_engine
from detection.config.weights import apply_contract
from detection.engine.weights import load_converted
from detection.modeling.backbones import backbone_type
from tests.convert import test_convnext, test_swin, test_vit
from tests.oracles import tiny_detector as tiny
from tests.oracles.resnets import make_resnet

STAGES = {"res2", "res3", "res4", "res5"}


def resnet_state(depth: int, **kind: Any) -> dict[str, Tensor]:
    return make_resnet(depth, **kind).state_dict()


def vit_state(**changes: Any) -> dict[str, Tensor]:
    network = {"embed_dim": 32, "num_heads": 4, "depth": 4, "patch_size": 16, "image_size": 96}
    return test_vit.make_state(**network, **changes)


def timm_state() -> dict[str, Tensor]:
    import timm

    return tiny.fill(timm.create_model("regnety_002").state_dict(), seed=1)


def below_an_fpn(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    return dict(model.backbone.bottom_up(image))


def of_c4(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Return res4, and res5 from the box head, before the norm that no file has."""
    x = features = model.backbone(image)["res4"]
    for name, block in model.roi_heads.res5.named_children():
        x = x if name == "norm" else block(x)
    return {"res4": features, "res5": x}


def last_map(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Return a transformer's last map; its pyramid may have maps of earlier blocks as well."""
    return {"last_feat": list(model.backbone.net(image).values())[-1]}


def before_the_norms(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Return the maps of a ConvNeXt or Swin before the norms, which no file has."""
    network = model.backbone.bottom_up
    network.norms = []
    return dict(network(image))


# As in classification: no windows, and only the positions of the file.
WHOLE = {"MODEL.VIT.WINDOW_SIZE": 0, "MODEL.VIT.REL_POS": False}
CONVNEXT = {**tiny.FPN, "MODEL.BACKBONE.NAME": "build_convnext_fpn_backbone", "MODEL.FPN.NORM": ""}
SWIN = {**CONVNEXT, "MODEL.BACKBONE.NAME": "build_swin_fpn_backbone"}
TIMM = {**CONVNEXT, "MODEL.BACKBONE.NAME": "build_timm_fpn_backbone"}
# Tensors of a file, keys of a detector, its features, and options that the file does not record.
FILES: dict[str, tuple[Callable[[], Any], dict[str, Any], Callable[..., Any], dict[str, Any]]] = {
    "r50": (lambda: resnet_state(50), tiny.FPN, below_an_fpn, {}),
    "r18-c4": (lambda: resnet_state(18), tiny.COMMON, of_c4, {}),
    "r50-c4": (lambda: resnet_state(50), tiny.COMMON, of_c4, {}),
    "r18-cifar": (lambda: resnet_state(18, stem="cifar"), tiny.FPN, below_an_fpn, {}),
    "r34-stride2": (lambda: resnet_state(34, stem="stride2"), tiny.FPN, below_an_fpn, {}),
    "vit": (vit_state, tiny.VIT_SFP | WHOLE, last_map, {"num_heads": 4}),
    "vit-layer-scale": (
        lambda: vit_state(layer_scale=True),
        tiny.VIT_SFP | WHOLE,
        last_map,
        {"num_heads": 4},
    ),
    "vit-four-maps": (vit_state, tiny.VIT_FPN | WHOLE, last_map, {"num_heads": 4}),
    "convnext": (test_convnext.make_state, CONVNEXT, before_the_norms, {}),
    "convnext-v2": (
        lambda: test_convnext.make_state(test_convnext.V2),
        CONVNEXT,
        before_the_norms,
        {},
    ),
    "swin": (test_swin.make_state, SWIN, before_the_norms, {}),
    "timm": (timm_state, TIMM, below_an_fpn, {"timm_model": "regnety_002"}),
}


@pytest.mark.parametrize("file", FILES)
def test_a_built_detector_gives_the_features_of_the_source(file, engine, tmp_path):
    make, keys, features_of, known = FILES[file]
    torch.save(make(), tmp_path / "a.file")
    convert_file(tmp_path / "a.file", tmp_path / "out.pth", **known)
    converted = verify.read_converted(tmp_path / "out.pth")
    contract, image = converted.contract, verify.verification_image(converted.contract)

    room = find_engine(engine)
    cfg = room.default_config(dense_pose=False)
    cfg.merge_from_list([item for pair in keys.items() for item in pair])
    apply_contract(cfg, contract, explicit=())
    room.check_config(cfg)
    model = room.build_model(cfg).eval()
    load_converted(model, converted.model, backbone_type(cfg.MODEL.BACKBONE.NAME))
    raw = read_file(tmp_path / "a.file")
    found = translate(tmp_path / "a.file", raw, Overrides.from_options(**known))
    state, architecture = found.source_network()
    with torch.no_grad():
        features = features_of(model, image)
        expected = reference_features(contract.family, architecture, state, image)

    wanted = {of_c4: {"res4", "res5"}, last_map: {"last_feat"}}.get(features_of, STAGES)
    assert set(features) == wanted
    exact = contract.family.name == "resnet"
    for name, value in features.items():
        limit = 0.0 if exact else TOLERANCE * float(expected[name].abs().max())
        torch.testing.assert_close(value, expected[name], rtol=0, atol=limit)
