"""Bytes that a process receives from others in collectives on tensors."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


@contextmanager
def received() -> Iterator[Counter[str]]:
    """Count the payload by operation: gather, exchange, sum."""
    counts: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., Any], size: Callable[..., int]) -> Any:
        def both(*args: Any) -> Any:
            counts[name] += size(*args)
            return call(*args)

        return both

    def gathered(out: Tensor, x: Tensor) -> int:
        return out.nbytes - x.nbytes

    def exchanged(out: Tensor, x: Tensor, counts: list[int], send_counts: list[int]) -> int:
        return (sum(counts) - counts[dist.get_rank()]) * (out.nbytes // len(out))

    def summed(x: Tensor, *op: object) -> int:
        return 0 if op else x.nbytes  # the largest number of all is not counted

    with mock.patch.multiple(
        dist,
        all_gather_into_tensor=counted("gather", dist.all_gather_into_tensor, gathered),
        all_to_all_single=counted("exchange", dist.all_to_all_single, exchanged),
        all_reduce=counted("sum", dist.all_reduce, summed),
    ):
        yield counts
