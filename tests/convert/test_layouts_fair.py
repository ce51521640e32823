"""Checkpoints of the self-supervised projects: the right network, its very tensors, its pixels."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from convert.families import resnet
from convert.read import read_file
from convert.recognize import recognize
from moco.common.errors import DataError
from tests.convert.layout_checks import assert_has_pixels
from tests.oracles.layouts_projects import made

# A ResNet-50 has 53 convolutions, and each a batch norm of four tensors and a counter.
TENSORS = 53 * 5


def test_state_dict_in_usual_order_is_not_simclrs() -> None:
    """Only the order of the keys tells the converter's file; without it pixels are unknown."""
    state = made("linear classifier").checkpoint["state_dict"]
    found = recognize({"state_dict": state}, "a.file")
    assert found.contract.source == "state dict"
    assert_has_pixels(found)
    assert "does not record its pixel normalization" in found.warnings[0]


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
