"""MoCo (sec. 3.2, Algorithm 1, Fig. 2c): a queue of keys, and an encoder that follows the queries'.

N images of all processes, n of this one, C dimension, K length of the queue.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.modeling.loss import info_nce
from moco.modeling.mechanisms.base import (
    Dictionary,
    KeyBatch,
    Mechanism,
    Passes,
    StepOutput,
    encode_keys,
    follow,
    in_bf16,
    own_rows,
)


class MomentumQueue(Mechanism):
    """Query encoder, key encoder and queue.

    Deviation: the official code updates the key encoder at the start of the next forward pass
    instead of after the query encoder's step. Both encode every batch with the same key encoder; a
    checkpoint written between two steps holds a key encoder that is one update further here.

    Every process has the whole queue. One gathering of the keys serves both the positives and the
    queue; the queue itself never moves.

    Args:
        encoder: becomes the query encoder; the key encoder starts as its copy.
        dim: C of the queue (C, K), which starts with random unit vectors.
        K: length of the queue.
        m: momentum of the key encoder, 0 <= m < 1 (eq. 2).
        T: temperature, > 0 (eq. 1).
    """

    queue: Tensor
    queue_ptr: Tensor

    def __init__(self, encoder: nn.Module, dim: int, K: int, m: float, T: float) -> None:
        super().__init__(encoder, T)
        self.K, self.m = K, m
        self.encoder_k = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def dictionary(self, batch: KeyBatch) -> Dictionary:
        """The new keys as positives, the queue as negatives."""
        keys = encode_keys(self.encoder_k, batch)  # (N, C)
        return Dictionary(own_rows(keys, len(batch.x_k)), self.queue, keys=keys)

    def forward(self, x_q: Tensor, dictionary: Dictionary) -> StepOutput:
        q = self.queries(x_q)
        bf16 = in_bf16(q.device)
        loss, accuracy = info_nce(q, dictionary.positive, dictionary.negatives, self.T, bf16)
        return StepOutput(loss, accuracy, q.detach())

    @torch.no_grad()
    def update(self, passes: Passes) -> None:
        """The key encoder follows, the keys replace the oldest in the queue."""
        follow(self.encoder_k, self.encoder_q, self.m)
        for dictionary in passes.dictionaries:
            assert dictionary.keys is not None
            self._enqueue(dictionary.keys)

    def _enqueue(self, keys: Tensor) -> None:
        """Overwrite the oldest N <= K columns, continuing at column 0 after the last."""
        N = keys.shape[0]
        assert N <= self.K, f"{N} keys in a queue of {self.K}"
        start = int(self.queue_ptr)
        before_wrap = min(N, self.K - start)
        self.queue[:, start : start + before_wrap] = keys[:before_wrap].T
        self.queue[:, : N - before_wrap] = keys[before_wrap:].T
        self.queue_ptr[0] = (start + N) % self.K
