"""Swins: recognized by any of four namings, converted with proof, or refused by name.

Golden verdicts have the layouts of the projects, and what is refused.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert.contract import InputContract
from convert.convert_to_d2 import convert_file
from convert.families.base import FEATURES
from convert.families.swin import (
    OFFICIAL,
    TORCHVISION,
    TRANSFORMERS,
    SwinArchitecture,
    verification_size,
)
from convert.modeling.swin import Swin, reference, relative_position_index
from convert.recognize import recognize
from convert.verify import Converted, check_features, read_converted
from moco.common.errors import DataError
from moco.modeling.soundness import fixed_image
from tests.oracles import layouts_swin
from tests.oracles.layouts_vit import randomize

SMALL = SwinArchitecture(12, (1, 2, 3, 2), (1, 2, 3, 6), 3, True)
NO_BIAS = dataclasses.replace(SMALL, qkv_bias=False)


def make_state(architecture: SwinArchitecture = SMALL) -> dict[str, Tensor]:
    """Random tensors in the official names."""
    return layouts_swin.official(qkv_bias=architecture.qkv_bias)


def converted(net: nn.Module, folder: Path) -> Swin:
    """Convert the tensors of a network, and return the backbone of the result."""
    torch.save(net.state_dict(), folder / "a.file")
    report = convert_file(folder / "a.file", folder / "out.pth")
    assert max(check.max_abs_diff for check in report.features.values()) == 0
    result = read_converted(folder / "out.pth")
    own = Swin(result.contract.architecture)
    own.load_state_dict(result.model)
    return own.eval()


def assert_same(own: Swin, expected: list[Tensor], size: tuple[int, int]) -> None:
    with torch.no_grad():
        actual = own(fixed_image(size))
    for name, value in zip(FEATURES, expected, strict=True):
        limit = 1e-5 * float(value.abs().max())
        torch.testing.assert_close(actual[name], value, rtol=0, atol=limit)


def timms(**options: Any) -> Any:
    from timm.models.swin_transformer import SwinTransformer

    settings: dict[str, Any] = {"embed_dim": 12, "depths": SMALL.depths, "num_classes": 5}
    settings |= {"num_heads": SMALL.num_heads, "window_size": 3, **options}
    return randomize(SwinTransformer(**settings), 0).eval()


@pytest.mark.parametrize("architecture", [SMALL, NO_BIAS], ids=["", "no bias"])
@torch.no_grad()
def test_timms_class_gives_the_same(architecture: SwinArchitecture, tmp_path: Path) -> None:
    """At a size at which all maps are several whole windows, and nothing is special."""
    size = (192, 288)
    net = timms(img_size=size, qkv_bias=architecture.qkv_bias)
    own = converted(net, tmp_path)
    assert read_converted(tmp_path / "out.pth").contract.architecture == architecture
    image = fixed_image(size)
    assert_same(own, net.forward_intermediates(image, intermediates_only=True), size)


@torch.no_grad()
def test_transformers_class_gives_the_same(tmp_path: Path) -> None:
    """At a size at which the windows of all maps are padded."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        embed_dim=12, depths=list(SMALL.depths), num_heads=list(SMALL.num_heads), window_size=3
    )
    net = randomize(transformers.SwinModel(config), 0).eval()
    own, seen = converted(net, tmp_path), list[Tensor]()
    for layer in net.encoder.layers:
        layer.blocks[-1].register_forward_hook(lambda _, x, y: seen.append(y[0]))
    height, width = size = (160, 224)
    net(fixed_image(size))
    maps = [y.view(1, height >> i, width >> i, -1) for i, y in enumerate(seen, 2)]
    assert_same(own, [y.permute(0, 3, 1, 2) for y in maps], size)


@torch.no_grad()
def test_torchvisions_class_gives_the_same(tmp_path: Path) -> None:
    """At a size at which the windows of all maps are padded."""
    from torchvision.models.swin_transformer import SwinTransformer

    options: Any = {"patch_size": [4, 4], "embed_dim": 12, "depths": list(SMALL.depths)}
    options |= {"num_heads": list(SMALL.num_heads), "window_size": [3, 3], "num_classes": 5}
    net = randomize(SwinTransformer(**options, stochastic_depth_prob=0), 0).eval()
    own = converted(net, tmp_path)
    size, expected = (160, 224), []
    x = fixed_image(size)
    for i, part in enumerate(net.features):
        x = part(x)
        if i % 2:
            expected.append(x.permute(0, 3, 1, 2))
    assert_same(own, expected, size)


def test_names_and_their_inverse() -> None:
    recognized = recognize(make_state(), "a.file").state
    for key in recognized:
        for names in (OFFICIAL, TORCHVISION, TRANSFORMERS):
            if "qkv" not in key or names is not TRANSFORMERS:
                assert names.own(names.external(key) or "") == key
    assert TRANSFORMERS.external("layers.1.blocks.0.attn.qkv.bias") == (
        "encoder.layers.1.blocks.0.attention.self.query.bias + "
        "encoder.layers.1.blocks.0.attention.self.key.bias + "
        "encoder.layers.1.blocks.0.attention.self.value.bias"
    )
    for key in ("layers.3.downsample.norm.weight", "norm.weight", "layers.0.blocks.00.norm1.bias"):
        assert OFFICIAL.own(key) is None


def test_detectron2s_names_are_the_official_ones() -> None:
    """`downsample` ends a stage in a detector, and starts the next one in timm."""
    model = Swin(SMALL).state_dict()
    names = {k for k in make_state() if not k.startswith(("norm.", "head."))}
    assert model.keys() == {k for k in names if not k.endswith(("_index", "_mask"))}


def test_positions_are_those_of_detectron2() -> None:
    """Row (dy + w - 1) (2 w - 1) + dx + w - 1 of the table, for cells that are dy and dx apart."""
    index = relative_position_index(3, torch.device("cpu")).view(9, 9)
    assert index.diagonal().tolist() == [12] * 9
    assert (int(index[0, 8]), int(index[8, 0]), int(index[0, 1])) == (0, 24, 11)


def test_the_proof_can_fail() -> None:
    found = recognize(make_state(), "a.file", sha256="0" * 64)
    tensors = {OFFICIAL.external(k) or k: v for k, v in found.state.items()}
    other = dataclasses.replace(SMALL, num_heads=(1, 2, 3, 3))
    state = dict(found.state)
    for j in range(2):
        state[f"layers.3.blocks.{j}.attn.relative_position_bias_table"] = torch.zeros(25, 3)
    with pytest.raises(DataError, match="features differ"):
        check_features(state, other, Converted(tensors, found.contract), "a.file")


def test_the_proof_is_at_a_size_without_padded_windows() -> None:
    """At others timm's differs, which pads maps after it shifted them."""
    net = reference(SMALL).eval()
    assert verification_size(SMALL) == (96, 192)
    assert net.layers[3].blocks[1].shift_size == (1, 1)  # type: ignore[index, union-attr]
    own, padded = Swin(SMALL), timms(img_size=(96, 160), always_partition=True)
    state = {k: v for k, v in padded.state_dict().items() if not k.startswith(("norm.", "head."))}
    own.load_state_dict({OFFICIAL.external(key) or key: value for key, value in state.items()})
    image = fixed_image((96, 160))
    with torch.no_grad():
        maps = padded.forward_intermediates(image, intermediates_only=True)
        assert not torch.allclose(own.eval()(image)["res4"], maps[2], atol=1e-2)


def test_its_contract() -> None:
    contract = recognize(make_state(), "a.file", sha256="0" * 64).contract
    written = contract.to_dict()
    assert (written["version"], written["family"]) == (2, "swin")
    listed = {k: list(v) if isinstance(v, tuple) else v for k, v in written["architecture"].items()}
    assert InputContract.from_dict({**written, "architecture": listed}) == contract
    for field, value in (("depths", [1, 2]), ("num_heads", [1, 2, 3, 5]), ("window_size", 0)):
        with pytest.raises(DataError, match=field):
            InputContract.from_dict({**written, "architecture": {**listed, field: value}})
