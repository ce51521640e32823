"""Precision and memory layout that `auto` chooses."""

import pytest
import torch

from moco.common.errors import UserError
from moco.engine.device import has_fast_bf16
from moco.engine.training import resolve_speed
from moco.pretraining.config import load_pretrain_cfg

CPU = torch.device("cpu")


CPUS = (
    ({"avx512_bf16": True}, True), ({"amx_bf16": True, "avx512_bf16": False}, True),
    ({"avx512_f": True, "avx512_bf16": False}, False), ({}, False),
)  # fmt: skip


@pytest.mark.parametrize(("found", "fast"), CPUS)
def test_fast_bf16_needs_instructions_of_a_cpu(monkeypatch, found, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert has_fast_bf16(CPU) is fast


@pytest.mark.parametrize("fast", [True, False])
def test_fast_bf16_must_not_be_emulated_by_a_gpu(monkeypatch, fast):
    def supported(including_emulation=True):
        return including_emulation or fast

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert has_fast_bf16(torch.device("cuda:0")) is fast


@pytest.mark.parametrize(
    ("device", "precision", "layout"),
    [("cpu", "fp32", True), ("cuda", "fp32", False), ("cuda", "bf16", True)],
)
def test_the_layout_follows_device_and_precision(device, precision, layout):
    cfg = load_pretrain_cfg(None, ["SOLVER.PRECISION", precision])
    chosen = resolve_speed(cfg, torch.device(device), {})
    assert (chosen.SOLVER.PRECISION, chosen.SOLVER.CHANNELS_LAST) == (precision, layout)
    assert cfg.SOLVER.CHANNELS_LAST is None


@pytest.mark.parametrize("fast", [True, False])
def test_emulated_bf16_gives_a_warning(monkeypatch, capsys, fast):
    monkeypatch.setattr("moco.engine.training.has_fast_bf16", lambda device: fast)
    cfg = load_pretrain_cfg(None, ["SOLVER.PRECISION", "bf16"])
    assert resolve_speed(cfg, CPU, {}).SOLVER.PRECISION == "bf16"
    assert ("slower than fp32" in capsys.readouterr().out) is not fast


def test_a_checkpoint_with_another_precision_is_refused():
    cfg = load_pretrain_cfg(None, [])
    with pytest.raises(UserError, match="PRECISION"):
        resolve_speed(cfg, CPU, {"SOLVER.PRECISION": "fp8"})
