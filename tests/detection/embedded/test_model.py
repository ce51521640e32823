"""The embedded model on its own: refusals, corner cases, formulas by hand."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from detection.data.sample import nonempty
from detection.embedded.boxes import decode, encode, match, rescale, sample
from detection.embedded.layers import FrozenBatchNorm, freeze
from detection.embedded.model import build_model
from detection.embedded.regions import contain_visible, crop_polygons, locate_keypoints, paste_masks
from detection.embedded.roi_heads import Pooler
from detection.embedded.rpn import cell_anchors, grid_anchors
from tests.oracles import tiny_detector as tiny

# A network of this project's own, which Detectron2 does not have.
R10 = {
    **tiny.COMMON,
    "MODEL.RESNETS.DEPTH": 10,
    "MODEL.RESNETS.STEM": "stride2",
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 8,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 8,
}


@pytest.mark.parametrize("stem", ["imagenet", "cifar", "stride2"])
def test_small_networks_train_and_detect(stem):
    torch.manual_seed(0)
    keys = {**R10, "MODEL.RESNETS.STEM": stem, "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0}
    model = build_model(tiny.task(keys))
    stride = {"imagenet": 16, "cifar": 4, "stride2": 8}[stem]
    assert model.backbone.strides["res4"] == stride
    samples = tiny.images([(61, 75), (80, 52)], seed=1)
    losses = model(samples)
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    with torch.no_grad():
        for found, sample in zip(model(samples), samples, strict=True):
            assert len(found["scores"]) == 100
            assert found["classes"].max() < 5
            assert (found["scores"].diff() <= 0).all()
            limit = torch.tensor([sample["width"], sample["height"]] * 2)
            assert (found["boxes"] >= 0).all() and (found["boxes"] <= limit).all()


@pytest.mark.parametrize("base", [R10, tiny.CASCADE], ids=["standard", "cascade"])
def test_nothing_found_and_nothing_proposed(base):
    model = build_model(tiny.task({**base, "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 1.0}))
    samples = tiny.images([(61, 75)], seed=1)
    model.eval()
    with torch.no_grad():
        assert model(samples)[0]["boxes"].shape == (0, 4)
        rules = dataclasses.replace(model.proposal_generator.rules, min_size_px=1e6)
        model.proposal_generator.rules = rules
        found = model(samples)[0]
    assert [len(found[name]) for name in ("boxes", "scores", "classes")] == [0, 0, 0]


def test_a_batch_without_any_object():
    torch.manual_seed(0)
    model = build_model(tiny.task(R10))
    samples = [tiny.without_objects(s) for s in tiny.images([(61, 75), (80, 52)], seed=1)]
    losses = model(samples)
    sum(losses.values()).backward()
    assert losses["loss_box_reg"] == losses["loss_rpn_loc"] == 0
    assert losses["loss_cls"] > 0 and losses["loss_rpn_cls"] > 0


def test_rpn_losses_are_divided_by_the_requested_size():
    """Not by the number of anchors found, which here is 960 in either case."""
    samples = tiny.images([(61, 75)], seed=1)
    sums = []
    for requested in (2000, 4000):
        torch.manual_seed(0)
        model = build_model(tiny.task({**R10, "MODEL.RPN.BATCH_SIZE_PER_IMAGE": requested}))
        losses = model(samples)
        sums.append([losses[n].item() * requested for n in ("loss_rpn_cls", "loss_rpn_loc")])
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_weights_that_are_not_finite():
    """In training an error; in evaluation, as in Detectron2, the affected boxes are dropped."""
    model = build_model(tiny.task(R10))
    samples = tiny.images([(61, 75)], seed=1)
    with torch.no_grad():
        model.proposal_generator.rpn_head.anchor_deltas.bias[0] = float("nan")
    with pytest.raises(FloatingPointError, match="proposals are not finite"):
        model(samples)
    model.eval()
    with torch.no_grad():
        found = model(samples)[0]
    assert torch.isfinite(found["boxes"]).all()


def test_anchors_by_hand():
    boxes = grid_anchors(cell_anchors([8, 16], [0.25, 1.0]), 10, 0.5, (2, 1))
    assert boxes.tolist() == [
        # cell (0, 0), center (5, 5): size 8 before size 16, ratio h / w = 1/4 before 1
        [-3, 3, 13, 7],
        [1, 1, 9, 9],
        [-11, 1, 21, 9],
        [-3, -3, 13, 13],
        # cell (1, 0), center (5, 15)
        [-3, 13, 13, 17],
        [1, 11, 9, 19],
        [-11, 11, 21, 19],
        [-3, 7, 13, 23],
    ]


def test_boxes_by_hand():
    boxes = torch.tensor([[0.0, 0.0, 10.0, 20.0], [5.0, 5.0, 5.0, 9.0]])
    assert nonempty(boxes).tolist() == [True, False]
    assert nonempty(boxes, 10.0).tolist() == [False, False]
    assert rescale(boxes, (20, 10), (10, 30)).tolist() == [[0, 0, 30, 10], [15, 2.5, 15, 4.5]]
    assert rescale(boxes, (10, 5), (20, 10)).tolist() == [[0, 0, 10, 20], [10, 10, 10, 18]]
    deltas = torch.tensor([[0.5, 0.0, 0.0, 100.0]], dtype=torch.bfloat16)
    decoded = decode(deltas, boxes[:1], (1.0, 1.0, 1.0, 1.0))
    assert decoded.dtype == torch.float32
    # Shifted by half a width; the height is clamped to 1000 / 16 times itself.
    assert decoded[0].tolist() == pytest.approx([5, 10 - 625, 15, 10 + 625], rel=1e-5)
    there = encode(boxes[:1] + 5, boxes[:1], (10.0, 10.0, 5.0, 5.0))
    assert there.tolist() == [[5.0, 2.5, 0.0, 0.0]]


def test_matching_by_hand():
    objects = torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 22.0, 22.0]])
    boxes = torch.tensor(
        [[0.0, 0.0, 10.0, 8.0], [0.0, 0.0, 5.0, 10.0], [0.0, 0.0, 10.0, 2.0], [18, 18, 22, 22]]
    )
    assert match(objects, boxes, (0.3, 0.7), each_object=False).tolist() == [0, -2, -1, -1]
    # The second object's best box overlaps it by a quarter.
    assert match(objects, boxes, (0.3, 0.7), each_object=True).tolist() == [0, -2, -1, 1]
    assert match(objects[:0], boxes, (0.3, 0.7), each_object=True).tolist() == [-1] * 4


def test_a_sample_has_its_size_and_its_share():
    torch.manual_seed(0)
    matched = torch.tensor([4] * 30 + [-1] * 30 + [-2] * 30)
    positive, negative = sample(matched, 20, 0.25)
    assert (len(positive), len(negative)) == (5, 15)
    assert (matched[positive] == 4).all() and (matched[negative] == -1).all()
    assert len(set(negative.tolist())) == 15
    assert negative.tolist() != sorted(negative.tolist())
    few = sample(torch.tensor([0, -1, -1, -2]), 20, 0.5)
    assert [sorted(part.tolist()) for part in few] == [[0], [1, 2]]


def test_a_region_goes_to_the_map_of_its_size():
    pooler = Pooler(7, (4, 8, 16, 32), 0)
    sides = torch.tensor([1.0, 111.9, 112.0, 223.9, 224.0, 447.9, 448.0, 5000.0])
    boxes = torch.stack([sides * 0, sides * 0, sides, sides], dim=1)
    assert pooler.levels(boxes).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert Pooler(7, (16, 32), 0).levels(boxes).tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


def test_masks_by_hand():
    square = [np.array([2.0, 2.0, 6.0, 2.0, 6.0, 6.0, 2.0, 6.0])]
    (cropped,) = crop_polygons([square], torch.tensor([[0.0, 0.0, 8.0, 8.0]]), 4)
    assert cropped.int().tolist() == [[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    (pasted,) = paste_masks(torch.ones(1, 4, 4), torch.tensor([[1.0, 0.0, 3.0, 2.0]]), (3, 4))
    assert pasted.int().tolist() == [[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert paste_masks(torch.ones(0, 4, 4), torch.zeros(0, 4), (3, 4)).shape == (0, 3, 4)


def test_keypoints_by_hand():
    heatmaps = torch.zeros(1, 1, 2, 2)
    heatmaps[0, 0, 1, 0] = 3.0
    (((x, y, score),),) = locate_keypoints(heatmaps, torch.tensor([[4.0, 8.0, 6.0, 10.0]])).tolist()
    assert (x, y) == (4.5, 9.5)
    assert score == pytest.approx(1 / (1 + 3 * np.exp(-3)))
    points = torch.tensor([[[5.0, 5.0, 1.0], [50.0, 5.0, 2.0]], [[5.0, 5.0, 0.0], [0.0, 0.0, 0.0]]])
    boxes = torch.tensor([[0.0, 0.0, 5.0, 5.0]] * 2)
    assert contain_visible(points, boxes).tolist() == [True, False]
    assert contain_visible(points[:1], boxes[:1] + 60).tolist() == [False]


def test_frozen_batch_norm_ignores_the_batch_and_learns_nothing():
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


@pytest.mark.parametrize(
    "keys",
    [
        R10,
        tiny.C4_MASK,
        tiny.DILATED_C5,
        tiny.FPN_MASK,
        tiny.KEYPOINTS,
        tiny.FCN,
        tiny.CASCADE,
        tiny.RETINANET,
    ],
    ids=["r10", "c4-mask", "dilated-c5", "fpn-mask", "keypoints", "fcn16s", "cascade", "retinanet"],
)
def test_mixed_precision_stays_close_to_full_precision(keys):
    torch.manual_seed(0)
    model = build_model(tiny.task(keys))
    samples = tiny.images([(61, 75), (80, 52)], seed=1, num_classes=1)
    samples = [tiny.with_labels(tiny.with_shapes(sample)) for sample in samples]
    torch.manual_seed(1)
    full = model(samples)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(samples)
    for name, loss in full.items():
        assert mixed[name].dtype == torch.float32
        # Proposals of nearly equal logits change places, so that others are sampled.
        assert mixed[name].item() == pytest.approx(loss.item(), rel=0.3, abs=0.3)
    sum(mixed.values()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
