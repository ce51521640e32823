import pytest
import torch

from moco.modeling.shuffle_bn import shuffle_plan, unshuffle


def companions(order, groups):
    """For each sample, the set of samples it is normalized with."""
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
