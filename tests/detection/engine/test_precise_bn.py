"""PreciseBN on several ranks: every rank gets the statistics of all images."""

import pytest
import torch
from torch import nn

from moco.common import distributed
from tests.oracles.processes import run_on

SIZES = {0: [(8, 8), (16, 12), (8, 24)], 1: [(32, 8), (8, 8), (16, 16)]}


def batches(rank: int) -> list[torch.Tensor]:
    """Return images whose sizes and distribution differ between ranks."""
    generator = torch.Generator().manual_seed(10 + rank)
    return [
        torch.randn(2, 3, *size, generator=generator) * (1 + rank) + 3 * rank
        for size in SIZES[rank]
    ]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).train()


def statistics(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    return model[1].running_mean.clone(), model[1].running_var.clone()


def estimate(upstream: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the statistics of this rank, and combine them unless `upstream`."""
    from detectron2.engine.hooks import PreciseBN

    from detection.engine.trainer import combine_statistics, count_values

    model, rank = network(), distributed.rank()
    hook = PreciseBN(0, model, batches(rank), len(SIZES[0]))
    with count_values(model) as counts:
        hook.update_stats()
    if not upstream:
        combine_statistics(counts)
    return statistics(model)


def of_all_pixels() -> tuple[torch.Tensor, torch.Tensor]:
    """Compute mean and variance of the convolution's output over all pixels of both ranks."""
    conv = network()[0]
    with torch.no_grad():
        values = [conv(batch) for rank in SIZES for batch in batches(rank)]
    flat = torch.cat([value.movedim(1, 0).flatten(1) for value in values], dim=1).double()
    return flat.mean(dim=1).float(), flat.var(dim=1, unbiased=False).float()


@pytest.mark.detectron2
@pytest.mark.slow
def test_ranks_end_alike_and_right(detectron2):
    first, second = run_on(2, estimate, False)
    for mine, theirs, true in zip(first, second, of_all_pixels(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


@pytest.mark.detectron2
@pytest.mark.slow
def test_upstream_ends_differently_on_every_rank(detectron2):
    """Once facebookresearch/detectron2#5398 is fixed, the combination is not needed."""
    (mean, _), (other, _) = run_on(2, estimate, True)
    assert (mean - other).abs().max() > 0.5


def test_one_process_is_left_alone():
    from detection.engine.trainer import combine_statistics

    model = network()
    before = statistics(model)
    combine_statistics({model[1]: 7})
    assert all(map(torch.equal, before, statistics(model)))
