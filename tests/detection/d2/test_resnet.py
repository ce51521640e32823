"""ResNets of every architecture that a contract can name, built and loaded by both engines."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet as tv

from convert.contract import InputContract
from convert.convert_to_d2 import convert_in_memory
from convert.families import resnet
from convert.families.base import LEFT_AT_INIT, first_rule
from convert.modeling.resnet import FEATURES, NUM_BLOCKS
from convert.verify import Converted, build_backbone, target_tensors
from detection.config.task import default_task
from detection.config.weights import apply_contract
from detection.embedded.model import build_model as build_embedded
from detection.engine.weights import load_converted, read_trained
from detection.modeling.backbones import backbone_type
from detection.train_net import main
from moco.common.errors import UserError
from moco.common.run import read_record
from moco.modeling.encoder import EncoderSpec
from moco.modeling.encoder import build_backbone as build_encoder
from tests.oracles.resnets import randomize

pytestmark = [pytest.mark.detectron2, pytest.mark.usefixtures("detectron2")]


class Arch(NamedTuple):
    """Architecture, and whether Detectron2's own builder has it (at full width)."""

    depth: int
    stem: str = "imagenet"
    channels: int = 64  # of the stem
    groups: int = 1
    width: int = 64  # of a group for 64 planes
    detectron2s: bool = True


# Real depths, blocks and groups; fewer channels where a test runs them.
ARCHS = {
    "resnet10": Arch(10, detectron2s=False),
    "resnet18": Arch(18),
    "resnet18 cifar": Arch(18, "cifar", detectron2s=False),
    "resnet18 w2x": Arch(18, channels=128, detectron2s=False),
    "resnet34": Arch(34),
    "resnet50": Arch(50),
    "resnet50 stride2": Arch(50, "stride2", detectron2s=False),
    "resnet50 w2x": Arch(50, channels=128),
    "resnet50 w4x": Arch(50, channels=256),
    "resnet101": Arch(101),
    "resnet152": Arch(152),
    "wide_resnet50_2": Arch(50, width=128),
    "wide_resnet101_2": Arch(101, width=128),
    "resnext50_32x4d": Arch(50, groups=32, width=4),
    "resnext50_32x8d": Arch(50, groups=32, width=8),
    "resnext50_32x8d cifar": Arch(50, "cifar", groups=32, width=8, detectron2s=False),
    "resnext101_32x8d": Arch(101, groups=32, width=8),
}
CONFIGS = {
    "C4": "configs/voc/faster_rcnn_R_50_C4_24k.yaml",
    "C4 with masks": "configs/coco/mask_rcnn_R_50_C4_1x.yaml",
    "FPN": "configs/coco/mask_rcnn_R_50_FPN_1x.yaml",
    "dilated C5": "configs/voc/faster_rcnn_R_50_dilated_C5_24k.yaml",
    "FCN": "configs/voc/fcn16s_R_50_30k.yaml",
}
SMALL_STEMS = ("resnet18 cifar", "resnet50 stride2", "resnext50_32x8d cifar")
# Deeper ones have no other kinds of blocks, and these tasks no other backbone than the first three.
TASKS = [
    *((n, "C4") for n, a in ARCHS.items() if a.depth <= 50),
    *((n, t) for n in ("resnet18", "resnet50", *SMALL_STEMS) for t in ("FPN", "dilated C5")),
    *((n, t) for n in ("resnet18 cifar", "resnet50 w2x") for t in ("C4 with masks", "FCN")),
    *(("resnet50 stride2", t) for t in ("C4 with masks", "FCN")),
]
SMALL = {
    "MODEL.DEVICE": "cpu",
    "MODEL.RESNETS.NORM": "BN",
    "MODEL.FPN.NORM": "",
    "MODEL.FPN.OUT_CHANNELS": 16,
    "MODEL.ROI_BOX_HEAD.NORM": "",
    "MODEL.ROI_BOX_HEAD.CONV_DIM": 16,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 16,
    "MODEL.ROI_MASK_HEAD.NORM": "",
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 16,
    "MODEL.SEM_SEG_HEAD.NORM": "BN",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 20,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 5,
}


def narrow(arch: Arch) -> Arch:
    """Reduce the channels to an eighth; a group of a ResNeXt keeps at least one."""
    return arch._replace(channels=arch.channels // 8, width=max(arch.width, 8))


def network(arch: Arch) -> tv.ResNet:
    """Build torchvision's own network of an architecture, with random BN statistics."""
    torch.manual_seed(0)
    block = tv.Bottleneck if arch.depth >= 50 else tv.BasicBlock
    net = tv.ResNet(block, [1, 1, 1, 1], groups=arch.groups, width_per_group=arch.width)
    net.inplanes = arch.channels
    size, stride = {"imagenet": (7, 2), "cifar": (3, 1), "stride2": (3, 2)}[arch.stem]
    net.conv1 = nn.Conv2d(3, arch.channels, size, stride, size // 2, bias=False)
    net.bn1, net.fc = nn.BatchNorm2d(arch.channels), nn.Identity()
    for i, count in enumerate(NUM_BLOCKS[arch.depth]):
        stage = net._make_layer(block, arch.channels * 2**i, count, stride=1 if i == 0 else 2)
        setattr(net, f"layer{i + 1}", stage)
    randomize(net, scale=(0.3, 0.6))
    return net


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, Converted]:
    """Narrow networks from the real conversion, by name."""
    folder = tmp_path_factory.mktemp("archs")

    def convert(arch: Arch) -> Converted:
        torch.save(network(arch).state_dict(), folder / "weights")
        found = convert_in_memory(folder / "weights")
        # The tensors of a 3x3 stem do not say its stride.
        architecture = dataclasses.replace(found.contract.architecture, stem=arch.stem)
        return dataclasses.replace(
            found, contract=dataclasses.replace(found.contract, architecture=architecture)
        )

    return {name: convert(narrow(arch)) for name, arch in ARCHS.items()}


def contract_of(arch: Arch) -> InputContract:
    """Return the contract of an architecture at full width, as convert/ recognizes it."""
    bottleneck = arch.depth >= 50
    return InputContract.from_fields(
        pixel_mean=(1, 2, 3),
        pixel_std=(1, 1, 1),
        channel_order="RGB",
        family="resnet",
        architecture={
            "stride_in_1x1": False,
            "depth": arch.depth,
            "stem": arch.stem,
            "stem_out_channels": arch.channels,
            "res2_out_channels": arch.channels * (4 if bottleneck else 1),
            "num_groups": arch.groups,
            "width_per_group": arch.width * arch.channels // 64 if bottleneck else 64,
        },
        source="test",
        source_sha256="0",
        encoder="single",
    )


def config(contract: InputContract, task: str | None = None, **keys: Any) -> Any:
    """Build Detectron2's config for these weights as the plugin does."""
    from detection.d2.config import check_transfer_config, transfer_defaults, with_builder

    cfg = transfer_defaults()
    if task:
        cfg.merge_from_file(CONFIGS[task])
    else:
        cfg.MODEL.BACKBONE.FREEZE_AT = 0
        cfg.MODEL.RESNETS.OUT_FEATURES = list(FEATURES)
    cfg.merge_from_list([item for pair in {**SMALL, **keys}.items() for item in pair])
    if contract.architecture.depth < 50 and cfg.MODEL.ROI_HEADS.NAME == "Res5ROIHeads":
        cfg.MODEL.ROI_HEADS.NAME = "Res5ROIHeadsExtraNorm"
    apply_contract(cfg, contract, explicit=())
    check_transfer_config(cfg)
    return with_builder(cfg)


def backbone(contract: InputContract) -> Any:
    from detectron2.modeling import build_backbone as build_by_name

    return build_by_name(config(contract))


def detector(cfg: Any) -> Any:
    from detectron2.modeling import build_model

    torch.manual_seed(1)
    return build_model(cfg)


def shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in state.items()}


@pytest.mark.parametrize("name", ARCHS)
def test_at_full_width_both_engines_have_torchvisions_tensors(name: str) -> None:
    """Detectron2's own builder is used wherever it has the network."""
    from detection.d2.backbones import detectron2_has

    arch = ARCHS[name]
    contract = contract_of(arch)
    with torch.device("meta"):
        theirs = backbone(contract).state_dict()
        source = network(arch).state_dict()
    assert shapes(theirs) == shapes(target_tensors(contract))
    cfg = config(contract, "FPN")
    assert detectron2_has(cfg) == arch.detectron2s
    own = "build_transfer_resnet_fpn_backbone"
    expected = "build_resnet_fpn_backbone" if arch.detectron2s else own
    assert cfg.MODEL.BACKBONE.NAME == expected
    trained = {key: value for key, value in theirs.items() if not first_rule(key, LEFT_AT_INIT)}
    assert shapes(trained) == shapes(
        {
            resnet.ResNetFamily().to_detectron2(key): value
            for key, value in source.items()
            if not first_rule(key, resnet.DROPPED)
        }
    )


@pytest.mark.parametrize(
    ("arch", "width"), [("resnet50", 2.0), ("resnet50", 4.0), ("resnet18", 2.0)]
)
def test_the_wide_ones_are_those_of_our_own_pre_training(arch: str, width: float) -> None:
    with torch.device("meta"):
        source = build_encoder(EncoderSpec(arch, width=width)).state_dict()
    theirs = target_tensors(contract_of(ARCHS[f"{arch} w{width:g}x"]))
    for key, value in source.items():
        if name := resnet.ResNetFamily().to_detectron2(key):
            assert value.shape == theirs[name].shape, key


@pytest.mark.parametrize("name", ARCHS)
def test_both_backbones_give_bitwise_equal_features_of_one_file(
    name: str, converted: dict[str, Converted]
) -> None:
    weights = converted[name]
    theirs, ours = backbone(weights.contract).eval(), build_backbone(weights.contract).eval()
    for net in (theirs, ours):
        missing = net.load_state_dict(weights.model, strict=False)
        assert not missing.unexpected_keys
        assert all(first_rule(key, LEFT_AT_INIT) for key in missing.missing_keys)
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected, actual = theirs(image), ours(image)
    for feature, shape in theirs.output_shape().items():
        assert torch.equal(expected[feature], actual[feature]), feature
        assert expected[feature].std() > 0.01
        assert tuple(actual[feature].shape[1:]) == (
            shape.channels,
            64 // shape.stride,
            96 // shape.stride,
        )
        assert ours.strides[feature] == shape.stride


def test_our_builders_leave_to_detectron2_what_it_has(converted: dict[str, Converted]) -> None:
    """Set explicitly, they build Detectron2's networks: equal names and initial weights."""
    contract = converted["resnet50"].contract
    for name in ("build_resnet_backbone", "build_resnet_fpn_backbone"):
        task = "FPN" if "fpn" in name else "C4"
        own = name.replace("build_", "build_transfer_")
        theirs = detector(config(contract, task)).state_dict()
        ours = detector(config(contract, task, **{"MODEL.BACKBONE.NAME": own})).state_dict()
        assert list(theirs) == list(ours)
        assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    # Our builders keep the options that only Detectron2's backbone has.
    deformed = {"MODEL.RESNETS.DEFORM_ON_PER_STAGE": [False, False, False, True]}
    dilated = detector(config(contract, "dilated C5", **deformed)).state_dict()
    assert "backbone.bottom_up.res5.0.conv2_offset.weight" in dilated


@pytest.mark.parametrize(("name", "task"), TASKS)
def test_a_detector_of_each_task_is_built_filled_and_runs(
    name: str, task: str, converted: dict[str, Converted]
) -> None:
    weights = converted[name]
    stem, depth = weights.contract.architecture.stem, weights.contract.architecture.depth
    if task in ("dilated C5", "FCN") and depth < 50:
        with pytest.raises(UserError, match=r"MODEL\.RESNETS\.RES5_DILATION 2"):
            config(weights.contract, task)
        return
    cfg = config(weights.contract, task)
    if task == "FCN" and stem != "imagenet":
        with pytest.raises(UserError, match="expected one feature map of stride 16"):
            detector(cfg)
        return
    model = detector(cfg).eval()
    coverage = load_converted(model, weights.model, backbone_type(cfg.MODEL.BACKBONE.NAME))
    assert coverage.loaded == len(weights.model)
    if task == "FPN":
        stride = {"imagenet": 4, "stride2": 2, "cifar": 1}[stem]
        strides = {key: shape.stride for key, shape in model.backbone.output_shape().items()}
        assert strides == {f"p{2 + i}": stride * 2**i for i in range(5)}
    with torch.no_grad():
        (output,) = model([{"image": torch.randint(0, 255, (3, 64, 64)), "height": 64}])
    assert output


@pytest.mark.parametrize("name", ["resnet10", "resnet18 cifar", "resnet18 w2x", "resnet50 stride2"])
def test_where_the_backbone_is_ours_both_engines_start_and_compute_alike(
    name: str, converted: dict[str, Converted]
) -> None:
    """The whole C4 detector has equal names, initial weights, res4 and res5."""
    weights = converted[name]
    theirs = detector(config(weights.contract, "C4")).eval()
    cfg = default_task()
    cfg.merge_from_file(CONFIGS["C4"])
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "MODEL.RESNETS.NORM", "BN"])
    apply_contract(cfg, weights.contract, explicit=())
    torch.manual_seed(1)
    ours = build_embedded(cfg).eval()
    start = theirs.state_dict()
    assert set(start) == set(ours.state_dict())
    for key, value in ours.state_dict().items():
        assert torch.equal(value, start[key]), key
    for model in (theirs, ours):
        load_converted(model, weights.model, backbone_type(cfg.MODEL.BACKBONE.NAME))
    with torch.no_grad():
        image = torch.randn(1, 3, 64, 96)
        expected, actual = theirs.backbone(image)["res4"], ours.backbone(image)["res4"]
        assert torch.equal(expected, actual)
        assert torch.equal(theirs.roi_heads.res5(expected), ours.roi_heads.res5(actual))


def test_freezing_covers_our_stem(converted: dict[str, Converted]) -> None:
    contract = converted["resnet18 cifar"].contract
    frozen = detector(config(contract, "FPN", **{"MODEL.BACKBONE.FREEZE_AT": 2}))
    learning = {n for n, p in frozen.backbone.bottom_up.named_parameters() if p.requires_grad}
    assert learning and not any(name.startswith(("stem", "res2")) for name in learning)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"MODEL.BACKBONE.NAME": "build_retinanet_resnet_fpn_backbone"}, "cannot build ResNet-18"),
        ({"MODEL.RESNETS.DEFORM_ON_PER_STAGE": [False, False, False, True]}, "set all to False"),
    ],
)
def test_what_only_detectron2s_backbone_can_is_refused(
    keys: dict[str, Any], message: str, converted: dict[str, Converted]
) -> None:
    with pytest.raises(UserError, match=message):
        config(converted["resnet18 cifar"].contract, "FPN", **keys)


@pytest.mark.slow
def test_a_run_trains_our_backbone_on_detectron2(small_options, tmp_path) -> None:
    """The record of a run keeps Detectron2's name of the builder."""
    torch.save(network(ARCHS["resnet18 cifar"]).state_dict(), tmp_path / "cifar.pth")
    keys = {
        "MODEL.WEIGHTS": tmp_path / "cifar.pth",
        "OUTPUT_DIR": tmp_path / "out",
        "SOLVER.MAX_ITER": 1,
        "SOLVER.STEPS": (),
        "SOLVER.WARMUP_ITERS": 0,
        "INPUT.MIN_SIZE_TRAIN": (48,),
        "INPUT.MIN_SIZE_TEST": 48,
    }
    options = [str(item) for pair in keys.items() for item in pair]
    config_file = "configs/voc/faster_rcnn_R_18_C4_small.yaml"
    main(["--engine", "detectron2", "--config-file", config_file, *small_options, *options])
    record = read_record(tmp_path / "out" / "run.json")
    assert record.engine == "detectron2"
    assert record.config["MODEL.BACKBONE.NAME"] == "build_resnet_backbone"
    assert record.config["MODEL.RESNETS.STEM"] == "cifar"
    stem = read_trained(tmp_path / "out" / "model_final.pth")["backbone.stem.conv1.weight"]
    assert stem.shape == (64, 3, 3, 3)
