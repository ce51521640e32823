"""MoCo v3 (arXiv 2104.02057): the other keys of the batch are the negatives, no queue is kept.

N images of all processes, n of this one, C dimension. A symmetric step (MOCO.SYMMETRIC) has two
passes, with each view as queries once and as keys once; its loss is their sum.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.modeling.encoder import Encoder, set_head
from moco.modeling.loss import pretext_accuracy
from moco.modeling.mechanisms.base import (
    Dictionary,
    KeyBatch,
    Mechanism,
    Passes,
    StepOutput,
    batch_as_dictionary,
    encode_keys,
    follow,
    unit_rows,
)
from moco.modeling.synced_bn import SyncedBatchNorm1d


class MoCoV3(Mechanism):
    """Query encoder with a prediction head, and an encoder of keys that follows it.

    BN, in the heads and in a ResNet, sees the batch of all processes, as the official code makes
    all of it SyncBN.

    Deviation: the official code updates the key encoder at the start of the next forward pass
    instead of after the query encoder's step (Algorithm 1). With the next step's m, as here, every
    batch meets the same key encoder.

    Args:
        encoder: becomes the query encoder, with a projection head of its own in place of what it
            has.
        dim: C.
        mlp_dim: hidden width of both heads.
        m: momentum of the key encoder at the start, 0 <= m <= 1; rises to 1 by half a cosine.
        T: temperature, > 0.
        projection_layers: 3 for a ViT, 2 for a ResNet (sec. 4; the official builder.py).
        predictor_norm: the prediction head ends with a BN, as a ViT's does and a ResNet's does not.
    """

    def __init__(
        self,
        encoder: Encoder,
        dim: int,
        mlp_dim: int,
        m: float,
        T: float,
        projection_layers: int,
        predictor_norm: bool,
    ) -> None:
        super().__init__(encoder, T)
        self.m = m
        set_head(encoder, mlp(projection_layers, encoder.feature_dim, mlp_dim, dim))
        self.encoder_k = copy.deepcopy(encoder).requires_grad_(False)
        self.predictor = mlp(2, dim, mlp_dim, dim, last_norm=predictor_norm)

    @torch.no_grad()
    def dictionary(self, batch: KeyBatch) -> Dictionary:
        """The batch's keys."""
        return batch_as_dictionary(encode_keys(self.encoder_k, batch))

    def forward(self, x_q: Tensor, dictionary: Dictionary) -> StepOutput:
        """Cross-entropy times 2 T (Algorithm 1)."""
        q, own = self.queries(x_q), dictionary.own
        assert own is not None
        with torch.autocast(q.device.type, enabled=False):
            logits = q @ dictionary.negatives / self.T  # (n, N)
            loss = 2 * self.T * F.cross_entropy(logits, own)
        positive = logits.detach().gather(1, own[:, None])
        others = logits.detach().scatter(1, own[:, None], float("-inf"))
        accuracy = pretext_accuracy(torch.cat([positive, others], dim=1))
        return StepOutput(loss, accuracy, q.detach())

    @torch.no_grad()
    def update(self, passes: Passes) -> None:
        """The key encoder follows."""
        follow(self.encoder_k, self.encoder_q, cosine_momentum(self.m, passes.progress))

    def queries(self, x_q: Tensor) -> Tensor:
        """Predictions (n, C) of unit length."""
        predicted = self.predictor(self.encoder_q(x_q))
        return unit_rows(predicted, like=next(self.encoder_q.parameters()))


def cosine_momentum(m: float, progress: float) -> float:
    """From `m` to 1 by half a cosine while `progress` goes from 0 to 1."""
    return 1 - (1 - m) * (1 + math.cos(math.pi * progress)) / 2


def mlp(
    num_layers: int, in_dim: int, hidden_dim: int, out_dim: int, last_norm: bool = True
) -> nn.Sequential:
    """Linear layers without bias, each but the last with BN and ReLU; numbered as in builder.py.

    Args:
        last_norm: a BN without scale and shift ends it.
    """
    layers: list[nn.Module] = []
    widths = [in_dim, *[hidden_dim] * (num_layers - 1)]
    for i, width in enumerate(widths):
        last = i + 1 == num_layers
        layers.append(nn.Linear(width, out_dim if last else hidden_dim, bias=False))
        if not last:
            layers += [SyncedBatchNorm1d(hidden_dim), nn.ReLU(inplace=True)]
    if last_norm:
        layers.append(SyncedBatchNorm1d(out_dim, affine=False))
    return nn.Sequential(*layers)
