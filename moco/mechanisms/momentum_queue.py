"""MoCo (sec. 3.2, Algorithm 1): a queue of keys and a key encoder that follows the query's.

N batch, C dimension, K length of the queue.
"""

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.loss import contrastive_logits, info_nce, pretext_accuracy
from moco.shuffle_bn import unshuffle


class StepOutput(NamedTuple):
    """One forward pass: the loss to minimise, the new keys (N, C), accuracy in 0..100."""

    loss: Tensor
    keys: Tensor
    accuracy: Tensor


class MomentumQueue(nn.Module):
    """Query encoder, key encoder and queue. One step of Algorithm 1 is::

        out = model(x_q, x_k, plan)
        out.loss.backward()
        optimizer.step()        # of model.encoder_q only
        model.update(out.keys)  # momentum update, then enqueue and dequeue

    Deviation: the official code updates the key encoder at the start of the next forward pass
    instead. Both encode every batch with the same key encoder; a checkpoint written between two
    steps holds a key encoder that is one update further here.

    Args:
        encoder: becomes the query encoder; the key encoder starts as its copy.
        dim, K: of the queue (C, K), which starts with random unit vectors.
        m: momentum of the key encoder, 0 <= m < 1 (eq. 2).
        T: temperature, > 0 (eq. 1).
    """

    queue: Tensor
    queue_ptr: Tensor

    def __init__(self, encoder: nn.Module, dim: int, K: int, m: float, T: float) -> None:
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = encoder
        self.encoder_k = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x_q: Tensor, x_k: Tensor, plan: Tensor | None = None) -> StepOutput:
        """Loss and keys for two views (N, 3, H, W) of the same pictures.

        Args:
            plan: order (N,) in which the keys pass through BN, see
                :func:`moco.shuffle_bn.shuffle_plan`; None leaves them in the queries' order.
        """
        q = F.normalize(self.encoder_q(x_q).to(self.queue), dim=1)  # (N, C)
        with torch.no_grad():
            if plan is None:
                k = self.encoder_k(x_k)
            else:
                k = unshuffle(self.encoder_k(x_k[plan]), plan)
            k = F.normalize(k.to(self.queue), dim=1)  # (N, C)
        with torch.autocast(q.device.type, enabled=False):
            logits = contrastive_logits(q, k, self.queue, self.T)  # (N, 1 + K)
        return StepOutput(info_nce(logits), k, pretext_accuracy(logits.detach()))

    @torch.no_grad()
    def update(self, keys: Tensor) -> None:
        """The end of a step: the key encoder follows, the keys replace the oldest in the queue."""
        self._follow_query_encoder()
        self._enqueue(keys)

    def _follow_query_encoder(self) -> None:
        """``f_k = m f_k + (1 - m) f_q`` for the parameters (eq. 2).

        BN's running statistics are no parameters: each encoder keeps its own, as in the official
        code.
        """
        torch._foreach_lerp_(
            list(self.encoder_k.parameters()), list(self.encoder_q.parameters()), 1 - self.m
        )

    def _enqueue(self, keys: Tensor) -> None:
        """Overwrite the oldest N <= K columns, going on at column 0 after the last."""
        N = keys.shape[0]
        assert N <= self.K, f"{N} keys in a queue of {self.K}"
        start = int(self.queue_ptr)
        before_wrap = min(N, self.K - start)
        self.queue[:, start : start + before_wrap] = keys[:before_wrap].T
        self.queue[:, : N - before_wrap] = keys[before_wrap:].T
        self.queue_ptr[0] = (start + N) % self.K
