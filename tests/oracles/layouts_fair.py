"""Tiny checkpoints as the self-supervised projects of convert/projects.py write them.

Names of keys come out of modules nested as the project nests them; the line of the project's code
that writes each dict is cited beside it. Nothing here shares a table with convert/.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet as tv

from tests.oracles.resnets import headless, make_resnet, parallel, sgd_state

DIM = 8
EPOCH = 100


@dataclasses.dataclass(frozen=True)
class Made:
    """A checkpoint and the networks that it was made from, by the choice of --encoder."""

    checkpoint: Any
    networks: dict[str, tv.ResNet]


def moco_v3() -> Made:
    """facebookresearch/moco-v3@c349e6e main_moco.py:310-316; names: moco/builder.py:27,99."""
    query, key = _resnet(0), _resnet(1)
    for net in (query, key):
        net.fc = _mlp(net.fc.in_features, 16, DIM, last_norm=True)
    model = nn.ModuleDict(
        {"base_encoder": query, "momentum_encoder": key, "predictor": _mlp(DIM, 16, DIM)}
    )
    checkpoint = {
        "epoch": EPOCH,
        "arch": "resnet50",
        "state_dict": parallel(model),
        "optimizer": sgd_state(query),
        "scaler": _scaler(),
    }
    return Made(checkpoint, {"query": query, "key": key})


def simsiam() -> Made:
    """facebookresearch/simsiam@a7bc177 main_simsiam.py:264-269; names: simsiam/builder.py:24-42."""
    net = _resnet(0)
    width = net.fc.in_features
    net.fc = nn.Sequential(
        nn.Linear(width, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, DIM),
        nn.BatchNorm1d(DIM, affine=False),
    )
    predictor = nn.Sequential(
        nn.Linear(DIM, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, DIM)
    )
    checkpoint = {
        "epoch": EPOCH,
        "arch": "resnet50",
        "state_dict": parallel(nn.ModuleDict({"encoder": net, "predictor": predictor})),
        "optimizer": sgd_state(net),
    }
    return Made(checkpoint, {"single": net})


def linear_classifier() -> Made:
    """facebookresearch/moco-v3@c349e6e main_lincls.py:319 (also moco, simsiam, pytorch/examples).

    `best_acc1` is a tensor: 0 in the first epoch, then `acc1` of accuracy().
    """
    net = _resnet(0)
    checkpoint = {
        "epoch": EPOCH,
        "arch": "resnet50",
        "state_dict": parallel(net),
        "best_acc1": torch.tensor(71.1),
        "optimizer": sgd_state(net.fc),
    }
    return Made(checkpoint, {"single": net})


def simclr_v1() -> Made:
    """tonylins/simclr-converter@139d3cb convert.py:84; names and their order: resnet_wider.py.

    Its blocks create the shortcut first ("hack: moving downsample to the first to make order
    correct"), and no batch norm of it has ever been in a PyTorch training.
    """
    net = _resnet(0)
    state: dict[str, Tensor] = {}
    keys = list(net.state_dict())
    for key in keys:
        block = ".".join(key.split(".")[:2])
        if block not in {".".join(done.split(".")[:2]) for done in state}:
            shortcut = [name for name in keys if name.startswith(f"{block}.downsample.")]
            state.update({name: net.state_dict()[name] for name in shortcut})
        state.setdefault(key, net.state_dict()[key])
    for key, value in state.items():
        if key.endswith("num_batches_tracked"):
            value.zero_()
    return Made({"state_dict": state}, {"single": net})


def simclr_v2(*, selective_kernels: bool = False) -> Made:
    """Separius/SimCLRv2-Pytorch@f4c2f41 convert.py:119-120; names: resnet.py:9-130."""
    net = _resnet(0)
    stages = (net.layer1, net.layer2, net.layer3, net.layer4)
    backbone = nn.Sequential(
        nn.Sequential(net.conv1, _norm_relu(net.bn1), net.maxpool),
        *(nn.ModuleDict({"blocks": nn.ModuleList(map(_simclr_v2_block, s))}) for s in stages),
    )
    if selective_kernels:
        first = backbone[1]["blocks"][0]["net"]
        first[2] = nn.ModuleDict({"main_conv": first[2], "mixing_conv": nn.Conv2d(8, 8, 1)})
    width = net.fc.in_features
    layers = [nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
    layers += [nn.Linear(width, DIM, bias=False), nn.BatchNorm1d(DIM)]
    resnet = nn.ModuleDict({"net": backbone, "fc": net.fc})
    head = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    checkpoint = {"resnet": resnet.state_dict(), "head": head.state_dict()}
    return Made(checkpoint, {"single": net})


def byol() -> Made:
    """ajtejankar/byol-convert@7497e7f convert.py:29-99: all weights first, then all statistics.

    Convolutions are views of haiku's (H, W, in, out), and there are no batch counters.
    """
    net = _resnet(0)
    state = {k: v for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    weights = {k: v for k, v in state.items() if ".running_" not in k}
    for key, value in weights.items():
        if value.ndim == 4:
            weights[key] = value.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
    statistics = {k: v for k, v in state.items() if ".running_" in k}
    return Made({**weights, **statistics}, {"single": net})


def barlow_twins(*, released: bool = False) -> Made:
    """facebookresearch/barlowtwins@8e8d284 main.py:146-148; names: main.py:191-205.

    The released checkpoint.pth has a function among the optimizer's settings (its issue #36).
    """
    net = headless(50, seed=0)
    projector = nn.Sequential(
        nn.Linear(net.layer4[-1].bn3.num_features, DIM, bias=False),
        nn.BatchNorm1d(DIM),
        nn.ReLU(),
        nn.Linear(DIM, DIM, bias=False),
    )
    model = nn.ModuleDict(
        {"backbone": net, "projector": projector, "bn": nn.BatchNorm1d(DIM, affine=False)}
    )
    checkpoint = {
        "epoch": EPOCH,
        "model": parallel(model),
        "optimizer": _lars(net, exclude_bias_and_norm if released else True),
    }
    return Made(checkpoint, {"single": net})


def vicreg() -> Made:
    """facebookresearch/vicreg@4e12602 main_vicreg.py:157-162; names: main_vicreg.py:189-192,223.

    A function is among the optimizer's settings: main_vicreg.py:109-115, and its issue #6.
    """
    net = headless(50, seed=0)
    projector = nn.Sequential(
        nn.Linear(net.layer4[-1].bn3.num_features, DIM),
        nn.BatchNorm1d(DIM),
        nn.ReLU(),
        nn.Linear(DIM, DIM, bias=False),
    )
    checkpoint = {
        "epoch": EPOCH,
        "model": parallel(nn.ModuleDict({"backbone": net, "projector": projector})),
        "optimizer": _lars(net, exclude_bias_and_norm),
    }
    return Made(checkpoint, {"single": net})


def backbone_only() -> Made:
    """What barlowtwins, vicreg and dino release beside their full checkpoints.

    facebookresearch/barlowtwins@8e8d284 main.py:151, facebookresearch/vicreg@4e12602
    main_vicreg.py:164, facebookresearch/dino@7c446df hubconf.py:90-94: state_dict() of
    torchvision's network without fc.
    """
    net = headless(50, seed=0)
    return Made(net.state_dict(), {"single": net})


def swav(*, released: bool = False, heads: int = 1) -> Made:
    """facebookresearch/swav@06b1b7c main_swav.py:239-246; names: src/resnet50.py:175-217,326-331.

    `released`: the state dict alone, with its "module." (hubconf.py:29-34). `heads`: the lists of
    prototypes of DeepCluster-v2 and SeLa-v2.
    """
    net = headless(50, seed=0)
    model = headless(50, seed=0)
    model.projection_head = nn.Sequential(
        nn.Linear(net.layer4[-1].bn3.num_features, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, DIM),
    )
    lists = {f"prototypes{i}": nn.Linear(DIM, 12, bias=False) for i in range(heads)}
    model.prototypes = nn.ModuleDict(lists) if heads > 1 else lists["prototypes0"]
    state = parallel(model)
    if released:
        return Made(state, {"single": net})
    checkpoint = {
        "epoch": EPOCH,
        "state_dict": state,
        "optimizer": sgd_state(model),
        "amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 12}},
    }
    return Made(checkpoint, {"single": net})


def dino() -> Made:
    """facebookresearch/dino@7c446df main_dino.py:278-287; names: utils.py:606-608.

    Both networks are under DistributedDataParallel because they have batch norms
    (main_dino.py:196-206); output_dir is a path under run_with_submitit.py:86.
    """
    teacher, student = headless(50, seed=0), headless(50, seed=1)
    args = argparse.Namespace(arch="resnet50", output_dir=PurePosixPath("runs/dino"), lr=0.03)
    checkpoint = {
        "student": parallel(nn.ModuleDict({"backbone": student, "head": _dino_head(student)})),
        "teacher": parallel(nn.ModuleDict({"backbone": teacher, "head": _dino_head(teacher)})),
        "optimizer": sgd_state(student),
        "epoch": EPOCH,
        "args": args,
        "dino_loss": {"center": torch.zeros(1, 12)},
        "fp16_scaler": _scaler(),
    }
    return Made(checkpoint, {"teacher": teacher, "student": student})


def vissl(method: str = "swav") -> Made:
    """facebookresearch/vissl@09270ed2 vissl/hooks/log_hooks.py:522-529 and utils/checkpoint.py:80.

    The backbone and its heads: vissl/models/base_ssl_model.py:414-417 and
    backbones/resnext.py:144-157.
    `method`: "swav"; "ema", with an average of the model (log_hooks.py:504-511); "moco" and "dino",
    whose losses hold the other network (hooks/moco_hooks.py:58, hooks/hook_utils.py:33-60).
    """
    net, other = headless(50, seed=0), headless(50, seed=1)
    base = _vissl_state(net)
    # facebookresearch/ClassyVision@08a82e8 classy_vision/tasks/classification_task.py:947-973.
    classy = {
        "train": True,
        "base_model": base,
        "meters": [{0: {"state": {"name": "accuracy", "total_sample_count": torch.zeros(2)}}}],
        "optimizer": {"optim": sgd_state(net)},
        "phase_idx": 199,
        "train_phase_idx": EPOCH - 1,
        "num_updates": 500400,
        "losses": [0.25],
        "hooks": {"LogGpuStatsHook": {}},
        "loss": {},
        "train_dataset_iterator": {"iter": 0},
    }
    networks = {"single": net}
    loss: dict[str, Tensor] = {}
    if method == "swav":  # vissl/losses/swav_loss.py:173
        loss = {"num_iteration": torch.zeros(1, dtype=torch.int64)}
    elif method == "ema":
        classy |= {"ema_model": _vissl_state(other), "ema_meters": []}
        networks = {"base": net, "ema": other}
    elif method == "moco":  # vissl/losses/moco_loss.py:52-64
        loss = {"queue": torch.randn(DIM, 32), "queue_ptr": torch.zeros(1, dtype=torch.int64)}
        loss |= _vissl_model(other, "moco_encoder.")
        networks = {"query": net, "key": other}
    elif method == "dino":  # vissl/losses/dino_loss.py:46
        loss = {"center": torch.zeros(1, 12)}
        loss |= _vissl_model(other, "momentum_teacher.module.")
        networks = {"teacher": other, "student": net}
    checkpoint = {
        "phase_idx": 199,
        "iteration": 500400,
        "loss": loss,
        "iteration_num": 5003,
        "train_phase_idx": EPOCH - 1,
        "classy_state_dict": classy,
        "type": "consolidated",
    }
    return Made(checkpoint, networks)


def vissl_zoo() -> Made:
    """Backbones that VISSL's scripts made of other projects' networks: converted_vissl_*.torch.

    facebookresearch/vissl@09270ed2 extra_scripts/convert_vissl_to_torchvision.py:46-47 reads them.
    """
    net = headless(50, seed=0)
    return Made({"model_state_dict": _vissl_backbone(net).state_dict()}, {"single": net})


LAYOUTS: Mapping[str, Callable[[], Made]] = {
    "moco-v3": moco_v3,
    "simsiam": simsiam,
    "linear classifier": linear_classifier,
    "simclr v1": simclr_v1,
    "simclr v2": simclr_v2,
    "byol": byol,
    "barlowtwins": barlow_twins,
    "barlowtwins released": lambda: barlow_twins(released=True),
    "vicreg": vicreg,
    "backbone only": backbone_only,
    "swav": swav,
    "swav released": lambda: swav(released=True),
    "swav lists of prototypes": lambda: swav(heads=3),
    "dino": dino,
    "vissl swav": vissl,
    "vissl ema": lambda: vissl("ema"),
    "vissl moco": lambda: vissl("moco"),
    "vissl dino": lambda: vissl("dino"),
    "vissl zoo": vissl_zoo,
}


def exclude_bias_and_norm(p: Tensor) -> bool:
    """facebookresearch/vicreg@4e12602 main_vicreg.py:235, which runs as `__main__`."""
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


def _resnet(seed: int) -> tv.ResNet:
    return make_resnet(50, seed=seed)


def _mlp(width: int, hidden: int, out: int, *, last_norm: bool = False) -> nn.Sequential:
    """Two layers of MoCo v3's `_build_mlp`."""
    layers = [nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU()]
    layers.append(nn.Linear(hidden, out, bias=False))
    return nn.Sequential(*layers, *([nn.BatchNorm1d(out, affine=False)] if last_norm else []))


def _lars(model: nn.Module, filters: Any) -> dict[str, Any]:
    """State of the LARS of barlowtwins and vicreg: `mu`, and two filters in each group."""
    parameters = list(model.parameters())
    group = {
        "lr": 0.2,
        "weight_decay": 1e-6,
        "momentum": 0.9,
        "eta": 0.001,
        "weight_decay_filter": filters,
        "lars_adaptation_filter": filters,
        "params": list(range(len(parameters))),
    }
    state = {i: {"mu": torch.ones_like(p)} for i, p in enumerate(parameters)}
    return {"state": state, "param_groups": [group]}


def _scaler() -> dict[str, Any]:
    """torch.cuda.amp.GradScaler().state_dict()."""
    return {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 12,
    }


def _norm_relu(norm: nn.Module, *, relu: bool = True) -> nn.Sequential:
    return nn.Sequential(norm, nn.ReLU() if relu else nn.Identity())


def _simclr_v2_block(block: tv.Bottleneck) -> nn.ModuleDict:
    projection: nn.Module = nn.Identity()
    if block.downsample is not None:
        shortcut, norm = block.downsample
        projection = nn.ModuleDict({"shortcut": shortcut, "bn": _norm_relu(norm, relu=False)})
    net = nn.Sequential(
        block.conv1,
        _norm_relu(block.bn1),
        block.conv2,
        _norm_relu(block.bn2),
        block.conv3,
        _norm_relu(block.bn3, relu=False),
    )
    return nn.ModuleDict({"projection": projection, "net": net})


def _dino_head(net: tv.ResNet) -> nn.ModuleDict:
    """facebookresearch/dino@7c446df vision_transformer.py:257-279; the last layer's weight norm."""
    width = net.layer4[-1].bn3.num_features
    layers = [nn.Linear(width, DIM), nn.GELU(), nn.Linear(DIM, DIM), nn.GELU()]
    last = nn.ParameterDict({"weight_g": torch.ones(12, 1), "weight_v": torch.randn(12, 4)})
    return nn.ModuleDict({"mlp": nn.Sequential(*layers, nn.Linear(DIM, 4)), "last_layer": last})


def _vissl_backbone(net: tv.ResNet) -> nn.ModuleDict:
    children = ("conv1", "bn1", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool")
    blocks = nn.ModuleDict({name: net.get_submodule(name) for name in children})
    return nn.ModuleDict({"_feature_blocks": blocks})


def _vissl_heads(net: tv.ResNet) -> nn.ModuleList:
    """One MLP head: vissl/models/heads/mlp.py:71."""
    width = net.layer4[-1].bn3.num_features
    clf = nn.Sequential(nn.Linear(width, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
    return nn.ModuleList([nn.ModuleDict({"clf": clf})])


def _vissl_state(net: tv.ResNet) -> dict[str, Any]:
    return {
        "model": {
            "trunk": _vissl_backbone(net).state_dict(),
            "heads": _vissl_heads(net).state_dict(),
        },
        "meta": {"trunk": {}, "heads": []},
    }


def _vissl_model(net: tv.ResNet, start: str) -> dict[str, Tensor]:
    model = nn.ModuleDict({"trunk": _vissl_backbone(net), "heads": _vissl_heads(net)})
    return {start + key: value for key, value in model.state_dict().items()}
