"""Tiny checkpoints as the frameworks and packages of convert/projects.py write them.

The names of keys come out of modules nested as the project nests them, or out of the package
itself (lightly, Lightning, timm); the line of the code that writes each dict is cited beside it.
Nothing here shares a table with convert/.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.oracles.layouts_fair import DIM, EPOCH, Made
from tests.oracles.resnets import headless, make_resnet, parallel, sgd_state


def pycontrast(*, momentum: bool = True, modal: str = "RGB") -> Made:
    """HobbitLong/PyContrast@84f94ea pycontrast/learning/contrast_trainer.py:113-122.

    Names: networks/build_backbone.py:16-34 (RGB) and 89-110 (CMC), memory/mem_moco.py:57; only
    `model` is under DistributedDataParallel (contrast_trainer.py:64).
    """
    nets = [headless(seed=0), headless(seed=1)]
    models = []
    for net in nets:
        parts: dict[str, nn.Module] = {"encoder": net, "head": _mlp(64)}
        if modal == "CMC":
            parts = {}
            for i, channels in enumerate((1, 2), start=1):
                parts[f"encoder{i}"] = headless(seed=i)
                parts[f"encoder{i}"].conv1 = nn.Conv2d(channels, 8, 7, 2, 3, bias=False)
                parts[f"head{i}"] = _mlp(64)
        else:
            parts["head_jig"] = nn.ModuleDict({"fc1": nn.Linear(64, 4), "fc2": nn.Linear(36, 4)})
        models.append(nn.ModuleDict(parts))
    checkpoint: dict[str, Any] = {
        "model": parallel(models[0]),
        "contrast": {"memory": torch.randn(32, DIM)},
        "optimizer": sgd_state(models[0]),
        "epoch": EPOCH,
        "amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 12}},
    }
    if momentum:
        checkpoint["model_ema"] = models[1].state_dict()
    return Made(checkpoint, {"model": nets[0], **({"ema": nets[1]} if momentum else {})})


def densecl() -> Made:
    """WXinlong/DenseCL@b64bbb6 openselfsup/models/densecl.py:28-52; necks.py:369-379."""
    query, key = headless(seed=0), headless(seed=1)
    model = _mm_lists("encoder_q", "encoder_k", query, key, _densecl_neck)
    for name in ("queue", "queue2"):
        model.register_buffer(name, torch.randn(DIM, 32))
        model.register_buffer(f"{name}_ptr", torch.zeros(1, dtype=torch.long))
    return Made(_mmcv(model), {"query": query, "key": key})


def openselfsup(method: str = "moco") -> Made:
    """open-mmlab/OpenSelfSup@1db69ec openselfsup/models/{moco.py:42-58,byol.py:35-42}.

    "mocov3" and "simsiam": open-mmlab/mmselfsup@6faad81 (0.x) mmselfsup/models/algorithms/
    {mocov3.py:37-44,simsiam.py:33-38}. "npid": openselfsup/models/npid.py:38-41.
    """
    one, other = headless(seed=0), headless(seed=1)
    networks = {"moco": ("query", "key"), "byol": ("online", "target"), "mocov3": _V3}
    names = {
        "moco": ("encoder_q", "encoder_k"),
        "byol": ("online_net", "target_net"),
        "mocov3": ("base_encoder", "momentum_encoder"),
    }
    if method in names:
        model = _mm_lists(*names[method], one, other, _mm_neck)
        found = dict(zip(networks[method], (one, other), strict=True))
    else:
        model = nn.Module()
        found = {"single": one}
        if method == "simsiam":
            model.encoder = nn.Sequential(one, _mm_neck())
        model.backbone = one
        model.neck = model.encoder[1] if method == "simsiam" else _mm_neck()
    if method == "moco":
        model.register_buffer("queue", torch.randn(DIM, 32))
        model.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
    else:
        model.head = nn.ModuleDict({"predictor": _mm_neck(DIM)})
    return Made(_mmcv(model), found)


def mmselfsup(method: str = "moco") -> Made:
    """open-mmlab/mmselfsup@80bb3f4 (1.x) mmselfsup/models/algorithms/{moco.py:65,byol.py:55,
    mocov3.py:55}; the same in open-mmlab/mmpretrain@ee7f2e8 mmpretrain/models/selfsup/.

    The average's names: open-mmlab/mmengine@2543429 mmengine/model/averaged_model.py:62-68.
    """
    one, other = headless(seed=0), headless(seed=1)
    networks = {"moco": ("query", "key"), "byol": ("online", "target"), "mocov3": _V3}
    name = {"moco": "encoder_k", "byol": "target_net", "mocov3": "momentum_encoder"}[method]
    model = nn.Module()
    model.backbone, model.neck = one, _mm_neck()
    model.head = nn.ModuleDict({"predictor": _mm_neck(DIM)})
    setattr(model, name, _averaged(nn.Sequential(other, _mm_neck())))
    if method == "moco":
        model.register_buffer("queue", torch.randn(DIM, 32))
        model.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
    return Made(_mmengine(model), dict(zip(networks[method], (one, other), strict=True)))


def mmpretrain(*, ema: bool = False, published: bool = False) -> Made:
    """open-mmlab/mmpretrain@ee7f2e8 mmpretrain/models/classifiers/image.py:77-79.

    `ema`: mmengine@2543429 mmengine/hooks/ema_hook.py:165 and 215-222 (the average is swapped into
    "state_dict"); `published`: tools/model_converters/publish_model.py.
    """
    trained, average = headless(seed=0), headless(seed=1)
    models = []
    for net in (trained, average):
        model = nn.Module()
        model.backbone = net
        model.head = nn.ModuleDict({"fc": nn.Linear(64, 16)})
        models.append(model)
    checkpoint = _mmengine(models[0])
    if published:
        kept = {key: checkpoint[key] for key in ("meta", "state_dict")}
        return Made(kept, {"single": trained})
    if not ema:
        return Made(checkpoint, {"single": trained})
    state = _averaged(models[1]).state_dict()
    for key in state:
        if key.startswith("module."):
            plain = key.removeprefix("module.")
            swapped = state[key]
            state[key] = checkpoint["state_dict"][plain]
            checkpoint["state_dict"][plain] = swapped
    checkpoint["ema_state_dict"] = state
    return Made(checkpoint, {"ema": average, "model": trained})


def extracted(author: str = "OpenSelfSup") -> Made:
    """OpenSelfSup@1db69ec tools/extract_backbone_weights.py:19-27, and DenseCL's and MMSelfSup's.

    The names after "backbone." of the checkpoint's state dict; `author` tells the three apart.
    """
    net = headless(seed=0)
    full = {f"backbone.{key}": value for key, value in net.state_dict().items()}
    state = {key[9:]: value for key, value in full.items() if key.startswith("backbone")}
    return Made({"state_dict": state, "author": author}, {"single": net})


def solo_learn(method: str = "byol", *, word: str = "backbone") -> Made:
    """vturrisi/solo-learn@9187ea3 solo/methods/base.py:193-210,643-658; `word`: main_linear.py:76.

    Heads: solo/methods/{byol.py:50-67,mocov2plus.py:53-70,dino.py:150-168,nnclr.py:53-76}.
    Lightning's trainer writes it (solo/utils/checkpointer.py, save).
    """
    online, momentum = headless(seed=0), headless(seed=1)
    model = nn.Module()
    setattr(model, word, online)
    model.classifier = nn.Linear(64, 16)
    networks = {"online": online}
    if method in ("byol", "mocov2plus", "dino"):
        setattr(model, f"momentum_{word}", momentum)
        networks["momentum"] = momentum
    if method == "dino":
        model.head, model.momentum_head = _mlp(64), _mlp(64)
        model.dino_loss_func = nn.Module()
        model.dino_loss_func.register_buffer("center", torch.zeros(1, DIM))
    else:
        model.projector = _mlp(64)
    if method in ("byol", "mocov2plus"):
        model.momentum_projector = _mlp(64)
    if method in ("byol", "nnclr"):
        model.predictor = _mlp(DIM)
        model.momentum_classifier = nn.Linear(64, 16)
    if method in ("mocov2plus", "nnclr"):
        model.register_buffer("queue", torch.randn(32, DIM))
        model.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
    if method == "nnclr":
        model.register_buffer("queue_y", -torch.ones(32, dtype=torch.long))
    checkpoint = {
        # pytorch_lightning/trainer/connectors/checkpoint_connector.py, dump_checkpoint, called at
        # the end of an epoch that is not yet counted.
        "epoch": EPOCH - 1,
        "global_step": 500400,
        "pytorch-lightning_version": "2.1.2",
        "state_dict": model.state_dict(),
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_progress": {
                    "current": {"ready": EPOCH, "completed": EPOCH - 1, "processed": EPOCH}
                },
            }
        },
        "callbacks": {},
        "optimizer_states": [sgd_state(model)],
        "lr_schedulers": [{"base_lrs": [0.3], "last_epoch": EPOCH}],
    }
    return Made(checkpoint, networks)


def torchvision_references(*, ema: bool = True) -> Made:
    """pytorch/vision@017e9b9 references/classification/train.py, main(): the saved dict.

    `ema`: utils.ExponentialMovingAverage is torch's AveragedModel, here the real one.
    """
    net, average = make_resnet(seed=0), make_resnet(seed=1)
    checkpoint: dict[str, Any] = {
        "model": net.state_dict(),
        "optimizer": sgd_state(net),
        "lr_scheduler": {"step_size": 30, "last_epoch": EPOCH},
        "epoch": EPOCH - 1,  # numbered from 0
        "args": argparse.Namespace(model="resnet18", lr=0.1, model_ema=ema, data_path="imagenet"),
        "scaler": {"scale": 65536.0, "growth_factor": 2.0},
    }
    if not ema:
        return Made(checkpoint, {"single": net})
    checkpoint["model_ema"] = torch.optim.swa_utils.AveragedModel(average).state_dict()
    return Made(checkpoint, {"ema": average, "model": net})


def cifar_notebook() -> Made:
    """facebookresearch/moco, branch colab-notebook: ModelBase, ModelMoCo and the saved dict.

    A ResNet-18 whose children, with a 3x3 conv1, without the max-pool and with a Flatten before fc,
    are the list `net`; SplitBatchNorm has BatchNorm2d's tensors. The epoch counts from 1.
    """
    nets = {"query": make_resnet(stem="cifar"), "key": make_resnet(stem="cifar", seed=1)}
    model = nn.Module()
    for name, net in zip(("encoder_q", "encoder_k"), nets.values(), strict=True):
        children: list[nn.Module] = []
        for child, module in net.named_children():
            if child == "maxpool":
                continue
            if child == "fc":
                children.append(nn.Flatten(1))
            children.append(module)
        base = nn.Module()
        base.net = nn.Sequential(*children)
        setattr(model, name, base)
    model.register_buffer("queue", nn.functional.normalize(torch.randn(16, 32), dim=0))
    model.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
    return Made(
        {"epoch": 200, "state_dict": model.state_dict(), "optimizer": sgd_state(model)}, nets
    )


def wrapped(net: nn.Module, *wrappers: str, container: str | None = None) -> dict[str, Any]:
    """A plain state dict under wrappers of training and perhaps one key."""
    state = {"".join(wrappers) + key: value for key, value in net.state_dict().items()}
    return {container: state} if container else state


LAYOUTS: Mapping[str, Callable[[], Made]] = {
    "pycontrast": pycontrast,
    "pycontrast bank": lambda: pycontrast(momentum=False),
    "densecl": densecl,
    "openselfsup moco": openselfsup,
    "openselfsup byol": lambda: openselfsup("byol"),
    "openselfsup npid": lambda: openselfsup("npid"),
    "mmselfsup 0.x mocov3": lambda: openselfsup("mocov3"),
    "mmselfsup 0.x simsiam": lambda: openselfsup("simsiam"),
    "mmselfsup 1.x moco": mmselfsup,
    "mmselfsup 1.x byol": lambda: mmselfsup("byol"),
    "mmselfsup 1.x mocov3": lambda: mmselfsup("mocov3"),
    "mmpretrain": mmpretrain,
    "mmpretrain published": lambda: mmpretrain(published=True),
    "mmpretrain ema": lambda: mmpretrain(ema=True),
    "openselfsup extracted": extracted,
    "mmselfsup extracted": lambda: extracted("MMSelfSup"),
    "densecl extracted": lambda: extracted("DenseCL"),
    "solo-learn byol": solo_learn,
    "solo-learn mocov2plus": lambda: solo_learn("mocov2plus"),
    "solo-learn dino": lambda: solo_learn("dino"),
    "solo-learn nnclr": lambda: solo_learn("nnclr"),
    "solo-learn older": lambda: solo_learn(word="encoder"),
    "torchvision references": lambda: torchvision_references(ema=False),
    "torchvision references ema": torchvision_references,
}


class HistoryBuffer:
    """mmengine@2543429 mmengine/logging/history_buffer.py:10: its attributes after two updates."""

    def __init__(self) -> None:
        self.max_length = 1000000
        self._log_history = np.array([6.9, 6.7])
        self._count_history = np.array([1, 1])


HistoryBuffer.__module__ = "mmengine.logging.history_buffer"


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


_V3 = ("base", "momentum")


def _mm_lists(
    first: str,
    second: str,
    one: nn.Module,
    other: nn.Module,
    neck: Callable[[], nn.Module],
) -> nn.Module:
    """Two lists [backbone, neck], and the first one's members once more under their own names."""
    model = nn.Module()
    setattr(model, first, nn.Sequential(one, neck()))
    setattr(model, second, nn.Sequential(other, neck()))
    model.backbone = one
    model.neck = getattr(model, first)[1]
    return model


def _mm_neck(width: int = 64) -> nn.Module:
    """openselfsup/models/necks.py:216, NonLinearNeckV2."""
    return nn.ModuleDict({"mlp": _mlp(width)})


def _densecl_neck() -> nn.Module:
    """openselfsup/models/necks.py:369-379, DenseCLNeck."""
    dense = nn.Sequential(nn.Conv2d(64, 16, 1), nn.ReLU(), nn.Conv2d(16, DIM, 1))
    return nn.ModuleDict({"mlp": _mlp(64), "mlp2": dense})


def _averaged(model: nn.Module) -> nn.Module:
    """mmengine/model/averaged_model.py:62-68: the buffer first."""
    average = nn.Module()
    average.register_buffer("steps", torch.tensor(12, dtype=torch.long))
    average.module = model
    return average


def _mmcv(model: nn.Module) -> dict[str, Any]:
    """open-mmlab/mmcv@7a13f99 (1.7.1) mmcv/runner/checkpoint.py:776-785: no "module.".

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
    return {"meta": meta, "state_dict": model.state_dict(), "optimizer": sgd_state(model)}


def _mmengine(model: nn.Module) -> dict[str, Any]:
    """open-mmlab/mmengine@2543429 mmengine/runner/runner.py:2206-2270, save_checkpoint.

    `message_hub`: mmengine/logging/message_hub.py, state_dict.
    """
    return {
        "meta": {
            "epoch": EPOCH,
            "iter": 500400,
            "cfg": "model = dict(type='MoCo')",
            "seed": 0,
            "experiment_name": "mocov2_20230101_000000",
            "time": "20230101_000000",
            "mmengine_version": "0.8.3",
            "dataset_meta": {"classes": ("tench", "goldfish")},
        },
        "state_dict": model.state_dict(),
        "message_hub": {
            "log_scalars": {"train/loss": HistoryBuffer()},
            "runtime_info": {"epoch": EPOCH - 1, "iter": 500399, "max_epochs": 200},
            "resumed_keys": {"train/loss": True},
        },
        "optimizer": sgd_state(model),
        "param_schedulers": [{"T_max": 200, "last_step": EPOCH, "_global_step": EPOCH + 1}],
    }


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, DIM))
