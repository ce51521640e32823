"""Synchronized BN: forward pass, gradients and statistics equal those of one process."""

import pytest
import torch
from torch import nn

from moco.common.distributed import mean_over_ranks, rank, sum_over_ranks, world_size
from moco.modeling.synced_bn import SyncedBatchNorm1d, SyncedBatchNorm2d
from tests.oracles.processes import run_on

SHAPES = {"1d": (8, 3), "2d": (8, 3, 4, 5)}


def normalized(kind, affine, dtype=torch.float64):
    """Return output and input gradient of all processes, weight gradient, and statistics."""
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(2, *SHAPES[kind], dtype=dtype, generator=generator)
    x = 3 * x + 1
    torch.manual_seed(0)
    bn = {"1d": SyncedBatchNorm1d, "2d": SyncedBatchNorm2d}[kind](3, affine=affine).to(dtype)
    if affine:
        nn.init.uniform_(bn.weight, 0.5, 2)
    n = len(x) // world_size()
    mine = slice(rank() * n, (rank() + 1) * n)
    own = x[mine].clone().requires_grad_(True)
    y = bn(own)
    (y * weights[mine]).sum().backward()
    rows, gradient = torch.zeros_like(x), torch.zeros_like(x)
    rows[mine], gradient[mine] = y.detach(), own.grad
    of_weight = sum_over_ranks(bn.weight.grad) if affine else torch.zeros(3)
    statistics = [mean_over_ranks(bn.running_mean), mean_over_ranks(bn.running_var)]
    evaluated = bn.eval()(x).detach()
    return [sum_over_ranks(rows), sum_over_ranks(gradient), of_weight, *statistics, evaluated]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_processes_normalize_as_one(kind, affine):
    one = normalized(kind, affine)
    for several in run_on(2, normalized, kind, affine):
        for got, expected in zip(several, one, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_one_process_has_torchs_layer():
    x = torch.randn(6, 3)
    ours, theirs = SyncedBatchNorm1d(3), nn.BatchNorm1d(3)
    assert torch.equal(ours(x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
