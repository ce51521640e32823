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
from convert.weights import fetchable
from moco.common.pretrained import find_remote
from tests.oracles.checkpoints import caffe2, detectron2_layout, official
from tests.oracles.resnets import make_resnet

ROOT = Path(__file__).resolve().parent.parent.parent


def _inits() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "configs" / "inits.yaml").read_text())["inits"]


@pytest.mark.parametrize("name", list(_inits()))
def test_the_described_inits_have_the_contract_that_convert_finds(
    name: str, save: Any, save_pickle: Any
) -> None:
    init = _inits()[name]
    required = {"weights", "source", "contract", "paper", "cite", "notes"}
    assert required <= set(init) <= required | {"hash", "size_mb"}
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
    written = contract.to_dict()
    values = {**written, **written["architecture"]}
    assert contract.source == init["source"]
    assert {key: values[key] for key in described} == described
    assert len(described) == 4


def test_the_hashes_of_the_inits_are_those_in_the_files_names() -> None:
    init = _inits()["supervised_torchvision_r50"]
    published = tv.ResNet50_Weights.IMAGENET1K_V1
    assert init["hash"] == "sha256:0676ba61"
    assert init["weights"].endswith("/resnet50-0676ba61.pth")
    assert published.url == init["weights"]
    assert init["size_mb"] == round(published.meta["_file_size"] * 1.048576, 1)  # given in MiB
    assert translate.TORCHVISION_V2 in tv.ResNet50_Weights.IMAGENET1K_V2.url


def test_every_name_has_an_address_that_is_read() -> None:
    addresses = {name: find_remote(name).address for name in fetchable()}
    assert set(_inits()) - set(addresses) == {"random", "moco_converted_by_moco"}
    for name, address in addresses.items():
        rest = _inits()[name]["weights"].removeprefix("detectron2://")
        assert address.removeprefix("https://dl.fbaipublicfiles.com/detectron2/") == rest
        assert find_remote(name).init == name
