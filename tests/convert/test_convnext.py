"""ConvNeXts: recognized by any of three namings, converted with proof, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from convert.contract import InputContract
from convert.convert_to_d2 import convert_file
from convert.families.base import FEATURES, Hints
from convert.families.convnext import (
    OFFICIAL_NAMES,
    TIMM,
    TORCHVISION_NAMES,
    ConvNeXtArchitecture,
    ConvNeXtFamily,
)
from convert.modeling.convnext import ConvNeXt
from convert.recognize import recognize
from convert.verify import Converted, check_features, read_converted
from moco.common.errors import DataError
from moco.modeling.soundness import fixed_image

SMALL = ConvNeXtArchitecture((1, 2, 1, 1), (8, 12, 16, 24), True, False, 1e-6)
V2 = dataclasses.replace(SMALL, layer_scale=False, grn=True)


def make_state(architecture: ConvNeXtArchitecture = SMALL) -> dict[str, Tensor]:
    """Random tensors with timm's names, those of the last norm and head included."""
    generator = torch.Generator().manual_seed(0)
    shapes = {key: value.shape for key, value in ConvNeXt(architecture).state_dict().items()}
    width = architecture.dims[-1]
    shapes |= {"head.norm.weight": (width,), "head.norm.bias": (width,)}
    shapes |= {"head.fc.weight": (5, width), "head.fc.bias": (5,)}
    return {key: 0.3 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def officially(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Rename a network as facebookresearch/ConvNeXt and ConvNeXt-V2 save it."""
    renamed = {}
    for key, value in state.items():
        name = OFFICIAL_NAMES.external(key) or key.replace("head.norm", "norm").replace(
            "head.fc", "head"
        )
        renamed[prefix + name] = value[None, None, None] if ".grn." in name else value
    return renamed


@pytest.mark.parametrize("architecture", [SMALL, V2], ids=str)
@pytest.mark.parametrize("convolutions", [False, True])
def test_timms_class_gives_the_same(
    architecture: ConvNeXtArchitecture, convolutions: bool, tmp_path: Path
) -> None:
    from timm.models.convnext import ConvNeXt as TimmConvNeXt

    net = TimmConvNeXt(
        depths=architecture.depths,
        dims=architecture.dims,
        num_classes=5,
        ls_init_value=1.0 if architecture.layer_scale else None,
        use_grn=architecture.grn,
        conv_mlp=convolutions,
    )
    state = make_state(architecture)
    theirs = {key: state[key].view_as(value) for key, value in net.state_dict().items()}
    net.load_state_dict(theirs)
    torch.save(theirs, tmp_path / "a.file")
    report = convert_file(tmp_path / "a.file", tmp_path / "out.pth")
    converted = read_converted(tmp_path / "out.pth")
    assert converted.contract.architecture == architecture
    assert report.dropped == {"final norm": 2, "head": 2}
    assert [report.features[name].stride for name in FEATURES] == [4, 8, 16, 32]
    assert converted.model.keys() == {key for key in state if not key.startswith("head.")}
    own = ConvNeXt(architecture)
    own.load_state_dict(converted.model)
    image = fixed_image((64, 96))
    with torch.no_grad():
        expected, features = net.eval().forward_intermediates(image)[1], own.eval()(image)
    for name, value in zip(FEATURES, expected, strict=True):
        torch.testing.assert_close(features[name], value)


@pytest.mark.parametrize("architecture", [SMALL, V2], ids=str)
def test_official_names(architecture: ConvNeXtArchitecture) -> None:
    """Golden verdicts have the other layouts; this one compares tensors by name."""
    state = make_state(architecture)
    found = recognize(officially(state), "a.file", sha256="0" * 64)
    assert found.contract.source == "facebookresearch/ConvNeXt"
    assert found.contract.architecture == architecture
    assert found.state.keys() == {key for key in state if TIMM.own(key)}
    assert all(torch.equal(value, state[key]) for key, value in found.state.items())
    assert not found.warnings


def test_names_and_their_inverse() -> None:
    for key in (k for k in make_state(V2) | make_state() if TIMM.own(k)):
        for names in (OFFICIAL_NAMES, TORCHVISION_NAMES):
            if other := names.external(key):
                assert names.own(other) == key
    for key in ("stem.2.weight", "stages.0.downsample.0.weight", "norm.weight", "head.norm.weight"):
        assert TIMM.own(key) is None
    for part in ("00.gamma", "*.gamma", "0.mlp.fc3.bias"):
        assert TIMM.own(f"stages.0.blocks.{part}") is None


def test_the_proof_can_fail() -> None:
    state = make_state()
    found = recognize(state, "a.file", sha256="0" * 64)
    other = dataclasses.replace(SMALL, layer_norm_eps=0.1)
    with pytest.raises(DataError, match="features differ"):
        check_features(found.state, other, Converted(found.state, found.contract), "a.file")


def test_its_contract() -> None:
    contract = recognize(make_state(), "a.file", sha256="0" * 64).contract
    written = contract.to_dict()
    assert (written["version"], written["family"]) == (2, "convnext")
    listed = {k: list(v) if k in ("depths", "dims") else v
              for k, v in written["architecture"].items()}  # fmt: skip
    assert InputContract.from_dict({**written, "architecture": listed}) == contract
    for field, value in (("depths", [1, 2]), ("dims", [8, 8, 8, 0]), ("grn", 1),
                         ("layer_norm_eps", 2.0)):  # fmt: skip
        with pytest.raises(DataError, match=field):
            InputContract.from_dict({**written, "architecture": {**listed, field: value}})
    clip = dataclasses.replace(SMALL, depths=(3, 4, 30, 3))
    shapes = {k: torch.empty(v.shape) for k, v in ConvNeXt(clip).state_dict().items()}
    found = ConvNeXtFamily().recognize(shapes, Hints())
    assert found == dataclasses.replace(clip, layer_norm_eps=1e-5)
