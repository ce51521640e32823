"""Base class and helpers of the paper's three mechanisms (Fig. 2) and of MoCo v3.

Each mechanism compares queries with a contrastive dictionary. Mechanisms differ in how the keys are
maintained and how the key encoder is updated. A training step is:

    dictionary = model.dictionary(batch)      # keys that the queries are compared with
    out = model(x_q, dictionary)              # InfoNCE (eq. 1)
    out.loss.backward()
    optimizer.step()
    model.update(Passes([dictionary], [out.queries], images, progress))

N images of all processes, n images of this process, C dimension, K negatives.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.common.distributed import gather_rows, rank, world_size
from moco.modeling.shuffle_bn import unshuffle


class KeyBatch(NamedTuple):
    """Input of a mechanism's dictionary in one pass over a batch.

    Attributes:
        x_k: Key views (n, 3, H, W) in the order of `plan`; empty for mechanisms without key views.
        plan: Order (N,) in which the keys pass through BN (`shuffle_plan`); None for the order of
            the queries.
        images: Indices (N,) of the images in the dataset, those of the first process first.
        step: Number of the step, from 0.
        num_chunks: Number of chunks in which `x_k` is encoded, to save memory.
    """

    x_k: Tensor
    plan: Tensor | None
    images: Tensor
    step: int
    num_chunks: int = 1


class Dictionary(NamedTuple):
    """Contrastive dictionary of this process's queries.

    Attributes:
        positive: Positive key of each query, (n, C).
        negatives: Negative keys (C, K).
        own: Column (n,) of each query's positive key among the negatives, where it must be ignored;
            None if the negatives do not contain the positive keys.
        keys: Keys (N, C) encoded in this step by all processes; None if no keys are encoded.
    """

    positive: Tensor
    negatives: Tensor
    own: Tensor | None = None
    keys: Tensor | None = None

    def rows(self, part: slice) -> "Dictionary":
        """Return the dictionary for a part of the queries."""
        own = None if self.own is None else self.own[part]
        return self._replace(positive=self.positive[part], own=own)


class StepOutput(NamedTuple):
    """Loss to minimize, accuracy of the pretext task in 0..100, and queries (n, C)."""

    loss: Tensor
    accuracy: Tensor
    queries: Tensor


class Passes(NamedTuple):
    """Results of all passes of a step over the batch.

    Attributes:
        dictionaries: Dictionary of each pass.
        queries: Queries (n, C) of each pass.
        images: Indices (N,) of the images in the dataset.
        progress: Fraction of the run that is done after this step, 0..1.
    """

    dictionaries: Sequence[Dictionary]
    queries: Sequence[Tensor]
    images: Tensor
    progress: float


class Mechanism(nn.Module, ABC):
    """Base class of a query encoder with a contrastive dictionary.

    Args:
        encoder: Query encoder, images (n, 3, H, W) → (n, C), not normalized.
        T: Temperature, > 0 (eq. 1).
    """

    needs_key_view: ClassVar[bool] = True

    def __init__(self, encoder: nn.Module, T: float) -> None:
        super().__init__()
        self.T = T
        self.encoder_q = encoder

    @property
    def has_key_encoder(self) -> bool:
        """True if the keys have a separate encoder."""
        return getattr(self, "encoder_k", self.encoder_q) is not self.encoder_q

    @abstractmethod
    def dictionary(self, batch: KeyBatch) -> Dictionary:
        """Return the dictionary for the queries of one pass; a collective operation."""

    @abstractmethod
    def forward(self, x_q: Tensor, dictionary: Dictionary) -> StepOutput:
        """Compute the loss of query views (n, 3, H, W) of this process, or of a part of them."""

    def update(self, passes: Passes) -> None:
        """Update dictionary and key encoder at the end of a step; a collective operation."""

    def gathered_state(self) -> dict[str, Tensor]:
        """Return the state gathered from all processes; a collective operation."""
        return dict(self.state_dict())

    def load_gathered_state(self, state: Mapping[str, Tensor]) -> None:
        """Load this process's part of a state from `gathered_state`."""
        self.load_state_dict(state)

    def queries(self, x_q: Tensor) -> Tensor:
        """Encode query views to queries (n, C) of unit length (sec. 3.3)."""
        return l2_normalize(self.encoder_q(x_q), next(self.encoder_q.parameters()).dtype)


def l2_normalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert rows (n, C) to a dtype and divide them by their L2 norm."""
    return F.normalize(x.to(dtype), dim=1)


def encode_keys(
    encoder: nn.Module, batch: KeyBatch, gather: Callable[[Tensor], Tensor] = gather_rows
) -> Tensor:
    """Encode the key views of all processes to keys (N, C) of unit length.

    Args:
        encoder: Key encoder.
        batch: Key views of this process.
        gather: Function that gathers rows (n, C) → (N, C), with or without gradient.

    Returns:
        Keys in the order of the queries.
    """
    parts = [encoder(part) for part in batch.x_k.chunk(batch.num_chunks)]
    keys = gather(l2_normalize(torch.cat(parts), next(encoder.parameters()).dtype))
    return keys if batch.plan is None else unshuffle(keys, batch.plan)


def batch_as_dictionary(keys: Tensor) -> Dictionary:
    """Return the dictionary of all keys (N, C), each positive for the query of its image."""
    n = len(keys) // world_size()
    own = torch.arange(rank() * n, (rank() + 1) * n, device=keys.device)
    return Dictionary(local_rows(keys, n), keys.T, own, keys)


def ema_update_(key_encoder: nn.Module, query_encoder: nn.Module, m: float) -> None:
    """Update the key encoder's parameters by `f_k = m f_k + (1 - m) f_q` (eq. 2).

    BN's running statistics are not parameters and stay separate, as in the official code.
    """
    torch._foreach_lerp_(list(key_encoder.parameters()), list(query_encoder.parameters()), 1 - m)


def uses_bf16(device: torch.device) -> bool:
    """Return whether autocast computes matrix products in bfloat16 on a device."""
    enabled = torch.is_autocast_enabled(device.type)
    return enabled and torch.get_autocast_dtype(device.type) == torch.bfloat16


def local_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Return this process's `num_rows` rows from the rows (N, ...) of all processes."""
    return rows[rank() * num_rows : (rank() + 1) * num_rows]
