"""Files that would run code: nothing in them runs, wherever they are opened."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.convert_to_d2 import convert_file
from convert.inspect_file import inspect_file
from convert.verify import read_converted
from moco.common.errors import DataError, UserError
from tests.oracles.checkpoints import official, own
from tests.oracles.payloads import ASLEEP, HOWS, WRITERS, Payload, as_tar, corpus, harmless


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("write", WRITERS)
def test_payloads_do_not_run(
    write: Any, how: str, protocol: int, tmp_path: Path, refuse: Callable[..., str]
) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / "x.pth.tar"
    write(Payload(marker, how), path, protocol)
    if write is not as_tar:  # a format that is not read
        name = "eval" if how == "eval" else f"{os.open.__module__}.open"
        assert re.search(rf"\nwarning  .*\b{name}\b", inspect_file(path))
    assert_never_run(path, marker, refuse)


def assert_never_run(path: Path, marker: Path, refuse: Callable[..., str]) -> None:
    refuse(path, ".")
    # Nor where it is only described, or where a converted file is expected, or one to replace.
    with contextlib.suppress(DataError):
        assert inspect_file(path).replace("\n", "").isprintable()
    path.rename(path.with_name("x.pkl"))
    with pytest.raises(DataError):
        read_converted(path.with_name("x.pkl"))
    with pytest.raises(UserError, match="not the output of an earlier conversion"):
        convert_file(path.with_name("any"), path.with_name("x.pkl"))
    assert not marker.exists()


@pytest.mark.slow
def test_payloads_in_any_place_do_not_run(tmp_path: Path, refuse: Callable[..., str]) -> None:
    marker = tmp_path / "marker"
    files = corpus(marker)
    assert len(files) > 40
    for content in files.values():
        (tmp_path / "x.pth.tar").write_bytes(content)
        assert_never_run(tmp_path / "x.pth.tar", marker, refuse)
        (tmp_path / "x.pkl").unlink()


def test_payloads_that_nobody_unpickles(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for content in harmless(marker).values():
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(DataError):
            convert_file(tmp_path / "x", tmp_path / "out.pth")
        assert not marker.exists()


def test_the_payloads_are_alive(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / "x"
    for name, content in corpus(marker).items():
        if name in ASLEEP:
            continue
        path.write_bytes(content)
        # What runs is followed by an error in most of them.
        with contextlib.suppress(Exception):
            pickle.loads(content)
        with contextlib.suppress(Exception):
            torch.load(path, weights_only=False)
        assert marker.exists(), name
        marker.unlink()


def test_a_payload_in_the_optimizer_of_a_good_checkpoint(save: Any, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for checkpoint in (official(), own()):
        checkpoint["optimizer"]["param_groups"][0]["lr"] = Payload(marker, "reduce")
        report = convert_file(save(checkpoint), tmp_path / "out.pth")
        assert any(".open" in line for line in report.warnings), "it names what the file asks for"
    assert not marker.exists()
