"""LARS beside its equations in float64, and through a training."""

import numpy as np
import pytest
import torch

from moco.common.cfgnode import load_cfg
from moco.common.errors import Preempted
from moco.engine.checkpoint import CLASSIFIER_FORMAT
from moco.engine.config import common_cfg, protocol_sha256
from moco.engine.lars import LARS
from moco.engine.optim import OPTIMIZERS
from tests.moco.classification.classify_runs import words
from tests.moco.commands import linear as main
from tests.oracles.training import weights

RATES = [0.5, 0.5, 0.2, 0.2]


def by_hand(w, gradients, momentum=0.9, decay=0.01, trust=0.1):
    """The docstring's equations in NumPy, one parameter."""
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
    """After one step with each gradient; a new optimizer takes the state up at `reload_at`."""
    keys = {"lr": 0.0, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.1}
    optimizer = LARS(parameters, **keys)
    for step, rate in enumerate(RATES):
        if step == reload_at:
            state = optimizer.state_dict()
            optimizer = LARS(parameters, lr=9.0)
            optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = rate
        for parameter, each in zip(parameters, gradients, strict=True):
            parameter.grad = each[step].clone()
        optimizer.step()
    return parameters


@pytest.mark.parametrize("reload_at", [None, 2])
def test_its_equations(reload_at):
    """A weight, a bias (neither decay nor trust ratio), and a weight of zeros (ratio 1)."""
    parameters = [torch.nn.Parameter(start.clone()) for start, _ in cases()]
    trained(parameters, [gradients for _, gradients in cases()], reload_at)
    for parameter, (start, gradients) in zip(parameters, cases(), strict=True):
        expected = by_hand(start.numpy(), gradients.numpy())
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-7)


def test_parameters_without_a_gradient_stay():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    LARS([weight], lr=1.0).step()
    assert torch.equal(weight, torch.ones(2, 2))


@pytest.fixture(scope="module")
def linear(labeled, pretrained):
    """`linear(folder, *flags, KEY=value)`: a linear classification of 6 steps; its last weights."""

    def run(folder, *flags, **changes):
        main([*words(folder, labeled, pretrained, **changes), *flags])
        return weights(folder, CLASSIFIER_FORMAT)

    return run


def test_an_optimizer_from_outside(linear, tmp_path):
    """A toy that only counts its steps: registered here, chosen by its name, nothing else."""
    steps = []

    class Toy(torch.optim.SGD):
        def step(self, closure=None):
            steps.append(self.param_groups[0]["lr"])
            return super().step(closure)

    def toy(parameters, solver):
        return Toy(parameters, solver.BASE_LR)

    OPTIMIZERS.register(toy)
    try:
        with pytest.raises(Preempted):
            linear(tmp_path / "run", SOLVER__OPTIMIZER="toy", SOLVER__STOP_AT_ITERS=2)
    finally:
        OPTIMIZERS._obj_map.pop("toy")
    assert steps == [3.0, 3.0]


def test_a_key_at_its_default_is_no_part_of_the_hash():
    defaults = common_cfg()
    lars = load_cfg(defaults, None, ["SOLVER.OPTIMIZER", "lars", "SEED", "1"])
    of_lars = protocol_sha256(lars, defaults, ("SEED",))
    assert of_lars == protocol_sha256({"SOLVER.OPTIMIZER": "lars"}, defaults, ())
    assert of_lars != protocol_sha256(defaults, defaults, ("SEED",))
