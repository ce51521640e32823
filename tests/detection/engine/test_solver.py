"""Schedules and gradient clipping against values computed by hand."""

import math

import pytest
import torch
from torch import nn

from detection.engine.solver import build_schedule, clip_gradients, set_learning_rate
from tests.oracles import tiny_detector as tiny


def solver(**keys):
    return tiny.task({f"SOLVER.{name}": value for name, value in keys.items()}).SOLVER


TEN = {"MAX_ITER": 10, "STEPS": (6, 8), "WARMUP_ITERS": 4, "WARMUP_FACTOR": 0.2}
TAIL = [1, 1, 0.1, 0.1, 0.01, 0.01]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [0.2, 0.4, 0.6, 0.8, *TAIL]),
        ({"WARMUP_METHOD": "constant"}, [0.2, 0.2, 0.2, 0.2, *TAIL]),
        ({"MAX_ITER": 5, "WARMUP_ITERS": 0, "STEPS": (3, 70)}, [1, 1, 1, 0.1, 0.1]),
    ],
)
def test_the_schedule(keys, expected):
    schedule = build_schedule(solver(**TEN | keys))
    factors = [schedule(i / len(expected)) for i in range(len(expected))]
    assert factors == pytest.approx(expected, rel=1e-9)


def test_the_papers_24k_schedule():
    paper = {"STEPS": (18000, 22000), "WARMUP_ITERS": 100, "WARMUP_FACTOR": 1e-3}
    schedule = build_schedule(solver(MAX_ITER=24000, **paper))
    chosen = [schedule(i / 24000) for i in (0, 50, 100, 17999, 18000, 21999, 22000, 23999)]
    assert chosen == pytest.approx([1e-3, 0.5005, *TAIL])


def test_half_a_cosine():
    """The cosine starts with the training and ends at BASE_LR_END."""
    cosine = {"LR_SCHEDULER_NAME": "WarmupCosineLR", "BASE_LR": 0.5, "BASE_LR_END": 0.1}
    schedule = build_schedule(solver(MAX_ITER=8, WARMUP_ITERS=2, WARMUP_FACTOR=0.2, **cosine))
    wave = [0.6 + 0.4 * math.cos(math.pi * i / 8) for i in range(8)]
    expected = [0.2, (0.2 + wave[2]) / 2, *wave[2:]]
    assert [schedule(i / 8) for i in range(8)] == pytest.approx(expected)
    group = {"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5, "initial_lr": 0.05}
    optimizer = torch.optim.SGD([group])
    set_learning_rate(optimizer, schedule(0.5))  # The group has its own rate.
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.6)


def test_a_power_of_what_remains():
    """After the warm-up it is mmsegmentation's `poly`, which begins with the training, too."""
    poly = {"LR_SCHEDULER_NAME": "WarmupPolyLR", "POLY_LR_POWER": 0.9}
    schedule = build_schedule(solver(MAX_ITER=8, WARMUP_ITERS=2, WARMUP_FACTOR=0.2, **poly))
    left = [(1 - i / 8) ** 0.9 for i in range(8)]
    expected = [0.2, (0.2 + left[2]) / 2, *left[2:]]
    assert [schedule(i / 8) for i in range(8)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"), [("value", [[1.0, -1.0], [0.5]]), ("norm", [[0.6, -0.8], [0.5]])]
)
def test_clipping_is_per_parameter(kind, expected):
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, -4.0]), torch.tensor([0.5])
    clip = {"ENABLED": True, "CLIP_TYPE": kind, "CLIP_VALUE": 1.0, "NORM_TYPE": 2.0}
    keys = {f"CLIP_GRADIENTS.{name}": value for name, value in clip.items()}
    clip_gradients(solver(**keys), torch.optim.SGD(parameters, lr=1.0))
    for parameter, values in zip(parameters, expected, strict=True):
        assert parameter.grad.tolist() == pytest.approx(values, rel=1e-5)
