"""The embedded model against the real Detectron2: every quantity, every bit, on the CPU in fp32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from detection.embedded.model import build_model
from tests.oracles import tiny_detector as tiny

pytestmark = pytest.mark.usefixtures("detectron2")

SIZES = [(161, 133), (120, 190), (147, 159)]
# Every key that changes a number of the model, away from its default.
UNUSUAL = {
    **tiny.NARROW_R50,
    "MODEL.BACKBONE.FREEZE_AT": 2,
    "MODEL.RESNETS.STRIDE_IN_1X1": True,
    "MODEL.RESNETS.NUM_GROUPS": 2,
    "MODEL.RESNETS.WIDTH_PER_GROUP": 8,
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS": [[0.4, 1.3]],
    "MODEL.ANCHOR_GENERATOR.OFFSET": 0.5,
    "MODEL.PROPOSAL_GENERATOR.MIN_SIZE": 8,
    "MODEL.RPN.IOU_THRESHOLDS": [0.25, 0.6],
    "MODEL.RPN.POSITIVE_FRACTION": 0.3,
    "MODEL.RPN.NMS_THRESH": 0.6,
    "MODEL.RPN.BBOX_REG_WEIGHTS": (1.5, 2.5, 0.3, 0.7),
    "MODEL.RPN.SMOOTH_L1_BETA": 0.1,
    "MODEL.RPN.LOSS_WEIGHT": 0.6,
    "MODEL.RPN.BBOX_REG_LOSS_WEIGHT": 1.7,
    "MODEL.ROI_HEADS.NAME": "Res5ROIHeads",
    "MODEL.ROI_HEADS.IOU_THRESHOLDS": [0.4],
    "MODEL.ROI_HEADS.POSITIVE_FRACTION": 0.5,
    "MODEL.ROI_HEADS.NMS_THRESH_TEST": 0.3,
    "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS": (8.0, 7.0, 6.0, 5.0),
    "MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA": 0.3,
    "MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_WEIGHT": 2.1,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 6,
    "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": 1,
    "TEST.DETECTIONS_PER_IMAGE": 3,
}


def both(keys: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """Detectron2's model and ours, with the same weights."""
    from tests.oracles import detectron2_engine as d2

    theirs, ours = d2.model(d2.config(keys)), build_model(tiny.task(keys))
    state = tiny.fill(theirs.state_dict(), seed=1)
    theirs.load_state_dict(state)
    ours.load_state_dict(state)
    return theirs, ours


def assert_same(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert set(theirs) == set(ours)
    different = [
        name
        for name, value in theirs.items()
        if not (ours[name] is None if value is None else torch.equal(value, ours[name]))
    ]
    assert not different, different


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_training_equal(
    theirs: nn.Module,
    ours: nn.Module,
    keys: dict[str, Any],
    samples: list[dict[str, Any]],
    steps: int,
) -> None:
    """Losses, gradients, weights and statistics of `steps` steps of SGD, two pictures each."""
    from tests.oracles import detectron2_engine as d2

    # The same optimizer on both sides: what is compared here is the model.
    their_sgd, _ = d2.solver(d2.config(keys), theirs)
    our_sgd, _ = d2.solver(d2.config(keys), ours)
    theirs.train()
    ours.train()
    for step in range(steps):
        batch = [samples[(step + i) % len(samples)] for i in range(2)]
        torch.manual_seed(step)
        their_losses = d2.losses(theirs, batch)
        torch.manual_seed(step)
        our_losses = ours(batch)
        assert list(their_losses) == list(our_losses)
        assert_same(their_losses, our_losses)
        for sgd, losses in ((their_sgd, their_losses), (our_sgd, our_losses)):
            sgd.zero_grad()
            sum(losses.values()).backward()
        assert_same(gradients(theirs), gradients(ours))
        their_sgd.step()
        our_sgd.step()
        assert_same(theirs.state_dict(), ours.state_dict())


def assert_detections_equal(
    theirs: nn.Module, ours: nn.Module, samples: list[dict[str, Any]]
) -> int:
    from tests.oracles import detectron2_engine as d2

    theirs.eval()
    ours.eval()
    count = 0
    with torch.no_grad():
        for sample in samples:
            (found,), (expected,) = ours([sample]), d2.detections(theirs, [sample])
            assert_same(expected, found)
            count += len(found["scores"])
    return count


def pictures_with_an_empty_one() -> list[dict[str, Any]]:
    samples = tiny.pictures(SIZES, seed=3)
    return [*samples, tiny.without_objects(tiny.pictures([(160, 160)], seed=4)[0])]


def assert_all_equal(keys: dict[str, Any], samples: list[dict[str, Any]], steps: int) -> None:
    """Detections, then training, then detections again."""
    theirs, ours = both(keys)
    assert assert_detections_equal(theirs, ours, samples) > 10 * len(samples)
    assert_training_equal(theirs, ours, keys, samples, steps)
    assert_detections_equal(theirs, ours, samples)


def test_r50() -> None:
    assert_all_equal(tiny.NARROW_R50, pictures_with_an_empty_one(), steps=6)


def test_r18() -> None:
    assert_all_equal(tiny.R18, pictures_with_an_empty_one(), steps=5)


def test_every_key_that_changes_a_number() -> None:
    theirs, ours = both(UNUSUAL)
    samples = pictures_with_an_empty_one()
    assert assert_detections_equal(theirs, ours, samples) > len(samples)
    assert_training_equal(theirs, ours, UNUSUAL, samples, steps=3)


def test_frozen_batch_norm() -> None:
    keys = {**tiny.NARROW_R50, "MODEL.RESNETS.NORM": "FrozenBN"}
    assert_all_equal(keys, pictures_with_an_empty_one(), steps=2)


def test_full_size_r50_on_real_pictures(shared_data: Path) -> None:
    samples = []
    for number, path in enumerate(sorted((shared_data / "coco" / "train2017").glob("*.jpg"))[2:4]):
        with Image.open(path) as image:
            width, height = image.size
            scale = 160 / min(width, height)
            small = image.convert("RGB").resize((int(width * scale), int(height * scale)))
        w, h = small.size
        samples.append(
            {
                "image": torch.tensor(np.asarray(small)).permute(2, 0, 1).contiguous(),
                "boxes": torch.tensor([[5.0, 8.5, w * 0.6, h * 0.7], [w * 0.4, 3, w - 2, h - 4]]),
                "classes": torch.tensor([number, 4]),
                "height": height,
                "width": width,
            }
        )
    theirs, ours = both(tiny.FULL_R50)
    assert assert_detections_equal(theirs, ours, samples) > 10
    assert_training_equal(theirs, ours, tiny.FULL_R50, samples, steps=2)


def test_intermediate_quantities() -> None:
    """Features, RPN outputs, anchors, proposals: where a difference starts, if there is one."""
    from detectron2.structures import ImageList as TheirImages

    theirs, ours = both(tiny.NARROW_R50)
    theirs.eval()
    ours.eval()
    samples = tiny.pictures(SIZES, seed=5)
    with torch.no_grad():
        their_images = theirs.preprocess_image(samples)
        our_images = ours.preprocess([sample["image"] for sample in samples])
        assert isinstance(their_images, TheirImages)
        assert torch.equal(their_images.tensor, our_images.tensors)
        assert their_images.image_sizes == our_images.image_sizes
        their_features = theirs.backbone(their_images.tensor)
        our_features = ours.backbone(our_images.tensors)
        assert_same(their_features, our_features)
        maps = [our_features["res4"]]
        theirs_rpn, ours_rpn = theirs.proposal_generator, ours.proposal_generator
        for their_maps, our_maps in zip(
            theirs_rpn.rpn_head(maps), ours_rpn.rpn_head(maps), strict=True
        ):
            assert torch.equal(their_maps[0], our_maps[0])
        (their_anchors,) = theirs_rpn.anchor_generator(maps)
        our_anchors = ours_rpn.anchor_generator(our_images, maps)
        assert torch.equal(their_anchors.tensor, our_anchors[0])
        their_proposals, _ = theirs_rpn(their_images, their_features)
        our_proposals, _ = ours_rpn(our_images, our_features)
        for expected, boxes in zip(their_proposals, our_proposals, strict=True):
            assert len(boxes) == 60
            assert torch.equal(expected.proposal_boxes.tensor, boxes)


@pytest.mark.parametrize("keys", [tiny.NARROW_R50, UNUSUAL], ids=["plain", "unusual"])
def test_the_same_seed_gives_the_same_initial_weights(keys: dict[str, Any]) -> None:
    from tests.oracles import detectron2_engine as d2

    torch.manual_seed(7)
    theirs = d2.model(d2.config(keys))
    torch.manual_seed(7)
    ours = build_model(tiny.task(keys))
    assert_same(theirs.state_dict(), ours.state_dict())
    trainable = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert trainable == {name for name, p in theirs.named_parameters() if p.requires_grad}
