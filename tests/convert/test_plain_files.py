"""Files of odd shape: what an untrusted dict may hold around, inside or instead of a network."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock

from convert.convert_to_d2 import convert_file
from convert.inspect_file import inspect_file
from convert.read import read_file
from convert.recognize import recognize
from moco.common.errors import DataError
from tests.oracles.checkpoints import official, own
from tests.oracles.resnets import make_resnet

Save = Callable[..., Path]


def test_lists_that_hold_each_other_many_times() -> None:
    nested: list[Any] = []
    for _ in range(100):
        nested = [nested, nested]
    start = time.process_time()
    found = recognize({**official(), "log": nested}, "x")
    assert time.process_time() - start < 10, "every path through them is 2^100"
    assert found.dropped["training record"] == 3


def test_lists_that_hold_themselves() -> None:
    cycle: dict[str, Any] = {}
    cycle["parent"] = [cycle]
    assert recognize({**official(), "args": cycle}, "x").dropped["training record"] == 3
    cycle["hidden"] = (torch.ones(1),)
    found = recognize({**official(), "args": cycle}, "x")
    assert found.dropped["ignored"] == 1 and "'args'" in found.notes[0]


def test_objects_of_any_class_are_listed(save: Save, tmp_path: Path) -> None:
    """They were refused together with the network next to them."""
    weight = torch.nn.Parameter(torch.ones(8, 3, 7, 7))
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weight], lr=0.1), 5)
    objects = {
        "scheduler": scheduler,
        "criterion": torch.nn.CrossEntropyLoss(torch.ones(3)),
        "classes": np.array(["cat", "dog"]),
        "window": slice(0, 2),
        "path": tmp_path,
    }
    src = save({**official(), **objects})
    report = convert_file(src, tmp_path / "out.pth")
    (note,) = (note for note in report.notes if "skipped objects" in note)
    for name in ("lr_scheduler.StepLR", "optim.sgd.SGD", "CrossEntropyLoss", "slice", "dtype U3"):
        assert name in note and name in inspect_file(src)
    assert not report.warnings
    plain = convert_file(save(official()), tmp_path / "plain.pth")
    assert sum(report.dropped.values()) == sum(plain.dropped.values()) + len(objects)
    a, b = (read_file(tmp_path / name)["model"] for name in ("out.pth", "plain.pth"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_marks_of_another_type() -> None:
    state = make_resnet().state_dict()
    for value in (np.ones(3), torch.ones(3), ["moco-transfer/1"]):
        raw = {"state_dict": dict(state), "format": value, "more": torch.ones(1)}
        found = recognize(raw, "x")
        assert (found.contract.source, found.contract.encoder) == ("state dict", "single")
        assert any(note.startswith("ignored") and "'more'" in note for note in found.notes)


@pytest.mark.parametrize("damage", [torch.ones(2), np.ones(2), 7, [1, 2], {"arch": torch.ones(2)}])
@pytest.mark.parametrize("key", ["encoder", "input"])
def test_a_damaged_record_of_our_own(key: str, damage: Any) -> None:
    with pytest.raises(DataError, match=r"damaged record|expected one of") as caught:
        recognize({**own(), key: damage}, "x")
    assert len(str(caught.value).splitlines()) == 1


def test_a_resnet_of_three_stages(tmp_path: Path) -> None:
    """As in akamaster/pytorch_resnet_cifar10, whose shortcuts have no tensors; 6 n + 2 layers."""
    net = nn.ModuleDict({"conv1": nn.Conv2d(3, 16, 3, bias=False), "bn1": nn.BatchNorm2d(16)})
    for i, (before, width) in enumerate([(16, 16), (16, 32), (32, 64)], start=1):
        blocks = [BasicBlock(before if n == 0 else width, width) for n in range(9)]
        net[f"layer{i}"] = nn.Sequential(*blocks)
    net["linear"] = nn.Linear(64, 10)
    state = {f"module.{key}": value for key, value in net.state_dict().items()}
    torch.save({"state_dict": state, "best_prec1": 93.6}, tmp_path / "resnet56.th")
    with pytest.raises(DataError, match="a ResNet-56 of three stages for CIFAR"):
        convert_file(tmp_path / "resnet56.th", tmp_path / "out.pth")
