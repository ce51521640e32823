import math

import pytest
import torch
import torch.nn.functional as F

from moco.modeling import loss as loss_module
from moco.modeling.loss import contrastive_logits, info_nce, pretext_accuracy


def unit_vectors(N, K, C=16, dtype=torch.float64, seed=0):
    """Return similar queries and keys (N, C), and negatives (C, K)."""
    generator = torch.Generator().manual_seed(seed)
    q = F.normalize(torch.randn(N, C, generator=generator, dtype=dtype), dim=1)
    k = F.normalize(q + torch.randn(N, C, generator=generator, dtype=dtype) / 4, dim=1)
    negatives = F.normalize(torch.randn(C, K, generator=generator, dtype=dtype), dim=0)
    return q, k, negatives


def definition(q, k, negatives, T):
    logits = contrastive_logits(q, k, negatives, T)
    loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
    return loss, pretext_accuracy(logits)


def with_gradient(function, q, *args, **kwargs):
    q = q.clone().requires_grad_()
    loss, accuracy = function(q, *args, **kwargs)
    (3 * loss).backward()
    return loss.detach(), accuracy, q.grad


def test_logits_by_hand():
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    k = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    negatives = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 0.0]])  # (C, K)
    logits = contrastive_logits(q, k, negatives, T=0.5)
    assert logits.tolist() == [[pytest.approx(1.2), 2, 0, -2], [2, 0, 2, 0]]


def test_loss_by_hand():
    """Logits (0, -1) and (1, 0)."""
    q, k = torch.eye(2), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    negatives = torch.tensor([[-1.0], [0.0]])
    loss, accuracy = info_nce(q, k, negatives, T=1.0)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)))
    assert accuracy.item() == 100


# Chunks of 12 logits: of 2, 3 and 12 negatives, which do or do not divide K; the smallest T is
# beyond LARGEST_LOGIT.
@pytest.mark.parametrize("T", [1.0, 0.07, 0.02, 0.005])
@pytest.mark.parametrize("N, K", [(6, 1), (4, 9), (4, 10), (1, 25), (40, 3)])
def test_equals_the_definition(monkeypatch, N, K, T):
    monkeypatch.setattr(loss_module, "CHUNK_CPU", 12)
    args = (*unit_vectors(N, K), T)
    for ours, exact in zip(
        with_gradient(info_nce, *args), with_gradient(definition, *args), strict=True
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bf16", [False, True])
def test_logits_whose_exponentials_do_not_fit_into_float32(bf16):
    args = unit_vectors(4, 30)
    loss, _, gradient = with_gradient(info_nce, *(x.float() for x in args), 0.004, bf16=bf16)
    exact, _, exact_gradient = with_gradient(definition, *args, 0.004)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-3, abs=1e-4)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-3, atol=1e-3)


def test_float32_at_the_papers_size_of_a_row():
    """The error of the gradient, relative to its largest value."""
    args = unit_vectors(8, 65536, C=128)
    _, _, exact = with_gradient(definition, *args, 0.07)
    narrow = [x.float() for x in args]
    for bf16, tolerance in ((False, 1e-6), (True, 1e-3)):
        loss, _, gradient = with_gradient(info_nce, *narrow, 0.07, bf16=bf16)
        assert (gradient - exact).abs().max() / exact.abs().max() < tolerance
        assert loss.item() == pytest.approx(definition(*args, 0.07)[0].item(), rel=tolerance)
        assert gradient.dtype == loss.dtype == torch.float32


def test_nothing_but_the_query_gets_a_gradient():
    q, k, negatives = (x.requires_grad_() for x in unit_vectors(3, 5))
    for T in (0.1, 0.001):
        loss, accuracy = info_nce(q, k, negatives, T)
        loss.backward()
        assert k.grad is None and negatives.grad is None and not accuracy.requires_grad
    assert q.grad is not None
    with torch.no_grad():
        assert not info_nce(q, k, negatives, 0.1)[0].requires_grad


def test_the_dictionary_may_change_before_the_backward_pass():
    q, k, negatives = unit_vectors(3, 5)
    _, _, expected = with_gradient(info_nce, q, k, negatives, 0.1)
    q.requires_grad_()
    loss, _ = info_nce(q, k, negatives, 0.1)
    negatives.zero_()
    (3 * loss).backward()
    torch.testing.assert_close(q.grad, expected)


def test_autocast_has_no_influence():
    args = (*unit_vectors(4, 50, dtype=torch.float32), 0.07)
    expected = with_gradient(info_nce, *args)
    with torch.autocast("cpu", torch.bfloat16):
        for ours, exact in zip(with_gradient(info_nce, *args), expected, strict=True):
            assert torch.equal(ours, exact)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("T", [0.07, 0.01])
def test_a_collapsed_encoder_has_accuracy_0(T, bf16):
    """All queries and keys are one vector: the loss is log(K + 1), and every logit is a tie."""
    q = torch.nn.functional.normalize(torch.randn(1, 128), dim=1).expand(32, 128).contiguous()
    negatives = q[:1].T.expand(128, 64).contiguous()
    loss, accuracy = info_nce(q, q.clone(), negatives, T, bf16=bf16)
    assert loss.item() == pytest.approx(math.log(65), abs=0.2 if bf16 else 1e-3)
    assert accuracy.item() == 0


@pytest.mark.parametrize("bf16", [False, True])
def test_accuracy_is_the_share_of_queries_nearest_to_their_key(bf16):
    """A query whose key is only as near as the nearest negative does not count."""
    q = torch.eye(4)
    k = torch.tensor([1.0, 0.5, -1.0, 0.0]).diag()
    negatives = torch.tensor([[0.5, 0.5, 0.0, 0.25], [0.0, 0.25, -0.5, 0.0]]).T  # (C, 2)
    for T in (0.25, 0.001):
        assert info_nce(q, k, negatives, T, bf16=bf16)[1].item() == 25
    logits = torch.tensor([[3.0, 1.0], [0.0, 2.0], [5.0, 4.0], [9.0, 1.0]])
    assert pretext_accuracy(logits).item() == 75
    q, k, negatives = unit_vectors(200, 40, C=3, dtype=torch.float32)
    exact = definition(q, k, negatives, 0.1)[1].item()
    assert 0 < exact < 100
    # In three dimensions many logits are equal in bf16, and a tie is wrong.
    got = info_nce(q, k, negatives, 0.1, bf16=bf16)[1].item()
    assert got == pytest.approx(exact, abs=4 if bf16 else 1)
