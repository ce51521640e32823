"""Layouts of the projects in convert/projects.py, transcribed from the code that writes them."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import nn
from torchvision.models import resnet as tv

from tests.oracles import layouts
from tests.oracles.layouts import (
    APEX,
    EPOCH,
    MLP,
    SCALER,
    Entries,
    Layout,
    Made,
    exclude_bias_and_norm,
    mmcv,
    mmengine,
    published,
    r50,
    r50_fc,
    trained,
)
from tests.oracles.resnets import make_resnet, sgd_state

_CLASSIFIER = trained(arch="resnet50")
_DINO_HEAD = "mlp.0:l mlp.2:l mlp.4:l last_layer.weight_g:t last_layer.weight_v:t"


def _swav(start: str, prototypes: str = "prototypes:w", entries: Entries | None = None) -> Layout:
    """Return SwaV's layout: facebookresearch/swav@06b1b7c main_swav.py:239-246.

    Names: src/resnet50.py:175-217,326-331; `prototypes`: a list in DeepCluster-v2 and SeLa-v2.
    """
    others = {"projection_head.": MLP, "": prototypes}
    return Layout({"single": ""}, others, entries or (lambda nets: {}), start, r50)


def _vissl(networks: Mapping[str, str], others: Mapping[str, str], **classy: Any) -> Layout:
    """Return VISSL's layout: facebookresearch/vissl@09270ed2 vissl/hooks/log_hooks.py:522-529.

    Also utils/checkpoint.py:80; backbone and heads: vissl/models/base_ssl_model.py:414-417,
    backbones/resnext.py:144-157 and heads/mlp.py:71. The dict in it:
    facebookresearch/ClassyVision@08a82e8 classy_vision/tasks/classification_task.py:947-973.
    """

    def entries(nets: list[tv.ResNet]) -> dict[str, Any]:
        inner = {
            "train": True,
            "base_model": {"meta": {"trunk": {}, "heads": []}},
            "meters": [{0: {"state": {"name": "accuracy", "total_sample_count": torch.zeros(2)}}}],
            "optimizer": {"optim": sgd_state(nets[0])},
            "phase_idx": 199,
            "train_phase_idx": EPOCH - 1,
            "num_updates": 500400,
            "losses": [0.25],
            "hooks": {"LogGpuStatsHook": {}},
            "loss": {},
            "train_dataset_iterator": {"iter": 0},
            **classy,
        }
        outer = {"phase_idx": 199, "iteration": 500400, "loss": {}, "iteration_num": 5003}
        outer |= {"train_phase_idx": EPOCH - 1, "type": "consolidated"}
        return {**outer, "classy_state_dict": inner}

    heads = {"classy_state_dict/base_model/model/heads/": "0.clf.0:l 0.clf.2:l", **others}
    return Layout(networks, heads, entries, network=r50)


_TRUNK = "classy_state_dict/base_model/model/trunk/_feature_blocks."
_VISSL_HEADS = "heads.0.clf.0:l heads.0.clf.2:l"

_FAIR: dict[str, Layout] = {
    # facebookresearch/moco-v3@c349e6e main_moco.py:310-316; names: moco/builder.py:27,99.
    "moco-v3": Layout(
        {"query": "base_encoder.", "key": "momentum_encoder."},
        {"base_encoder.fc. momentum_encoder.fc.": "0:w 1:n 3:w 4:s", "predictor.": "0:w 1:n 3:w"},
        trained(arch="resnet50", scaler=SCALER),
        "state_dict/module.",
        r50,
    ),
    # facebookresearch/simsiam@a7bc177 main_simsiam.py:264-269; names: simsiam/builder.py:24-42.
    "simsiam": Layout(
        {"single": "encoder."},
        {"encoder.fc.": "0:w 1:n 3:w 4:n 6:l 7:s", "predictor.": "0:w 1:n 3:l"},
        _CLASSIFIER,
        "state_dict/module.",
        r50,
    ),
    # facebookresearch/moco-v3@c349e6e main_lincls.py:319 (also moco, simsiam, pytorch/examples).
    # `best_acc1` is a tensor: 0 in the first epoch, then `acc1` of accuracy().
    "linear classifier": Layout(
        {"single": "state_dict/module."},
        entries=trained(arch="resnet50", best_acc1=torch.tensor(71.1)),
        network=r50_fc,
    ),
    # tonylins/simclr-converter@139d3cb convert.py:84; names and their order: resnet_wider.py.
    "simclr v1": Layout({"single": "state_dict/"}, network=r50_fc, arrange=layouts.shortcuts_first),
    # Separius/SimCLRv2-Pytorch@f4c2f41 convert.py:119-120; names: resnet.py:9-130.
    "simclr v2": Layout(
        {"single": "resnet/"},
        {"head/": "layers.0:w layers.1:n layers.3:w layers.4:n"},
        network=r50_fc,
        arrange=layouts.simclr_v2,
    ),
    # ajtejankar/byol-convert@7497e7f convert.py:29-99.
    "byol": Layout({"single": ""}, network=r50_fc, arrange=layouts.weights_first),
    # facebookresearch/barlowtwins@8e8d284 main.py:146-148; names: main.py:191-205.
    **{
        name: Layout(
            {"single": "backbone."},
            {"projector.": "0:w 1:n 3:w", "": "bn:s"},
            layouts.lars(filters),
            "model/module.",
            r50,
        )
        # The released checkpoint.pth has a function among the optimizer's settings (issue #36).
        for name, filters in (
            ("barlowtwins", True),
            ("barlowtwins released", exclude_bias_and_norm),
        )
    },
    # facebookresearch/vicreg@4e12602 main_vicreg.py:157-162; names: main_vicreg.py:189-192,223.
    # A function is among the optimizer's settings: main_vicreg.py:109-115, and its issue #6.
    "vicreg": Layout(
        {"single": "backbone."},
        {"projector.": "0:l 1:n 3:w"},
        layouts.lars(exclude_bias_and_norm),
        "model/module.",
        r50,
    ),
    # Released next to full checkpoints: facebookresearch/barlowtwins@8e8d284 main.py:151,
    # facebookresearch/vicreg@4e12602 main_vicreg.py:164, facebookresearch/dino@7c446df
    # hubconf.py:90-94: state_dict() of torchvision's network without fc.
    "backbone only": Layout({"single": ""}, network=r50),
    "swav": _swav("state_dict/module.", entries=trained(amp=APEX)),
    # The state dict alone, with its "module." (hubconf.py:29-34).
    "swav released": _swav("module."),
    "swav lists of prototypes": _swav(
        "state_dict/module.",
        " ".join(f"prototypes.prototypes{i}:w" for i in range(3)),
        trained(amp=APEX),
    ),
    # facebookresearch/dino@7c446df main_dino.py:278-287; names: utils.py:606-608; head:
    # vision_transformer.py:257-279. Both networks are under DistributedDataParallel because they
    # have batch norms (main_dino.py:196-206); output_dir is a path under
    # run_with_submitit.py:86.
    "dino": Layout(
        {"teacher": "teacher/module.backbone.", "student": "student/module.backbone."},
        {"teacher/module.head. student/module.head.": _DINO_HEAD, "dino_loss/": "center:t"},
        trained(
            args=argparse.Namespace(
                arch="resnet50", output_dir=PurePosixPath("runs/dino"), lr=0.03
            ),
            fp16_scaler=SCALER,
        ),
        network=r50,
    ),
    # vissl/losses/swav_loss.py:173
    "vissl swav": _vissl({"single": _TRUNK}, {"loss/": "num_iteration:i"}),
    # vissl/hooks/log_hooks.py:504-511: an average of the model.
    "vissl ema": _vissl(
        {"base": _TRUNK, "ema": _TRUNK.replace("base_model", "ema_model")},
        {"classy_state_dict/ema_model/model/heads/": "0.clf.0:l 0.clf.2:l"},
        ema_model={"meta": {"trunk": {}, "heads": []}},
        ema_meters=[],
    ),
    # vissl/hooks/moco_hooks.py:58 and losses/moco_loss.py:52-64: the loss holds the key encoder.
    "vissl moco": _vissl(
        {"query": _TRUNK, "key": "loss/moco_encoder.trunk._feature_blocks."},
        {"loss/": "queue:t queue_ptr:i", "loss/moco_encoder.": _VISSL_HEADS},
    ),
    # vissl/hooks/hook_utils.py:33-60 and losses/dino_loss.py:46: the loss holds the teacher.
    "vissl dino": _vissl(
        {
            "teacher": "loss/momentum_teacher.module.trunk._feature_blocks.",
            "student": _TRUNK,
        },
        {"loss/": "center:t", "loss/momentum_teacher.module.": _VISSL_HEADS},
    ),
    # Other projects' networks by VISSL's scripts, converted_vissl_*.torch:
    # extra_scripts/convert_vissl_to_torchvision.py:46-47 reads them.
    "vissl zoo": Layout({"single": "model_state_dict/_feature_blocks."}, network=r50),
}


def _pycontrast(
    networks: Mapping[str, str], others: Mapping[str, str], network: Any = layouts.r18
) -> Layout:
    """Return PyContrast's layout: HobbitLong/PyContrast@84f94ea.

    pycontrast/learning/contrast_trainer.py:113-122; names: networks/build_backbone.py:16-34 (RGB)
    and 89-110 (CMC), memory/mem_moco.py:57; only `model` is under DistributedDataParallel
    (contrast_trainer.py:64).
    """
    others = {"contrast/": "memory:t", **others}
    return Layout(networks, others, trained(amp=APEX), network=network)


def _of_one_or_two_channels(seed: int) -> tv.ResNet:
    net = layouts.r18(seed)
    net.conv1 = nn.Conv2d(1 + seed % 2, 8, 7, 2, 3, bias=False)
    return net


_NECK = "mlp.0:l mlp.1:n mlp.3:l"  # openselfsup/models/necks.py:216, NonLinearNeckV2
_DENSE_NECK = f"{_NECK} mlp2.0:c mlp2.2:c"  # openselfsup/models/necks.py:369-379, DenseCLNeck
_PREDICTOR = "predictor.mlp.0:l predictor.mlp.1:n predictor.mlp.3:l"


def _mm_lists(first: str, second: str, roles: str, others: Mapping[str, str], neck: str) -> Layout:
    """Return two lists [backbone, neck], the first with the second names backbone and neck."""
    one, other = roles.split()
    networks = {one: f"{first}.0. backbone.", other: f"{second}.0."}
    others = {f"{first}.1. {second}.1. neck.": neck, **others}
    return Layout(networks, others, mmcv, "state_dict/")


def _mm_average(name: str, roles: str, queue: str = "") -> Layout:
    """Return the layout of MMSelfSup 1.x, whose average has a counter first.

    open-mmlab/mmengine@2543429 mmengine/model/averaged_model.py:62-68.
    """
    one, other = roles.split()
    networks = {one: "backbone.", other: f"{name}.module.0."}
    others = {f"neck. {name}.module.1.": _NECK, "head.": _PREDICTOR, f"{name}.": "steps:i"}
    return Layout(networks, {**others, "": queue}, mmengine, "state_dict/")


def _solo_learn(others: Mapping[str, str], word: str = "backbone", momentum: bool = True) -> Layout:
    """Return solo-learn's layout: vturrisi/solo-learn@9187ea3 solo/methods/base.py.

    Lines 193-210,643-658; `word`: main_linear.py:76. Heads: solo/methods/{byol.py:50-67,
    mocov2plus.py:53-70,dino.py:150-168,nnclr.py:53-76}. Lightning's trainer writes it
    (solo/utils/checkpointer.py, save).
    """
    networks = {"online": f"{word}."} | ({"momentum": f"momentum_{word}."} if momentum else {})

    def entries(nets: list[tv.ResNet]) -> dict[str, Any]:
        current = {"ready": EPOCH, "completed": EPOCH - 1, "processed": EPOCH}
        return {
            # pytorch_lightning/trainer/connectors/checkpoint_connector.py, dump_checkpoint, called
            # at the end of an epoch that is not yet counted.
            "epoch": EPOCH - 1,
            "global_step": 500400,
            "pytorch-lightning_version": "2.1.2",
            "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": current}}},
            "callbacks": {},
            "optimizer_states": [sgd_state(nets[0])],
            "lr_schedulers": [{"base_lrs": [0.3], "last_epoch": EPOCH}],
        }

    return Layout(networks, {"": "classifier:l", **others}, entries, "state_dict/")


_SOLO_BYOL = {"projector. momentum_projector. predictor.": MLP, "momentum_": "classifier:l"}


def _references(nets: list[tv.ResNet]) -> dict[str, Any]:
    """Return entries of pytorch/vision@017e9b9 references/classification/train.py, main().

    utils.ExponentialMovingAverage is torch's AveragedModel, here the real one.
    """
    ema = len(nets) > 1
    rest: dict[str, Any] = {
        "optimizer": sgd_state(nets[0]),
        "lr_scheduler": {"step_size": 30, "last_epoch": EPOCH},
        "epoch": EPOCH - 1,  # numbered from 0
        "args": argparse.Namespace(model="resnet18", lr=0.1, model_ema=ema, data_path="imagenet"),
        "scaler": {"scale": 65536.0, "growth_factor": 2.0},
    }
    average = {"model_ema": torch.optim.swa_utils.AveragedModel(nets[0]).state_dict()}
    return rest | (average if ema else {})


def _r18_fc(seed: int) -> tv.ResNet:
    return make_resnet(seed=seed)


def _author(author: str) -> Layout:
    """Return what tools/extract_backbone_weights.py writes: OpenSelfSup@1db69ec:19-27.

    The names after "backbone." of a state dict; DenseCL and MMSelfSup have the same tool.
    """
    return Layout({"single": "state_dict/"}, entries=lambda nets: {"author": author})


_FRAMEWORKS: dict[str, Layout] = {
    "pycontrast": _pycontrast(
        {"model": "model/module.encoder.", "ema": "model_ema/encoder."},
        {
            "model/module.head. model_ema/head.": MLP,
            "model/module.head_jig. model_ema/head_jig.": "fc1:l fc2:l",
        },
    ),
    "pycontrast bank": _pycontrast(
        {"model": "model/module.encoder."},
        {"model/module.head.": MLP, "model/module.head_jig.": "fc1:l fc2:l"},
    ),
    # WXinlong/DenseCL@b64bbb6 openselfsup/models/densecl.py:28-52.
    "densecl": _mm_lists(
        "encoder_q",
        "encoder_k",
        "query key",
        {"": "queue:t queue_ptr:i queue2:t queue2_ptr:i"},
        _DENSE_NECK,
    ),
    # open-mmlab/OpenSelfSup@1db69ec openselfsup/models/{moco.py:42-58,byol.py:35-42,npid.py:38-41}.
    "openselfsup moco": _mm_lists(
        "encoder_q", "encoder_k", "query key", {"": "queue:t queue_ptr:i"}, _NECK
    ),
    "openselfsup byol": _mm_lists(
        "online_net", "target_net", "online target", {"head.": _PREDICTOR}, _NECK
    ),
    "openselfsup npid": Layout(
        {"single": "backbone."}, {"neck.": _NECK, "head.": _PREDICTOR}, mmcv, "state_dict/"
    ),
    # open-mmlab/mmselfsup@6faad81 (0.x) mmselfsup/models/algorithms/{mocov3.py:37-44,
    # simsiam.py:33-38}.
    "mmselfsup 0.x mocov3": _mm_lists(
        "base_encoder", "momentum_encoder", "base momentum", {"head.": _PREDICTOR}, _NECK
    ),
    "mmselfsup 0.x simsiam": Layout(
        {"single": "encoder.0. backbone."},
        {"encoder.1. neck.": _NECK, "head.": _PREDICTOR},
        mmcv,
        "state_dict/",
    ),
    # open-mmlab/mmselfsup@80bb3f4 (1.x) mmselfsup/models/algorithms/{moco.py:65,byol.py:55,
    # mocov3.py:55}; the same in open-mmlab/mmpretrain@ee7f2e8 mmpretrain/models/selfsup/.
    "mmselfsup 1.x moco": _mm_average("encoder_k", "query key", "queue:t queue_ptr:i"),
    "mmselfsup 1.x byol": _mm_average("target_net", "online target"),
    "mmselfsup 1.x mocov3": _mm_average("momentum_encoder", "base momentum"),
    # open-mmlab/mmpretrain@ee7f2e8 mmpretrain/models/classifiers/image.py:77-79.
    "mmpretrain": Layout({"single": "backbone."}, {"head.": "fc:l"}, mmengine, "state_dict/"),
    "mmpretrain published": Layout(
        {"single": "backbone."}, {"head.": "fc:l"}, published, "state_dict/"
    ),
    # open-mmlab/mmengine@2543429 mmengine/hooks/ema_hook.py:165 and 215-222: the average is
    # swapped into "state_dict".
    "mmpretrain ema": Layout(
        {"ema": "state_dict/backbone.", "model": "ema_state_dict/module.backbone."},
        {"state_dict/head. ema_state_dict/module.head.": "fc:l", "ema_state_dict/": "steps:i"},
        mmengine,
    ),
    "openselfsup extracted": _author("OpenSelfSup"),
    "mmselfsup extracted": _author("MMSelfSup"),
    "densecl extracted": _author("DenseCL"),
    "solo-learn byol": _solo_learn(_SOLO_BYOL),
    "solo-learn mocov2plus": _solo_learn(
        {"projector. momentum_projector.": MLP, "": "classifier:l queue:t queue_ptr:i"}
    ),
    "solo-learn dino": _solo_learn({"head. momentum_head.": MLP, "dino_loss_func.": "center:t"}),
    "solo-learn nnclr": _solo_learn(
        {
            "projector. predictor.": MLP,
            "momentum_": "classifier:l",
            "": "classifier:l queue:t queue_ptr:i queue_y:i",
        },
        momentum=False,
    ),
    "solo-learn older": _solo_learn(_SOLO_BYOL, "encoder"),
    "torchvision references": Layout({"single": "model/"}, {}, _references, network=_r18_fc),
    "torchvision references ema": Layout(
        {"ema": None, "model": "model/"}, {}, _references, network=_r18_fc
    ),
}

LAYOUTS = {**_FAIR, **_FRAMEWORKS}

# Layouts that only some tests use.
OTHERS = {
    # facebookresearch/moco, branch colab-notebook: ModelMoCo and the saved dict; the epoch counts
    # from 1, and SplitBatchNorm has BatchNorm2d's tensors.
    "cifar notebook": Layout(
        {"query": "encoder_q.net.", "key": "encoder_k.net."},
        {"": "queue:t queue_ptr:i"},
        trained(epoch=200),
        "state_dict/",
        lambda seed: make_resnet(stem="cifar", seed=seed),
        layouts.numbered,
    ),
    "pycontrast CMC": _pycontrast(
        {
            "L": "model/module.encoder1.",
            "ab": "model/module.encoder2.",
            "L's average": "model_ema/encoder1.",
            "ab's average": "model_ema/encoder2.",
        },
        {f"model/module.head{i}. model_ema/head{i}.": MLP for i in (1, 2)},
        _of_one_or_two_channels,
    ),
    "simclr v2 with selective kernels": Layout(
        {"single": "resnet/"},
        {"resnet/net.1.blocks.0.net.2.": "mixing_conv:c", "head/": "layers.0:w"},
        network=r50_fc,
        arrange=layouts.selective_kernels,
    ),
}


@functools.cache
def made(name: str) -> Made:
    """Generate a file of a layout, which is not to be changed."""
    return {**LAYOUTS, **OTHERS}[name].make()
