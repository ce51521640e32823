"""InfoNCE loss (eq. 1): (K+1)-way classification of the positive key against K negatives.

The cross-entropy of `contrastive_logits` is the definition, with gradients to queries and keys.
`info_nce` computes the same loss for a dictionary without gradient (momentum queue, memory bank)
in one pass, without storing an (N, 1 + K) tensor.

N queries, C dimension of queries and keys, K negatives.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Vectors of unit length have logits within ± 1/T. Up to this magnitude, the sum of billions of
# exponentials fits into float32 and bfloat16, so the maximum need not be subtracted first.
LARGEST_LOGIT = 60.0
# Smaller differences between logits are ties: equal vectors have equal logits up to rounding.
TIE = 1e-4
# Number of logits per chunk: on a CPU, logits and keys stay in the cache; on a GPU, they keep the
# whole device busy.
CHUNK_CPU, CHUNK_GPU = 1 << 20, 1 << 23
CHUNK_KEYS_CPU = 4096


def contrastive_logits(q: Tensor, k: Tensor, negatives: Tensor, T: float) -> Tensor:
    """Return the logits of eq. 1, with the positives in column 0 and the negatives after it.

    Args:
        q: Queries (N, C) of unit length.
        k: Keys (N, C) of unit length; row n is the positive of row n of `q`.
        negatives: Keys (C, K), with columns of unit length.
        T: Temperature, > 0.

    Returns:
        Similarities divided by the temperature, (N, 1 + K).
    """
    positive = (q * k).sum(dim=1, keepdim=True)  # (N, 1)
    negative = q @ negatives  # (N, K)
    return torch.cat([positive, negative], dim=1) / T


def pretext_accuracy(logits: Tensor) -> Tensor:
    """Return the percentage (0..100) of queries whose positive is closer than all negatives.

    A tie with a negative counts as wrong, since a collapsed encoder has only ties.

    Args:
        logits: Logits (N, 1 + K), with the positives in column 0.
    """
    return (logits[:, 0] > logits[:, 1:].amax(dim=1) + TIE).float().mean() * 100


def info_nce(
    q: Tensor, positive: Tensor, negatives: Tensor, T: float, bf16: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the InfoNCE loss of a dictionary without gradient, and the pretext accuracy.

    The loss is the mean over the queries of `-log softmax` at the positive. Only `q` receives a
    gradient, which is computed in the same pass, so the dictionary may change before `backward`.
    Autocast does not apply.

    Args:
        q: Queries (N, C) of unit length.
        positive: Keys (N, C) of unit length, in the dtype of `q`.
        negatives: Keys (C, K) with columns of unit length, in the dtype of `q`.
        T: Temperature, > 0.
        bf16: Compute products in bfloat16 and sums in the precision of `q`. The error of a logit
            l is then up to `|l| / 256`, as under autocast; `python -m benchmarks.speed pretrain`
            measures the error of the gradient.

    Returns:
        Loss, a scalar, and accuracy (`pretext_accuracy`).
    """
    positive, negatives = positive.detach(), negatives.detach()
    with torch.autocast(q.device.type, enabled=False):
        if 1 / T > LARGEST_LOGIT:
            logits = contrastive_logits(q, positive, negatives, T)
            target = torch.zeros(len(q), dtype=torch.long, device=q.device)
            return F.cross_entropy(logits, target), pretext_accuracy(logits.detach())
        needs_gradient = q.requires_grad and torch.is_grad_enabled()
        return _InfoNCE.apply(q, positive, negatives, T, bf16, needs_gradient)


class _InfoNCE(torch.autograd.Function):
    """InfoNCE with its gradient computed in the forward pass.

    With p the softmax of the logits: `dloss/dq = (sum_i p_i k_i - k_0) / (N T)`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        positive: Tensor,
        negatives: Tensor,
        T: float,
        bf16: bool,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        N = q.shape[0]
        positive_logit = (q * positive).sum(dim=1) / T  # (N,)
        positive_exp = positive_logit.exp()
        total, largest = positive_exp.clone(), torch.zeros_like(positive_exp)
        weighted_keys = torch.zeros_like(q)  # sum over the negatives of exp(l) k, (N, C)
        factor = (q / T).bfloat16() if bf16 else q / T
        chunk = CHUNK_GPU // N if q.is_cuda else min(CHUNK_CPU // N, CHUNK_KEYS_CPU)
        chunk = max(1, min(chunk, negatives.shape[1]))
        buffer = factor.new_empty(N, chunk)
        for keys in _parts(negatives, chunk, factor.dtype):
            exp = torch.mm(factor, keys, out=buffer[:, : keys.shape[1]]).exp_()  # (N, chunk)
            total += _row_sum(exp)
            largest = torch.maximum(largest, _row_max(exp).to(q.dtype))
            if needs_gradient:
                weighted_keys += exp @ keys.T
        loss = (total.log() - positive_logit).mean()
        if needs_gradient:
            share = (positive_exp / total - 1).unsqueeze(1)  # p_0 - 1
            gradient = weighted_keys.div_(total.unsqueeze(1)).addcmul_(share, positive)
            ctx.save_for_backward(gradient.div_(N * T))
        # In bf16 the positive must be rounded as the negatives before they are compared.
        compared = positive_exp
        if bf16:
            product = torch.bmm(factor.unsqueeze(1), positive.to(factor.dtype).unsqueeze(2))
            compared = product.flatten().exp_().to(q.dtype)
        accuracy = (compared > largest * (1 + TIE)).float().mean() * 100
        ctx.mark_non_differentiable(accuracy)
        return loss, accuracy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * loss_gradient, None, None, None, None, None


def _parts(x: Tensor, size: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield `size` columns of `x` at a time; converting several parts at once is faster."""
    for wide in x.split(8 * size, dim=1):
        yield from wide.to(dtype).split(size, dim=1)


def _row_sum(x: Tensor) -> Tensor:
    """Return the row sums (N,); in bfloat16, a product with ones is twice as fast as `sum`."""
    return (x @ x.new_ones(x.shape[1], 1))[:, 0] if x.dtype == torch.bfloat16 else x.sum(dim=1)


def _row_max(x: Tensor) -> Tensor:
    """Return the largest value of each row of nonnegative numbers, (N,)."""
    if x.dtype != torch.bfloat16:
        return x.amax(dim=1)
    # Nonnegative floats have the order of their bits, and CPUs compare integers much faster.
    return x.view(torch.int16).amax(dim=1).view(torch.bfloat16)
