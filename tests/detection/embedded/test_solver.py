"""Schedule, parameter groups and clipping against values written out."""

import pytest
import torch
from torch import nn

from detection.embedded.solver import (
    build_optimizer,
    build_schedule,
    clip_gradients,
    set_learning_rate,
)
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


def test_groups():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Linear(2, 2))
    model[2].weight.requires_grad = False
    keys = {"WEIGHT_DECAY": 0.1, "WEIGHT_DECAY_NORM": 0.0, "BIAS_LR_FACTOR": 2.0}
    optimizer = build_optimizer(solver(BASE_LR=0.5, **keys), model)
    groups = optimizer.param_groups
    found = {(g["lr"], g["weight_decay"]): [id(p) for p in g["params"]] for g in groups}
    assert found == {
        (0.5, 0.1): [id(model[0].weight)],
        (1.0, 0.1): [id(model[0].bias), id(model[2].bias)],
        (0.5, 0.0): [id(model[1].weight)],
        (1.0, 0.0): [id(model[1].bias)],
    }
    set_learning_rate(optimizer, 0.1)
    assert [g["lr"] for g in groups] == pytest.approx([0.05, 0.1, 0.05, 0.1])


def test_weight_decay_of_biases_wins_over_that_of_norms():
    keys = {"WEIGHT_DECAY": 0.1, "WEIGHT_DECAY_NORM": 0.2, "WEIGHT_DECAY_BIAS": 0.3}
    optimizer = build_optimizer(solver(**keys), nn.BatchNorm2d(2))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.3]


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
