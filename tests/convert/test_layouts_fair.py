"""Checkpoints of the self-supervised projects: the right network, its very tensors, its pixels."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convert.convert_to_d2 import convert_file
from convert.families import resnet
from convert.files import read_file
from convert.sources import Given, recognize
from convert.verify import read_converted
from moco.common.errors import DataError
from moco.common.files import sha256_file
from tests.convert.layout_checks import (
    assert_is,
    check_beside,
    check_encoder,
    check_leftovers,
    check_unknown_encoder,
)
from tests.oracles import layouts_fair
from tests.oracles.layouts_fair import Made

IMAGENET = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
SWAV = ((123.675, 116.28, 103.53), (58.14, 57.12, 57.375))  # 0.228 x 255
ONLY_SCALED = ((0.0, 0.0, 0.0), (255.0, 255.0, 255.0))
# A ResNet-50 has 53 convolutions, and each a batch norm of four tensors and a counter.
TENSORS, COUNTERS = 53 * 5, 53


@dataclasses.dataclass(frozen=True)
class Expected:
    source: str
    dropped: dict[str, int]  # beside the batch counters of the backbone
    epoch: int | None = 100
    pixels: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET
    unwrapped: tuple[str, ...] = ("state_dict",)  # path to the default network's state dict
    note: str = ""  # what a note has to say


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
        epoch=None,
        pixels=ONLY_SCALED,
        note="max-pool",
    ),
    "simclr v2": Expected(
        "google-research/simclr v2 (Separius/SimCLRv2-Pytorch)",
        {"head": 2, "projection head": 1},
        epoch=None,
        pixels=ONLY_SCALED,
        unwrapped=("resnet",),
        note="max-pool",
    ),
    "byol": Expected(
        "google-deepmind/byol (ajtejankar/byol-convert)",
        {"head": 2, "batch counter": -COUNTERS},
        epoch=None,
        unwrapped=(),
        note="SAME",
    ),
    "barlowtwins": Expected(
        "facebookresearch/barlowtwins",
        {"projector": 7, "loss": 3, "training record": 1, "optimizer": 1},
        unwrapped=("model",),
    ),
    "vicreg": Expected(
        "facebookresearch/vicreg",
        {"projector": 8, "training record": 1, "optimizer": 1},
        unwrapped=("model",),
    ),
    "backbone only": Expected(
        "torchvision", {}, epoch=None, unwrapped=(), note="dilated, anti-aliased"
    ),
    "swav": Expected(
        "facebookresearch/swav",
        {"projection head": 8, "batch counter": 1, "prototypes": 1, "training record": 1}
        | {"optimizer": 1, "loss scaling": 1},
        pixels=SWAV,
    ),
    "swav released": Expected(
        "facebookresearch/swav",
        {"projection head": 8, "batch counter": 1, "prototypes": 1},
        epoch=None,
        pixels=SWAV,
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
        {"teacher's head": 4, "student encoder": 1, "center of the loss": 1, "training record": 5},
        unwrapped=("loss",),
    ),
    "vissl zoo": Expected(
        "facebookresearch/vissl (converted)", {}, epoch=None, unwrapped=("model_state_dict",)
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

LAYOUTS = pytest.mark.parametrize("name", layouts_fair.LAYOUTS)


@functools.cache
def made(name: str) -> Made:
    return layouts_fair.LAYOUTS[name]()


def test_every_layout_is_expected() -> None:
    assert EXPECTED.keys() == layouts_fair.LAYOUTS.keys()


@LAYOUTS
def test_default(name: str, save: Callable[..., Path]) -> None:
    source, expected = made(name), EXPECTED[name]
    with layouts_fair.pickles_as_main():
        path = save(source.checkpoint)
    found = recognize(read_file(path), "a.file")
    assert found.contract.source == expected.source
    choice, network = next(iter(source.networks.items()))
    assert (found.contract.encoder, found.encoders) == (choice, tuple(source.networks))
    assert_is(found, network, TENSORS)
    counters = {"batch counter": COUNTERS + expected.dropped.get("batch counter", 0)}
    dropped = expected.dropped | counters
    assert found.dropped == {rule: count for rule, count in dropped.items() if count}
    assert found.epoch == expected.epoch
    assert (found.contract.pixels.mean, found.contract.pixels.std) == expected.pixels
    assert (found.contract.pixels.channel_order, found.contract.architecture.stride_in_1x1) == (
        "RGB",
        False,
    )
    assert (found.contract.architecture.depth, found.contract.architecture.stem) == (50, "imagenet")
    assert found.warnings == []
    assert len(found.notes) == bool(expected.note)
    assert all(expected.note in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "choice"),
    [(name, choice) for name in layouts_fair.LAYOUTS for choice in made(name).networks],
)
def test_every_encoder(name: str, choice: str) -> None:
    check_encoder(made(name), choice, TENSORS)


@LAYOUTS
def test_unknown_encoder(name: str) -> None:
    check_unknown_encoder(made(name))


@LAYOUTS
def test_leftover_keys_are_named(name: str) -> None:
    check_leftovers(made(name).checkpoint, EXPECTED[name].unwrapped)


@LAYOUTS
def test_tensors_beside_it_are_named(name: str) -> None:
    check_beside(made(name).checkpoint)


@pytest.mark.parametrize("name", ["simclr v1", "simclr v2", "byol", "swav", "dino"])
def test_from_file_to_file(name: str, save: Callable[..., Path], tmp_path: Path) -> None:
    """Networks with pixels, names or memory of their own, and one of several."""
    expected = EXPECTED[name]
    with layouts_fair.pickles_as_main():
        src = save(made(name).checkpoint)
    report = convert_file(src, tmp_path / "out.pth")
    contract = read_converted(tmp_path / "out.pth").contract
    assert contract == report.contract
    assert (contract.source, contract.source_sha256) == (expected.source, sha256_file(src))
    assert (contract.pixels.mean, contract.pixels.std) == expected.pixels
    assert contract.encoder == next(iter(made(name).networks))
    assert report.epoch == expected.epoch


def test_selective_kernels_are_refused() -> None:
    checkpoint = layouts_fair.simclr_v2(selective_kernels=True).checkpoint
    with pytest.raises(DataError, match="main_conv"):
        recognize(checkpoint, "a.file")


def test_state_dict_in_usual_order_is_not_simclrs() -> None:
    """Only the order of the keys tells the converter's file; without it pixels are unknown."""
    state = made("linear classifier").checkpoint["state_dict"]
    found = recognize({"state_dict": state}, "a.file")
    assert found.contract.source == "state dict"
    assert (found.contract.pixels.mean, found.contract.pixels.std) == IMAGENET
    assert "does not say how its pixels were normalized" in found.warnings[0]


def test_weights_before_statistics_are_not_always_byols() -> None:
    net = made("linear classifier").networks["single"]
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    found = recognize(state, "a.file")
    assert found.contract.source == "torchvision"
    assert not any("TensorFlow" in note for note in found.notes)


def test_shortcuts_first_are_not_always_simclrs() -> None:
    """Detectron2's blocks create them first, too; its networks have no fc."""
    state = made("simclr v1").checkpoint["state_dict"]
    state = {key: value for key, value in state.items() if not key.startswith("fc.")}
    assert recognize({"state_dict": state}, "a.file").contract.source == "state dict"


def test_one_network_of_two() -> None:
    """A file without the default network says so instead of taking the other."""
    checkpoint = {k: v for k, v in made("dino").checkpoint.items() if k != "teacher"}
    with pytest.raises(DataError, match=r"no teacher encoder.*--encoder student"):
        recognize(checkpoint, "a.file")
    found = recognize(checkpoint, "a.file", Given(encoder="student"))
    assert_is(found, made("dino").networks["student"], TENSORS)


def test_byols_own_file_names_its_converter(tmp_path: Path) -> None:
    """google-deepmind/deepmind-research@f5de0ed byol/utils/checkpointing.py:65-71, by dill."""

    class State:
        """dill makes a namedtuple's class anew with a function of its own."""

        def __reduce__(self) -> Any:
            return _create_namedtuple, ("_ByolExperimentState", ("online_params",), "byol")

    path = tmp_path / "pretrain_res50x1.pkl"
    content = pickle.dumps({"experiment_state": State(), "step": 1}, protocol=2)
    old, new = f"c{__name__}\n".encode(), b"cdill._dill\n"
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    with pytest.raises(DataError, match=r"dill.*byol-convert"):
        read_file(path)


def _create_namedtuple(*args: Any) -> Any:
    raise AssertionError("it ran")


@pytest.mark.parametrize("part", ["", ".index", ".meta", ".data-00000-of-00001"])
def test_simclrs_own_files_name_their_converters(part: str, tmp_path: Path) -> None:
    """A checkpoint of TensorFlow: three files, and what people give is often none of them."""
    end = (0xDB4775248B80FB57).to_bytes(8, "little")  # leveldb's table_format.md
    (tmp_path / "model.ckpt-225206.index").write_bytes(bytes(40) + end)
    (tmp_path / "model.ckpt-225206.meta").write_bytes(b"\n\x03")
    (tmp_path / "model.ckpt-225206.data-00000-of-00001").write_bytes(bytes(64))
    with pytest.raises(DataError, match=r"TensorFlow.*simclr-converter.*SimCLRv2-Pytorch"):
        read_file(tmp_path / f"model.ckpt-225206{part}")


def test_an_index_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "weights.index").write_bytes(b"short")
    (tmp_path / "weights").write_bytes(pickle.dumps({"a": 1}))
    assert read_file(tmp_path / "weights") == {"a": 1}


@pytest.mark.parametrize(
    "key",
    [
        "net.0.2.weight",
        "net.0.0.bias",
        "net.5.blocks.0.net.0.weight",
        "net.1.blocks.00.net.0.weight",
        "net.1.blocks.x.net.0.weight",
        "net.1.blocks.0.net.1.weight",
        "net.1.blocks.0.projection.shortcut.2.weight",
        "conv1.weight",
        "",
    ],
)
def test_names_of_simclr_v2_are_not_guessed(key: str) -> None:
    assert resnet.SCHEMES["simclr v2"].rename(key) is None
