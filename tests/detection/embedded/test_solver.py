"""Schedule, parameter groups and clipping against values written out."""

from typing import Any

import pytest
import torch
from torch import nn

from detection.embedded.solver import (
    clip_gradients,
    parameter_groups,
    set_learning_rate,
    warmup_multistep,
)


def factors(max_iter: int, **options: Any) -> list[float]:
    defaults: dict[str, Any] = {
        "steps": (6, 8),
        "gamma": 0.1,
        "warmup_iters": 4,
        "warmup_factor": 0.2,
        "warmup_method": "linear",
    }
    schedule = warmup_multistep(max_iter=max_iter, **{**defaults, **options})
    return [schedule(i / max_iter) for i in range(max_iter)]


def test_linear_warmup_then_steps() -> None:
    expected = [0.2, 0.4, 0.6, 0.8, 1, 1, 0.1, 0.1, 0.01, 0.01]
    assert factors(10) == pytest.approx(expected, rel=1e-9)


def test_constant_warmup() -> None:
    expected = [0.2, 0.2, 0.2, 0.2, 1, 1, 0.1, 0.1, 0.01, 0.01]
    assert factors(10, warmup_method="constant") == pytest.approx(expected, rel=1e-9)


def test_no_warmup_and_steps_out_of_reach() -> None:
    assert factors(5, warmup_iters=0, steps=(3, 70)) == pytest.approx([1, 1, 1, 0.1, 0.1])


def test_the_papers_24k_schedule() -> None:
    rates = factors(24000, steps=(18000, 22000), warmup_iters=100, warmup_factor=1e-3)
    assert rates[0] == pytest.approx(1e-3)
    assert rates[50] == pytest.approx(0.5005)
    chosen = [rates[i] for i in (100, 17999, 18000, 21999, 22000, 23999)]
    assert chosen == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_groups() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Linear(2, 2))
    model[2].weight.requires_grad = False
    groups = parameter_groups(
        model,
        base_lr=0.5,
        weight_decay=0.1,
        weight_decay_norm=0.0,
        weight_decay_bias=None,
        bias_lr_factor=2.0,
    )
    found = {(g["lr"], g["weight_decay"]): [id(p) for p in g["params"]] for g in groups}
    assert found == {
        (0.5, 0.1): [id(model[0].weight)],
        (1.0, 0.1): [id(model[0].bias), id(model[2].bias)],
        (0.5, 0.0): [id(model[1].weight)],
        (1.0, 0.0): [id(model[1].bias)],
    }
    optimizer = torch.optim.SGD(groups, lr=9.0)
    set_learning_rate(optimizer, 0.1)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.1, 0.05, 0.1])


def test_weight_decay_of_biases_wins_over_that_of_norms() -> None:
    groups = parameter_groups(
        nn.BatchNorm2d(2),
        base_lr=0.5,
        weight_decay=0.1,
        weight_decay_norm=0.2,
        weight_decay_bias=0.3,
        bias_lr_factor=1.0,
    )
    assert [g["weight_decay"] for g in groups] == [0.2, 0.3]


@pytest.mark.parametrize(
    ("kind", "expected"), [("value", [[1.0, -1.0], [0.5]]), ("norm", [[0.6, -0.8], [0.5]])]
)
def test_clipping_is_per_parameter(kind: str, expected: list[list[float]]) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.tensor([3.0, -4.0])
    parameters[1].grad = torch.tensor([0.5])
    clip_gradients(torch.optim.SGD(parameters, lr=1.0), kind, 1.0, 2.0)
    for parameter, values in zip(parameters, expected, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.tolist() == pytest.approx(values, rel=1e-5)
