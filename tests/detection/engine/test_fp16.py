"""Training in fp16: losses are scaled; steps with overflowing gradients are skipped and counted.

A detector in fp16 takes minutes on a CPU, where such a task is refused, so the network is one
matrix.
"""

from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detection.engine.trainer import Trainer
from moco.common.errors import NumericError
from moco.common.files import load_torch
from moco.engine.stop import StopRequest

SIZE, FACTOR = 8, 100.0


class Matrix(nn.Module):
    """Network in which every gradient is 800; scaled, it must not exceed 65504 in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, samples: Any) -> dict[str, Tensor]:
        return {"loss": self.matrix(torch.full((SIZE, SIZE), FACTOR)).sum()}


def trainer(task_cfg: Any, precision: str = "fp16") -> Trainer:
    cfg = task_cfg.clone()
    cfg.defrost()
    cfg.SOLVER.PRECISION, cfg.SOLVER.MAX_ITER, cfg.SOLVER.BASE_LR = precision, 200, 1e-5
    # The limit is between the gradient and the scaled gradient.
    cfg.SOLVER.CLIP_GRADIENTS.update({"ENABLED": True, "CLIP_TYPE": "value", "CLIP_VALUE": 1000.0})
    cfg.freeze()
    torch.manual_seed(0)
    return Trainer(cfg, "embedded", Matrix(), StopRequest())


def test_steps_that_overflow_are_skipped_and_counted(task_cfg, tmp_path):
    """Ten halvings of the scale 65536 give 64, with which the gradient is finite."""
    one = trainer(task_cfg)
    one.folder = tmp_path
    moved = []
    for iteration in range(13):
        before = one.model.matrix.weight.detach().clone()
        one.step(iteration, repeat([]))
        moved.append(not torch.equal(before, one.model.matrix.weight))
    assert moved == [False] * 10 + [True] * 3
    assert (one.scaler.skipped, one.scaler.get_scale()) == (10, 64.0)
    # The gradient is unscaled before it is clipped.
    assert torch.allclose(one.model.matrix.weight.grad, torch.full((SIZE, SIZE), SIZE * FACTOR))

    path = one.save(12)
    assert load_torch(path)["skipped"] == 10
    again = trainer(task_cfg)
    again.folder = tmp_path
    again.resume()
    assert (again.done, again.scaler.skipped, again.scaler.get_scale()) == (13, 10, 64.0)
    one.step(13, repeat([]))
    again.step(13, repeat([]))
    assert torch.equal(one.model.matrix.weight, again.model.matrix.weight)


def test_a_training_that_skips_most_steps_is_refused(task_cfg, tmp_path):
    one = trainer(task_cfg)
    one.folder, one.scaler.skipped = tmp_path, 51
    with pytest.raises(NumericError, match=r"fp16: 51 of 101 steps were skipped.*set bf16 or fp32"):
        one.save(100)
    one.scaler.skipped = 50
    one.save(100)


def test_in_fp32_nothing_is_scaled(task_cfg):
    one = trainer(task_cfg, "fp32")
    one.step(0, repeat([]))
    assert not one.scaler.is_enabled() and one.scaler.skipped == 0
