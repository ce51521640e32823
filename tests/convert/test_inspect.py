"""Output of `inspect` for files that can be converted, and for those that cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.inspect_weights import main
from convert.convert_to_d2 import convert_file
from convert.inspect_file import inspect_file
from moco.common.files import sha256_file
from tests.convert.test_vit import make_state
from tests.oracles.checkpoints import official

Save = Callable[..., Path]


def test_a_checkpoint_with_two_encoders(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = save(official())
    before = set(tmp_path.rglob("*"))
    main([str(src)])
    out = capsys.readouterr().out
    assert set(tmp_path.rglob("*")) == before
    for text in (
        f"file          {src}: {src.stat().st_size:,} bytes",
        f"sha256        {sha256_file(src)}",
        "holds         'epoch': 200",
        "holds         'arch': 'resnet18'",
        "holds         'state_dict': 250 tensors (209 float32, 41 int64)",
        "source        facebookresearch/moco, epoch 200, MLP head",
        "network       query: ResNet-18, 8 stem channels, 100 tensors, 176,712 parameters, "
        "family resnet; default",
        "network       key: ResNet-18, 8 stem channels, 100 tensors, 176,712 parameters, "
        "family resnet; --encoder",
        "RGB, scale 0..255, mean [123.675, 116.28, 103.53], std [58.395, 57.12, 57.375]",
        f"next          python -m benchmarks convert {src} weights.pth",
    ):
        assert text in out, text
    # The number of parameters is that of the network.
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    names = official()["state_dict"]
    count = sum(
        value.numel()
        for key, value in names.items()
        if key.startswith("module.encoder_q.")
        and ".fc." not in key
        and not key.endswith(statistics)
    )
    assert count == 176_712


def test_only_a_key_encoder(save: Save) -> None:
    checkpoint = official()
    for key in [key for key in checkpoint["state_dict"] if "encoder_q" in key]:
        del checkpoint["state_dict"][key]
    out = inspect_file(save(checkpoint))
    assert "problem       no query encoder" in out
    assert out.splitlines()[-1].endswith("weights.pth --encoder key")


def test_a_converted_file(save: Save, tmp_path: Path) -> None:
    src = save(official())
    for suffix in (".pth", ".pkl", ".safetensors"):
        dst = tmp_path / f"out{suffix}"
        convert_file(src, dst)
        out = inspect_file(dst)
        assert "source        facebookresearch/moco, already converted" in out
        assert f"from          a file with sha256 {sha256_file(src)}" in out
        assert f"MODEL.WEIGHTS {dst}" in out.splitlines()[-1]


def test_the_exit_code_is_that_of_a_conversion(save: Save) -> None:
    assert main([str(save(official()))]) == 0
    assert main([str(save({"weights": {"a": torch.ones(2, 3)}}))]) == 3
    assert main([str(save(make_state()))]) == 0  # with --num-heads


def test_a_file_that_cannot_be_converted_is_described_with_the_reason(save: Save) -> None:
    broken = official()
    broken["state_dict"]["module.encoder_q.bn1.bias"][0] = torch.nan
    out = inspect_file(save(broken))
    assert "problem       not a sound ResNet-18" in out and "NaN or Inf" in out
    assert out.splitlines()[-1].endswith("--encoder key")
    strange = inspect_file(save({"weights": {"a\x1b[31m": torch.ones(2, 3)}, 7: [1]}))
    assert r"'weights': 1 tensors (1 float32)" in strange
    assert "not usable    unknown layout" in strange.splitlines()[-1]
    assert "\x1b" not in strange
    assert "a list, not a dict" in inspect_file(save([1, 2]))
