import copy

import pytest
import torch
from torch import nn

from moco.shuffle_bn import GroupedBatchNorm2d, shuffle_plan, unshuffle


def companions(order, groups):
    """For each sample, the set of samples it is normalised with."""
    of = {}
    for group in order.view(groups, -1).tolist():
        for sample in group:
            of[sample] = frozenset(group)
    return of


@pytest.mark.parametrize("N, G", [(4, 2), (6, 3), (8, 2), (64, 4), (256, 8)])
def test_a_key_never_shares_its_batch_statistics_with_its_query(N, G):
    queries = companions(torch.arange(N), G)
    for step in range(30):
        keys = companions(shuffle_plan(N, G, seed=3, step=step), G)
        assert all(keys[n] != queries[n] for n in range(N))


def test_plan_is_a_permutation_and_a_pure_function():
    plan = shuffle_plan(32, 4, seed=1, step=5)
    assert plan.sort().values.tolist() == list(range(32))
    assert torch.equal(plan, shuffle_plan(32, 4, seed=1, step=5))
    assert not torch.equal(plan, shuffle_plan(32, 4, seed=1, step=6))
    assert not torch.equal(plan, shuffle_plan(32, 4, seed=2, step=5))


def test_plan_where_groups_cannot_differ():
    assert shuffle_plan(3, 1, 0, 0).sort().values.tolist() == [0, 1, 2]
    assert shuffle_plan(2, 2, 0, 0).sort().values.tolist() == [0, 1]


def test_unshuffle_undoes_shuffle():
    x = torch.randn(12, 5)
    plan = shuffle_plan(12, 3, 0, 0)
    assert not torch.equal(x[plan], x)
    assert torch.equal(unshuffle(x[plan], plan), x)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_equals_batch_norm_on_each_group(memory_format):
    torch.manual_seed(0)
    G, x = 3, torch.randn(6, 4, 5, 5).to(memory_format=memory_format)
    plain = nn.BatchNorm2d(4)
    nn.init.uniform_(plain.weight)
    nn.init.uniform_(plain.bias)
    grouped = GroupedBatchNorm2d(4, G)
    grouped.load_state_dict(plain.state_dict())
    copies = [copy.deepcopy(plain) for _ in range(G)]
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = torch.cat([bn(part) for bn, part in zip(copies, a.chunk(G), strict=True)])
    got = grouped(b)
    torch.testing.assert_close(got, expected)
    assert got.is_contiguous(memory_format=memory_format)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    torch.testing.assert_close(b.grad, a.grad)
    torch.testing.assert_close(grouped.weight.grad, sum(bn.weight.grad for bn in copies))
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(bn, name) for bn in copies]).mean(0)
        torch.testing.assert_close(getattr(grouped, name), mean)
    assert grouped.num_batches_tracked == 1


def test_state_and_evaluation_are_batch_norms():
    grouped, plain = GroupedBatchNorm2d(4, 2), nn.BatchNorm2d(4)
    grouped(torch.randn(4, 4, 3, 3))
    assert grouped.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(grouped.state_dict())
    x = torch.randn(3, 4, 3, 3)  # 3 is no multiple of 2: evaluation knows no groups
    torch.testing.assert_close(grouped.eval()(x), plain.eval()(x))
