"""Bitwise equality of the embedded model with Detectron2 in every quantity, on the CPU in fp32."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.oracles import tiny_detector as tiny

pytestmark = [pytest.mark.detectron2, pytest.mark.usefixtures("detectron2")]

SIZES = [(161, 133), (120, 190), (147, 159)]
# Values of every head and pyramid that the task files do not use.
UNUSUAL_FPN = {
    **tiny.FPN_MASK,
    "MODEL.BACKBONE.FREEZE_AT": 1,
    "MODEL.FPN.NORM": "",
    "MODEL.FPN.FUSE_TYPE": "avg",
    "MODEL.FPN.IN_FEATURES": ["res3", "res4", "res5"],
    "MODEL.RPN.IN_FEATURES": ["p3", "p4", "p5", "p6"],
    "MODEL.ANCHOR_GENERATOR.SIZES": [[16, 24], [32, 48], [64, 96], [128, 200]],
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS": [[0.5, 2.0], [1.0, 3.0], [0.5, 1.0], [1.0, 2.0]],
    "MODEL.ROI_HEADS.IN_FEATURES": ["p4", "p5"],
    "MODEL.ROI_BOX_HEAD.NUM_CONV": 1,
    "MODEL.ROI_BOX_HEAD.CONV_DIM": 32,
    "MODEL.ROI_BOX_HEAD.NORM": "GN",
    "MODEL.ROI_BOX_HEAD.NUM_FC": 1,
    "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": 2,
    "MODEL.ROI_MASK_HEAD.NUM_CONV": 1,
    "MODEL.ROI_MASK_HEAD.NORM": "BN",
    "MODEL.ROI_MASK_HEAD.POOLER_SAMPLING_RATIO": 1,
    "INPUT.MASK_FORMAT": "bitmask",
}
UNUSUAL_KEYPOINTS = {
    **tiny.KEYPOINTS,
    "MODEL.MASK_ON": True,
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 8,
    "MODEL.RESNETS.NORM": "FrozenBN",
    "MODEL.ROI_BOX_HEAD.NUM_CONV": 1,
    "MODEL.ROI_BOX_HEAD.CONV_DIM": 8,
    "MODEL.ROI_BOX_HEAD.NUM_FC": 0,
    "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS": 3,
    "MODEL.ROI_KEYPOINT_HEAD.LOSS_WEIGHT": 0.7,
    "MODEL.ROI_KEYPOINT_HEAD.NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS": False,
    "MODEL.ROI_KEYPOINT_HEAD.POOLER_SAMPLING_RATIO": 2,
}
# The heads of ViTDet: layer norm, an RPN of two convolutions, four of them in the box head.
LAYER_NORM = {
    **tiny.FPN_MASK,
    "MODEL.FPN.NORM": "LN",
    "MODEL.RPN.CONV_DIMS": [-1, 24],
    "MODEL.ROI_BOX_HEAD.NUM_CONV": 4,
    "MODEL.ROI_BOX_HEAD.CONV_DIM": 8,
    "MODEL.ROI_BOX_HEAD.NUM_FC": 1,
    "MODEL.ROI_BOX_HEAD.NORM": "LN",
    "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG": True,
    "MODEL.ROI_MASK_HEAD.NORM": "LN",
}
CONV_BN = {
    **tiny.FPN_MASK,
    "MODEL.RPN.CONV_DIMS": [24],
    "MODEL.ROI_BOX_HEAD.NUM_CONV": 4,
    "MODEL.ROI_BOX_HEAD.CONV_DIM": 8,
    "MODEL.ROI_BOX_HEAD.NUM_FC": 1,
    "MODEL.ROI_BOX_HEAD.NORM": "BN",
    "MODEL.ROI_MASK_HEAD.NORM": "BN",
}
UNUSUAL_CASCADE = {
    **tiny.CASCADE,
    **{key: value for key, value in tiny.KEYPOINTS.items() if "KEYPOINT" in key},
    "MODEL.ROI_HEADS.NUM_CLASSES": 1,
    "MODEL.ROI_HEADS.IOU_THRESHOLDS": [0.4],
    "MODEL.ROI_BOX_CASCADE_HEAD.IOUS": (0.4, 0.45),
    "MODEL.ROI_BOX_CASCADE_HEAD.BBOX_REG_WEIGHTS": ((5.0, 6.0, 3.0, 4.0), (9.0, 8.0, 7.0, 6.0)),
    "MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE": True,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.05,
}
SIGMOID = {**tiny.NARROW_R50, "MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE": True}
UNUSUAL_RETINANET = {
    **tiny.RETINANET,
    "MODEL.FPN.NORM": "LN",
    "MODEL.RPN.IN_FEATURES": ["p3"],
    "MODEL.RETINANET.IN_FEATURES": ["p4", "p5", "p7"],
    "MODEL.ANCHOR_GENERATOR.SIZES": [[20, 30, 50]],
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS": [[0.5, 1.5]],
    "MODEL.RETINANET.NUM_CONVS": 1,
    "MODEL.RETINANET.NORM": "LN",
    "MODEL.RETINANET.IOU_THRESHOLDS": [0.45],
    "MODEL.RETINANET.IOU_LABELS": [0, 1],
    "MODEL.RETINANET.PRIOR_PROB": 0.2,
    "MODEL.RETINANET.FOCAL_LOSS_ALPHA": 0.6,
    "MODEL.RETINANET.FOCAL_LOSS_GAMMA": 1.5,
    "MODEL.RETINANET.BBOX_REG_WEIGHTS": (2.0, 3.0, 0.5, 0.7),
    "MODEL.RETINANET.SMOOTH_L1_LOSS_BETA": 0.0,
    "MODEL.RETINANET.TOPK_CANDIDATES_TEST": 7,
    "MODEL.RETINANET.NMS_THRESH_TEST": 0.3,
    "TEST.DETECTIONS_PER_IMAGE": 4,
}
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
UNUSUAL_VIT = {
    **tiny.VIT_SFP,
    "MODEL.BACKBONE.FREEZE_AT": 2,
    "MODEL.BACKBONE.SQUARE_PAD": 209,
    "MODEL.VIT.PATCH_SIZE": 8,
    "MODEL.VIT.EMBED_DIM": 64,
    "MODEL.VIT.QKV_BIAS": False,
    "MODEL.VIT.LAYER_SCALE": True,
    "MODEL.VIT.CLASS_POSITION": False,
    "MODEL.VIT.LAYER_NORM_EPS": 1e-3,
    "MODEL.VIT.ACTIVATION": "quick_gelu",
    "MODEL.VIT.PRE_NORM": True,
    "MODEL.VIT.PATCH_BIAS": False,
    "MODEL.VIT.WINDOW_SIZE": 0,
    "MODEL.VIT.CHECKPOINT_BLOCKS": True,
    "MODEL.FPN.NORM": "GN",
    "MODEL.FPN.OUT_CHANNELS": 32,
    "INPUT.MAX_SIZE_TRAIN": 200,
    "INPUT.MAX_SIZE_TEST": 200,
}
UNUSUAL_VIT_FPN = {
    **tiny.VIT_FPN,
    "MODEL.VIT.GLOBAL_BLOCKS": [],
    "MODEL.VIT.REL_POS": False,
    "MODEL.VIT.DEPTH": 5,
    "MODEL.FPN.NORM": "LN",
    "MODEL.FPN.FUSE_TYPE": "avg",
    "MODEL.BACKBONE.SQUARE_PAD": 192,
    "INPUT.MAX_SIZE_TRAIN": 190,
    "INPUT.MAX_SIZE_TEST": 190,
}
CONVNEXT = {
    **tiny.FPN_MASK,
    "MODEL.BACKBONE.NAME": "build_convnext_fpn_backbone",
    "MODEL.CONVNEXT.DEPTHS": [1, 2, 1, 2],
    "MODEL.CONVNEXT.DIMS": [8, 12, 16, 24],
    "MODEL.CONVNEXT.DROP_PATH": 0.5,
    "MODEL.FPN.NORM": "",
}
CONVNEXT_V2 = {
    **CONVNEXT,
    "MODEL.CONVNEXT.LAYER_SCALE": False,
    "MODEL.CONVNEXT.GRN": True,
    "MODEL.BACKBONE.FREEZE_AT": 2,
    "MODEL.BACKBONE.SQUARE_PAD": 224,
    "INPUT.MAX_SIZE_TRAIN": 224,
    "INPUT.MAX_SIZE_TEST": 224,
}
SWIN = {
    **tiny.FPN_MASK,
    "MODEL.BACKBONE.NAME": "build_swin_fpn_backbone",
    "MODEL.SWIN.EMBED_DIM": 8,
    "MODEL.SWIN.DEPTHS": [1, 2, 2, 1],
    "MODEL.SWIN.NUM_HEADS": [1, 2, 4, 8],
    "MODEL.SWIN.WINDOW_SIZE": 3,
    "MODEL.SWIN.DROP_PATH": 0.5,
    "MODEL.FPN.NORM": "",
}
SWIN_CASCADE = {
    **SWIN,
    "MODEL.ROI_HEADS.NAME": "CascadeROIHeads",
    "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG": True,
    "MODEL.SWIN.QKV_BIAS": False,
    "MODEL.BACKBONE.FREEZE_AT": 2,
    "MODEL.BACKBONE.SQUARE_PAD": 224,
    "MODEL.FPN.NORM": "LN",
    "INPUT.MAX_SIZE_TRAIN": 224,
    "INPUT.MAX_SIZE_TEST": 224,
}
TIMM = {
    **tiny.FPN_MASK,
    "MODEL.BACKBONE.NAME": "build_timm_fpn_backbone",
    "MODEL.TIMM.NAME": "regnety_002",
    "MODEL.TIMM.DROP_PATH": 0.3,
    "MODEL.FPN.NORM": "",
}


ARCHITECTURES = {
    "r50-c4": tiny.NARROW_R50,
    "r18-c4": tiny.NARROW_R18,
    "r50-c4-frozen-bn": {**tiny.NARROW_R50, "MODEL.RESNETS.NORM": "FrozenBN"},
    "r50-c4-mask": tiny.C4_MASK,
    "r18-c4-mask": {**tiny.NARROW_R18, "MODEL.MASK_ON": True, "MODEL.ROI_MASK_HEAD.CONV_DIM": 8},
    "r50-c4-unusual": UNUSUAL,
    "r50-dilated-c5": tiny.DILATED_C5,
    "r50-fpn-mask": tiny.FPN_MASK,
    "r50-fpn-unusual": UNUSUAL_FPN,
    "r50-fpn-keypoints": tiny.KEYPOINTS,
    "r50-fpn-keypoints-unusual": UNUSUAL_KEYPOINTS,
    "r50-fpn-square": {
        **tiny.FPN,
        "MODEL.BACKBONE.SQUARE_PAD": 200,
        "INPUT.MAX_SIZE_TRAIN": 200,
        "INPUT.MAX_SIZE_TEST": 200,
    },
    "r50-fcn16s": tiny.FCN,
    "vit-linear": tiny.VIT_LINEAR,
    "vit-linear-frozen": tiny.VIT_LINEAR_FROZEN,
    "vit-upernet": tiny.VIT_UPERNET,
    "r50-upernet": tiny.R50_UPERNET,
    "r50-c4-sigmoid": SIGMOID,
    "r50-fpn-layer-norm": LAYER_NORM,
    "r50-fpn-4conv1fc": CONV_BN,
    "r50-cascade-mask": tiny.CASCADE,
    "r50-cascade-unusual": UNUSUAL_CASCADE,
    "r50-retinanet": tiny.RETINANET,
    "r50-retinanet-unusual": UNUSUAL_RETINANET,
    "vit-sfp": tiny.VIT_SFP,
    "vit-sfp-unusual": UNUSUAL_VIT,
    "vit-sfp-dinov3": tiny.DINO,
    "vit-fpn-mask": tiny.VIT_FPN,
    "vit-fpn-mask-unusual": UNUSUAL_VIT_FPN,
    "convnext-fpn-mask": CONVNEXT,
    "convnext-v2-fpn-mask-square": CONVNEXT_V2,
    "swin-fpn-mask": SWIN,
    "swin-cascade-mask-square": SWIN_CASCADE,
    "timm-fpn-mask": TIMM,
    **tiny.upernets(convnext=CONVNEXT, swin=SWIN, timm=TIMM),
}


def both(keys):
    """Build Detectron2's model and ours, check that a seed makes them equal, and fill both."""
    from tests.oracles import detectron2_engine as d2

    theirs, ours = d2.same_start(keys)
    state = tiny.fill(theirs.state_dict(), seed=1)
    theirs.load_state_dict(state)
    ours.load_state_dict(state)
    return theirs, ours


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_training_equal(theirs, ours, keys, batches):
    """Compare losses, gradients, weights and statistics in a step of SGD on every batch.

    Returns:
        The largest value of each loss.
    """
    from tests.oracles import detectron2_engine as d2

    # The same optimizer on both sides: what is compared here is the model.
    their_sgd, _ = d2.solver(d2.config(keys), theirs)
    our_sgd, _ = d2.solver(d2.config(keys), ours)
    theirs.train()
    ours.train()
    their_regions, our_regions = numbers_of_regions(theirs), numbers_of_regions(ours)
    largest = {}
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        their_losses = d2.losses(theirs, batch)
        after = torch.get_rng_state()
        torch.manual_seed(step)
        our_losses = ours(batch)
        assert torch.equal(after, torch.get_rng_state())
        assert list(their_losses) == list(our_losses)
        tiny.assert_same(their_losses, our_losses)
        for sgd, losses in ((their_sgd, their_losses), (our_sgd, our_losses)):
            sgd.zero_grad()
            sum(losses.values()).backward()
        tiny.assert_same(gradients(theirs), gradients(ours))
        their_sgd.step()
        our_sgd.step()
        tiny.assert_same(theirs.state_dict(), ours.state_dict())
        for name, loss in our_losses.items():
            largest[name] = max(largest.get(name, 0.0), loss.item())
    assert their_regions == our_regions
    return largest


def numbers_of_regions(model):
    """Return a list to which each head appends its name and its number of regions."""
    seen = []
    for name, module in model.named_modules():
        if name.endswith(("box_predictor", "mask_head", "keypoint_head")):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.append((name, len(inputs[0])))
            )
    return seen


def assert_answers_equal(theirs, ours, samples):
    """Compare detections, masks, keypoints and pixel scores, on one image and on all at once."""
    from tests.oracles import detectron2_engine as d2

    theirs.eval()
    ours.eval()
    answers = []
    with torch.no_grad():
        for batch in ([samples[0]], samples):
            for found, expected in zip(ours(batch), d2.detections(theirs, batch), strict=True):
                tiny.assert_same(expected, found)
                answers.append(found)
    return answers


def images(keys):
    """Return images of different sizes with several objects, none, one, and one of a pixel."""
    samples = tiny.images(SIZES, seed=3)  # with 1, 2 and 3 objects
    samples.insert(1, tiny.without_objects(tiny.images([(160, 160)], seed=4)[0]))
    samples.append(tiny.one_pixel(tiny.images([(97, 114)], seed=5)[0]))
    number = keys.get("MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", 17)
    prepared = []
    for sample in samples:
        sample["classes"] %= keys["MODEL.ROI_HEADS.NUM_CLASSES"]
        sample = tiny.with_labels(tiny.with_shapes(sample, number))
        if len(sample["boxes"]) > 2:
            sample["keypoints"][1] = 0.0  # an object that the keypoint head never sees
        if keys.get("INPUT.MASK_FORMAT") == "bitmask":
            sample = tiny.with_bitmaps(sample)
        prepared.append(sample)
    return prepared


@pytest.mark.parametrize("keys", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_every_quantity(keys):
    """Initial weights are equal, and outputs before and after five equal steps of training."""
    theirs, ours = both(keys)
    samples = images(keys)
    answers = assert_answers_equal(theirs, ours, samples)
    some, none, two, three, pixel = samples
    batches = [[some, two], [none, three], [pixel], [three, pixel], [two, some, none]]
    largest = assert_training_equal(theirs, ours, keys, batches)
    assert_answers_equal(theirs, ours, samples)
    # The comparison is not about zeros.
    assert min(largest.values()) > 1e-3
    if "sem_seg" in answers[0]:
        auxiliary = {"loss_sem_seg_auxiliary"} & set(largest)
        assert set(largest) == {"loss_sem_seg", *auxiliary}
        assert bool(auxiliary) == (keys["MODEL.SEM_SEG_HEAD.NAME"] == "UPerHead")
        assert all(len(answer["sem_seg"].argmax(dim=0).unique()) > 1 for answer in answers)
        return
    assert sum(len(answer["scores"]) for answer in answers) > len(answers)
    boxes = {"loss_cls", "loss_box_reg"}
    if keys["MODEL.ROI_HEADS.NAME"] == "CascadeROIHeads":
        stages = range(len(keys.get("MODEL.ROI_BOX_CASCADE_HEAD.IOUS", "123")))
        boxes = {f"{name}_stage{number}" for name in boxes for number in stages}
    wanted = {*boxes, "loss_rpn_cls", "loss_rpn_loc"}
    if keys.get("MODEL.META_ARCHITECTURE") == "RetinaNet":
        wanted = boxes
    if keys.get("MODEL.MASK_ON"):
        wanted |= {"loss_mask"}
        shares = torch.cat([answer["masks"].float().mean(dim=(1, 2)) for answer in answers])
        assert 0 < shares.mean() < 1
    if keys.get("MODEL.KEYPOINT_ON"):
        wanted |= {"loss_keypoint"}
        points = torch.cat([answer["keypoints"] for answer in answers])
        assert len(points.flatten().unique()) > 100
    assert set(largest) == wanted


@pytest.mark.parametrize(
    "keys", [tiny.NARROW_R50, tiny.DILATED_C5, tiny.FPN, UNUSUAL_FPN, CONVNEXT]
)
def test_intermediate_quantities(keys):
    """Features, RPN outputs, anchors and proposals are equal, which locates any difference."""
    theirs, ours = both(keys)
    theirs.eval()
    ours.eval()
    samples = tiny.images(SIZES, seed=5)
    with torch.no_grad():
        images = theirs.preprocess_image(samples)
        _, batch = ours.images(samples)
        assert torch.equal(images.tensor, batch)
        features = theirs.backbone(images.tensor)
        tiny.assert_same(features, ours.backbone(batch))
        maps = [features[name] for name in keys.get("MODEL.RPN.IN_FEATURES", ["res4"])]
        theirs_rpn, ours_rpn = theirs.proposal_generator, ours.proposal_generator
        logits, deltas = theirs_rpn.rpn_head(maps)
        for x, one, four in zip(maps, logits, deltas, strict=True):
            our_logits, our_deltas = ours_rpn.rpn_head(x)
            assert torch.equal(one.permute(0, 2, 3, 1).flatten(1), our_logits)
            corners = four.unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3)
            assert torch.equal(corners, our_deltas)
        for expected, anchors in zip(
            theirs_rpn.anchor_generator(maps), ours_rpn.anchors(maps), strict=True
        ):
            assert torch.equal(expected.tensor, anchors)
        their_proposals, _ = theirs_rpn(images, features)
        our_proposals, _ = ours_rpn(features, images.image_sizes)
        for found, boxes in zip(their_proposals, our_proposals, strict=True):
            assert len(boxes) == 60
            assert torch.equal(found.proposal_boxes.tensor, boxes)


@pytest.mark.parametrize("keys", [tiny.FPN_MASK, tiny.KEYPOINTS], ids=["mask", "keypoints"])
def test_512_regions(keys):
    """Training is equal with the paper's number of regions and Detectron2's of proposals."""
    keys = {
        **keys,
        "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 2000,
        "MODEL.RPN.POST_NMS_TOPK_TRAIN": 1000,
        "MODEL.RPN.BATCH_SIZE_PER_IMAGE": 256,
        "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 512,
    }
    theirs, ours = both(keys)
    samples = images(keys)
    assert_training_equal(theirs, ours, keys, [samples[2:4], samples[1:3]])


def test_full_size_r50_on_real_images(shared_data):
    samples = []
    for number, path in enumerate(sorted((shared_data / "coco" / "train2017").glob("*.jpg"))[2:4]):
        with Image.open(path) as image:
            width, height = image.size
            scale = 112 / min(width, height)
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
    assert len(assert_answers_equal(theirs, ours, samples)[0]["scores"]) > 5
    assert_training_equal(theirs, ours, tiny.FULL_R50, [samples, samples[::-1]])
