"""The table of checkpoint layouts: who writes which keys, and how its networks see pixels.

One row per layout, most specific first; the first row that fits a file is taken. A file is known by
what is in it, never by its name. convert/networks.py and convert/sources.py read the table; the
names inside a network are a scheme of its family (convert/families/). Above each row: the code that
writes the file and that normalizes its pixels.

Wrappers are taken off the keys before they are compared, so no row has them. A rule is what a
report calls the dropped tensors -> patterns of their keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from convert.contract import FOLDED, IMAGENET_MEAN, IMAGENET_STD
from convert.families.base import USUAL
from convert.families.vit_names import TORCHVISION
from convert.recorded import Recorded, caffe2_record, mm_configuration, own_record, timm_arguments
from moco.modeling.soundness import Triple

# The CIFAR notebook's pixels (0..255, RGB), as configs/pretrain/cifar10_r18_200ep.yaml has them.
CIFAR_MEAN = (125.307, 122.961, 113.8575)
CIFAR_STD = (51.5865, 50.847, 51.255)

# MSRA's networks take BGR; their std is inside conv1 (detectron2/config/defaults.py, PIXEL_STD).
MSRA_MEAN = (103.53, 116.28, 123.675)
MSRA_STD = (1.0, 1.0, 1.0)
# Where pixels are only scaled to 0..1.
ZERO_MEAN = (0.0, 0.0, 0.0)
ZERO_TO_ONE_STD = (255.0, 255.0, 255.0)

# Keys beside a network that no layout needs.
TOP_DROPPED = {
    "optimizer": "optimizer optimizers optimizer_states optim",
    "schedule": "lr_scheduler lr_schedulers scheduler schedulers",
    "loss scaling": "scaler grad_scaler loss_scaler amp amp_scaler fp16_scaler",
    "training record": "callbacks loops rng_state random_state",
}


def _beside(prefixes: str, **others: str) -> dict[str, str]:
    """A rule for each start of keys, called as it; `others`: rules of another name."""
    rules = {prefix.replace("_", " "): f"{prefix}.*" for prefix in prefixes.split()}
    return rules | {rule.replace("_", " "): patterns for rule, patterns in others.items()}


# Heads under the names that people give them, dropped from a plain state dict.
PLAIN_DROPPED = {
    "Detectron2's head": "stem.fc.*",
    **_beside("head classifier projector projection_head predictor prediction_head neck decoder"),
    "queue": "queue*",
    "batch counter": "*.num_batches_tracked",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """One checkpoint layout: how it is recognized and which of its tensors are the backbone.

    Attributes:
        networks: choice of --encoder -> start of its tensors in the flattened file, as
            "state_dict/encoder_q."; the first is the one that the project itself transfers.
        dropped: rules for keys beside the networks.
        has: starts of keys that must be in a network's dict; they tell it from layouts alike.
        marks: paths ("a/b") to plain values of the file: this value, ... for any, None for none.
        scheme: of the family's schemes of names.
        epoch: path to the number of epochs finished; `epoch_offset`: 1 where the file numbers its
            epochs from 0.
        order: keys of the default network in the order of the file. Converters from other
            frameworks leave one that no PyTorch module has.
        note: what every user of this source has to know.
        says: what its code says of its networks beside their tensors, in the words of a family's
            `recognize`.
        recorded: what a file says of its pixels and strides, see convert/recorded.py.
        channel_order, mean, std: what the network was trained with, where the file does not say.
        families: whose networks alone it has; none: any.
        plain: made for a plain state dict, which no row of the table fits.
    """

    name: str
    networks: Mapping[str, str]
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has: tuple[str, ...] = ()
    marks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scheme: str = USUAL
    epoch: str = "epoch"
    epoch_offset: int = 0
    order: tuple[str, ...] = ()
    note: str = ""
    says: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    recorded: Callable[[Mapping[Any, Any]], Recorded] | None = None
    channel_order: str = "RGB"
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    plain: bool = False
    families: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether it is this project's own, versioned format."""
        return isinstance(self.marks.get("format"), str)


_MOCO_DROPPED = {"queue": "queue*", "memory bank": "bank*", "NCE's constant": "Z*"}
_D2_LAYOUT: dict[str, Any] = {
    "networks": {"single": "model/"},
    "dropped": {"head": "stem.fc.*"},
    "scheme": "detectron2",
}

# google-research/simclr@383d414 resnet.py:594; resnet_wider.py and resnet.py:105 of the converters.
_SAME_POOL = (
    "SimCLR's max-pool pads as TensorFlow's SAME (one pixel, after), the converter's network and "
    "this backbone as torchvision (one pixel on both sides)"
)

# What Lightning's trainer writes: pytorch_lightning 2.6.6 trainer/connectors/
# checkpoint_connector.py, dump_checkpoint, and callbacks/weight_averaging.py, on_save_checkpoint
# (the averaged weights are in "state_dict"). Its "epoch" is the current one, finished or not.
_LIGHTNING: dict[str, Any] = {
    "marks": {"pytorch-lightning_version": ...},
    "epoch": "loops/fit_loop/epoch_progress/current/processed",
}
_LIGHTNING_DROPPED = {
    "weights before averaging": "current_model_state",
    "training record": "averaging_state",
}
# What is beside a backbone in OpenSelfSup, MMSelfSup and mmpretrain. The modules of a list
# (encoder_q = [backbone, neck]) have a second name there.
_MM_DROPPED = _beside(
    "neck head memory_bank",
    queue="queue*",
    class_weights="loss_weight*",
    list_of_the_encoder="encoder.*",
    EMA_counter="steps*",
    training_record="message_hub meta",
    schedule="param_schedulers",
)
_SOLO_DROPPED = _LIGHTNING_DROPPED | _beside(
    "classifier momentum_classifier projector momentum_projector head momentum_head prototypes "
    "decoder",
    predictor="predictor*",
    loss="dino_loss_func.*",
    queue="queue*",
    memory_bank="local_memory_*",
    transformer="transformer_encoder.*",
    position_code="pos_enc.*",
)
_LIGHTLY_DROPPED = _LIGHTNING_DROPPED | _beside(
    "local_projection_head key_projection_head teacher_projection_head student_projection_head "
    "anchor_projection_head teacher_head student_head prediction_head decoder",
    projection_head="projection_head*",
    heads_of_classes_and_patches="teacher_*_head.* student_*_head.*",
    prototypes="prototypes*",
    mask_token="*mask_token",
    classifier="online_classifier.*",
    loss="criterion* *_criterion.*",
    groups="smog.*",
)

_VISSL_BACKBONE = "classy_state_dict/base_model/model/trunk/_feature_blocks."
_VISSL: dict[str, Any] = {
    # Also the loss's own (MoCo's queue, DINO's center) and its network's head.
    "dropped": {
        "queue": "queue*",
        "center of the loss": "center*",
        "head": "heads moco_encoder.heads.*",
        "teacher's head": "momentum_teacher.module.heads.*",
        "loss": "loss",
        "training record": "meters ema_meters",
    },
    "epoch": "train_phase_idx",
    "epoch_offset": 1,
}


# The networks and marks of files that may have an average beside the model.
_EMA_FIRST: tuple[dict[str, str], dict[str, Any]] = (
    {"ema": "model_ema/", "model": "model/"},
    {"model_ema": ...},
)
_ONE_MODEL: tuple[dict[str, str], dict[str, Any]] = ({"single": "model/"}, {})


def _mm(name: str, has: tuple[str, ...] = (), **networks: str) -> Layout:
    """A training checkpoint of mmcv's or mmengine's runner: choice of --encoder -> prefix."""
    dropped = {}
    if "backbone." not in networks.values():
        dropped["second name of the encoder"] = "backbone.*"
    # Beside a list's backbone: encoder_q.1. or encoder_k.module.1. is its neck, encoder_k.steps a
    # counter of the average.
    for choice, prefix in networks.items():
        if prefix.endswith(".0."):
            dropped[f"{choice} neck"] = prefix.replace(".0.", ".1.") + "*"
            dropped[f"{choice} EMA counter"] = prefix.split(".", 1)[0] + ".steps*"
    return Layout(
        name,
        {choice: f"state_dict/{prefix}" for choice, prefix in networks.items()},
        {**dropped, **_MM_DROPPED},
        has=has,
        marks={"meta": ...},
        epoch="meta/epoch",
        recorded=mm_configuration,
    )


def _lightly(has: str = "projection_head", **networks: str) -> tuple[Layout, ...]:
    """A LightningModule under the schemes of its backbone: choice of --encoder -> prefix."""
    # "4.0.conv1.weight" is layer1 of torchvision's ResNet and layer3 of lightly's own, so lightly's
    # comes first. MaskedVisionTransformer{TIMM,Torchvision} (lightly/models/modules) call theirs
    # `vit`; masked_autoencoder.py's MAEBackbone is torchvision's own class.
    return tuple(
        Layout(
            "lightly",
            {choice: f"state_dict/{prefix}{inner}" for choice, prefix in networks.items()},
            _LIGHTLY_DROPPED,
            has=tuple(has.split()),
            scheme=scheme,
            # Of benchmarks/imagenet/vitb16 and of examples/pytorch_lightning/msn.py.
            says={"num_heads": {384: 6, 768: 12}},
            **_LIGHTNING,
        )
        for inner, scheme in (
            ("", USUAL),
            ("", "lightly"),
            ("", "numbered"),
            ("vit.", USUAL),
            ("vit.", TORCHVISION),
            ("", TORCHVISION),
        )
    )


def _caffe2(name: str, scheme: str) -> tuple[Layout, ...]:
    """Two rows: blobs at the top, and as Detectron2 also keeps them, under "model"."""
    return tuple(
        Layout(
            name,
            {"single": start},
            {
                "head": "fc1000_*",
                "momentum": "*_momentum",  # as detectron2/checkpoint/detection_checkpoint.py
                "convolution bias": "*_b",
            },
            marks={"__author__": author},
            scheme=scheme,
            recorded=caffe2_record,
            channel_order="BGR",
            mean=MSRA_MEAN,
            std=MSRA_STD,
            says={"stride_in_1x1": True},
        )
        for start, author in (("", None), ("model/", "Caffe2"))
    )


LAYOUTS: tuple[Layout, ...] = (
    # moco/engine/checkpoint.py
    Layout(
        "moco-transfer",
        {"query": "state_dict/encoder_q.", "key": "state_dict/encoder_k."},
        {**_MOCO_DROPPED, "predictor": "predictor.*"},
        marks={"format": "moco-transfer/1"},
        recorded=own_record,
    ),
    # moco/classification/run.py: what moco.linear and moco.finetune write.
    Layout(
        "moco-transfer classifier",
        {"single": "state_dict/"},
        marks={"format": "moco-transfer-classifier/1"},
        recorded=own_record,
    ),
    # facebookresearch/moco@7397dfe main_moco.py:382 (the dict) and moco/builder.py (the names): v1
    # has fc.*, v2 fc.0.* and fc.2.*.
    Layout(
        "facebookresearch/moco",
        {"query": "state_dict/encoder_q.", "key": "state_dict/encoder_k."},
        _MOCO_DROPPED,
        # Others name their encoders so, too: Lightning's are plain state dicts here.
        marks={"format": None, "pytorch-lightning_version": None},
    ),
    # facebookresearch/moco, branch colab-notebook, moco_cifar10_demo.ipynb: ModelBase (the names:
    # the children of torchvision's ResNet without its max-pool), train_transform (the pixels), the
    # last cell (the dict, model_last.pth). SplitBatchNorm has BatchNorm2d's tensors.
    Layout(
        "facebookresearch/moco (CIFAR notebook)",
        {"query": "state_dict/encoder_q.net.", "key": "state_dict/encoder_k.net."},
        _MOCO_DROPPED,
        scheme="unpooled",
        recorded=lambda raw: Recorded(says={"stem": "cifar"}, mean=CIFAR_MEAN, std=CIFAR_STD),
    ),
    # --- A: self-supervised projects
    # facebookresearch/moco-v3@c349e6e main_moco.py:310 (the dict), :258 (the pixels) and
    # moco/builder.py:27 (the names); main_lincls.py:181 takes base_encoder.
    Layout(
        "facebookresearch/moco-v3",
        {"query": "state_dict/base_encoder.", "key": "state_dict/momentum_encoder."},
        {"predictor": "predictor.*"},
        marks={"pytorch-lightning_version": None},
        says={"num_heads": {384: 12, 768: 12, 1024: 16, 1280: 16}},  # vits.py
    ),
    # facebookresearch/simsiam@a7bc177 main_simsiam.py:264 (the dict), :225 (the pixels) and
    # simsiam/builder.py:24 (the names).
    Layout(
        "facebookresearch/simsiam",
        {"single": "state_dict/encoder."},
        {"predictor": "predictor.*"},
        has=("encoder.fc.6.", "predictor.3."),
    ),
    # facebookresearch/moco-v3@c349e6e main_lincls.py:319 and :268, the same in moco and simsiam;
    # pytorch/examples@77f55b9 imagenet/main.py:299, from which they come, has the same keys.
    Layout(
        "pytorch/examples imagenet",
        {"single": "state_dict/"},
        {"training record": "best_acc1"},
        marks={"arch": ..., "best_acc1": ...},
    ),
    # google-research/simclr@383d414 (TensorFlow) by tonylins/simclr-converter@139d3cb
    # convert.py:84 and resnet_wider.py, whose blocks create the shortcut first. Pixels are 0..1
    # and no more: simclr data_util.py:515; eval.py, "the original model do not have normalization".
    Layout(
        "google-research/simclr v1 (tonylins/simclr-converter)",
        {"single": "state_dict/"},
        has=("fc.bias", "bn1.num_batches_tracked"),
        marks={"epoch": None, "arch": None, "optimizer": None},
        order=("layer1.0.downsample.0.weight", "layer1.0.conv1.weight"),
        mean=ZERO_MEAN,
        std=ZERO_TO_ONE_STD,
        note=_SAME_POOL,
    ),
    # The same, version 2, by Separius/SimCLRv2-Pytorch@f4c2f41 convert.py:120, resnet.py (the
    # names) and verify.py:18 (the pixels). Selective kernels (sk1) have keys that no rule knows.
    Layout(
        "google-research/simclr v2 (Separius/SimCLRv2-Pytorch)",
        {"single": "resnet/"},
        {"projection head": "head"},
        scheme="simclr v2",
        mean=ZERO_MEAN,
        std=ZERO_TO_ONE_STD,
        note=_SAME_POOL,
    ),
    # google-deepmind/deepmind-research@f5de0ed byol (haiku) by ajtejankar/byol-convert@7497e7f
    # convert.py:29-99: the online network, weights first, then statistics, without counters.
    # Pixels: byol/utils/dataset.py:63; padding: byol/utils/networks.py:106.
    Layout(
        "google-deepmind/byol (ajtejankar/byol-convert)",
        {"single": ""},
        marks={"bn1.num_batches_tracked": None},
        order=("fc.weight", "bn1.running_mean"),
        note=(
            "BYOL's network pads as TensorFlow's SAME (unevenly at stride 2), this backbone as "
            "torchvision: the weights are the same, the features close to it"
        ),
    ),
    # facebookresearch/barlowtwins@8e8d284 main.py:146 (the dict), :304 (the pixels), :191 (the
    # names). Its resnet50.pth (main.py:151) is torchvision's without fc.
    Layout(
        "facebookresearch/barlowtwins",
        {"single": "model/backbone."},
        {"projector": "projector.*", "loss": "bn.*"},
        has=("projector.0.", "bn.running_mean"),
    ),
    # facebookresearch/vicreg@4e12602 main_vicreg.py:157 (the dict), :189 (the names),
    # augmentations.py:57 (the pixels). Its resnet50.pth (:164) is torchvision's without fc: padding
    # 1 and 2 (resnet.py:163,186) is conv1's 3.
    Layout(
        "facebookresearch/vicreg",
        {"single": "model/backbone."},
        {"projector": "projector.*"},
        has=("projector.0.bias",),
    ),
    # facebookresearch/swav@06b1b7c main_swav.py:239 (the dict; released files are its state dict,
    # hubconf.py:34), src/resnet50.py:157-217 (the names; padding as vicreg's),
    # src/multicropdataset.py:38 (the pixels: std[0] is 0.228). Also DeepCluster-v2 and SeLa-v2.
    *(
        Layout(
            "facebookresearch/swav",
            {"single": start},
            {"projection head": "projection_head.*", "prototypes": "prototypes.*"},
            has=("projection_head.", "prototypes."),
            std=(58.14, 57.12, 57.375),
        )
        for start in ("state_dict/", "")
    ),
    # facebookresearch/dino@7c446df main_dino.py:278 (the dict), :431 (the pixels), utils.py:606
    # (the names); eval_linear.py:264 takes the teacher. Its dino_resnet50_pretrain.pth
    # (hubconf.py:91) is torchvision's without fc.
    Layout(
        "facebookresearch/dino",
        {
            "teacher": "teacher/backbone.",
            "student": "student/backbone.",
        },
        {"head": "head.*", "loss": "dino_loss"},
        marks={"dino_loss": ...},
        says={"num_heads": {192: 3, 384: 6, 768: 12}},  # vision_transformer.py
    ),
    # facebookresearch/mae models_mae.py (the names, the heads), util/misc.py, save_model (the
    # dict), main_pretrain.py (the pixels). A file without the decoder is a plain state dict.
    Layout(
        "facebookresearch/mae",
        {"single": "model/"},
        {"decoder": "decoder_*"},
        has=("decoder_pred.", "mask_token"),
        epoch_offset=1,
        says={"num_heads": {768: 12, 1024: 16, 1280: 16}},
    ),
    # bytedance/ibot@564f363 main_ibot.py, train_ibot (the dict) and DataAugmentationiBOT (the
    # pixels), models/vision_transformer.py (the names); evaluation/eval_linear.py, the teacher.
    Layout(
        "bytedance/ibot",
        {"teacher": "teacher/backbone.", "student": "student/backbone."},
        {"head": "head.*", "loss": "ibot_loss"},
        marks={"ibot_loss": ...},
        says={"num_heads": {192: 3, 384: 6, 768: 12, 1024: 16}},
    ),
    # facebookresearch/msn@db0d572 src/msn_train.py, save_checkpoint (the dict) and init_model (the
    # head), src/deit.py (the names), src/data_manager.py, make_transforms (the pixels);
    # linear_eval.py, load_pretrained, takes the target encoder.
    Layout(
        "facebookresearch/msn",
        {"target": "target_encoder/", "anchor": "encoder/"},
        {"projection head": "fc.* pred.*", "prototypes": "prototypes", "optimizer": "opt"},
        marks={"target_encoder": ..., "prototypes": ...},
        says={"num_heads": {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16}},
    ),
    # facebookresearch/dinov2@02eb93a dinov2/train/train.py, do_test (teacher_checkpoint.pth),
    # train/ssl_meta_arch.py and models/vision_transformer.py (the names), data/transforms.py (the
    # pixels).
    *(
        Layout(
            "facebookresearch/dinov2",
            {"teacher": "teacher/backbone."},
            _beside("dino_head ibot_head"),
            has=("dino_head.",),
            scheme=scheme,
            says={"num_heads": {384: 6, 768: 12, 1024: 16}},
            families=("vit",),
        )
        for scheme in (USUAL, "chunked")
    ),
    # facebookresearch/vissl@09270ed2 vissl/hooks/log_hooks.py:522 (the dict), models/
    # base_ssl_model.py:414 and backbones/resnext.py:144 (the names),
    # configs/config/pretrain/simclr/
    # simclr_8node_resnet.yaml:34 (the pixels, as in all of pretrain/; INPUT_TYPE "bgr" is not in
    # the file). The loss holds MoCo's key encoder (hooks/moco_hooks.py:58) and DINO's teacher
    # (hooks/hook_utils.py:33-60), which VISSL's DINO configs evaluate.
    Layout(
        "facebookresearch/vissl",
        {
            "teacher": "loss/momentum_teacher.module.trunk._feature_blocks.",
            "student": _VISSL_BACKBONE,
        },
        has=("momentum_teacher.",),
        **_VISSL,
    ),
    Layout(
        "facebookresearch/vissl",
        {
            "query": _VISSL_BACKBONE,
            "key": "loss/moco_encoder.trunk._feature_blocks.",
        },
        has=("moco_encoder.",),
        **_VISSL,
    ),
    # log_hooks.py:504, SAVE_EMA_MODEL.
    Layout(
        "facebookresearch/vissl",
        {
            "base": _VISSL_BACKBONE,
            "ema": "classy_state_dict/ema_model/model/trunk/_feature_blocks.",
        },
        marks={"classy_state_dict/ema_model": ...},
        **_VISSL,
    ),
    Layout("facebookresearch/vissl", {"single": _VISSL_BACKBONE}, **_VISSL),
    # Others' networks in VISSL's names (converted_vissl_*.torch): extra_scripts/
    # convert_vissl_to_torchvision.py:46.
    Layout(
        "facebookresearch/vissl (converted)",
        {"single": "model_state_dict/_feature_blocks."},
    ),
    # --- B: frameworks and packages
    # HobbitLong/PyContrast@84f94ea pycontrast/learning/contrast_trainer.py:113 (the dict),
    # networks/build_backbone.py:16 and 59 (the names), datasets/util.py:235 (the pixels); its own
    # detection/convert_pretrained.py takes "model" unless told --ema.
    Layout(
        "HobbitLong/PyContrast",
        {"model": "model/encoder.", "ema": "model_ema/encoder."},
        {"head": "head*", "memory bank": "contrast"},
        has=("head.",),
    ),
    # CMC, build_backbone.py:89: one network sees L, the other ab, so neither takes RGB.
    Layout(
        "HobbitLong/PyContrast (CMC)",
        {"L": "model/encoder1.", "ab": "model/encoder2."},
        {"head": "head*", "memory bank": "contrast", "EMA network": "model_ema"},
        has=("head1.",),
    ),
    # WXinlong/DenseCL@b64bbb6 openselfsup/models/densecl.py:28; pixels: configs/selfsup/densecl/
    # densecl_imagenet_200ep.py:31. Every list's backbone has the second name "backbone.".
    _mm("WXinlong/DenseCL", ("queue2",), query="encoder_q.0.", key="encoder_k.0."),
    # open-mmlab/OpenSelfSup@1db69ec openselfsup/models/{moco.py:42,byol.py:35} and
    # open-mmlab/mmselfsup@6faad81 (0.x) mmselfsup/models/algorithms/mocov3.py:37; pixels:
    # configs/selfsup/moco/r50_v2.py:30; stride: openselfsup/models/backbones/resnet.py:298.
    _mm("OpenSelfSup / MMSelfSup 0.x", query="encoder_q.0.", key="encoder_k.0."),
    _mm("OpenSelfSup / MMSelfSup 0.x", online="online_net.0.", target="target_net.0."),
    _mm("OpenSelfSup / MMSelfSup 0.x", base="base_encoder.0.", momentum="momentum_encoder.0."),
    # open-mmlab/mmselfsup@80bb3f4 (1.x) mmselfsup/models/algorithms/{moco.py:65,byol.py:55,
    # mocov3.py:55}, open-mmlab/mmpretrain@ee7f2e8 mmpretrain/models/selfsup/{moco.py:65,byol.py:55,
    # mocov3.py:180}; the dict: open-mmlab/mmengine@2543429 mmengine/runner/runner.py:2229; pixels:
    # configs/_base_/datasets/imagenet_bs32_mocov2.py:6.
    *(
        _mm(
            "MMSelfSup 1.x / mmpretrain",
            (f"{average}.",),
            **{choice: "backbone.", other: f"{average}.module.0."},
        )
        for choice, other, average in (
            ("query", "key", "encoder_k"),
            ("online", "target", "target_net"),
            ("base", "momentum", "momentum_encoder"),
        )
    ),
    # mmengine/hooks/ema_hook.py:165 and 215: the EMA weights are in "state_dict", the trained ones
    # in "ema_state_dict".
    dataclasses.replace(
        _mm("mmpretrain", single="backbone."),
        networks={
            "ema": "state_dict/backbone.",
            "model": "ema_state_dict/backbone.",
        },
        marks={"meta": ..., "ema_state_dict": ...},
    ),
    # Every other algorithm of these projects, and their classifiers: mmpretrain's pixels are
    # configs/_base_/datasets/imagenet_bs32.py:6, its stride mmpretrain/models/backbones/
    # resnet.py:486.
    _mm("OpenSelfSup / MMSelfSup / mmpretrain", single="backbone."),
    # What their tools/extract_backbone_weights.py write, of OpenSelfSup@1db69ec:19,
    # WXinlong/DenseCL@b64bbb6 and mmselfsup@6faad81 tools/model_converters/.
    *(
        Layout(f"{name} (extracted)", {"single": "state_dict/"}, marks={"author": author})
        for name, author in (
            ("OpenSelfSup", "OpenSelfSup"),
            ("MMSelfSup", "MMSelfSup"),
            ("WXinlong/DenseCL", "DenseCL"),
        )
    ),
    # Converted for Detectron2 by these projects: OpenSelfSup@1db69ec and WXinlong/DenseCL@b64bbb6
    # benchmarks/detection/convert-pretrain-to-detectron2.py:30, mmselfsup@6faad81 tools/benchmarks/
    # detectron2/convert-pretrain-to-detectron2.py:31, PyContrast@84f94ea detection/
    # convert_pretrained.py:47, solo-learn@9187ea3 downstream/object_detection/
    # convert_model_to_detectron2.py:52; their pixels are in *_moco.yaml and *_infomin.yaml there.
    *(
        Layout(f"{name} (converted)", **_D2_LAYOUT, marks={"__author__": author})
        for name, author in (
            ("OpenSelfSup / DenseCL", "OpenSelfSup"),
            ("MMSelfSup", "MMSelfSup"),
            ("HobbitLong/PyContrast", "Yonglong"),
            ("vturrisi/solo-learn", "solo-learn"),
        )
    ),
    # vturrisi/solo-learn@9187ea3 solo/methods/base.py:193,210,643 (the names; "encoder" in
    # older checkpoints, main_linear.py:76), pixels: solo/data/pretrain_dataloader.py:206. Only the
    # online network is transferred (downstream/object_detection/convert_model_to_detectron2.py).
    *(
        Layout(
            "vturrisi/solo-learn",
            {"online": f"state_dict/{word}.", "momentum": f"state_dict/momentum_{word}."},
            _SOLO_DROPPED,
            has=("classifier.", beside),
            says={
                "no_3x3_stem": "solo-learn's CIFAR networks pad their 3x3 stem by 2 pixels "
                "(solo/methods/base.py:204), this backbone by 1: the features would be others",
                # Of solo/backbones/vit/: its MoCo v3 and MAE of widths 192 and 384 have 12, too.
                "num_heads": {768: 12, 1024: 16, 1280: 16},
            },
            **_LIGHTNING,
        )
        for word in ("backbone", "encoder")
        for beside in ("projector.", f"momentum_{word}.", "decoder.decoder_pred.")
    ),
    # lightly-ai/lightly@e8d317f; pixels: lightly/transforms/utils.py:1. benchmarks/imagenet/
    # resnet50/{dino.py:33,byol.py:27,mocov2.py:32} keep torchvision's names,
    # examples/pytorch_lightning/{moco.py:26,dino.py:33} have nn.Sequential's numbers.
    *_lightly(
        "teacher_backbone. student_backbone.",
        teacher="teacher_backbone.",
        student="student_backbone.",
    ),
    *_lightly("student_backbone.", teacher="backbone.", student="student_backbone."),
    *_lightly("teacher_backbone.", online="backbone.", teacher="teacher_backbone."),
    *_lightly("key_backbone.", query="backbone.", key="key_backbone."),
    *_lightly("backbone_momentum.", online="backbone.", momentum="backbone_momentum."),
    # examples/pytorch_lightning/msn.py and mae.py; benchmarks/imagenet/vitb16/{mae,ibot,dinov2}.py.
    *_lightly("anchor_backbone.", target="backbone.", anchor="anchor_backbone."),
    *_lightly(single="backbone."),
    *_lightly("decoder.", single="backbone."),
    # huggingface/pytorch-image-models@aa4b585 timm/utils/checkpoint_saver.py:90 and, of a task,
    # timm/task/task.py:207; EMA first as in timm/models/_helpers.py:120; pixels: timm/models/
    # resnet.py:801. Epochs are numbered from 0 (train.py:1197).
    *(
        Layout(
            "timm",
            networks,
            {"training record": "task_state task_state_ema"},
            marks={"version": 2, "arch": ..., **marks},
            epoch_offset=1,
            recorded=timm_arguments,
        )
        for networks, marks in (
            (
                {"ema": "state_dict_ema/", "model": "state_dict/"},
                {"state_dict_ema": ...},
            ),
            ({"single": "state_dict/"}, {}),
        )
    ),
    # pytorch/vision@017e9b9 references/classification/train.py, main() (the dict; EMA is what
    # --test-only evaluates), utils.py, ExponentialMovingAverage; pixels: presets.py.
    *(
        Layout(
            "torchvision references",
            networks,
            {"EMA counter": "n_averaged*"},
            marks={"lr_scheduler": ..., "args": ..., **marks},
            scheme=scheme,
            epoch_offset=1,
        )
        for scheme in (USUAL, "torchvision")
        for networks, marks in (_EMA_FIRST, _ONE_MODEL)
    ),
    # facebookresearch/ConvNeXt@048efce utils.py:447 (the dict, also ConvNeXt-V2's), models/
    # convnext.py:55 (the names), main.py, --imagenet_default_mean_and_std (the pixels).
    *(
        Layout(
            "facebookresearch/ConvNeXt",
            networks,
            marks=marks,
            scheme="official",
            epoch_offset=1,
        )
        for networks, marks in (_EMA_FIRST, _ONE_MODEL, ({"single": ""}, {}))
    ),
    # keyu-tian/SparK@a63e386 pretrain/utils/misc.py:146 (the dict), spark.py:33-77 (the names),
    # utils/imagenet.py:70 (the pixels): a ResNet of timm's, or a ConvNeXt in the official names.
    # What it saves without decoder is a plain state dict.
    *(
        Layout(
            "keyu-tian/SparK",
            {"single": "module/sparse_encoder.sp_cnn."},
            {
                "decoder": "dense_decoder.* densify_*",
                "mask tokens": "mask_tokens.*",
                "pixels": "imn_m imn_s norm_black",
                "training record": "config",
            },
            marks={"is_pretrain": True},
            scheme=scheme,
            epoch_offset=1,
        )
        for scheme in (USUAL, "official")
    ),
    # ---
    # torchvision/models/resnet.py: net.state_dict(), with or without fc.
    Layout(
        "torchvision",
        {"single": ""},
        families=("resnet",),
        note="names and shapes are torchvision's and say nothing about pixels or strides; dilated, "
        "anti-aliased and caffe-style networks have the same ones",
    ),
    # torchvision/models/convnext.py, as above.
    Layout("torchvision", {"single": ""}, scheme="torchvision"),
    # detectron2 tools/convert-torchvision-to-d2.py, so detectron2://ImageNetPretrained/torchvision/;
    # its docstring gives colors, mean, std and the stride's place.
    Layout("detectron2/torchvision", **_D2_LAYOUT, marks={"__author__": "torchvision"}),
    # facebookresearch/moco@7397dfe detection/convert-pretrain-to-detectron2.py; what it belongs to
    # is in *_moco.yaml beside it.
    Layout("facebookresearch/moco (converted)", **_D2_LAYOUT, marks={"__author__": "MOCO"}),
    # detectron2://ImageNetPretrained/MSRA/: Caffe2's names with BN statistics (MODEL_ZOO.md, "we do
    # not fuse BatchNorm"; the keys are printed in detectron2#1688).
    *_caffe2("detectron2/MSRA", "caffe2"),
    # catalog://ImageNetPretrained/MSRA/ of Detectron: the statistics are folded into scale and bias
    # (detectron2/checkpoint/catalog.py: "only load them to a model with FrozenBN").
    *_caffe2("detectron/MSRA" + FOLDED, "caffe2 folded"),
)
