"""End-to-end mechanism (Fig. 2a): the batch is the dictionary, and gradients update both encoders.

N images of all processes, n images of this process, C dimension; N is K, so there are K - 1
negatives.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.common.distributed import gather_rows_with_gradient
from moco.modeling.loss import contrastive_logits, pretext_accuracy
from moco.modeling.mechanisms.base import (
    Dictionary,
    KeyBatch,
    Mechanism,
    StepOutput,
    batch_as_dictionary,
    encode_keys,
)


class EndToEnd(Mechanism):
    """Query encoder and key encoder, both updated by back-propagation.

    The positive of a query is the key of the same image; the negatives are the N - 1 other keys in
    the batch of all processes. Gradients flow through queries and keys, and from the loss of one
    process into the keys of the others.

    Args:
        encoder: Query encoder.
        T: Temperature, > 0 (eq. 1).
        shared: Use the query encoder as key encoder ("the two encoders can be different", Fig. 2).
            Otherwise the key encoder starts as a copy and is trained by a separate gradient.
    """

    def __init__(self, encoder: nn.Module, T: float, shared: bool = True) -> None:
        super().__init__(encoder, T)
        self.encoder_k = encoder if shared else copy.deepcopy(encoder)

    def dictionary(self, batch: KeyBatch) -> Dictionary:
        """Encode the keys of the batch with gradient, under shuffling BN as in MoCo (sec. 3.3)."""
        return batch_as_dictionary(encode_keys(self.encoder_k, batch, gather_rows_with_gradient))

    def forward(self, x_q: Tensor, dictionary: Dictionary) -> StepOutput:
        """Compute InfoNCE with gradients to queries and keys."""
        q = self.queries(x_q)
        with torch.autocast(q.device.type, enabled=False):
            logits = contrastive_logits(q, dictionary.positive, dictionary.negatives, self.T)
            assert dictionary.own is not None
            own = F.one_hot(1 + dictionary.own, logits.shape[1]).bool()
            logits = logits.masked_fill(own, float("-inf"))  # (n, 1 + N), N - 1 negatives
            positives = torch.zeros(len(q), dtype=torch.long, device=q.device)  # in column 0
            loss = F.cross_entropy(logits, positives)
        return StepOutput(loss, pretext_accuracy(logits.detach()), q.detach())
