"""Device, threads, deterministic kernels and precision of a training process."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from moco.common.distributed import local_processes, local_rank
from moco.common.errors import NumericError, UserError
from moco.common.files import read_text
from moco.common.keys import Key, one_of
from moco.engine.keys import PRECISIONS


def pick_device(name: str, key: str = "device") -> torch.device:
    """Return the device named `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.

    `cuda` is the GPU of this process's local rank. `key` is the key or flag of `name`, for
    messages.

    Raises:
        UserError: If the name is invalid, there is no such GPU, or several processes would share
            one GPU.
    """
    if name.startswith("cuda:") and local_processes() > 1:
        raise UserError(
            f"{key}: {name} would be the GPU of all {local_processes()} processes of this "
            "machine; use cuda, which gives each its own"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank()}"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise UserError(f"{key}: got {name!r}, choices are auto, cpu, cuda, cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise UserError(
            f"{key}: {name} is not available (GPUs found: {torch.cuda.device_count()}); use cpu"
        )
    return torch.device(name)


def set_up_torch(num_threads: int, deterministic: bool) -> None:
    """Set the number of threads (0 keeps torch's choice) and the use of deterministic kernels."""
    if deterministic:  # cuBLAS requires it before its first use
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if num_threads:
        torch.set_num_threads(num_threads)
    torch.backends.cudnn.benchmark = not deterministic
    torch.use_deterministic_algorithms(deterministic)


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether a device computes bf16 natively: AVX512-BF16, AMX, or a GPU since Ampere."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if hasattr(torch.cpu, "get_capabilities"):  # not in torch 2.7
        found = {name for name, has in torch.cpu.get_capabilities().items() if has is True}
    else:
        found = set()
        with suppress(OSError):  # Linux
            found = set(read_text("/proc/cpuinfo").split())
    return not found.isdisjoint({"avx512_bf16", "amx_bf16"})


def slow_bf16_warning(where: str) -> str:
    """Return the warning for bf16 on a device that does not compute it natively."""
    return (
        f"SOLVER.PRECISION bf16: {where} does not have fast bf16, so this is slower than fp32; "
        "SOLVER.PRECISION auto takes the faster"
    )


def auto_precision(fast: bool, before: Mapping[str, Any]) -> str:
    """Return the precision of SOLVER.PRECISION auto.

    Args:
        fast: Whether the device has fast bf16.
        before: Keys of the run to resume, whose precision is kept; empty for a new run.
    """
    chosen: str = before.get("SOLVER.PRECISION", "bf16" if fast else "fp32")
    # The value may come from an untrusted checkpoint.
    Key("", range=one_of(*PRECISIONS)).check("SOLVER.PRECISION", chosen)
    return chosen


class LossScaler(torch.amp.GradScaler):
    """Gradient scaler for SOLVER.PRECISION fp16, which skips steps whose gradients overflow.

    Attributes:
        skipped: Number of skipped steps.
    """

    SETTLED_STEPS = 100  # number of steps until the scale has adjusted

    def __init__(self, device: torch.device, precision: str) -> None:
        super().__init__(device.type, enabled=precision == "fp16")
        self.skipped = 0

    def take_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, or skip the step; adjust the scale."""
        steps: list[object] = []
        # A changed scale would show a skipped step as well, but reading it waits for the GPU.
        hook = optimizer.register_step_post_hook(lambda *_: steps.append(None))
        self.step(optimizer)
        hook.remove()
        self.update()
        self.skipped += not steps

    def check(self, done: int, total: int) -> None:
        """Raise NumericError after `done` of `total` steps if most of them were skipped."""
        if self.skipped > done / 2 and done >= min(total, self.SETTLED_STEPS):
            raise NumericError(
                f"SOLVER.PRECISION fp16: {self.skipped} of {done} steps were skipped, because a "
                "gradient overflowed; set bf16 or fp32"
            )


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Return the autocast context of SOLVER.PRECISION; it is disabled for fp32."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "fp32")
