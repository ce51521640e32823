"""Transfers between the CPU and a GPU for which neither waits."""

import torch
from torch import Tensor


def send(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to a device; a GPU receives it when it has computed what was before.

    The memory is pinned, because the copy of memory that is not would wait for the GPU.
    """
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class AsyncScalars:
    """Values of a device on their way to the CPU; ask for them late, when they have arrived.

    Args:
        values: Tensor of the device, which is not changed in place afterwards.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def tolist(self) -> list[float]:
        """Wait until they have arrived, and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers
