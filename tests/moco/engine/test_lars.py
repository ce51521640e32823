"""LARS compared with its equations in float64, and an optimizer registered by a user."""

import numpy as np
import pytest
import torch

from moco.common.cfgnode import load_cfg
from moco.common.errors import Preempted
from moco.engine.config import default_cfg, protocol_sha256
from moco.engine.keys import COMMON
from moco.engine.lars import LARS
from moco.engine.solver import OPTIMIZERS
from tests.moco.classification.classify_runs import words
from tests.moco.commands import linear as main

RATES = [0.5, 0.5, 0.2, 0.2]


def by_hand(w, gradients, momentum=0.9, decay=0.01, trust=0.1):
    """Apply the docstring's equations to one parameter in NumPy."""
    v = np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        u = g + decay * w if w.ndim > 1 else g
        norms = np.linalg.norm(w), np.linalg.norm(u)
        r = trust * norms[0] / norms[1] if w.ndim > 1 and all(norms) else 1.0
        v = momentum * v + r * u
        w = w - rate * v
    return torch.from_numpy(w)


def cases():
    torch.manual_seed(0)
    weight, bias, zero = torch.randn(3, 4), torch.randn(4), torch.zeros(2, 2)
    return [
        (start.double(), torch.randn(4, *start.shape).double()) for start in (weight, bias, zero)
    ]


def trained(parameters, gradients, reload_at=None):
    """Take a step with each gradient; a new optimizer loads the state at `reload_at`."""
    keys = {"lr": 0.0, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.1}
    optimizer = LARS(parameters, **keys)
    for step, rate in enumerate(RATES):
        if step == reload_at:
            state = optimizer.state_dict()
            optimizer = LARS(parameters, lr=9.0)
            optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = rate
        for parameter, each in zip(parameters, gradients, strict=True):
            parameter.grad = None if each is None else each[step].clone()
        optimizer.step()
    return parameters


@pytest.mark.parametrize("reload_at", [None, 2])
def test_its_equations(reload_at):
    """Check a weight, a bias (no decay, no trust ratio), and a weight of zeros (ratio 1)."""
    parameters = [torch.nn.Parameter(start.clone()) for start, _ in cases()]
    frozen = torch.nn.Parameter(torch.ones(2, 2))  # without a gradient
    trained([*parameters, frozen], [*(gradients for _, gradients in cases()), None], reload_at)
    assert torch.equal(frozen, torch.ones(2, 2))
    for parameter, (start, gradients) in zip(parameters, cases(), strict=True):
        expected = by_hand(start.numpy(), gradients.numpy())
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-7)


def test_all_parameters_at_once_are_bitwise_those_of_one_after_the_other():
    torch.manual_seed(1)
    shapes = [(64, 3, 7, 7), (64,), (10, 128), (10,), (2, 2)]
    starts = [torch.randn(shape) for shape in shapes[:-1]] + [torch.zeros(2, 2)]
    gradients = [torch.randn(4, *shape) for shape in shapes]
    together = trained([torch.nn.Parameter(w.clone()) for w in starts], gradients)
    for start, gradient, got in zip(starts, gradients, together, strict=True):
        w, v = start.clone(), torch.zeros_like(start)
        for rate, update in zip(RATES, gradient, strict=True):
            if w.ndim > 1:
                update = update.add(w, alpha=0.01)
                norms = w.norm(), update.norm()
                ratio = 0.1 * norms[0] / norms[1]
                update = update * torch.where((norms[0] > 0) & (norms[1] > 0), ratio, 1.0)
            v.mul_(0.9).add_(update)
            w.add_(v, alpha=-rate)
        assert torch.equal(got.detach(), w)


def test_an_optimizer_from_outside(register, labeled, pretrained, tmp_path):
    """A toy that only counts its steps is registered here and chosen by its name."""
    steps = []

    class Toy(torch.optim.SGD):
        def step(self, closure=None):
            steps.append(self.param_groups[0]["lr"])
            return super().step(closure)

    def toy(parameters, solver):
        return Toy(parameters, solver.BASE_LR)

    register(OPTIMIZERS, toy)
    with pytest.raises(Preempted):
        keys = {"SOLVER__OPTIMIZER": "toy", "SOLVER__STOP_AT_ITERS": 2}
        main(words(tmp_path / "run", labeled, pretrained, **keys))
    assert steps == [3.0, 3.0]


def test_keys_at_their_defaults_are_not_hashed():
    defaults = default_cfg(COMMON)
    lars = load_cfg(defaults, None, ["SOLVER.OPTIMIZER", "lars", "SEED", "1"])
    of_lars = protocol_sha256(lars, defaults, COMMON)
    assert of_lars == protocol_sha256({"SOLVER.OPTIMIZER": "lars"}, defaults, COMMON)
    assert of_lars != protocol_sha256(defaults, defaults, COMMON)
