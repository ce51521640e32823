"""MoCo v3 (arXiv 2104.02057): the other keys of the batch are the negatives, without a queue.

A symmetric step (MOCO.SYMMETRIC) has two passes, with each view as queries once and as keys once;
the losses of the passes are added.

N images of all processes, n images of this process, C dimension.
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
    ema_update_,
    encode_keys,
    l2_normalize,
)
from moco.modeling.synced_bn import SyncedBatchNorm1d


class MoCoV3(Mechanism):
    """Query encoder with a prediction head, and momentum encoder of the keys.

    BN in the heads and in a ResNet is synchronized over all processes, as in the official code,
    which converts all of it to SyncBN.

    Deviation: the official code updates the key encoder at the start of the next forward pass
    instead of after the query encoder's step (Algorithm 1). With the next step's m, as here, every
    batch meets the same key encoder.

    Args:
        encoder: Query encoder, whose head is replaced by a projection head.
        dim: Output dimension C.
        mlp_dim: Hidden width of both heads.
        m: Initial momentum of the key encoder, 0 <= m <= 1, which rises to 1 by half a cosine.
        T: Temperature, > 0.
        projection_layers: Number of layers of the projection head: 3 for a ViT, 2 for a ResNet
            (sec. 4; the official builder.py).
        predictor_norm: End the prediction head with a BN: True for a ViT, False for a ResNet.
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
        """Encode the keys of the batch."""
        return batch_as_dictionary(encode_keys(self.encoder_k, batch))

    def forward(self, x_q: Tensor, dictionary: Dictionary) -> StepOutput:
        """Compute the cross-entropy times 2 T (Algorithm 1)."""
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
        """Update the key encoder."""
        ema_update_(self.encoder_k, self.encoder_q, cosine_momentum(self.m, passes.progress))

    def queries(self, x_q: Tensor) -> Tensor:
        """Encode query views to predictions (n, C) of unit length."""
        predicted = self.predictor(self.encoder_q(x_q))
        return l2_normalize(predicted, next(self.encoder_q.parameters()).dtype)


def cosine_momentum(m: float, progress: float) -> float:
    """Return the momentum that rises from `m` to 1 by half a cosine as `progress` goes to 1."""
    return 1 - (1 - m) * (1 + math.cos(math.pi * progress)) / 2


def mlp(
    num_layers: int, in_dim: int, hidden_dim: int, out_dim: int, last_norm: bool = True
) -> nn.Sequential:
    """Build an MLP of linear layers without bias, with BN and ReLU after all but the last.

    The modules are numbered as in the official builder.py.

    Args:
        num_layers: Number of linear layers.
        in_dim: Input dimension.
        hidden_dim: Width of the hidden layers.
        out_dim: Output dimension.
        last_norm: End with a BN without scale and shift.
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
