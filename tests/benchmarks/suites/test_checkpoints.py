"""Checkpoints of one pre-training as inits: their epochs, order, names, and refusals."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.suites import suite_file
from benchmarks.suites.suite_file import load_suite, parse_inits
from moco.common.errors import DataError, UserError
from tests.benchmarks.suites.lab import write_suite


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_file.forkserver, "call", lambda function, *args: function(*args))


def write(folder: Path, **epochs: object) -> Path:
    """Write checkpoints by the word after `ckpt_`, with the content that is given."""
    for word, content in epochs.items():
        torch.save(content, folder / f"ckpt_{word.removeprefix('_')}.pth")
    return folder


def test_the_recorded_epoch_orders_the_rows(tmp_path):
    x = {"x": torch.zeros(1)}
    write(tmp_path, a={"epoch": 200, **x}, b={"meta": {"epoch": 5}, **x}, _0030={"step": 7, **x})
    expected = {"mine-epoch0005": "b", "mine-epoch0030": "0030", "mine-epoch0200": "a"}
    found = parse_inits(["random", f"mine={tmp_path}/ckpt_*.pth"])
    files = {name: f"{tmp_path}/ckpt_{word}.pth" for name, word in expected.items()}
    assert found == {"random": "random", **files} and [*found] == ["random", *expected]
    suite = load_suite(write_suite(tmp_path, {}, inits={"mine": f"{tmp_path}/ckpt_?.pth"}))
    assert [*suite.inits] == ["mine-epoch0005", "mine-epoch0200"]


@pytest.mark.parametrize(
    ("name", "epoch"),
    [
        ("checkpoint_0199.pth.tar", 199),
        ("checkpoint-100.pth", 100),
        ("r50_ckpt_0.pth", 0),
        ("moco_v2_800ep.pth", 800),
        ("r50-epoch=99-step=5000.ckpt", 99),
        ("epoch_12.pth", 12),
        ("mine-epoch0010.pth.tar", 10),
        ("300epochs.pth", 300),
        ("step=5000.ckpt", None),
        ("model_0009999.pth", None),
        ("r50.pth", None),
        ("12epics.pth", None),
    ],
)
def test_the_epoch_in_a_name(name, epoch):
    assert suite_file._named_epoch(name) == epoch


def test_a_file_is_read_again_when_it_changes(tmp_path):
    path = write(tmp_path, a={"epoch": 1}) / "ckpt_a.pth"
    assert suite_file.order_by_epoch([path], "") == {1: path}
    torch.save({"epoch": 22, "x": torch.zeros(9)}, path)
    assert suite_file.order_by_epoch([path], "") == {22: path}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["mine={}/no_*.pth"], DataError, r"mine=.*no_\*\.pth: no file has such a name"),
        (["mine={}/ckpt_[ab].pth"], DataError, "ckpt_a.pth and ckpt_b.pth are both of epoch 3"),
        (["mine={}/*x*.pth"], DataError, "x.pth records no epoch, and its name has none"),
        (["{}/ckpt_*.pth"], UserError, "a pattern needs a name; expected 'NAME=.*pth'"),
        (["mine={}/ckpt_c*.pth"] * 2, UserError, "mine is given twice"),
        (["mine-epoch0004=a.pth", "mine={}/ckpt_c*.pth"], UserError, "mine is given twice"),
    ],
)
def test_refusals_are_one_line(tmp_path, arguments, error, words):
    write(tmp_path, a={"epoch": 3}, b={"epoch": 3}, c={"epoch": 4})
    torch.save({"epoch": "4"}, tmp_path / "x.pth")
    with pytest.raises(error, match=words) as caught:
        parse_inits([each.format(tmp_path) for each in arguments])
    assert not re.search("\n", str(caught.value))


def test_what_exists_or_is_an_address_is_no_pattern(tmp_path):
    (tmp_path / "a[1].pth").write_text("weights")
    address = "https://host/a*.pth#sha256=0123"
    files = {"mine": f"{tmp_path}/a[1].pth", "web": address}
    assert parse_inits([f"{name}={file}" for name, file in files.items()]) == files
