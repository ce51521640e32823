import pytest
import torch

from moco.modeling.shuffle_bn import shuffle_plan, unshuffle


def companions(order, groups):
    """Return the set of samples that each sample is normalized with."""
    return {n: frozenset(group) for group in order.view(groups, -1).tolist() for n in group}


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
    for n, groups in ((3, 1), (2, 2)):  # the groups cannot differ
        assert shuffle_plan(n, groups, 0, 0).sort().values.tolist() == list(range(n))


def test_unshuffle_undoes_shuffle():
    x, plan = torch.randn(12, 5), shuffle_plan(12, 3, 0, 0)
    assert not torch.equal(x[plan], x)
    assert torch.equal(unshuffle(x[plan], plan), x)
