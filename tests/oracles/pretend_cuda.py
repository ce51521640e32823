"""A GPU that is not there: tensors that say `cuda:0`, compute on the CPU, and refuse to be mixed.

`pretend_driver.install()` lasts until its process ends, so each test that uses it is a process of
its own. Found are operations on tensors of two devices, `.numpy()` of the GPU's, its random numbers
that a resumed run does not continue, kernels that are not deterministic, and in `waits` where the
CPU waits for it. Not found are errors of kernels and streams, of NCCL, and of C++ that asks whether
a tensor is on CUDA. Private parts of torch are used, those of torch 2.15.
"""

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

HERE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
ROOT = re.escape(str(Path(__file__).resolve().parents[2]))
SOURCE = re.compile(
    rf"(?<={ROOT})/(moco|detection|convert|benchmarks)/|/detectron2/(?!.*/detectron2/)"
)
CASTS = (torch.float16, torch.bfloat16)
aten = torch.ops.aten

waits: Counter[tuple[str, str]] = Counter()  # (file:line, why) of each wait
collectives: list[tuple[str, str, list[str]]] = []  # (file:line, operation, devices of its tensors)
state: dict[str, Any] = {"initialized": False, "wants_meta": False, "saved": set()}
numbers = torch.Generator()

# A CPU's indices are sent to the GPU, and CPU's scalars are arguments of a kernel.
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
COPIES = {"_to_copy", "copy_", "_foreach_copy_"}
WITH_SCALARS = {*INDEXED, "fill_", "masked_fill", "masked_fill_", "where", "lerp", "lerp_"}
# The sizes of their results, or their results, are numbers that the CPU has to know.
SYNCHRONOUS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "nms", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "linalg_eigh"),
}
# No deterministic kernel on CUDA, by the documentation of torch.use_deterministic_algorithms.
NOT_DETERMINISTIC = {
    *("_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward", "nll_loss2d_forward"),
    *("nll_loss2d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
    *("reflection_pad2d_backward", "grid_sampler_2d_backward", "_ctc_loss_backward", "histc"),
}


class DeviceMix(RuntimeError):
    """Raised where CUDA would refuse an operation."""


class OnGPU(Tensor):
    """Tensor of the GPU, for C++ one on `meta`; `held` on the CPU has its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: HERE)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnGPU":
        c, keys = torch._C, {"device_for_backend_keys": torch.device("cuda")}
        # The guards act from their construction on, so this line makes them in this order.
        with torch.inference_mode(False), c._DisableTorchDispatch(), c.DisableTorchFunction():
            empty = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
            made = torch.Tensor._make_subclass(cls, empty, False, **keys)
        made.held = held
        return made

    def get_device(self) -> int:
        return int(HERE.index)

    def __reduce_ex__(self, protocol: int) -> Any:
        state["saved"].add(self.held.untyped_storage()._cdata)
        return self.held.requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnGPU":
        copied = OnGPU(self.held.clone()).requires_grad_(self.requires_grad)
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k == "_is_param"})
        memo[id(self)] = copied
        return copied

    # With these, Module.to keeps its parameters, as it does for a GPU.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> "OnGPU":
        return OnGPU(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def place() -> str:
    """Return line and function of the project, or of Detectron2, that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if found := SOURCE.search(name):
            return f"{name[found.start() + 1 :]}:{frame.f_lineno} {function}"
        frame = frame.f_back
    return "?"


def wait(why: str) -> None:
    waits[place(), why] += 1


def _check(name: str, func: Any, tensors: list[Tensor]) -> None:
    on_cpu = [x for x in tensors if not isinstance(x, OnGPU)]
    if name in COPIES or func.namespace == "c10d":
        return
    if name in INDEXED and isinstance(tensors[0], OnGPU):
        values = [x for x in on_cpu if "put" in name and x is tensors[-1]]
        for _ in on_cpu[len(values) :]:
            wait(f"{name}: index sent")
        on_cpu = values
    pointwise = torch.Tag.pointwise in func.tags or name.startswith("_foreach_")
    into_cpu = on_cpu and name.endswith("_") and on_cpu[0] is tensors[0]
    if into_cpu or any(x.dim() or not (pointwise or name in WITH_SCALARS) for x in on_cpu):
        found = [(tuple(x.shape), x.device.type) for x in tensors]
        raise DeviceMix(f"{func} at {place()}: tensors on two devices, {found}")


def _check_copy(source: Tensor, to: torch.device, non_blocking: bool) -> None:
    if source.device.type == to.type:
        return
    pinned = to.type == "cpu" or getattr(source, "_pinned", False)
    if not non_blocking or not pinned:
        wait(f"{source.device.type} to {to.type}" + (", not pinned" if non_blocking else ""))


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(numbers.get_state())
    yield
    numbers.set_state(torch.default_generator.get_state())
    torch.default_generator.set_state(before)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    try:  # in float32 where the CPU has no kernel for 16 bits
        return func(*args, **kwargs)
    except RuntimeError as error:
        flat, spec = tree_flatten((args, kwargs))
        small = [x.dtype for x in flat if isinstance(x, Tensor) and x.dtype in CASTS]
        if not small or not re.search("not (implemented|supported)", str(error)):
            raise
        wide = [x.float() if isinstance(x, Tensor) and x.dtype in CASTS else x for x in flat]
        args, kwargs = tree_unflatten(wide, spec)
        back = lambda x: x.to(small[0]) if x.is_floating_point() else x  # noqa: E731
        return tree_map_only(Tensor, back, func(*args, **kwargs))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name.split("::")[1]
    flat, spec = tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    if func.namespace == "c10d":
        collectives.append((place(), name, [x.device.type for x in tensors]))
    ours = any(isinstance(x, OnGPU) for x in tensors)
    target = torch.device(kwargs["device"]) if kwargs.get("device") else None
    # Autograd asks for `meta` where it wants what we call CUDA.
    gpus = ("cuda",) if state["wants_meta"] else ("cuda", "meta")
    to_gpu = target is not None and target.type in gpus
    if not ours and not to_gpu:
        return func(*args, **kwargs)
    if ours:
        _check(name, func, tensors)
    if to_gpu:
        assert target is not None
        if target.type == "cuda" and target.index not in (None, HERE.index):
            raise DeviceMix(f"{target}: invalid device ordinal")
        kwargs["device"] = torch.device("cpu")
        flat, spec = tree_flatten((args, kwargs))
        state["initialized"] = True
    to = HERE if to_gpu else target or HERE
    if name == "copy_":
        to = args[0].device
        _check_copy(args[1], to, bool((args[2:3] or (kwargs.get("non_blocking"),))[0]))
    elif name == "_to_copy":
        _check_copy(args[0], to, bool(kwargs.get("non_blocking")))
    elif name in SYNCHRONOUS or (
        name in INDEXED and any(x.dtype == torch.bool for x in tensors[1:2])
    ):
        wait(name)
    if name in NOT_DETERMINISTIC and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(f"{name} at {place()}: no deterministic implementation")
    args, kwargs = tree_unflatten([x.held if isinstance(x, OnGPU) else x for x in flat], spec)
    random = torch.Tag.nondeterministic_seeded in func.tags and to == HERE
    with _own_random_numbers() if random else contextlib.nullcontext():
        result = _compute(func, args, kwargs)
    if name == "_local_scalar_dense" or to.type == "cpu":
        return result
    known = {id(x.held): x for x in tensors if isinstance(x, OnGPU)}  # in place, or out=

    def wrap(x: Tensor) -> Tensor:
        same = known.get(id(x))
        if same is None:
            return OnGPU(x)
        if same.shape != x.shape or same.stride() != x.stride():
            with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
                aten.as_strided_.default(same, x.shape, x.stride(), 0)
        return same

    return tree_map_only(Tensor, wrap, result)


class Operations(TorchDispatchMode):
    """Operations without a tensor of the GPU, some of which make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, dict(kwargs or {}))
