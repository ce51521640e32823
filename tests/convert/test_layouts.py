"""Every project of convert/projects.py in a generated file: what is recognized and dropped."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from convert.contract import Given
from convert.read import read_file
from convert.translate import recognize
from moco.common.errors import DataError, UserError
from tests.convert.layout_checks import MAKERS, made
from tests.oracles import layouts_fair, layouts_frameworks

# Convolutions by depth; each has a batch norm of four tensors and a counter.
CONVOLUTIONS = {18: 20, 50: 53}
COUNTERS = CONVOLUTIONS[50]
NETWORK = CONVOLUTIONS[18] * 6
MLP, DENSE_NECK = 2 + 5 + 2, 13  # two linear layers with a batch norm; and two convolutions
NO_PIXELS = "meta's configuration names no mean and std: ImageNet's are assumed"


@dataclasses.dataclass(frozen=True)
class Expected:
    source: str
    dropped: dict[str, int]  # beside the batch counters of the backbone
    unwrapped: tuple[str, ...] = ("state_dict",)  # path to the default network's state dict
    note: str = ""  # what a note has to say
    depth: int = 50


Framework = functools.partial(Expected, depth=18)


VISSL_RECORD = 5 + 7 + 2  # of the file, of classy_state_dict, and its meters and its model's meta
EXPECTED = {
    "moco-v3": Expected(
        "facebookresearch/moco-v3",
        {"head": 10, "key encoder": 328, "predictor": 7, "training record": 2, "optimizer": 1}
        | {"loss scaling": 1},
    ),
    "simsiam": Expected(
        "facebookresearch/simsiam",
        {"head": 17, "predictor": 8, "training record": 2, "optimizer": 1},
    ),
    "linear classifier": Expected(
        "pytorch/examples imagenet", {"head": 2, "training record": 3, "optimizer": 1}
    ),
    "simclr v1": Expected(
        "google-research/simclr v1 (tonylins/simclr-converter)",
        {"head": 2},
        note="max-pool",
    ),
    "simclr v2": Expected(
        "google-research/simclr v2 (Separius/SimCLRv2-Pytorch)",
        {"head": 3},
        unwrapped=("resnet",),
        note="max-pool",
    ),
    "byol": Expected(
        "google-deepmind/byol (ajtejankar/byol-convert)",
        {"head": 2, "batch counter": -COUNTERS},
        unwrapped=(),
        note="SAME",
    ),
    "barlowtwins": Expected(
        "facebookresearch/barlowtwins",
        {"projection head": 7, "loss": 2, "batch counter": 1, "training record": 1, "optimizer": 1},
        unwrapped=("model",),
    ),
    "vicreg": Expected(
        "facebookresearch/vicreg",
        {"projection head": 8, "training record": 1, "optimizer": 1},
        unwrapped=("model",),
    ),
    "backbone only": Expected("torchvision", {}, unwrapped=(), note="dilated, anti-aliased"),
    "swav": Expected(
        "facebookresearch/swav",
        {"projection head": 8, "batch counter": 1, "prototypes": 1, "training record": 1}
        | {"optimizer": 1, "loss scaling": 1},
    ),
    "swav released": Expected(
        "facebookresearch/swav",
        {"projection head": 8, "batch counter": 1, "prototypes": 1},
        unwrapped=(),
    ),
    "dino": Expected(
        "facebookresearch/dino",
        {"head": 8, "student encoder": 1, "training record": 2, "optimizer": 1, "loss": 1}
        | {"loss scaling": 1},
        unwrapped=("teacher",),
    ),
    "vissl swav": Expected(
        "facebookresearch/vissl",
        {"head": 1, "loss": 2, "optimizer": 1, "training record": VISSL_RECORD},
        unwrapped=("classy_state_dict", "base_model", "model", "trunk"),
    ),
    "vissl moco": Expected(
        "facebookresearch/vissl",
        {"head": 1, "key encoder": 1, "loss": 1, "optimizer": 1, "training record": VISSL_RECORD},
        unwrapped=("classy_state_dict", "base_model", "model", "trunk"),
    ),
    "vissl dino": Expected(
        "facebookresearch/vissl",
        {"head": 4, "student encoder": 1, "loss": 1, "training record": 5},
        unwrapped=("loss",),
    ),
    "vissl zoo": Expected(
        "facebookresearch/vissl (converted)", {}, unwrapped=("model_state_dict",)
    ),
}
EXPECTED["barlowtwins released"] = EXPECTED["barlowtwins"]
EXPECTED["swav lists of prototypes"] = dataclasses.replace(
    EXPECTED["swav"], dropped=EXPECTED["swav"].dropped | {"prototypes": 3}
)
EXPECTED["vissl ema"] = dataclasses.replace(
    EXPECTED["vissl swav"],
    # And the meters of the average.
    dropped=EXPECTED["vissl swav"].dropped
    | {"ema encoder": 1, "training record": VISSL_RECORD + 1},
)


RUN = {"training record": 1, "optimizer": 1}
MMENGINE = {"training record": 2, "optimizer": 1, "schedule": 1}
LIGHTNING = {"training record": 5, "optimizer": 1, "schedule": 1}
OLD_MM, NEW_MM = "OpenSelfSup / MMSelfSup 0.x", "MMSelfSup 1.x / mmpretrain"
ANY_MM, SOLO = "OpenSelfSup / MMSelfSup / mmpretrain", "vturrisi/solo-learn"


def lists(one: str, other: str, neck: int = MLP) -> dict[str, int]:
    """Two lists [backbone, neck], and the first one's members under their second names."""
    return {
        f"{other} encoder": NETWORK,
        f"second name of the {one} encoder": NETWORK,
        "neck": 3 * neck,
    }


def average(other: str) -> dict[str, int]:
    """A backbone and a neck, and the average of both."""
    return {
        "neck": 2 * MLP,
        "head": MLP,
        f"{other} encoder": NETWORK,
        "EMA counter": 1,
    }


def solo(**dropped: int) -> Expected:
    named = {name.replace("_", " "): count for name, count in dropped.items()}
    return Framework(SOLO, {"classifier": 2, **named, **LIGHTNING})


FRAMEWORKS = {
    "pycontrast": Framework(
        "HobbitLong/PyContrast",
        {"head": MLP + 4, "memory bank": 1, "loss scaling": 1, "ema encoder": 1, **RUN},
        unwrapped=("model",),
    ),
    "pycontrast bank": Framework(
        "HobbitLong/PyContrast",
        {"head": MLP + 4, "memory bank": 1, "loss scaling": 1, **RUN},
        unwrapped=("model",),
    ),
    "densecl": Framework(
        "WXinlong/DenseCL", {**lists("query", "key", DENSE_NECK), "queue": 4, **RUN}
    ),
    "openselfsup moco": Framework(OLD_MM, {**lists("query", "key"), "queue": 2, **RUN}),
    "openselfsup byol": Framework(OLD_MM, {**lists("online", "target"), "head": MLP, **RUN}),
    "openselfsup npid": Framework(ANY_MM, {"neck": MLP, "head": MLP, **RUN}),
    "mmselfsup 0.x mocov3": Framework(OLD_MM, {**lists("base", "momentum"), "head": MLP, **RUN}),
    "mmselfsup 0.x simsiam": Framework(
        ANY_MM,
        {"second name of the single encoder": NETWORK, "neck": 2 * MLP, "head": MLP, **RUN},
    ),
    "mmselfsup 1.x moco": Framework(NEW_MM, {**average("key"), "queue": 2, **MMENGINE}),
    "mmselfsup 1.x byol": Framework(NEW_MM, {**average("target"), **MMENGINE}),
    "mmselfsup 1.x mocov3": Framework(NEW_MM, {**average("momentum"), **MMENGINE}),
    "mmpretrain": Framework(ANY_MM, {"head": 2, **MMENGINE}),
    "mmpretrain published": Framework(ANY_MM, {"head": 2, "training record": 1}),
    "mmpretrain ema": Framework("mmpretrain", {"head": 2, "model encoder": 1, **MMENGINE}),
    "openselfsup extracted": Framework(
        "OpenSelfSup (extracted)",
        {"training record": 1},
    ),
    "mmselfsup extracted": Framework(
        "MMSelfSup (extracted)",
        {"training record": 1},
    ),
    "densecl extracted": Framework(
        "WXinlong/DenseCL (extracted)",
        {"training record": 1},
    ),
    "solo-learn byol": solo(
        momentum_encoder=NETWORK, classifier=4, projection_head=2 * MLP, predictor=MLP
    ),
    "solo-learn mocov2plus": solo(momentum_encoder=NETWORK, projection_head=2 * MLP, queue=2),
    "solo-learn dino": solo(momentum_encoder=NETWORK, head=2 * MLP, loss=1),
    "solo-learn nnclr": solo(projection_head=MLP, predictor=MLP, classifier=4, queue=3),
    "torchvision references": Framework(
        "torchvision references",
        {"head": 2, "training record": 2, "optimizer": 1, "schedule": 1, "loss scaling": 1},
        unwrapped=("model",),
    ),
    "torchvision references ema": Framework(
        "torchvision references",
        {"head": 2, "average counter": 1, "model encoder": 1, "training record": 2, "optimizer": 1}
        | {"schedule": 1, "loss scaling": 1},
        unwrapped=("model_ema",),
    ),
}
FRAMEWORKS["solo-learn older"] = FRAMEWORKS["solo-learn byol"]


EXPECTED |= FRAMEWORKS
WITH_CONFIGURATION = (OLD_MM, NEW_MM, ANY_MM, "WXinlong/DenseCL", "mmpretrain")
LAYOUTS = pytest.mark.parametrize("name", MAKERS)
ONE_OF_EACH = {expected.source: name for name, expected in EXPECTED.items()}.values()


def write(name: str, save: Callable[..., Path]) -> Path:
    with layouts_fair.pickles_as_main(), layouts_frameworks.pickles_as_mmengine():
        return save(made(name).checkpoint)


def test_every_layout_is_expected() -> None:
    assert EXPECTED.keys() == MAKERS.keys()


@LAYOUTS
def test_every_layout(name: str, save: Callable[..., Path]) -> None:
    """What the network is and needs is in tests/golden/convert_verdicts.yaml."""
    source, expected = made(name), EXPECTED[name]
    raw = read_file(write(name, save))
    found = recognize(raw, "a.file")
    convolutions = CONVOLUTIONS[expected.depth]
    counters = convolutions + expected.dropped.get("batch counter", 0)
    dropped = expected.dropped | {"batch counter": counters}
    assert found.dropped == {rule: count for rule, count in dropped.items() if count}
    note = NO_PIXELS if expected.source in WITH_CONFIGURATION else expected.note
    assert len(found.notes) == bool(note)
    assert all(note in text for text in found.notes)
    for choice in source.networks:
        found = recognize(raw, "a.file", Given(encoder=choice))
        others = source.networks.keys() - {choice}
        assert {f"{other} encoder" for other in others} <= found.dropped.keys()


@pytest.mark.parametrize("name", ["moco-v3", "simsiam"])
def test_unknown_encoder(name: str) -> None:
    with pytest.raises(UserError, match="--encoder rabbit"):
        recognize(made(name).checkpoint, "a.file", Given(encoder="rabbit"))


@LAYOUTS
def test_leftover_keys_are_named(name: str) -> None:
    """Keys beside the backbone are listed as ignored; one under its names is refused by name."""
    checkpoint = state = copy.copy(made(name).checkpoint)
    for part in EXPECTED[name].unwrapped:
        state[part] = copy.copy(state[part])
        state = state[part]
    before = recognize(checkpoint, "a.file")
    beside = {key: torch.ones(1) for key in ("surprise.weight", "module.surprise")}
    state.update(beside)
    found = recognize(checkpoint, "a.file")
    assert found.dropped == before.dropped | {"ignored": 2}
    assert found.state.keys() == before.state.keys()
    (note,) = (note for note in found.notes if note not in before.notes)
    assert all(repr(key) in note for key in beside)
    inside = before.named("layer4.0.conv1.weight") + ".gate"
    state[inside] = torch.ones(1)
    with pytest.raises(DataError) as error:
        recognize(checkpoint, "a.file")
    assert repr(inside) in str(error.value)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_tensors_beside_it_are_named(name: str) -> None:
    """What is beside the state dict is listed as ignored, unless it holds convolutions."""
    checkpoint = made(name).checkpoint
    before = recognize(checkpoint, "a.file")
    found = recognize(checkpoint | {"surprise": {"weight": torch.ones(1)}}, "a.file")
    assert found.dropped == before.dropped | {"ignored": 1}
    assert any("'surprise'" in note for note in found.notes)
    with pytest.raises(DataError, match=r"'surprise'.* ambiguous .*--encoder with one of") as error:
        recognize(checkpoint | {"surprise": {"weight": torch.ones(1, 1, 3, 3)}}, "a.file")
    assert str(error.value).endswith(f" {', '.join(before.encoders)}")
