"""Device, threads, deterministic kernels and precision of a training process."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from fvcore.common.config import CfgNode

from moco.common.distributed import highest, is_main, local_processes, local_rank
from moco.common.errors import UserError
from moco.common.files import read_text
from moco.common.keys import Key, one_of
from moco.engine.keys import PRECISIONS


def pick_device(name: str) -> torch.device:
    """Return the device named `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.

    `cuda` is the GPU of this process's local rank.

    Raises:
        UserError: If the name is invalid, there is no such GPU, or several processes would share
            one GPU.
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
            f"device: {name} is not available (GPUs found: {torch.cuda.device_count()}); use cpu"
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
    """Return whether bf16 is native: AVX512-BF16, AMX, or a GPU since Ampere."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if hasattr(torch.cpu, "get_capabilities"):  # not in torch 2.7
        found = {name for name, has in torch.cpu.get_capabilities().items() if has is True}
    else:
        found = set()
        with suppress(OSError):  # Linux
            found = set(read_text("/proc/cpuinfo").split())
    return not found.isdisjoint({"avx512_bf16", "amx_bf16"})


def slow_bf16(where: str) -> str:
    """Return the warning for bf16 on a device without `has_fast_bf16`."""
    return (
        f"SOLVER.PRECISION bf16: {where} does not have fast bf16, so this is slower than fp32; "
        "SOLVER.PRECISION auto takes the faster"
    )


def with_speed(cfg: CfgNode, device: torch.device, resumed: Mapping[str, Any]) -> CfgNode:
    """Replace `auto` and None by a precision and a memory layout.

    Args:
        cfg: Configuration with the requested SOLVER.PRECISION and SOLVER.CHANNELS_LAST.
        device: Device of the training.
        resumed: Keys of the run to resume, which keeps its choice; empty for a new run.
    """
    requested = cfg.SOLVER.PRECISION, cfg.SOLVER.CHANNELS_LAST
    # All processes take the same, even if their processors differ.
    fast = not highest(int(not has_fast_bf16(device)))
    if requested[0] == "bf16" and not (fast or resumed) and is_main():
        print(f"warning: {slow_bf16('a processor here')}", flush=True)
    if "auto" not in requested and None not in requested:
        return cfg
    cfg = cfg.clone()
    cfg.defrost()
    if cfg.SOLVER.PRECISION == "auto":
        here = "bf16" if fast else "fp32"
        cfg.SOLVER.PRECISION = chosen = resumed.get("SOLVER.PRECISION", here)
        if is_main() and resumed and chosen != here:
            slower = "" if fast else ", although this processor has no instructions for bf16"
            print(f"warning: SOLVER.PRECISION stays {chosen}, as the run began{slower}", flush=True)
    if cfg.SOLVER.CHANNELS_LAST is None:
        faster = device.type == "cpu" or cfg.SOLVER.PRECISION != "fp32"
        cfg.SOLVER.CHANNELS_LAST = bool(resumed.get("SOLVER.CHANNELS_LAST", faster))
    # The value may come from an untrusted checkpoint.
    Key("", range=one_of(*PRECISIONS)).check("SOLVER.PRECISION", cfg.SOLVER.PRECISION)
    cfg.freeze()
    return cfg


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Return the autocast context of SOLVER.PRECISION; it is disabled for fp32."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "fp32")
