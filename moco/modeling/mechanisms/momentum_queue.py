"""MoCo mechanism (sec. 3.2, Algorithm 1, Fig. 2c): a queue of keys and a momentum key encoder.

N images of all processes, n images of this process, C dimension, K length of the queue.
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
    ema_update_,
    encode_keys,
    local_rows,
    uses_bf16,
)


class MomentumQueue(Mechanism):
    """Query encoder, key encoder and queue.

    Deviation: the official code updates the key encoder at the start of the next forward pass
    instead of after the query encoder's step. Both encode every batch with the same key encoder,
    but a checkpoint written here has a key encoder with one more update.

    Every process has the whole queue. The keys are gathered once, both as positives and for the
    queue; the queue itself is never communicated.

    Args:
        encoder: Query encoder; the key encoder starts as a copy.
        dim: Dimension C of the queue (C, K), which starts with random unit vectors.
        K: Length of the queue.
        m: Momentum of the key encoder, 0 <= m < 1 (eq. 2).
        T: Temperature, > 0 (eq. 1).
    """

    queue: Tensor
    queue_ptr: Tensor

    def __init__(self, encoder: nn.Module, dim: int, K: int, m: float, T: float) -> None:
        super().__init__(encoder, T)
        self.K, self.m = K, m
        self.encoder_k = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        self._start = 0  # as in `queue_ptr`, without waiting for the device
        self.register_load_state_dict_post_hook(_read_pointer)

    @torch.no_grad()
    def dictionary(self, batch: KeyBatch) -> Dictionary:
        """Encode the keys of the batch as positives; the queue holds the negatives."""
        keys = encode_keys(self.encoder_k, batch)  # (N, C)
        return Dictionary(local_rows(keys, len(batch.x_k)), self.queue, keys=keys)

    def forward(self, x_q: Tensor, dictionary: Dictionary) -> StepOutput:
        """Compute InfoNCE with gradients to the queries only."""
        q = self.queries(x_q)
        bf16 = uses_bf16(q.device)
        loss, accuracy = info_nce(q, dictionary.positive, dictionary.negatives, self.T, bf16)
        return StepOutput(loss, accuracy, q.detach())

    @torch.no_grad()
    def update(self, passes: Passes) -> None:
        """Update the key encoder and replace the oldest keys of the queue."""
        ema_update_(self.encoder_k, self.encoder_q, self.m)
        for dictionary in passes.dictionaries:
            assert dictionary.keys is not None
            self._enqueue(dictionary.keys)

    def _enqueue(self, keys: Tensor) -> None:
        """Overwrite the oldest N <= K columns, continuing at column 0 after the last."""
        N = keys.shape[0]
        assert N <= self.K, f"{N} keys in a queue of {self.K}"
        start = self._start
        before_wrap = min(N, self.K - start)
        self.queue[:, start : start + before_wrap] = keys[:before_wrap].T
        self.queue[:, : N - before_wrap] = keys[before_wrap:].T
        self._start = (start + N) % self.K
        self.queue_ptr.fill_(self._start)


def _read_pointer(model: nn.Module, _: object) -> None:
    assert isinstance(model, MomentumQueue)
    model._start = int(model.queue_ptr)
