"""Backbones as modules: features, pixels, refusals, and their way back to a file."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from convert.backbone import Backbone, load_backbone
from convert.convert_to_d2 import convert_file
from convert.verify import read_converted
from moco.common.errors import DataError, UserError
from tests.oracles.checkpoints import own
from tests.oracles.resnets import make_resnet

MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)


@pytest.mark.parametrize("order", ["RGB", "BGR"])
def test_maps_are_those_of_the_module_on_normalized_images(order: str) -> None:
    net, images = make_resnet(18), torch.rand(2, 3, 64, 96)
    backbone = load_backbone(net, channel_order=order)
    x = (images - MEAN) / STD
    x = net.maxpool(net.relu(net.bn1(net.conv1(x if order == "RGB" else x.flip(1)))))
    maps = backbone(images)
    for i, name in enumerate(("res2", "res3", "res4", "res5"), start=1):
        x = net.get_submodule(f"layer{i}")(x)
        torch.testing.assert_close(maps[name], x, rtol=1e-4, atol=1e-4)
        assert backbone.channels[name] == x.shape[1]
        assert backbone.strides[name] == 64 // x.shape[2] == 96 // x.shape[3]
    assert not backbone.training and backbone.size_divisibility == 1


def test_a_file_and_its_options(tmp_path) -> None:
    torch.save(own(depth=18), tmp_path / "checkpoint.pth.tar")
    backbone = load_backbone(tmp_path / "checkpoint.pth.tar")
    assert backbone.contract.encoder == "query"
    assert backbone.mean.flatten().tolist() == [102, 127.5, 153]
    other = load_backbone(tmp_path / "checkpoint.pth.tar", encoder="key", mean=(1.5, 2, 3))
    assert other.contract.encoder == "key" and other.contract.pixels.mean == (1.5, 2, 3)
    with pytest.raises(UserError, match=r"^heads: no such option"):
        load_backbone(tmp_path / "checkpoint.pth.tar", heads=3)
    with pytest.raises(UserError, match=r"^family= timm: .*a file of this project"):
        load_backbone(tmp_path / "checkpoint.pth.tar", family="timm")


def test_it_is_saved_as_the_converter_writes_it(tmp_path) -> None:
    torch.save(own(depth=18), tmp_path / "checkpoint.pth.tar")
    convert_file(tmp_path / "checkpoint.pth.tar", tmp_path / "converted.pth")
    backbone = load_backbone(tmp_path / "checkpoint.pth.tar")
    backbone.save(tmp_path / "saved.pth")
    expected, saved = (read_converted(tmp_path / f"{n}.pth") for n in ("converted", "saved"))
    assert saved.contract == expected.contract and saved.model.keys() == expected.model.keys()
    assert all(torch.equal(saved.model[key], value) for key, value in expected.model.items())
    with torch.no_grad():  # after a training, its present weights
        backbone.net.stem.conv1.weight.add_(1)
    backbone.save(tmp_path / "saved.pth")
    key = "stem.conv1.weight"
    assert torch.equal(load_backbone(tmp_path / "saved.pth").net.state_dict()[key],
                       expected.model[key] + 1)  # fmt: skip


def test_other_images_are_refused() -> None:
    backbone = load_backbone(make_resnet(18))
    for images in (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.rand(3, 8, 8)):
        with pytest.raises(ValueError, match=r"expected RGB images 0\.\.1"):
            backbone(images)


def test_a_module_of_no_family() -> None:
    with pytest.raises(DataError) as error:
        load_backbone(nn.Sequential(nn.Linear(3, 4)))
    text = str(error.value)
    assert text.startswith("the Sequential: unknown layout")
    assert "ResNets and ResNeXts" in text and "tests/example_family/" in text
    with pytest.raises(DataError, match=r"the ResNet: .* never trained") as error:
        load_backbone(resnet18())
    assert "tests/example_family/" not in str(error.value)


@pytest.mark.slow
def test_a_module_of_timm_brings_its_pixels() -> None:
    import timm

    net = timm.create_model("vit_tiny_patch16_224")  # mean and std 0.5
    for name, parameter in net.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    backbone: Backbone = load_backbone(net)
    assert backbone.contract.pixels.mean == backbone.contract.pixels.std == (127.5,) * 3
    assert backbone.strides == {"last_feat": 16} and backbone.size_divisibility == 16
    with pytest.raises(ValueError, match=r"\(64, 72\) px, expected multiples of 16"):
        backbone(torch.rand(1, 3, 64, 72))


@pytest.mark.slow
def test_a_module_of_transformers_brings_its_configuration() -> None:
    import transformers

    config = transformers.ViTConfig(hidden_size=48, num_attention_heads=2, intermediate_size=96)
    net = transformers.ViTModel(config)
    for name, parameter in net.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    assert load_backbone(net).contract.architecture.num_heads == 2
