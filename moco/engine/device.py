"""Device, threads, deterministic kernels and precision of a training process."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from moco.common.cfgcheck import check_choice
from moco.common.distributed import highest, is_main, local_processes, local_rank
from moco.common.errors import UserError
from moco.engine.config import PRECISIONS


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
            found = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    return not found.isdisjoint({"avx512_bf16", "amx_bf16"})


def slow_bf16(where: str) -> str:
    """What to say where bf16 was asked for, but not `has_fast_bf16`."""
    return (
        f"SOLVER.PRECISION bf16: {where} does not have fast bf16, so this is slower than fp32; "
        "SOLVER.PRECISION auto takes the faster"
    )


def with_speed(cfg: CfgNode, device: torch.device, begun: Mapping[str, Any]) -> CfgNode:
    """The keys with a precision and a memory layout in place of `auto` and None.

    Args:
        begun: keys and values of the run that is resumed, which stays as it began; else empty.
    """
    asked = cfg.SOLVER.PRECISION, cfg.SOLVER.CHANNELS_LAST
    # The same on all processes, whatever their processors.
    fast = not highest(int(not has_fast_bf16(device)))
    if asked[0] == "bf16" and not (fast or begun) and is_main():
        print(f"warning: {slow_bf16('a processor here')}", flush=True)
    if "auto" not in asked and None not in asked:
        return cfg
    cfg = cfg.clone()
    cfg.defrost()
    if cfg.SOLVER.PRECISION == "auto":
        here = "bf16" if fast else "fp32"
        cfg.SOLVER.PRECISION = chosen = begun.get("SOLVER.PRECISION", here)
        if is_main() and begun and chosen != here:
            slower = "" if fast else ", although this processor has no instructions for bf16"
            print(f"warning: SOLVER.PRECISION stays {chosen}, as the run began{slower}", flush=True)
    if cfg.SOLVER.CHANNELS_LAST is None:
        faster = device.type == "cpu" or cfg.SOLVER.PRECISION != "fp32"
        cfg.SOLVER.CHANNELS_LAST = bool(begun.get("SOLVER.CHANNELS_LAST", faster))
    check_choice(cfg, "SOLVER.PRECISION", PRECISIONS)  # a checkpoint may say anything
    cfg.freeze()
    return cfg


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """SOLVER.PRECISION: fp32 throughout, or matrix products in bf16 or fp16."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "fp32")
