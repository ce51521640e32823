"""Data loading: batches from worker processes, with an error where one dies or hangs."""

from collections.abc import Iterable, Iterator
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch

from moco.common.errors import DataError, kill_children
from moco.engine.stop import ignore_stop_signals

T = TypeVar("T")


def as_it_is(batch: Any) -> Any:
    """A collate function for datasets that make whole batches."""
    return batch


def batch_loader(
    dataset: Any,
    batch_sampler: Iterable[Any],
    device: torch.device,
    workers: int,
    timeout_seconds: int,
) -> Iterator[Any]:
    """Batches of a dataset that makes whole ones; see `read_ahead` for errors.

    Args:
        batch_sampler: what the dataset's `__getitems__` is called with.
        timeout_seconds: a worker that delivers nothing for this long is taken to hang.
    """
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=workers,
        collate_fn=as_it_is,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_stop_signals,
        timeout=timeout_seconds if workers else 0,
    )
    return read_ahead(loader)


def read_ahead(loader: Iterable[T]) -> Iterator[T]:
    """The loader's batches.

    Raises:
        DataError: a data-loader worker died or hangs.
    """
    kill_workers_at_exit()
    try:
        yield from loader
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        if "DataLoader worker" not in reason and "DataLoader timed out" not in reason:
            raise
        raise DataError(
            f"a data-loader worker died or hangs ({reason}); out of memory or of "
            "/dev/shm, or a slow disk? Lower DATA.NUM_WORKERS or DATA.CACHE_MIB, or raise "
            "DATA.WORKER_TIMEOUT_SECONDS, then --resume"
        ) from error


def kill_workers_at_exit() -> None:
    """To be called before workers are started that `ignore_stop_signals`.

    They ignore the one with which multiprocessing ends, and then awaits, those that an error has
    left behind.
    """
    Finalize(None, kill_children, exitpriority=10)
