"""The contract: strict in, strict out, and Detectron2's keys."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest

from convert.contract import InputContract
from moco.common.errors import DataError, UserError

ARCHITECTURE = {
    "stride_in_1x1": False,
    "depth": 50,
    "stem": "imagenet",
    "stem_out_channels": 64,
    "res2_out_channels": 256,
    "num_groups": 1,
    "width_per_group": 64,
}
R50: dict[str, Any] = {
    "pixel_mean": (123.675, 116.28, 103.53),
    "pixel_std": (58.395, 57.12, 57.375),
    "channel_order": "RGB",
    "family": "resnet",
    "architecture": ARCHITECTURE,
    "source": "torchvision",
    "source_sha256": "0" * 64,
    "encoder": "single",
}


def changed(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a contract's fields with some replaced, also in its architecture."""
    own = {name: value for name, value in changes.items() if name in ARCHITECTURE}
    others = {name: value for name, value in changes.items() if name not in own}
    return {**values, "architecture": {**values["architecture"], **own}, **others}


def test_round_trip() -> None:
    value = InputContract.from_fields(**R50)
    written = value.to_dict()
    assert (written["version"], written["architecture"]["depth"]) == (2, 50)
    assert written["pixel_mean"] == [123.675, 116.28, 103.53]
    assert InputContract.from_dict(written) == value
    # As when training starts another process.
    assert pickle.loads(pickle.dumps(value)) == value


def test_detectron2_keys() -> None:
    assert InputContract.from_fields(**R50).d2_keys() == {
        "INPUT.FORMAT": "RGB",
        "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
        "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
        "MODEL.RESNETS.DEPTH": 50,
        "MODEL.RESNETS.STEM": "imagenet",
        "MODEL.RESNETS.STEM_OUT_CHANNELS": 64,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 256,
        "MODEL.RESNETS.NUM_GROUPS": 1,
        "MODEL.RESNETS.WIDTH_PER_GROUP": 64,
    }


@pytest.mark.detectron2
def test_the_keys_are_detectron2s() -> None:
    pytest.importorskip("detectron2")
    from detectron2.config import get_cfg

    cfg = get_cfg()
    keys = InputContract.from_fields(**R50).d2_keys()
    del keys["MODEL.RESNETS.STEM"]
    cfg.merge_from_list([item for pair in keys.items() for item in pair])
    assert cfg.MODEL.RESNETS.DEPTH == 50
    assert cfg.MODEL.PIXEL_STD == [58.395, 57.12, 57.375]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("pixel_mean", (0.485, 0.456, 0.406), "scale 0..1"),
        ("pixel_mean", (1.0, 2.0), "three finite numbers"),
        ("pixel_mean", (1.0, 2.0, math.nan), "three finite numbers"),
        ("pixel_mean", (1.0, 2.0, 256.0), "0..255"),
        ("pixel_mean", "123", "three finite numbers"),
        ("pixel_std", (1.0, 0.0, 1.0), "more than 0"),
        ("pixel_std", (1.0, True, 1.0), "three finite numbers"),
        ("channel_order", "rgb", "'RGB', 'BGR'"),
        ("stride_in_1x1", 0, "true or false"),
        ("depth", 20, "expected one of"),
        ("stem", "vgg", "expected one of"),
        ("num_groups", 0, "an integer"),
        ("width_per_group", 2**40, "an integer"),
        ("stem_out_channels", 64.0, "an integer"),
        ("source", "", "expected one line of text"),
    ],
)
def test_values_out_of_range(field: str, value: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        InputContract.from_fields(**changed(R50, **{field: value}))
    assert field in str(caught.value)
    written = changed(InputContract.from_fields(**R50).to_dict(), **{field: value})
    with pytest.raises(DataError, match="contract: .*" + reason):
        InputContract.from_dict(written)


def test_mean_zero_is_a_normalization_too() -> None:
    plain = InputContract.from_fields(
        **{**R50, "pixel_mean": (0, 0, 0), "pixel_std": (255, 255, 255)}
    )
    assert plain.pixels.mean == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d["architecture"].pop("depth"), r"architecture: missing \['depth'\]"),
        (lambda d: d.update(color="RGB"), r"unknown .*'color'"),
        (lambda d: d.update(version=1), "version 1, this program reads 2"),
        (lambda d: d.pop("family"), r"missing \['family'\]"),
        (lambda d: d.update(architecture=[]), "architecture: got list"),
        (lambda d: d.update(family="rabbit"), "rabbit"),
        (lambda d: d.clear(), "version None"),
    ],
)
def test_another_dict_is_refused(change: Any, reason: str) -> None:
    written = InputContract.from_fields(**R50).to_dict()
    change(written)
    with pytest.raises(DataError, match=reason):
        InputContract.from_dict(written)
    with pytest.raises(DataError, match="expected a dict"):
        InputContract.from_dict([written])


def test_architecture_in_words() -> None:
    value = InputContract.from_fields(**R50).architecture
    assert str(value) == "ResNet-50"
    narrow = dataclasses.replace(value, depth=18, stem="cifar", stem_out_channels=24)
    assert str(narrow) == "ResNet-18, cifar stem, 24 stem channels"
    grouped = dataclasses.replace(value, num_groups=32, width_per_group=4)
    assert str(grouped) == "ResNet-50, 32 groups of 4"
