"""Memory bank mechanism (Fig. 2b; InstDisc, arXiv 1805.01978): one stored key per image.

N images of all processes, n images of this process, C dimension, K negatives, M images in the
dataset, W processes.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.common.async_copy import to_device_async
from moco.common.distributed import gather_rows, rank, sum_over_ranks, world_size
from moco.modeling.loss import info_nce
from moco.modeling.mechanisms.base import (
    Dictionary,
    KeyBatch,
    Mechanism,
    Passes,
    StepOutput,
    l2_normalize,
    local_rows,
    uses_bf16,
)

_NEGATIVES = 16  # separates these random numbers from order and shuffle


class MemoryBank(Mechanism):
    """Query encoder and memory bank (M, C).

    The positive of a query is the entry of the same image in the bank, written when the image was
    last seen. The negatives are K entries sampled at random for the whole batch, the same on all
    processes. After a step, the entry of each image moves towards the query: the momentum is on
    the representations, not on an encoder. BN needs no shuffling, since query and keys come from
    different batches (sec. 3.3).

    Entry i is on process `i % W`, so that 1.28M x 128 entries in fp32 take 655 MB / W per process.

    Deviation: InstDisc samples K negatives for each query; sec. 3.2 says "the dictionary for each
    mini-batch is randomly sampled". Sampling is with replacement, as in InstDisc, so the negatives
    may contain the entry of a query's image.

    Args:
        encoder: Query encoder.
        dim: Dimension C of an entry; the bank starts with random unit vectors.
        num_images: Number of entries M.
        K: Number of negatives per step, >= 1.
        momentum: Momentum of an entry in [0, 1): `momentum * entry + (1 - momentum) * q`, then
            normalized (InstDisc: 0.5).
        T: Temperature, > 0 (eq. 1).
        loss: `info_nce` (sec. 4.1) or the original's `nce` (InstDisc, sec. 3.2; a footnote of
            sec. 4.1 compares them).
        seed: Seed of the negatives, which depend on seed and step.
    """

    needs_key_view: ClassVar[bool] = False
    bank: Tensor
    Z: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        dim: int,
        num_images: int,
        K: int,
        momentum: float,
        T: float,
        loss: str = "info_nce",
        seed: int = 0,
    ) -> None:
        super().__init__(encoder, T)
        self.num_images, self.K, self.momentum = num_images, K, momentum
        self._nce, self._seed = loss == "nce", seed
        # Every process samples all entries, so that the bank does not depend on their number.
        start = F.normalize(torch.randn(num_images, dim), dim=1)
        self.register_buffer("bank", start[rank() :: world_size()].clone())
        # Normalizing constant of NCE, 0 until it is estimated from the first batch.
        self.register_buffer("Z", torch.zeros(()))
        self._has_Z = False  # reading Z itself would wait for the GPU in every step

    @torch.no_grad()
    def dictionary(self, batch: KeyBatch) -> Dictionary:
        """Look up the entries of the batch's images and of K images sampled at random."""
        rng = np.random.default_rng([self._seed, batch.step, _NEGATIVES])
        sampled = torch.from_numpy(rng.integers(self.num_images, size=self.K))
        images = batch.images.cpu()
        entries = self._entries(torch.cat([images, sampled]))
        positive, negatives = entries.split([len(images), self.K])
        return Dictionary(local_rows(positive, len(images) // world_size()), negatives.T)

    def forward(self, x_q: Tensor, dictionary: Dictionary) -> StepOutput:
        """Compute InfoNCE or NCE with gradients to the queries only."""
        q = self.queries(x_q)
        positive, negatives = dictionary.positive, dictionary.negatives
        compared = q.detach() if self._nce else q  # NCE needs only the accuracy
        loss, accuracy = info_nce(compared, positive, negatives, self.T, uses_bf16(q.device))
        if self._nce:
            with torch.autocast(q.device.type, enabled=False):
                loss = self._nce_loss(q, positive, negatives)
        return StepOutput(loss, accuracy, q.detach())

    @torch.no_grad()
    def update(self, passes: Passes) -> None:
        """Move the entries of the batch's images towards their queries."""
        gathered, images = gather_rows(torch.cat(list(passes.queries))), passes.images.cpu()
        here = (images % world_size() == rank()).nonzero()[:, 0]
        rows = to_device_async(images[here] // world_size(), self.bank.device)
        new = gathered[to_device_async(here, gathered.device)].to(self.bank)
        moved = self.bank[rows] * self.momentum + new * (1 - self.momentum)
        self.bank[rows] = l2_normalize(moved, self.bank.dtype)

    def gathered_state(self) -> dict[str, Tensor]:
        """Return the state with the whole bank (M, C) in the order of the images."""
        state = dict(self.state_dict())
        rows_each = -(-self.num_images // world_size())
        padded = F.pad(self.bank, (0, 0, 0, rows_each - len(self.bank)))
        shards = gather_rows(padded).view(world_size(), rows_each, -1)
        state["bank"] = shards.transpose(0, 1).reshape(-1, padded.shape[1])[: self.num_images]
        return state

    def load_gathered_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a gathered state with this process's entries of the bank."""
        self.load_state_dict({**state, "bank": state["bank"][rank() :: world_size()]})

    def _entries(self, images: Tensor) -> Tensor:
        """Return the entries (len(images), C) of images, gathered from all processes."""
        rows = self.bank.new_zeros(len(images), self.bank.shape[1])
        here = (images % world_size() == rank()).nonzero()[:, 0]
        own = to_device_async(images[here] // world_size(), rows.device)
        rows[to_device_async(here, rows.device)] = self.bank[own]
        return sum_over_ranks(rows)

    def _nce_loss(self, q: Tensor, positive: Tensor, negatives: Tensor) -> Tensor:
        """Compute the NCE loss of InstDisc (eq. 7 and 8): the positive against K noise samples.

        With P(i | q) = exp(q v_i / T) / Z, where Z is a constant estimated from the first batch,
        and noise of probability 1/M: h = P / (P + K / M), loss = -ln h(positive) - sum ln(1 - h).
        """
        own = ((q * positive).sum(dim=1) / self.T).exp()  # (n,)
        noise = (q @ negatives / self.T).exp()  # (n, K)
        if not self._has_Z and self.Z == 0:
            total = torch.stack([own.sum() + noise.sum(), own.new_tensor(noise.numel() + len(q))])
            mean = sum_over_ranks(total)
            self.Z.copy_(mean[0] / mean[1] * self.num_images)
        self._has_Z = True
        scale = self.K / self.num_images
        own, noise = own / self.Z, noise / self.Z
        return -(
            (own / (own + scale)).log().mean() + (scale / (noise + scale)).log().sum(dim=1).mean()
        )
