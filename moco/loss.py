"""InfoNCE (eq. 1): the positive key against the queue, as a (K+1)-way classification.

N batch, C dimension of queries and keys, K length of the queue.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def contrastive_logits(q: Tensor, k: Tensor, queue: Tensor, T: float) -> Tensor:
    """Similarities over temperature: the positives in column 0, the negatives after it.

    Args:
        q, k: (N, C), of unit length; row n of ``k`` is the positive of row n of ``q``.
        queue: (C, K), columns of unit length.
        T: temperature, > 0.

    Returns:
        (N, 1 + K)
    """
    positive = (q * k).sum(dim=1, keepdim=True)  # (N, 1)
    negative = q @ queue  # (N, K)
    return torch.cat([positive, negative], dim=1) / T


def info_nce(logits: Tensor) -> Tensor:
    """Mean over the batch of ``-log softmax`` at column 0; ``logits`` is (N, 1 + K)."""
    target = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, target)


def pretext_accuracy(logits: Tensor) -> Tensor:
    """Percentage (0..100) of queries that are nearest to their own key."""
    return (logits.argmax(dim=1) == 0).float().mean() * 100
