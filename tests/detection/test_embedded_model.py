"""The embedded model on its own: refusals, corner cases, formulas by hand."""

from typing import Any

import pytest
import torch
from torch import nn

from detection.embedded.boxes import Float32BoxCoder, nonempty, rescale
from detection.embedded.model import build_model
from detection.embedded.norm import FrozenBatchNorm, freeze
from detection.embedded.rpn import GridAnchors
from moco.errors import UserError
from tests.oracles import tiny_detector as tiny

# A network of this project's own, which Detectron2 does not have.
R10 = {
    **tiny.COMMON,
    "MODEL.RESNETS.DEPTH": 10,
    "MODEL.RESNETS.STEM": "stride2",
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 8,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 8,
}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("MODEL.META_ARCHITECTURE", "RetinaNet", "GeneralizedRCNN"),
        ("MODEL.MASK_ON", True, "False"),
        ("MODEL.KEYPOINT_ON", True, "False"),
        ("MODEL.BACKBONE.NAME", "build_resnet_fpn_backbone", "build_resnet_backbone"),
        ("MODEL.RESNETS.RES5_DILATION", 2, "1"),
        ("MODEL.RESNETS.NORM", "GN", "BN, FrozenBN"),
        ("MODEL.RESNETS.DEPTH", 26, "10, 18, 34, 50, 101, 152"),
        ("MODEL.RESNETS.OUT_FEATURES", ["res5"], "res4"),
        ("MODEL.ROI_HEADS.NAME", "StandardROIHeads", "Res5ROIHeads"),
        ("MODEL.RPN.BBOX_REG_LOSS_TYPE", "giou", "smooth_l1"),
        ("MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", True, "False"),
        ("MODEL.ANCHOR_GENERATOR.SIZES", [[32], [64]], "one list"),
        ("INPUT.FORMAT", "L", "RGB, BGR"),
        ("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", "WarmupMultiStepLR"),
        ("TEST.AUG.ENABLED", True, "False"),
    ],
)
def test_what_cannot_be_honoured_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        build_model(tiny.task({**tiny.NARROW_R50, key: value}))
    message = str(caught.value)
    shown = value if isinstance(value, str) else str(value)
    assert key in message and shown in message and said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"MODEL.RESNETS.RES2_OUT_CHANNELS": 256}, r"RES2_OUT_CHANNELS 256.*set it to 8"),
        ({"MODEL.RESNETS.NUM_GROUPS": 2}, r"NUM_GROUPS 2.*set it to 1"),
        ({"MODEL.ROI_HEADS.NAME": "Res5ROIHeads"}, r"use Res5ROIHeadsExtraNorm"),
    ],
)
def test_keys_that_contradict_each_other(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build_model(tiny.task({**R10, **keys}))


@pytest.mark.parametrize("stem", ["imagenet", "cifar", "stride2"])
def test_small_networks_train_and_detect(stem: str) -> None:
    torch.manual_seed(0)
    keys = {**R10, "MODEL.RESNETS.STEM": stem, "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0}
    model = build_model(tiny.task(keys))
    stride = {"imagenet": 16, "cifar": 4, "stride2": 8}[stem]
    assert model.backbone.strides["res4"] == stride
    samples = tiny.pictures([(61, 75), (80, 52)], seed=1)
    losses = model(samples)
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing
    model.eval()
    with torch.no_grad():
        for found, sample in zip(model(samples), samples, strict=True):
            assert len(found["scores"]) == 100
            assert found["classes"].max() < 5
            assert (found["scores"].diff() <= 0).all()
            limit = torch.tensor([sample["width"], sample["height"]] * 2)
            assert (found["boxes"] >= 0).all() and (found["boxes"] <= limit).all()


def test_nothing_found_and_nothing_proposed() -> None:
    model = build_model(tiny.task({**R10, "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 1.0}))
    samples = tiny.pictures([(61, 75)], seed=1)
    model.eval()
    with torch.no_grad():
        assert model(samples)[0]["boxes"].shape == (0, 4)
        model.proposal_generator.min_size_px = 1e6
        found = model(samples)[0]
    assert [len(found[name]) for name in ("boxes", "scores", "classes")] == [0, 0, 0]


def test_a_batch_without_any_object() -> None:
    torch.manual_seed(0)
    model = build_model(tiny.task(R10))
    samples = [tiny.without_objects(s) for s in tiny.pictures([(61, 75), (80, 52)], seed=1)]
    losses = model(samples)
    sum(losses.values()).backward()
    assert losses["loss_box_reg"] == losses["loss_rpn_loc"] == 0
    assert losses["loss_cls"] > 0 and losses["loss_rpn_cls"] > 0


def test_rpn_losses_are_divided_by_the_size_asked_for() -> None:
    """Not by the number of anchors found, which here is 960 in either case."""
    samples = tiny.pictures([(61, 75)], seed=1)
    sums = []
    for asked in (2000, 4000):
        torch.manual_seed(0)
        model = build_model(tiny.task({**R10, "MODEL.RPN.BATCH_SIZE_PER_IMAGE": asked}))
        losses = model(samples)
        sums.append([losses[n].item() * asked for n in ("loss_rpn_cls", "loss_rpn_loc")])
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_weights_that_are_not_finite() -> None:
    """In training an error; in evaluation, as in Detectron2, the affected boxes are dropped."""
    model = build_model(tiny.task(R10))
    samples = tiny.pictures([(61, 75)], seed=1)
    with torch.no_grad():
        model.proposal_generator.rpn_head.anchor_deltas.bias[0] = float("nan")
    with pytest.raises(FloatingPointError, match="proposals are not finite"):
        model(samples)
    model.eval()
    with torch.no_grad():
        found = model(samples)[0]
    assert torch.isfinite(found["boxes"]).all()


def test_anchors_by_hand() -> None:
    anchors = GridAnchors([[8, 16]], [[0.25, 1.0]], strides=[10], offset=0.5)
    from torchvision.models.detection.image_list import ImageList

    images = ImageList(torch.zeros(2, 3, 25, 13), [(25, 13), (20, 10)])
    boxes, again = anchors(images, [torch.zeros(2, 7, 2, 1)])
    assert torch.equal(boxes, again)
    assert boxes.tolist() == [
        # cell (0, 0), centre (5, 5): size 8 before size 16, ratio h / w = 1/4 before 1
        [-3, 3, 13, 7],
        [1, 1, 9, 9],
        [-11, 1, 21, 9],
        [-3, -3, 13, 13],
        # cell (1, 0), centre (5, 15)
        [-3, 13, 13, 17],
        [1, 11, 9, 19],
        [-11, 11, 21, 19],
        [-3, 7, 13, 23],
    ]


def test_boxes_by_hand() -> None:
    boxes = torch.tensor([[0.0, 0.0, 10.0, 20.0], [5.0, 5.0, 5.0, 9.0]])
    assert nonempty(boxes).tolist() == [True, False]
    assert nonempty(boxes, 10.0).tolist() == [False, False]
    assert rescale(boxes, (20, 10), (10, 30)).tolist() == [[0, 0, 30, 10], [15, 2.5, 15, 4.5]]
    assert rescale(boxes, (10, 5), (20, 10)).tolist() == [[0, 0, 10, 20], [10, 10, 10, 18]]
    coder = Float32BoxCoder((1.0, 1.0, 1.0, 1.0))
    deltas = torch.tensor([[0.5, 0.0, 0.0, 100.0]], dtype=torch.bfloat16)
    decoded = coder.decode(deltas, [boxes[:1]])
    assert decoded.dtype == torch.float32
    # Shifted by half a width; the height is clamped to 1000 / 16 times itself.
    assert decoded[0, 0].tolist() == pytest.approx([5, 10 - 625, 15, 10 + 625], rel=1e-5)


def test_frozen_batch_norm_ignores_the_batch_and_learns_nothing() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor.uniform_(0.5, 1.5)
    block = nn.Sequential(nn.Conv2d(3, 3, 1), norm)
    x = torch.randn(2, 3, 4, 4)
    expected = block.eval()(x)
    freeze(block.train())
    assert isinstance(block[1], FrozenBatchNorm)
    assert not [p for p in block.parameters() if p.requires_grad]
    assert torch.equal(block(x), expected)
    torch.testing.assert_close(block(x.clone().requires_grad_()), expected)


def test_mixed_precision_stays_close_to_full_precision() -> None:
    torch.manual_seed(0)
    model = build_model(tiny.task(R10))
    samples = tiny.pictures([(61, 75), (80, 52)], seed=1)
    torch.manual_seed(1)
    full = model(samples)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(samples)
    for name, loss in full.items():
        assert mixed[name].dtype == torch.float32
        assert mixed[name].item() == pytest.approx(loss.item(), rel=0.2, abs=0.02)
