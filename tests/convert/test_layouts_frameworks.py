"""Checkpoints of frameworks and packages: the right network, its very tensors, its pixels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

from convert.contract import Overrides
from convert.families import resnet
from convert.read import read_file
from convert.recognize import recognize
from moco.common.errors import DataError
from tests.convert.layout_checks import assert_has_pixels, assert_is
from tests.oracles import layouts_lightning
from tests.oracles.layouts import EPOCH, wrapped
from tests.oracles.layouts_projects import made
from tests.oracles.resnets import headless, make_resnet, randomize

TENSORS = 20 * 5  # a ResNet-18 has 20 convolutions, and each a batch norm of four tensors


@pytest.fixture(autouse=True)
def quiet_lightning() -> Iterator[None]:
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("pytorch_lightning")


@pytest.fixture
def lightly(lightning: Any) -> Any:
    return pytest.importorskip("lightly")


@pytest.fixture
def timm() -> Any:
    import timm

    return timm


@pytest.mark.parametrize(
    ("name", "key", "rule"),
    [
        # mmselfsup@80bb3f4 mmselfsup/models/memories/{odc_memory.py:39,simple_memory.py:31} and
        # algorithms/odc.py:59.
        ("openselfsup npid", "memory_bank.centroids", "memory bank"),
        ("openselfsup npid", "memory_bank.feature_bank", "memory bank"),
        ("openselfsup npid", "loss_weight", "loss"),
        # solo-learn@9187ea3 solo/methods/{swav.py:73,deepclusterv2.py:64,134,all4one.py:97-108} and
        # utils/positional_encodings.py:27.
        ("solo-learn nnclr", "prototypes.weight_g", "prototypes"),
        ("solo-learn nnclr", "prototypes.0.weight", "prototypes"),
        ("solo-learn nnclr", "local_memory_index", "memory bank"),
        ("solo-learn nnclr", "queue_index", "queue"),
        ("solo-learn nnclr", "predictor2.0.weight", "predictor"),
        ("solo-learn nnclr", "transformer_encoder.layers.0.norm1.weight", "decoder"),
        ("solo-learn nnclr", "pos_enc.penc.penc.inv_freq", "decoder"),
    ],
)
def test_other_tensors_of_a_file(name: str, key: str, rule: str) -> None:
    source = made(name)
    state = source.checkpoint["state_dict"] | {key: torch.ones(1)}
    before = recognize(source.checkpoint, "a.file").dropped
    found = recognize(source.checkpoint | {"state_dict": state}, "a.file")
    assert found.dropped[rule] == before.get(rule, 0) + 1


def test_numbered_state_dict() -> None:
    """`nn.Sequential(*list(resnet.children())[:-1])`, as lightly's tutorials save it."""
    net = headless(seed=0)
    numbered = nn.Sequential(*list(net.children())[:-1])
    state = wrapped(numbered, "backbone.", container="resnet18_parameters")
    found = recognize(state, "a.file")
    assert found.contract.source == "state dict"
    assert_is(found, net, TENSORS)


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        # Numbered and torchvision's names; golden verdicts have all kinds.
        ("moco example", ("online", "momentum")),
        ("dino", ("teacher", "student")),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_lightly(kind: str, choices: tuple[str, ...], lightly: Any, tmp_path: Path) -> None:
    """Lightning's own trainer writes a module of lightly's own heads."""
    networks = layouts_lightning.lightly(kind, tmp_path / "some.file")
    raw = read_file(tmp_path / "some.file")
    found = recognize(raw, "a.file")
    assert (found.contract.source, found.contract.encoder) == ("lightly", choices[0])
    assert found.encoders == choices
    for choice in choices:
        assert_is(recognize(raw, "a.file", Overrides(encoder=choice)), networks[choice], TENSORS)
    counts = len(raw["state_dict"]) + len(raw) - 1
    assert TENSORS + sum(found.dropped.values()) == counts
    assert_has_pixels(found)


@pytest.mark.filterwarnings("ignore")
def test_lightlys_own_resnet(lightly: Any, tmp_path: Path) -> None:
    """Its children have other numbers and its shortcuts another name than torchvision's."""
    net = layouts_lightning.lightly_own_resnet(tmp_path / "some.file")
    found = recognize(read_file(tmp_path / "some.file"), "a.file")
    assert (found.contract.source, found.contract.architecture.stem) == ("lightly", "cifar")
    state = {key.replace("shortcut", "downsample"): v for key, v in net.state_dict().items()}
    assert len(found.state) == TENSORS
    for key, value in found.state.items():
        assert torch.equal(value, state[key]), key


@pytest.mark.filterwarnings("ignore")
def test_lightning_after_training(lightning: Any, tmp_path: Path) -> None:
    """Any LightningModule with one ResNet, and omegaconf's nodes among its hyper-parameters."""
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"lr": 0.1, "data": {"sizes": [224, 96]}})
    module = layouts_lightning.lightning_module({"net": make_resnet()}, config)
    layouts_lightning.write_lightning(module, tmp_path / "some.file", fit=True)
    (during,) = (tmp_path / "checkpoints").iterdir()  # what ModelCheckpoint wrote in between
    for path in (tmp_path / "some.file", during):
        found = recognize(read_file(path), "a.file")
        assert (found.contract.source, found.dropped["head"]) == ("state dict", 2)
        assert_is(found, module.net, TENSORS)


@pytest.mark.filterwarnings("ignore")
def test_lightnings_average_is_taken(lightning: Any, tmp_path: Path) -> None:
    callbacks = pytest.importorskip("pytorch_lightning.callbacks")
    parts = {"backbone": headless(seed=0), "projection_head": nn.Linear(64, 8)}
    layouts_lightning.write_lightning(
        layouts_lightning.lightning_module(parts),
        tmp_path / "some.file",
        fit=True,
        callbacks=[callbacks.EMAWeightAveraging(decay=0.5)],
    )
    (during,) = (tmp_path / "checkpoints").iterdir()
    raw = read_file(during)
    key = "backbone.conv1.weight"
    assert not torch.equal(raw["state_dict"][key], raw["current_model_state"][key])
    found = recognize(raw, "a.file")
    assert found.contract.source == "lightly"
    assert torch.equal(found.state["conv1.weight"], raw["state_dict"][key])
    assert found.dropped["weights before averaging"] == 1
    # The trainer's own "epoch" is 0 during and 1 after the first.
    assert (raw["epoch"], found.epoch) == (0, 1)
    assert recognize(read_file(tmp_path / "some.file"), "a.file").epoch == 1


def test_timms_saver(timm: Any, tmp_path: Path) -> None:
    path, networks = layouts_lightning.timm_saver(tmp_path, ema=True)
    raw = read_file(path)
    found = recognize(raw, "a.file")
    assert (found.contract.source, found.encoders, found.epoch) == ("timm", tuple(networks), EPOCH)
    assert_has_pixels(found)
    for choice, network in networks.items():
        found = recognize(raw, "a.file", Overrides(encoder=choice))
        state = network.state_dict()
        assert found.state.keys() == {
            key for key in state if resnet.ResNetFamily().to_detectron2(key)
        }
        assert all(torch.equal(value, state[key]) for key, value in found.state.items())
    of_task = raw | {"task_state": {"projection": torch.ones(1)}}  # as its distillation has
    assert recognize(of_task, "a.file").dropped["training record"] == 7


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "wide_resnet50_2", "resnext50_32x4d"])
def test_timms_names_are_torchvisions(name: str, timm: Any) -> None:
    with torch.device("meta"):
        ours, theirs = models.get_model(name).state_dict(), timm.create_model(name).state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


def test_timm_from_the_hub(timm: Any, tmp_path: Path) -> None:
    """timm/models/_hub.py, save_for_hf: safetensors, or torch.save of the state dict."""
    safetensors = pytest.importorskip("safetensors.torch")
    net = timm.create_model("resnet50", num_classes=2)
    randomize(net)
    safetensors.save_file(net.state_dict(), tmp_path / "some.file", metadata={"format": "pt"})
    found = recognize(read_file(tmp_path / "some.file"), "a.file")
    assert (found.contract.source, found.contract.architecture.depth) == ("torchvision", 50)
    assert_is(found, net, tensors=53 * 5)
    assert_has_pixels(found)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet50d", "stem is three 3x3 convolutions"),
        ("resnet50c", "stem is three 3x3 convolutions"),
        ("ecaresnet50t", "stem is three 3x3 convolutions"),
        ("swinv2_tiny_window8_256", "a Swin V2"),
        ("mvitv2_tiny", "an MViTv2, which Detectron2 itself has"),
        ("beit_base_patch16_224", r"q_bias|relative_position|gamma_1"),
        ("convnext_atto_ols", "stem.2.weight"),
    ],
)
@pytest.mark.parametrize("container", [None, "state_dict"])
def test_other_networks_are_refused(
    name: str, reason: str, container: str | None, timm: Any
) -> None:
    with torch.device("meta"):
        net = timm.create_model(name)
    with pytest.raises(DataError, match=reason) as error:
        recognize(wrapped(net, "module.", container=container), "a.file")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["2.0.weight", "04.0.conv1.weight", "4.0.downsample.0.bias", ""])
def test_numbers_that_no_resnet_has(key: str) -> None:
    assert resnet.SCHEMES["numbered"].rename(key) is None


@pytest.mark.parametrize("key", ["6.0.conv1.weight", "2.0.downsample.0.weight", "0.bias", ""])
def test_names_that_lightlys_resnet_has_not(key: str) -> None:
    assert resnet.SCHEMES["lightly"].rename(key) is None
