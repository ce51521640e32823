"""configs/inits.yaml says what convert/ finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fvcore.common.config import CfgNode
from torchvision.models import resnet as tv

from convert import translate
from convert.convert_to_d2 import convert_in_memory

ROOT = Path(__file__).resolve().parent.parent.parent


def _inits() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "configs" / "inits.yaml").read_text())["inits"]


@pytest.mark.parametrize("name", list(_inits()))
def test_the_described_inits_have_the_contract_that_convert_finds(
    name: str,
    make_resnet: Any,
    official: Any,
    caffe2: Any,
    detectron2_layout: Any,
    save: Any,
    save_pickle: Any,
) -> None:
    init = _inits()[name]
    assert set(init) == {"weights", "source", "contract", "paper", "from", "cite", "notes"}
    assert init["cite"] and init["notes"] is not None
    described = init["contract"]
    if init["source"] is None:
        assert init["weights"] == "random"
        from detection.config.weights import apply_random

        cfg = CfgNode(
            {
                "INPUT": {"FORMAT": "BGR"},
                "MODEL": {
                    "PIXEL_MEAN": [0.0],
                    "PIXEL_STD": [0.0],
                    "RESNETS": {"STRIDE_IN_1X1": True, "DEPTH": 50},
                },
            }
        )
        apply_random(cfg, explicit=())
        found = {
            "channel_order": cfg.INPUT.FORMAT,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
            "stride_in_1x1": cfg.MODEL.RESNETS.STRIDE_IN_1X1,
        }
        assert found == described
        return
    make: dict[str, Callable[[], Path]] = {
        "torchvision": lambda: save(make_resnet(50).state_dict()),
        "facebookresearch/moco": lambda: save(official(depth=50)),
        "facebookresearch/moco (converted)": lambda: save_pickle(
            detectron2_layout(make_resnet(50), "MOCO")
        ),
        "detectron2/torchvision": lambda: save_pickle(detectron2_layout(make_resnet(50))),
        "detectron2/MSRA": lambda: save_pickle(caffe2(make_resnet(50))),
    }
    contract = convert_in_memory(make[init["source"]]()).contract
    values = contract.to_dict()
    assert contract.source == init["source"]
    assert {key: values[key] for key in described} == described
    assert len(described) == 4


def test_the_hashes_of_the_inits_are_those_in_the_files_names() -> None:
    init = _inits()["supervised_torchvision_r50"]
    digits = init["from"]["sha256"]
    assert digits == "0676ba61"
    assert init["weights"] == f"PATH/resnet50-{digits}.pth"
    assert init["from"]["url"].endswith(f"/resnet50-{digits}.pth")
    assert tv.ResNet50_Weights.IMAGENET1K_V1.url == init["from"]["url"]
    assert translate.TORCHVISION_V2 in tv.ResNet50_Weights.IMAGENET1K_V2.url
    for init in _inits().values():
        if "://" in init["weights"]:
            rest = init["weights"].removeprefix("detectron2://")
            assert init["from"]["url"] == f"https://dl.fbaipublicfiles.com/detectron2/{rest}"
