"""Table of known projects and their checkpoint layouts, the most specific first.

A file is recognized by its contents, never by its name; the names of a network's tensors are a
scheme of its family (convert/families/). A row holds what distinguishes the project's files, the
role of each network, and properties that no tensor determines. Wrappers of training are removed
from keys before matching. The comment above each row cites the code that writes the file and
normalizes its pixels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from convert.contract import FOLDED, IMAGENET_MEAN, IMAGENET_STD
from convert.families.base import USUAL
from convert.families.vit_names import CLIP, DINOV3
from convert.metadata import (
    CheckpointMetadata,
    caffe2_record,
    mm_configuration,
    own_record,
    timm_arguments,
)
from moco.modeling.soundness import Triple

# Entries next to a network that belong to no network, in files of any project: name in a report ->
# patterns of keys.
DROPPED = {
    "optimizer": "optimizer optimizers optimizer_states optim opt",
    "schedule": "lr_scheduler lr_schedulers scheduler schedulers param_schedulers",
    "loss scaling": "scaler grad_scaler loss_scaler amp amp_scaler fp16_scaler",
    "training record": "callbacks loops rng_state random_state averaging_state best_acc1 config "
    "meta meters ema_meters message_hub task_state task_state_ema",
    "EMA counter": "n_averaged* steps* *.steps*",
    "queue": "queue*",
    "memory bank": "bank* contrast memory_bank.* local_memory_*",
    "NCE's constant": "Z Z.*",
    "predictor": "predictor* prediction_head.*",
    "projection head": "projector.* momentum_projector.* projection_head* *_projection_head.* "
    "fc.* pred.*",
    "prototypes": "prototypes*",
    # Includes OpenMMLab's lists [backbone, neck].
    "neck": "neck.* encoder.1.* encoder_[qk].1.* encoder_k.module.1.* base_encoder.1.* "
    "momentum_encoder.1.* momentum_encoder.module.1.* online_net.1.* target_net.1.* "
    "target_net.module.1.*",
    "classifier": "classifier.* momentum_classifier.* online_classifier.*",
    "head": "head head.* heads head[12_]* momentum_head.* teacher_*head.* student_*head.* "
    "dino_head.* ibot_head.* moco_encoder.heads.* momentum_teacher.module.heads.* fc1000_* "
    "stem.fc.*",
    "decoder": "decoder.* decoder_* transformer_encoder.* pos_enc.*",
    "loss": "loss criterion* *_criterion.* dino_loss* ibot_loss center* loss_weight* "
    "bn.running_mean bn.running_var",
    "mask token": "*mask_token mask_tokens.*",
    "momentum": "*_momentum",  # as in detectron2/checkpoint/detection_checkpoint.py
    "batch counter": "*.num_batches_tracked",
}


# Frameworks that save the averaged weights in "state_dict": a key that identifies them -> key of
# the trained weights. pytorch_lightning 2.6.6 callbacks/weight_averaging.py, on_save_checkpoint;
# mmengine/hooks/ema_hook.py:165 and 215.
AVERAGES = {"pytorch-lightning_version": "current_model_state", "meta": "ema_state_dict"}


@dataclasses.dataclass(frozen=True)
class Project:
    """Checkpoint layout of a project, and properties that its files do not record.

    Attributes:
        name: Name of the project, the source in input contracts.
        roles: Choices of --encoder -> prefixes of their tensors in the flattened file, e.g.
            "state_dict/encoder_q."; a prefix that ends with "*" matches exactly one network. The
            first role is the one that the project itself transfers. Of several sets the first whose
            networks are all in the file is used, else the first with any of them.
        marks: Paths ("a/b") to plain values that identify the file: a value, ... for any value, or
            None for no value.
        has: Required prefixes of keys in the dict of a role's network; of several separated by
            spaces, one is enough.
        order: Keys of the default network in the order of the file. Converters from other
            frameworks write an order that no PyTorch module has.
        families, schemes: Allowed families and naming schemes; empty allows any.
        own: Additional drop rules, for parts of the project that hold convolutions or a second
            network.
        epoch: Path to the number of epochs finished.
        epoch_offset: 1 if the file counts epochs from 0.
        channel_order, mean, std: Normalization used in training, if the file does not record it.
        metadata: Facts of the project's code that no tensor holds, by the names that a family's
            `recognize` takes.
        recorded: Function that reads the metadata of a file, see convert/metadata.py.
        note: Note for every conversion from this source.
        any_network: True if the files hold networks of many origins, distinguished only by name.
    """

    name: str
    roles: tuple[Mapping[str, str], ...] = ()
    marks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    has: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    own: Mapping[str, str] = dataclasses.field(default_factory=dict)
    epoch: str = "epoch"
    epoch_offset: int = 0
    channel_order: str = "RGB"
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    recorded: Callable[[Mapping[Any, Any]], CheckpointMetadata] | None = None
    note: str = ""
    any_network: bool = False

    @property
    def is_ours(self) -> bool:
        """True for the versioned format of this project."""
        return isinstance(self.marks.get("format"), str)

    @property
    def is_unknown(self) -> bool:
        """True if no row fits the file, so that only its naming scheme is known."""
        return not self.roles


def _prefixed_roles(holder: str, **roles: str) -> dict[str, str]:
    """Return roles whose networks are all in one dict."""
    return {role: holder + start for role, start in roles.items()}


_MOCO = _prefixed_roles("state_dict/", query="encoder_q.", key="encoder_k.")
_EMA_FIRST = ({"ema": "model_ema/", "model": "model/"}, {"single": "model/"})
# The CIFAR notebook's pixels (0..255, RGB), as configs/pretrain/cifar10_r18_200ep.yaml has them.
CIFAR_MEAN, CIFAR_STD = (125.307, 122.961, 113.8575), (51.5865, 50.847, 51.255)
# Normalization that only scales pixels to 0..1.
ZERO_MEAN, ZERO_TO_ONE_STD = (0.0, 0.0, 0.0), (255.0, 255.0, 255.0)
# google-research/simclr@383d414 resnet.py:594; resnet_wider.py and resnet.py:105 of the converters.
_SAME_POOL = (
    "SimCLR's max-pool pads as TensorFlow's SAME (one pixel, after), the converter's network and "
    "this backbone as torchvision (one pixel on both sides)"
)

# This project, and self-supervised projects that mainly train ResNets.
_RESNETS = (
    # moco/engine/checkpoint.py
    Project("moco-transfer", (_MOCO,), {"format": "moco-transfer/1"}, recorded=own_record),
    # moco/classification/run.py: what `moco-transfer linear` and `finetune` write.
    Project(
        "moco-transfer classifier",
        ({"single": "state_dict/"},),
        {"format": "moco-transfer-classifier/1"},
        recorded=own_record,
    ),
    # facebookresearch/moco@7397dfe main_moco.py:382 (the dict) and moco/builder.py (the names): v1
    # has fc.*, v2 fc.0.* and fc.2.*. Other projects use these names, too;
    # Lightning's checkpoints with them match no row.
    Project("facebookresearch/moco", (_MOCO,), {"format": None, "pytorch-lightning_version": None}),
    # facebookresearch/moco, branch colab-notebook, moco_cifar10_demo.ipynb: ModelBase (the names:
    # the children of torchvision's ResNet without its max-pool), train_transform (the pixels), the
    # last cell (the dict, model_last.pth). SplitBatchNorm has BatchNorm2d's tensors.
    Project(
        "facebookresearch/moco (CIFAR notebook)",
        (_prefixed_roles("state_dict/", query="encoder_q.net.", key="encoder_k.net."),),
        schemes=("unpooled",),
        metadata={"stem": "cifar"},
        recorded=lambda raw: CheckpointMetadata(mean=CIFAR_MEAN, std=CIFAR_STD),
    ),
    # facebookresearch/moco-v3@c349e6e main_moco.py:310 (the dict), :258 (the pixels) and
    # moco/builder.py:27 (the names); main_lincls.py:181 takes base_encoder; vits.py (the heads).
    Project(
        "facebookresearch/moco-v3",
        (_prefixed_roles("state_dict/", query="base_encoder.", key="momentum_encoder."),),
        {"pytorch-lightning_version": None},
        metadata={"num_heads": {384: 12, 768: 12, 1024: 16, 1280: 16}},
    ),
    # facebookresearch/simsiam@a7bc177 main_simsiam.py:264 (the dict), :225 (the pixels) and
    # simsiam/builder.py:24 (the names).
    Project(
        "facebookresearch/simsiam",
        ({"single": "state_dict/encoder."},),
        has=("encoder.fc.6.", "predictor.3."),
    ),
    # facebookresearch/moco-v3@c349e6e main_lincls.py:319 and :268, the same in moco and simsiam;
    # pytorch/examples@77f55b9 imagenet/main.py:299, from which they come, has the same keys.
    Project(
        "pytorch/examples imagenet", ({"single": "state_dict/"},), {"arch": ..., "best_acc1": ...}
    ),
    # google-research/simclr@383d414 (TensorFlow) by tonylins/simclr-converter@139d3cb
    # convert.py:84 and resnet_wider.py, whose blocks create the shortcut first. Pixels are 0..1
    # and no more: simclr data_util.py:515; eval.py, "the original model do not have normalization".
    Project(
        "google-research/simclr v1 (tonylins/simclr-converter)",
        ({"single": "state_dict/"},),
        {"epoch": None, "arch": None, "optimizer": None},
        has=("fc.bias", "bn1.num_batches_tracked"),
        order=("layer1.0.downsample.0.weight", "layer1.0.conv1.weight"),
        mean=ZERO_MEAN,
        std=ZERO_TO_ONE_STD,
        note=_SAME_POOL,
    ),
    # The same, version 2, by Separius/SimCLRv2-Pytorch@f4c2f41 convert.py:120, resnet.py (the
    # names) and verify.py:18 (the pixels). Selective kernels (sk1) have keys that no rule knows.
    Project(
        "google-research/simclr v2 (Separius/SimCLRv2-Pytorch)",
        ({"single": "*"},),
        schemes=("simclr v2",),
        mean=ZERO_MEAN,
        std=ZERO_TO_ONE_STD,
        note=_SAME_POOL,
    ),
    # google-deepmind/deepmind-research@f5de0ed byol (haiku) by ajtejankar/byol-convert@7497e7f
    # convert.py:29-99: the online network, weights first, then statistics, without counters.
    # Pixels: byol/utils/dataset.py:63; padding: byol/utils/networks.py:106.
    Project(
        "google-deepmind/byol (ajtejankar/byol-convert)",
        ({"single": ""},),
        {"bn1.num_batches_tracked": None},
        order=("fc.weight", "bn1.running_mean"),
        note="BYOL's network pads as TensorFlow's SAME (unevenly at stride 2), this backbone as "
        "torchvision: the weights are the same, the features close to it",
    ),
    # facebookresearch/barlowtwins@8e8d284 main.py:146 (the dict), :304 (the pixels), :191 (the
    # names). Its resnet50.pth (main.py:151) is torchvision's without fc.
    Project(
        "facebookresearch/barlowtwins",
        ({"single": "model/backbone."},),
        has=("projector.0.", "bn.running_mean"),
    ),
    # facebookresearch/vicreg@4e12602 main_vicreg.py:157 (the dict), :189 (the names),
    # augmentations.py:57 (the pixels). Its resnet50.pth (:164) is torchvision's without fc: padding
    # 1 and 2 (resnet.py:163,186) is conv1's 3.
    Project("facebookresearch/vicreg", ({"single": "model/backbone."},), has=("projector.0.bias",)),
    # facebookresearch/swav@06b1b7c main_swav.py:239 (the dict; released files are its state dict,
    # hubconf.py:34), src/resnet50.py:157-217 (the names; padding as vicreg's),
    # src/multicropdataset.py:38 (the pixels: std[0] is 0.228). Also DeepCluster-v2 and SeLa-v2.
    Project(
        "facebookresearch/swav",
        ({"single": "state_dict/"}, {"single": ""}),
        has=("projection_head.", "prototypes."),
        std=(58.14, 57.12, 57.375),
    ),
)

# Self-supervised projects that mainly train vision transformers.
_TRANSFORMERS = (
    # facebookresearch/dino@7c446df main_dino.py:278 (the dict), :431 (the pixels), utils.py:606
    # (the names); eval_linear.py:264 takes the teacher; vision_transformer.py (the heads). Its
    # dino_resnet50_pretrain.pth (hubconf.py:91) is torchvision's without fc.
    Project(
        "facebookresearch/dino",
        ({"teacher": "teacher/backbone.", "student": "student/backbone."},),
        {"dino_loss": ...},
        metadata={"num_heads": {192: 3, 384: 6, 768: 12}},
    ),
    # facebookresearch/mae models_mae.py (the names, the heads), util/misc.py, save_model (the
    # dict), main_pretrain.py (the pixels). A file without the decoder is a plain state dict.
    Project(
        "facebookresearch/mae",
        ({"single": "model/"},),
        has=("decoder_pred.", "mask_token"),
        epoch_offset=1,
        metadata={"num_heads": {768: 12, 1024: 16, 1280: 16}},
    ),
    # bytedance/ibot@564f363 main_ibot.py, train_ibot (the dict) and DataAugmentationiBOT (the
    # pixels), models/vision_transformer.py (the names); evaluation/eval_linear.py, the teacher.
    Project(
        "bytedance/ibot",
        ({"teacher": "teacher/backbone.", "student": "student/backbone."},),
        {"ibot_loss": ...},
        metadata={"num_heads": {192: 3, 384: 6, 768: 12, 1024: 16}},
    ),
    # facebookresearch/msn@db0d572 src/msn_train.py, save_checkpoint (the dict) and init_model (the
    # head), src/deit.py (the names), src/data_manager.py, make_transforms (the pixels);
    # linear_eval.py, load_pretrained, takes the target encoder.
    Project(
        "facebookresearch/msn",
        ({"target": "target_encoder/", "anchor": "encoder/"},),
        {"target_encoder": ..., "prototypes": ...},
        metadata={"num_heads": {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16}},
    ),
    # facebookresearch/dinov3 dinov3/train/train.py, do_test (teacher_checkpoint.pth),
    # train/ssl_meta_arch.py and models/vision_transformer.py (the names), data/transforms.py (the
    # pixels of its configs, ImageNet's). Released backbones are plain state dicts.
    Project(
        "facebookresearch/dinov3",
        ({"teacher": "teacher/backbone."},),
        has=("dino_head.",),
        schemes=(DINOV3,),
    ),
    # SwinTransformer/Transformer-SSL@4510de1 (MoBY) utils.py:65 (the dict), models/moby.py:47 (the
    # names), data/build.py:126 (the pixels); utils.py:24, load_pretrained, takes the encoder.
    Project(
        "SwinTransformer/Transformer-SSL",
        (_prefixed_roles("model/", query="encoder.", key="encoder_k."),),
        has=("projector_k.", "predictor."),
        families=("swin",),
        own={"projection head": "projector_k.*"},
        epoch_offset=1,
    ),
    # microsoft/Swin-Transformer@f82860b (SimMIM) main_simmim_pt.py:113 and utils_simmim.py (the
    # dict), models/simmim.py (the names), data/data_simmim_pt.py:55 (the pixels).
    Project(
        "microsoft/Swin-Transformer SimMIM",
        ({"single": "model/encoder."},),
        has=("encoder.mask_token", "decoder.0."),
        families=("swin",),
        epoch_offset=1,
    ),
    # facebookresearch/dinov2@02eb93a dinov2/train/train.py, do_test (teacher_checkpoint.pth),
    # train/ssl_meta_arch.py and models/vision_transformer.py (the names), data/transforms.py (the
    # pixels).
    Project(
        "facebookresearch/dinov2",
        ({"teacher": "teacher/backbone."},),
        has=("dino_head.",),
        families=("vit",),
        metadata={"num_heads": {384: 6, 768: 12, 1024: 16, 1536: 24}},
    ),
)

# OpenAI's TorchScript archives as plain state dicts: openai/CLIP@d05afc4 clip/model.py,
# build_model, removes the sizes, and QuickGELU is its only activation.
_CLIP = Project(
    "openai/CLIP",
    ({"single": "visual."},),
    has=("input_resolution", "context_length", "vocab_size"),
    schemes=(CLIP,),
    metadata={"activation": "quick_gelu"},
)

_TRUNK = "classy_state_dict/base_model/model/trunk/_feature_blocks."
_VISSL = (
    # facebookresearch/vissl@09270ed2 vissl/hooks/log_hooks.py:522 (the dict) and :504,
    # SAVE_EMA_MODEL, models/base_ssl_model.py:414 and backbones/resnext.py:144 (the names),
    # configs/config/pretrain/simclr/simclr_8node_resnet.yaml:34 (the pixels, as in all of
    # pretrain/; INPUT_TYPE "bgr" is not in the file). The loss holds MoCo's key encoder
    # (hooks/moco_hooks.py:58) and DINO's teacher (hooks/hook_utils.py:33-60), which VISSL's DINO
    # configs evaluate.
    Project(
        "facebookresearch/vissl",
        (
            {
                "teacher": "loss/momentum_teacher.module.trunk._feature_blocks.",
                "student": _TRUNK,
            },
            {"query": _TRUNK, "key": "loss/moco_encoder.trunk._feature_blocks."},
            {"base": _TRUNK, "ema": _TRUNK.replace("base_model", "ema_model")},
            {"single": _TRUNK},
        ),
        epoch="train_phase_idx",
        epoch_offset=1,
    ),
    # Others' networks in VISSL's names (converted_vissl_*.torch): extra_scripts/
    # convert_vissl_to_torchvision.py:46.
    Project(
        "facebookresearch/vissl (converted)", ({"single": "model_state_dict/_feature_blocks."},)
    ),
    # HobbitLong/PyContrast@84f94ea pycontrast/learning/contrast_trainer.py:113 (the dict),
    # networks/build_backbone.py:16 and 59 (the names), datasets/util.py:235 (the pixels); its own
    # detection/convert_pretrained.py takes "model" unless told --ema.
    Project(
        "HobbitLong/PyContrast",
        ({"model": "model/encoder.", "ema": "model_ema/encoder."},),
        has=("head.",),
    ),
    # CMC, build_backbone.py:89: one network sees L, the other ab, so neither takes RGB.
    Project(
        "HobbitLong/PyContrast (CMC)",
        ({"L": "model/encoder1.", "ab": "model/encoder2."},),
        has=("head1.",),
        own={"EMA network": "model_ema"},
    ),
)


def _mm(name: str, *roles: Mapping[str, str], **known: Any) -> Project:
    """Return the row of training checkpoints of mmcv's or mmengine's runner."""
    known = {"marks": {"meta": ...}, **known}
    return Project(name, roles, epoch="meta/epoch", recorded=mm_configuration, **known)


_MM_LISTS = (
    _prefixed_roles("state_dict/", query="encoder_q.0.", key="encoder_k.0."),
    _prefixed_roles("state_dict/", online="online_net.0.", target="target_net.0."),
    _prefixed_roles("state_dict/", base="base_encoder.0.", momentum="momentum_encoder.0."),
)
_OPENMMLAB = (
    # WXinlong/DenseCL@b64bbb6 openselfsup/models/densecl.py:28; pixels: configs/selfsup/densecl/
    # densecl_imagenet_200ep.py:31. Every list's backbone has the second name "backbone.".
    _mm("WXinlong/DenseCL", _MM_LISTS[0], has=("queue2",)),
    # open-mmlab/OpenSelfSup@1db69ec openselfsup/models/{moco.py:42,byol.py:35} and
    # open-mmlab/mmselfsup@6faad81 (0.x) mmselfsup/models/algorithms/mocov3.py:37; pixels:
    # configs/selfsup/moco/r50_v2.py:30; stride: openselfsup/models/backbones/resnet.py:298.
    _mm("OpenSelfSup / MMSelfSup 0.x", *_MM_LISTS),
    # open-mmlab/mmselfsup@80bb3f4 (1.x) mmselfsup/models/algorithms/{moco.py:65,byol.py:55,
    # mocov3.py:55}, open-mmlab/mmpretrain@ee7f2e8 mmpretrain/models/selfsup/{moco.py:65,byol.py:55,
    # mocov3.py:180}; the dict: open-mmlab/mmengine@2543429 mmengine/runner/runner.py:2229; pixels:
    # configs/_base_/datasets/imagenet_bs32_mocov2.py:6.
    _mm(
        "MMSelfSup 1.x / mmpretrain",
        _prefixed_roles("state_dict/", query="backbone.", key="encoder_k.module.0."),
        _prefixed_roles("state_dict/", online="backbone.", target="target_net.module.0."),
        _prefixed_roles("state_dict/", base="backbone.", momentum="momentum_encoder.module.0."),
        has=("encoder_k. target_net. momentum_encoder.",),
    ),
    # See `AVERAGES`.
    _mm(
        "mmpretrain",
        {"ema": "state_dict/backbone.", "model": "ema_state_dict/backbone."},
        marks={"meta": ..., "ema_state_dict": ...},
    ),
    _mm("OpenSelfSup / MMSelfSup / mmpretrain", _prefixed_roles("state_dict/", single="backbone.")),
    # What their tools/extract_backbone_weights.py write, of OpenSelfSup@1db69ec:19,
    # WXinlong/DenseCL@b64bbb6 and mmselfsup@6faad81 tools/model_converters/.
    *(
        Project(f"{name} (extracted)", ({"single": "state_dict/"},), {"author": author})
        for name, author in (
            ("OpenSelfSup", "OpenSelfSup"),
            ("MMSelfSup", "MMSelfSup"),
            ("WXinlong/DenseCL", "DenseCL"),
        )
    ),
)

# What Lightning's trainer writes: pytorch_lightning 2.6.6 trainer/connectors/
# checkpoint_connector.py, dump_checkpoint. Its "epoch" is the current one, finished or not.
_LIGHTNING: dict[str, Any] = {
    "marks": {"pytorch-lightning_version": ...},
    "epoch": "loops/fit_loop/epoch_progress/current/processed",
}
_AVERAGED = {"own": {"weights before averaging": "current_model_state"}, **_LIGHTNING}
_MODULES = (
    # vturrisi/solo-learn@9187ea3 solo/methods/base.py:193,210,643 (the names; "encoder" in
    # older checkpoints, main_linear.py:76), pixels: solo/data/pretrain_dataloader.py:206. Only the
    # online network is transferred (downstream/object_detection/convert_model_to_detectron2.py).
    Project(
        "vturrisi/solo-learn",
        tuple(
            _prefixed_roles("state_dict/", online=f"{word}.", momentum=f"momentum_{word}.")
            for word in ("backbone", "encoder")
        ),
        has=(
            "classifier.",
            "projector. momentum_backbone. momentum_encoder. decoder.decoder_pred.",
        ),
        metadata={
            "no_3x3_stem": "solo-learn's CIFAR networks pad their 3x3 stem by 2 pixels "
            "(solo/methods/base.py:204), this backbone by 1: the features would be others",
            # Of solo/backbones/vit/: its MoCo v3 and MAE of widths 192 and 384 have 12, too.
            "num_heads": {768: 12, 1024: 16, 1280: 16},
        },
        **_AVERAGED,
    ),
    # lightly-ai/lightly@e8d317f; pixels: lightly/transforms/utils.py:1. benchmarks/imagenet/
    # resnet50/{dino.py:33,byol.py:27,mocov2.py:32} keep torchvision's names,
    # examples/pytorch_lightning/{moco.py:26,dino.py:33} have nn.Sequential's numbers; msn.py and
    # mae.py, benchmarks/imagenet/vitb16/{mae,ibot,dinov2}.py. MaskedVisionTransformer{TIMM,
    # Torchvision} (lightly/models/modules) call theirs `vit`.
    Project(
        "lightly",
        tuple(
            {role: f"state_dict/{start}{inner}" for role, start in roles.items()}
            for roles in (
                {"teacher": "teacher_backbone.", "student": "student_backbone."},
                {"teacher": "backbone.", "student": "student_backbone."},
                {"online": "backbone.", "teacher": "teacher_backbone."},
                {"query": "backbone.", "key": "key_backbone."},
                {"online": "backbone.", "momentum": "backbone_momentum."},
                {"target": "backbone.", "anchor": "anchor_backbone."},
                {"single": "backbone."},
            )
            for inner in ("", "vit.")
        ),
        has=(
            "projection_head decoder. teacher_backbone. student_backbone. key_backbone. "
            "backbone_momentum. anchor_backbone.",
        ),
        # Of benchmarks/imagenet/vitb16 and of examples/pytorch_lightning/msn.py.
        metadata={"num_heads": {384: 6, 768: 12}},
        **_AVERAGED,
    ),
)

# Networks of any origin, in the names of the library that trained them.
_LIBRARIES = (
    # microsoft/Swin-Transformer@f82860b utils.py:136 (the dict), models/swin_transformer.py (the
    # names), data/build.py:161 (the pixels). Detectron2's Swin has the same names.
    Project(
        "microsoft/Swin-Transformer",
        ({"single": "model/"},),
        schemes=("microsoft",),
        epoch_offset=1,
    ),
    # facebookresearch/dinov3 dinov3/models/convnext.py (the names: the final norm is the last of
    # `norms`, too), README.md (the pixels).
    Project("facebookresearch/dinov3", ({"single": ""},), has=("norms.3.",), schemes=("official",)),
    # facebookresearch/ConvNeXt@048efce utils.py:447 (the dict, also ConvNeXt-V2's), models/
    # convnext.py:55 (the names), main.py, --imagenet_default_mean_and_std (the pixels).
    Project(
        "facebookresearch/ConvNeXt",
        (*_EMA_FIRST, {"single": ""}),
        schemes=("official",),
        epoch_offset=1,
    ),
    # keyu-tian/SparK@a63e386 pretrain/utils/misc.py:146 (the dict), spark.py:33-77 (the names),
    # utils/imagenet.py:70 (the pixels): a ResNet of timm's, or a ConvNeXt in the official names.
    # Its files without decoder are plain state dicts.
    Project(
        "keyu-tian/SparK",
        ({"single": "module/sparse_encoder.sp_cnn."},),
        {"is_pretrain": True},
        own={"SparK's decoder": "dense_decoder.* densify_*", "pixels": "imn_m imn_s norm_black"},
        epoch_offset=1,
    ),
    # huggingface/pytorch-image-models@aa4b585 timm/utils/checkpoint_saver.py:90 and, of a task,
    # timm/task/task.py:207; EMA first as in timm/models/_helpers.py:120; pixels: timm/models/
    # resnet.py:801. Epochs are numbered from 0 (train.py:1197).
    Project(
        "timm",
        ({"ema": "state_dict_ema/", "model": "state_dict/"}, {"single": "state_dict/"}),
        {"version": 2, "arch": ...},
        epoch_offset=1,
        recorded=timm_arguments,
        any_network=True,
    ),
    # pytorch/vision@017e9b9 references/classification/train.py, main() (the dict; EMA is what
    # --test-only evaluates), utils.py, ExponentialMovingAverage; pixels: presets.py.
    Project(
        "torchvision references", _EMA_FIRST, {"lr_scheduler": ..., "args": ...}, epoch_offset=1
    ),
    # torchvision/models/resnet.py: net.state_dict(), with or without fc.
    Project(
        "torchvision",
        ({"single": ""},),
        families=("resnet",),
        schemes=(USUAL,),
        note="names and shapes are torchvision's, which do not determine normalization or strides; "
        "dilated, anti-aliased and caffe-style networks have the same ones",
        any_network=True,
    ),
    # torchvision/models/convnext.py and swin_transformer.py, as above.
    Project(
        "torchvision",
        ({"single": ""},),
        families=("convnext", "swin"),
        schemes=("torchvision",),
        any_network=True,
    ),
)


def _caffe2(name: str, scheme: str) -> tuple[Project, ...]:
    """Return the rows of Caffe2 blobs: at the top level, and under "model" as in Detectron2.

    MSRA's networks take BGR; their std is folded into conv1 (detectron2/config/defaults.py,
    PIXEL_STD).
    """
    return tuple(
        Project(
            name,
            ({"single": start},),
            {"__author__": author},
            schemes=(scheme,),
            own={"convolution bias": "*_b"},  # checked by `caffe2_record`
            recorded=caffe2_record,
            channel_order="BGR",
            mean=(103.53, 116.28, 123.675),
            std=(1.0, 1.0, 1.0),
            metadata={"stride_in_1x1": True},
        )
        for start, author in (("", None), ("model/", "Caffe2"))
    )


_DETECTRON2 = (
    # Converted for Detectron2 by these projects: OpenSelfSup@1db69ec and WXinlong/DenseCL@b64bbb6
    # benchmarks/detection/convert-pretrain-to-detectron2.py:30, mmselfsup@6faad81 tools/benchmarks/
    # detectron2/convert-pretrain-to-detectron2.py:31, PyContrast@84f94ea detection/
    # convert_pretrained.py:47, solo-learn@9187ea3 downstream/object_detection/
    # convert_model_to_detectron2.py:52; their pixels are in *_moco.yaml and *_infomin.yaml there.
    # "torchvision": detectron2 tools/convert-torchvision-to-d2.py, whose docstring gives colors,
    # mean, std and the stride's place, so detectron2://ImageNetPretrained/torchvision/.
    # "MOCO": facebookresearch/moco@7397dfe detection/convert-pretrain-to-detectron2.py; its
    # preprocessing is in *_moco.yaml next to it.
    *(
        Project(name, ({"single": "model/"},), {"__author__": author}, schemes=("detectron2",))
        for name, author in (
            ("OpenSelfSup / DenseCL (converted)", "OpenSelfSup"),
            ("MMSelfSup (converted)", "MMSelfSup"),
            ("HobbitLong/PyContrast (converted)", "Yonglong"),
            ("vturrisi/solo-learn (converted)", "solo-learn"),
            ("detectron2/torchvision", "torchvision"),
            ("facebookresearch/moco (converted)", "MOCO"),
        )
    ),
    # detectron2://ImageNetPretrained/MSRA/: Caffe2's names with BN statistics (MODEL_ZOO.md, "we do
    # not fuse BatchNorm"; the keys are printed in detectron2#1688).
    *_caffe2("detectron2/MSRA", "caffe2"),
    # catalog://ImageNetPretrained/MSRA/ of Detectron: the statistics are folded into scale and bias
    # (detectron2/checkpoint/catalog.py: "only load them to a model with FrozenBN").
    *_caffe2("detectron/MSRA" + FOLDED, "caffe2 folded"),
)

PROJECTS: tuple[Project, ...] = (
    *_RESNETS,
    *_TRANSFORMERS,
    _CLIP,
    *_VISSL,
    *_OPENMMLAB,
    *_MODULES,
    *_LIBRARIES,
    *_DETECTRON2,
)
