"""Device, threads, deterministic kernels and precision of a training process."""

import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch

from moco.common.distributed import local_processes, local_rank
from moco.common.errors import UserError


def pick_device(name: str) -> torch.device:
    """`auto` (a GPU where there is one), `cpu`, `cuda` (this process's) or `cuda:N`.

    Raises:
        UserError: not a device's name, a GPU that is not there, or one GPU for several processes.
    """
    if name.startswith("cuda:") and local_processes() > 1:
        raise UserError(
            f"device: {name} would be the GPU of all {local_processes()} processes of this "
            "machine; use DEVICE cuda, which gives each its own"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank()}"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise UserError(f"device: got {name!r}, choices are auto, cpu, cuda, cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device: {name} is not here (GPUs found: {torch.cuda.device_count()}); use cpu"
        )
    return torch.device(name)


def set_up_torch(num_threads: int, deterministic: bool) -> None:
    """Threads (0: torch's choice), and whether kernels have to be deterministic."""
    if deterministic:  # what cuBLAS requires, before its first use
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if num_threads:
        torch.set_num_threads(num_threads)
    torch.backends.cudnn.benchmark = not deterministic
    torch.use_deterministic_algorithms(deterministic)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 is more than emulated: AVX512-BF16, AMX, or a GPU since Ampere."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if hasattr(torch.cpu, "get_capabilities"):  # not in torch 2.7
        found = {name for name, has in torch.cpu.get_capabilities().items() if has is True}
    else:
        found = set()
        with suppress(OSError):  # Linux
            found = set(Path("/proc/cpuinfo").read_text().split())
    return not found.isdisjoint({"avx512_bf16", "amx_bf16"})


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """SOLVER.PRECISION: fp32 throughout, or matrix products in bf16 or fp16."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "fp32")
