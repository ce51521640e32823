"""Data loading in worker processes, with a clear error if a worker dies or hangs."""

from collections.abc import Iterable, Iterator
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch

from moco.common.errors import DataError, kill_children
from moco.engine.stop import ignore_stop_signals

T = TypeVar("T")


def identity_collate(batch: Any) -> Any:
    """Return a batch unchanged, as collate function of datasets that return whole batches."""
    return batch


def batch_loader(
    dataset: Any,
    batch_sampler: Iterable[Any],
    device: torch.device,
    workers: int,
    timeout_seconds: int,
) -> Iterator[Any]:
    """Iterate over the batches of a dataset that returns whole batches.

    Args:
        dataset: Dataset with `__getitems__`.
        batch_sampler: Arguments of `__getitems__`, one for each batch.
        device: Device that the batches will be copied to; for a GPU, their memory is pinned.
        workers: Number of worker processes; 0 loads in this process.
        timeout_seconds: Time without a batch after which a worker is considered hung.

    Raises:
        DataError: If a worker died or hangs.
    """
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=workers,
        collate_fn=identity_collate,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_stop_signals,
        timeout=timeout_seconds if workers else 0,
    )
    return read_ahead(loader)


def read_ahead(loader: Iterable[T]) -> Iterator[T]:
    """Iterate over a loader's batches.

    Raises:
        DataError: If a data-loader worker died or hangs.
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
    """Kill the workers at exit; must be called before workers with `ignore_stop_signals` start.

    At exit, multiprocessing sends SIGTERM to workers that are left after an error and waits for
    them, but these workers ignore the signal.
    """
    Finalize(None, kill_children, exitpriority=10)
