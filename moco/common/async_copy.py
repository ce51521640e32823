"""Asynchronous copies between the CPU and a GPU."""

import torch
from torch import Tensor


def to_device_async(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting; the copy is queued behind earlier GPU work.

    The source is pinned first, because a copy from pageable memory would wait for the GPU.
    """
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class AsyncScalars:
    """Asynchronous copy of a tensor to the CPU; call `tolist` late, when the copy is done.

    Args:
        values: Tensor on any device, which must not be changed in place afterwards.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def tolist(self) -> list[float]:
        """Wait until the copy is done and return the values."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers
