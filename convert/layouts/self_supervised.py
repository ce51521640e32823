"""This project's own files and those of self-supervised projects that mainly train ResNets."""

from convert.layouts.base import Layout
from convert.recorded import Recorded, own_record

# The CIFAR notebook's pixels (0..255, RGB), as configs/pretrain/cifar10_r18_200ep.yaml has them.
CIFAR_MEAN = (125.307, 122.961, 113.8575)
CIFAR_STD = (51.5865, 50.847, 51.255)

# Where pixels are only scaled to 0..1.
ZERO_MEAN = (0.0, 0.0, 0.0)
ZERO_TO_ONE_STD = (255.0, 255.0, 255.0)

_MOCO_DROPPED = {"queue": "queue*", "memory bank": "bank*", "NCE's constant": "Z*"}

# google-research/simclr@383d414 resnet.py:594; resnet_wider.py and resnet.py:105 of the converters.
_SAME_POOL = (
    "SimCLR's max-pool pads as TensorFlow's SAME (one pixel, after), the converter's network and "
    "this backbone as torchvision (one pixel on both sides)"
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
    # moco/classification/run.py: what `moco-transfer linear` and `finetune` write.
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
)
