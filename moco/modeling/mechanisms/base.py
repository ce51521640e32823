"""What the paper's three mechanisms (Fig. 2) and MoCo v3 have in common.

Queries meet a contrastive dictionary. They differ in how the keys are maintained and how the key
encoder is updated. One step is, for all of them:

    dictionary = model.dictionary(batch)      # what the queries are compared with
    out = model(x_q, dictionary)              # InfoNCE (eq. 1)
    out.loss.backward()
    optimizer.step()
    model.update(Passes([dictionary], [out.queries], images, progress))

N images of all processes, n of this one, C dimension, K negatives.
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
    """What a mechanism makes its dictionary of in one pass over a batch.

    Attributes:
        x_k: key views (n, 3, H, W), in the order of `plan`; empty without key views.
        plan: order (N,) in which the keys pass through BN (`shuffle_plan`); None: the queries'.
        images: (N,) numbers of the images in the dataset, those of the first process first.
        step: number of the step, from 0.
        num_chunks: parts in which the encoder sees `x_k`, to save memory.
    """

    x_k: Tensor
    plan: Tensor | None
    images: Tensor
    step: int
    num_chunks: int = 1


class Dictionary(NamedTuple):
    """The contrastive dictionary: what this process's queries are compared with.

    Attributes:
        positive: (n, C), the key of each query.
        negatives: (C, K).
        own: (n,) column of each query's own key among the negatives, where it is no negative; None
            where it is not among them.
        keys: (N, C) the keys encoded in this step by all processes, None where none are.
    """

    positive: Tensor
    negatives: Tensor
    own: Tensor | None = None
    keys: Tensor | None = None

    def rows(self, part: slice) -> "Dictionary":
        """The same for some of the queries."""
        own = None if self.own is None else self.own[part]
        return self._replace(positive=self.positive[part], own=own)


class StepOutput(NamedTuple):
    """One forward pass: loss to minimize, accuracy of the pretext task 0..100, queries (n, C)."""

    loss: Tensor
    accuracy: Tensor
    queries: Tensor


class Passes(NamedTuple):
    """All passes of a step over its batch.

    Attributes:
        dictionaries: of each.
        queries: (n, C) of each.
        images: (N,), as in `KeyBatch`.
        progress: share of the run that is done with this step, 0..1.
    """

    dictionaries: Sequence[Dictionary]
    queries: Sequence[Tensor]
    images: Tensor
    progress: float


class Mechanism(nn.Module, ABC):
    """Query encoder and dictionary.

    Args:
        encoder: becomes the query encoder: images (n, 3, H, W) → (n, C), not normalized.
        T: temperature, > 0 (eq. 1).
    """

    needs_key_view: ClassVar[bool] = True

    def __init__(self, encoder: nn.Module, T: float) -> None:
        super().__init__()
        self.T = T
        self.encoder_q = encoder

    @property
    def has_key_encoder(self) -> bool:
        """Whether keys have an encoder of their own."""
        return getattr(self, "encoder_k", self.encoder_q) is not self.encoder_q

    @abstractmethod
    def dictionary(self, batch: KeyBatch) -> Dictionary:
        """The dictionary for one pass's queries. All processes have to call it together."""

    @abstractmethod
    def forward(self, x_q: Tensor, dictionary: Dictionary) -> StepOutput:
        """Loss of some or all of this process's queries (n, 3, H, W) and their dictionary."""

    def update(self, passes: Passes) -> None:
        """The end of a step: what the dictionary becomes. All processes call it together."""

    def gathered_state(self) -> dict[str, Tensor]:
        """`state_dict` of all processes together, the same on each; they call it together."""
        return dict(self.state_dict())

    def load_gathered_state(self, state: Mapping[str, Tensor]) -> None:
        """This process's part of what `gathered_state` returned."""
        self.load_state_dict(state)

    def queries(self, x_q: Tensor) -> Tensor:
        """Queries (n, C) of unit length (sec. 3.3)."""
        return unit_rows(self.encoder_q(x_q), like=next(self.encoder_q.parameters()))


def unit_rows(x: Tensor, like: Tensor) -> Tensor:
    """Rows over their L2 norm, in the precision of `like`."""
    return F.normalize(x.to(like.dtype), dim=1)


def encode_keys(
    encoder: nn.Module, batch: KeyBatch, gather: Callable[[Tensor], Tensor] = gather_rows
) -> Tensor:
    """Keys (N, C) of unit length of all processes' key views, in the order of the queries.

    `gather`: rows (n, C) -> (N, C), with or without gradient.
    """
    parts = [encoder(part) for part in batch.x_k.chunk(batch.num_chunks)]
    keys = gather(unit_rows(torch.cat(parts), like=next(encoder.parameters())))
    return keys if batch.plan is None else unshuffle(keys, batch.plan)


def batch_as_dictionary(keys: Tensor) -> Dictionary:
    """Keys (N, C) of a batch, each the positive of one query and a negative of the others."""
    n = len(keys) // world_size()
    own = torch.arange(rank() * n, (rank() + 1) * n, device=keys.device)
    return Dictionary(own_rows(keys, n), keys.T, own, keys)


def follow(key_encoder: nn.Module, query_encoder: nn.Module, m: float) -> None:
    """`f_k = m f_k + (1 - m) f_q` for the parameters (eq. 2).

    BN's running statistics are no parameters: each encoder keeps its own, as in the official code.
    """
    torch._foreach_lerp_(list(key_encoder.parameters()), list(query_encoder.parameters()), 1 - m)


def in_bf16(device: torch.device) -> bool:
    """Whether autocast is on and makes matrix products in bfloat16."""
    enabled = torch.is_autocast_enabled(device.type)
    return enabled and torch.get_autocast_dtype(device.type) == torch.bfloat16


def own_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Of rows (N, ...) of all processes the `num_rows` of this one."""
    return rows[rank() * num_rows : (rank() + 1) * num_rows]
