"""Tiny checkpoints of the projects in convert/projects.py: one generator and a table of layouts.

Each layout is transcribed from the code of its project, which is cited above it: prefixes of the
networks, keys of heads and buffers, and further entries of the file. Nothing here shares a table
with convert/. Checkpoints that packages write themselves are in layouts_lightning.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models import resnet as tv

from tests.oracles.resnets import headless, make_resnet, sgd_state

EPOCH = 100
DIM = 8
State = dict[str, Tensor]
Entries = Callable[[list[tv.ResNet]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Made:
    """A checkpoint and the networks that it was made from, by the choice of --encoder."""

    checkpoint: Any
    networks: dict[str, tv.ResNet]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of a checkpoint; a "/" in a key separates nested dicts.

    Attributes:
        networks: Role -> prefixes of its tensors, separated by spaces; None if `entries` has them.
        others: Prefixes, separated by spaces -> other modules under each, as "name:kind" with the
            kinds of `_module`.
        entries: Function from the networks to further entries of the file.
        start: Prefix of all keys in `networks` and `others`.
        network: Function from a seed to a network.
        arrange: Function from a network's state dict to that in the file.
    """

    networks: Mapping[str, str | None]
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)
    entries: Entries = lambda nets: {}
    start: str = ""
    network: Callable[[int], tv.ResNet] = lambda seed: r18(seed)
    arrange: Callable[[State], State] = dict

    def make(self) -> Made:
        """Generate the checkpoint."""
        torch.manual_seed(0)
        nets = {role: self.network(seed) for seed, role in enumerate(self.networks)}
        flat: dict[str, Any] = {}
        for role, prefixes in self.networks.items():
            state = self.arrange(nets[role].state_dict())
            for prefix in _split(prefixes):
                flat |= {f"{self.start}{prefix}{key}": value for key, value in state.items()}
        for prefixes, modules in self.others.items():
            for prefix in _split(prefixes):
                for module in modules.split():
                    flat |= _module(f"{self.start}{prefix}", *module.split(":"))
        checkpoint: dict[str, Any] = {}
        for key, value in flat.items():
            *path, last = key.split("/")
            holder = checkpoint
            for name in path:
                holder = holder.setdefault(name, {})
            holder[last] = value
        return Made(_merged(checkpoint, self.entries([*nets.values()])), nets)


def _split(prefixes: str | None) -> list[str]:
    return [] if prefixes is None else prefixes.split(" ")  # "" is one empty prefix


def _module(prefix: str, name: str, kind: str) -> dict[str, Tensor]:
    """Return the tensors of a module.

    Its kind is a (l)inear layer, one (w)ithout bias, a 1x1 (c)onvolution, a batch (n)orm, one with
    (s)tatistics alone, or a (t)ensor or (i)nteger that is no module.
    """
    if kind in "ti":
        return {prefix + name: torch.randn(DIM, DIM) if kind == "t" else torch.zeros(1).long()}
    statistics = {
        "running_mean": torch.randn(DIM),
        "running_var": torch.ones(DIM),
        "num_batches_tracked": torch.tensor(7),
    }
    weight, bias = {"weight": torch.randn(DIM, DIM)}, {"bias": torch.randn(DIM)}
    tensors = {
        "l": weight | bias,
        "w": weight,
        "c": {"weight": torch.randn(DIM, DIM, 1, 1)} | bias,
        "n": {"weight": torch.randn(DIM)} | bias | statistics,
        "s": statistics,
    }[kind]
    return {f"{prefix}{name}.{key}": value for key, value in tensors.items()}


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _merged(one[key], other[key]) for key in one.keys() & other.keys()}
    return {**one, **other, **both}


def trained(*, arch: str = "", epoch: int = EPOCH, **more: Any) -> Entries:
    """Return entries that most training scripts save: epoch, optimizer, perhaps arch, and more."""
    named = {"arch": arch} if arch else {}
    return lambda nets: {"epoch": epoch, **named, "optimizer": sgd_state(nets[-1]), **more}


# torch.cuda.amp.GradScaler().state_dict()
SCALER = {
    "scale": 65536.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 12,
}
APEX = {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 12}}
MLP = "0:l 1:n 3:l"


def r18(seed: int) -> tv.ResNet:
    """Return a ResNet-18 without fc."""
    return headless(seed=seed)


def r50(seed: int) -> tv.ResNet:
    """Return a ResNet-50 without fc."""
    return headless(50, seed=seed)


def r50_fc(seed: int) -> tv.ResNet:
    """Return a ResNet-50 with a linear classifier."""
    return make_resnet(50, seed=seed)


def exclude_bias_and_norm(p: Tensor) -> bool:
    """Filter parameters: facebookresearch/vicreg@4e12602 main_vicreg.py:235, run as `__main__`."""
    return p.ndim == 1


exclude_bias_and_norm.__module__ = "__main__"


@contextlib.contextmanager
def pickles_as_main() -> Iterator[None]:
    """Let `exclude_bias_and_norm` be pickled by its name, as the training script pickles it."""
    main = sys.modules["__main__"]
    main.exclude_bias_and_norm = exclude_bias_and_norm
    try:
        yield
    finally:
        delattr(main, "exclude_bias_and_norm")


def lars(filters: Any) -> Entries:
    """Return entries with the LARS of barlowtwins and vicreg: `mu`, and two filters in a group."""

    def entries(nets: list[tv.ResNet]) -> dict[str, Any]:
        parameters = list(nets[0].parameters())
        group = {"lr": 0.2, "weight_decay": 1e-6, "momentum": 0.9, "eta": 0.001}
        group |= {"weight_decay_filter": filters, "lars_adaptation_filter": filters}
        group |= {"params": list(range(len(parameters)))}
        state = {i: {"mu": torch.ones_like(p)} for i, p in enumerate(parameters)}
        return {"epoch": EPOCH, "optimizer": {"state": state, "param_groups": [group]}}

    return entries


def _block(key: str) -> str:
    return ".".join(key.split(".")[:2])


def shortcuts_first(state: State) -> State:
    """Order keys as SimCLR v1's converter does: shortcuts first in a block, counters at 0.

    "hack: moving downsample to the first to make order correct"; no batch norm of it has ever been
    in a PyTorch training.
    """
    blocks = list(dict.fromkeys(map(_block, state)))
    order = sorted(state, key=lambda k: (blocks.index(_block(k)), ".downsample." not in k))
    return {k: state[k] * 0 if k.endswith("num_batches_tracked") else state[k] for k in order}


def weights_first(state: State) -> State:
    """Order keys as BYOL's converter does: all weights, then all statistics, without counters.

    Convolutions are views of haiku's (H, W, in, out).
    """
    kept = {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
    for key, value in kept.items():
        if value.ndim == 4:
            kept[key] = value.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
    return {k: kept[k] for k in sorted(kept, key=lambda k: ".running_" in k)}


def simclr_v2(state: State) -> State:
    """Rename tensors as in SimCLRv2-Pytorch's resnet.py:9-130: lists of convolution, norm, ReLU."""
    names = {"conv1": "net.0.0", "bn1": "net.0.1.0", "fc": "fc"}
    inside = {f"conv{i}": f"net.{2 * i - 2}" for i in (1, 2, 3)}
    inside |= {f"bn{i}": f"net.{2 * i - 1}.0" for i in (1, 2, 3)}
    inside |= {"downsample.0": "projection.shortcut", "downsample.1": "projection.bn.0"}
    renamed = {}
    for key, value in state.items():
        module, _, tensor = key.rpartition(".")
        if block := re.fullmatch(r"layer(\d)\.(\d)\.(.*)", module):
            module = f"net.{block[1]}.blocks.{block[2]}.{inside[block[3]]}"
        else:
            module = names[module]
        renamed[f"{module}.{tensor}"] = value
    return renamed


def selective_kernels(state: State) -> State:
    """Rename the 3x3 convolution of a block of SimCLR v2 with selective kernels."""
    key = "net.1.blocks.0.net.2."
    return {k.replace(key, f"{key}main_conv."): v for k, v in simclr_v2(state).items()}


def numbered(state: State) -> State:
    """Rename children of a ResNet by number, without max-pool and with a Flatten before fc.

    facebookresearch/moco, branch colab-notebook: ModelBase.
    """
    numbers = {"conv1": 0, "bn1": 1, "layer1": 3, "layer2": 4, "layer3": 5, "layer4": 6, "fc": 9}
    split = ((key.partition("."), value) for key, value in state.items())
    return {f"{numbers[child]}.{rest}": value for (child, _, rest), value in split}


class HistoryBuffer:
    """Attributes of mmengine@2543429 mmengine/logging/history_buffer.py:10 after two updates."""

    def __init__(self) -> None:
        self.max_length = 1000000
        self._log_history = np.array([6.9, 6.7])
        self._count_history = np.array([1, 1])


HistoryBuffer.__module__ = "mmengine.logging.history_buffer"


def mmcv(nets: list[tv.ResNet]) -> dict[str, Any]:
    """Return entries of open-mmlab/mmcv@7a13f99 (1.7.1) mmcv/runner/checkpoint.py:776-785.

    `meta`: mmcv/runner/epoch_based_runner.py:162-173, and OpenSelfSup@1db69ec tools/train.py:129.
    """
    meta = {
        "openselfsup_version": "0.3.0",
        "config": "model = dict(type='MOCO')",
        "mmcv_version": "1.0.3",
        "time": "Mon Jun 15 21:30:05 2020",
        "epoch": EPOCH,
        "iter": 500400,
    }
    return {"meta": meta, "optimizer": sgd_state(nets[0])}


def published(nets: list[tv.ResNet]) -> dict[str, Any]:
    """Return the entries that mmpretrain's tools/model_converters/publish_model.py keeps."""
    meta = {
        "epoch": EPOCH,
        "iter": 500400,
        "cfg": "model = dict(type='MoCo')",
        "seed": 0,
        "experiment_name": "mocov2_20230101_000000",
        "time": "20230101_000000",
        "mmengine_version": "0.8.3",
        "dataset_meta": {"classes": ("tench", "goldfish")},
    }
    return {"meta": meta}


def mmengine(nets: list[tv.ResNet]) -> dict[str, Any]:
    """Return entries of open-mmlab/mmengine@2543429 mmengine/runner/runner.py:2206-2270.

    `message_hub`: mmengine/logging/message_hub.py, state_dict.
    """
    hub = {
        "log_scalars": {"train/loss": HistoryBuffer()},
        "runtime_info": {"epoch": EPOCH - 1, "iter": 500399, "max_epochs": 200},
        "resumed_keys": {"train/loss": True},
    }
    schedulers = [{"T_max": 200, "last_step": EPOCH, "_global_step": EPOCH + 1}]
    rest = {"optimizer": sgd_state(nets[0]), "param_schedulers": schedulers}
    return {**published(nets), "message_hub": hub, **rest}


@contextlib.contextmanager
def pickles_as_mmengine() -> Iterator[None]:
    """Let `HistoryBuffer` be pickled by the name of mmengine's class."""
    names = ("mmengine", "mmengine.logging", HistoryBuffer.__module__)
    added = {name: types.ModuleType(name) for name in names}
    vars(added[HistoryBuffer.__module__])["HistoryBuffer"] = HistoryBuffer
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def wrapped(net: nn.Module, *wrappers: str, container: str | None = None) -> dict[str, Any]:
    """Return a plain state dict under wrappers of training and perhaps one key."""
    state = {"".join(wrappers) + key: value for key, value in net.state_dict().items()}
    return {container: state} if container else state
