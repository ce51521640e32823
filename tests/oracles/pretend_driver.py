"""What torch asks a GPU's driver, answered for the GPU of `tests/oracles/pretend_cuda.py`."""

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _foreach_supported_types
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tests.oracles.pretend_cuda import CASTS, HERE, OnGPU, Operations, numbers, place, state, wait

# Autocast in C++ would look at where a tensor really is, so these Python functions cast.
LOWER = re.compile("conv.*[123]d|linear|.*matmul.*|.*mm|einsum|scaled_dot_product_attention|prelu")
UPPER = re.compile(
    "exp|expm1|log|log2|log10|log1p|.*pow.*|reciprocal|rsqrt|sum|prod|cumsum|norm|cdist|.*softmax|"
    "logsumexp|layer_norm|group_norm|normalize|nll_loss|.*cross_entropy.*|(mse|l1|smooth_l1)_loss"
)


class _Functions(TorchFunctionMode):
    """Functions that do not reach the dispatcher as they would with a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, x = dict(kwargs or {}), getattr(func, "__name__", ""), (*args, None)[0]
        words = {str(a) for a in (*args, *kwargs.values()) if isinstance(a, str | torch.device)}
        if "meta" in words and not state["wants_meta"]:
            state["wants_meta"] = True
            try:
                return func(*args, **kwargs)
            finally:
                state["wants_meta"] = False
        if "cuda" in words and func is not torch.device:  # C++ would ask the driver for its number
            named = lambda a: HERE if str(a) == "cuda" else a  # noqa: E731
            args, kwargs = tree_map_only((str, torch.device), named, (args, kwargs))
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device, grad = kwargs.pop("device"), kwargs.pop("requires_grad", False)
            return func(*args, **kwargs).to(device).requires_grad_(grad)
        if isinstance(x, OnGPU):
            if name in ("numpy", "__array__"):
                raise TypeError(f"can't convert a tensor of {HERE} to numpy ({place()})")
            if name == "tolist":
                wait(name)
                return x.held.tolist()
            if name == "new_tensor":
                own = {"dtype": x.dtype, "device": HERE, **kwargs}
                device = own.pop("device")
                return torch.tensor(*args[1:], **own).to(device)
            if name == "to" and not any(isinstance(a, Tensor) for a in args[1:]):
                given = {k: v for k, v in kwargs.items() if k != "copy"}
                device, dtype, _, layout = torch._C._nn._parse_to(*args[1:], **given)
                if device == HERE:  # C++ would see another one
                    return func(
                        x, dtype or x.dtype, **({"memory_format": layout} if layout else {})
                    )
        if name == "cuda":
            return x if isinstance(x, OnGPU) else x.to(HERE)
        lower, upper = LOWER.fullmatch(name), UPPER.fullmatch(name)
        if torch.is_autocast_enabled("cuda") and (lower or upper) and "out" not in kwargs:
            to = torch.get_autocast_dtype("cuda") if lower else torch.float32
            floats = (torch.float32, *CASTS)
            cast = lambda a: a.to(to) if a.dtype in floats and a.dtype != to else a  # noqa: E731
            args, kwargs = tree_map_only(OnGPU, cast, (args, kwargs))
        return func(*args, **kwargs)


class _Event:
    """An event or a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: wait("event") if name == "synchronize" else 1.0


def _pin_memory(x: Tensor, *_: Any) -> Tensor:
    if isinstance(x, OnGPU):
        raise RuntimeError(f"cannot pin a tensor of {HERE} ({place()})")
    pinned = x if x.is_pinned() else x.clone()
    pinned._pinned = True  # type: ignore[attr-defined]
    return pinned


def install() -> None:
    """Give this process a GPU, for the tensors of this thread."""
    gpu = SimpleNamespace(name="pretended GPU", major=9, minor=0, total_memory=80 << 30)
    cuda: dict[str, Any] = {
        **dict.fromkeys(("Event", "Stream", "current_stream"), _Event),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), lambda n: numbers.manual_seed(int(n))),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "set_device"), lambda *a: None),
        **dict.fromkeys(("max_memory_allocated", "memory_allocated"), lambda *a: 0),
        **dict.fromkeys(("is_available", "is_bf16_supported"), lambda *a, **k: True),
        "_lazy_init": lambda: state.update(initialized=True),
        "is_initialized": lambda: state["initialized"],
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: HERE.index + 1,
        "current_device": lambda: HERE.index,
        "synchronize": lambda *a: wait("synchronize"),
        "get_device_name": lambda *a: gpu.name,
        "get_device_capability": lambda *a: (gpu.major, gpu.minor),
        "get_device_properties": lambda *a: gpu,
        "get_rng_state": lambda *a: numbers.get_state(),
        "set_rng_state": lambda state, *a: numbers.set_state(state),
    }
    accelerator: dict[str, Any] = {
        "is_available": lambda: True,
        "current_accelerator": lambda *a, **k: torch.device("cuda"),
        "current_stream": _Event,
        "current_device_index": lambda: HERE.index,
        **dict.fromkeys(("set_device_index", "set_device_idx"), lambda index: None),
    }
    for module, values in ((torch.cuda, cuda), (torch.accelerator, accelerator)):
        for name, value in values.items():
            setattr(module, name, value)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[assignment]
    torch.Tensor.is_pinned = lambda x, *a: getattr(x, "_pinned", False)  # type: ignore[assignment]
    torch.autograd.set_multithreading_enabled(False)  # a device would have a thread of its own
    tag = torch.serialization.location_tag
    torch.serialization.location_tag = lambda storage: (
        str(HERE) if storage._cdata in state["saved"] else tag(storage)
    )
    _foreach_supported_types.append(OnGPU)
    connect = torch.distributed.init_process_group  # gloo stands in for NCCL
    torch.distributed.init_process_group = lambda backend=None, *a, **k: connect("gloo", *a, **k)
    for mode in (_Functions(), Operations()):
        mode.__enter__()
