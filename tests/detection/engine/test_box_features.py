"""Features of boxes against torchvision's network, on both engines; sampled background."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import resnet18
from torchvision.ops import roi_align

from detection.config.engines import find_engine
from detection.config.task import default_task, load_task
from detection.data.pipeline import training_records
from detection.engine.box_features import (
    background_boxes,
    box_features,
    pool,
    score_backbone,
    with_strides,
)
from detection.engine.per_image import network_of
from detection.engine.weights import load_converted
from detection.evaluation.logme import logme
from detection.modeling.backbones import backbone_type
from tests.conftest import ROOT
from tests.oracles.small_tasks import SMALL, SMALL_VIT

FPN = "faster_rcnn_R_18_FPN_small"


def test_background_has_the_sizes_of_the_objects_and_is_off_them():
    objects = torch.tensor([[10.0, 10, 40, 30], [50, 20, 60, 80], [0, 0, 20, 20]])
    rng = np.random.default_rng(0)
    found = [background_boxes(objects, (100, 120), rng) for _ in range(200)]
    for boxes in found:
        assert torch.allclose(boxes[:, 2:] - boxes[:, :2], objects[:, 2:] - objects[:, :2])
        assert (boxes >= 0).all() and (boxes[:, 2] <= 120).all() and (boxes[:, 3] <= 100).all()
        for x1, y1, x2, y2 in boxes.tolist():
            for a1, b1, a2, b2 in objects.tolist():
                both = max(min(x2, a2) - max(x1, a1), 0) * max(min(y2, b2) - max(y1, b1), 0)
                union = (x2 - x1) * (y2 - y1) + (a2 - a1) * (b2 - b1) - both
                assert both < 0.3 * union
    assert len({tuple(boxes.flatten().tolist()) for boxes in found}) == 200
    again = background_boxes(objects, (100, 120), np.random.default_rng(0))
    assert torch.equal(again, found[0])


def test_an_object_that_fills_its_image_leaves_no_background():
    whole = torch.tensor([[0.0, 0, 120, 100]])
    assert background_boxes(whole, (100, 120), np.random.default_rng(0)).shape == (0, 4)


def test_the_mean_of_a_ramp_is_its_value_at_the_center():
    """Cell i of a map of stride s is centered at s (i + 1/2) px."""
    x = (torch.arange(20.0) + 0.5) * 16
    maps = {
        "fine": torch.zeros(1, 2, 40, 40),
        "ramp": torch.stack([x.expand(20, 20), x[:, None].expand(20, 20)])[None],
        "coarse": torch.zeros(1, 2, 10, 10),
    }
    boxes = torch.tensor([[40.0, 30, 200, 90], [100, 100, 108, 300]])
    found = pool(maps, {"fine": 8, "ramp": 16, "coarse": 32}, boxes)
    assert torch.allclose(found, torch.tensor([[120.0, 60], [104, 200]]), atol=1e-3)
    found = pool({"fine": maps["fine"], "ramp": maps["ramp"]}, {"fine": 8, "ramp": 14}, boxes)
    assert torch.allclose(found[0], torch.tensor([120.0, 60]) * 16 / 14, atol=1e-3)


def built(file: str, engine: str, small_options, weights: str, converted=None, more=None):
    keys = [str(word) for pair in (more or {}).items() for word in pair]
    path = ROOT / "configs" / "voc" / f"{file}.yaml"
    cfg = load_task(path, [*small_options, *keys, "MODEL.WEIGHTS", weights], engine).cfg
    torch.manual_seed(1)
    model = find_engine(engine).build_model(cfg)
    if converted is not None:
        load_converted(model, converted.model, backbone_type(cfg.MODEL.BACKBONE.NAME))
    return cfg, find_engine(engine), model


@pytest.mark.parametrize("file", ["faster_rcnn_R_18_C4_small", FPN])
def test_features_are_those_of_torchvisions_network(
    engine, file, small_options, r18_file, converted
):
    """Below a pyramid, whose layers are random, as well."""
    cfg, own, model = built(file, engine, small_options, str(r18_file), converted)
    net = resnet18()
    net.load_state_dict(torch.load(r18_file.with_name("resnet18.pth"), weights_only=True))
    net.eval()
    model.eval()
    mean, std = (
        torch.tensor(x).view(3, 1, 1) for x in ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
    )
    with torch.no_grad():
        found = list(box_features(cfg, own, model))
        assert len(found) == 6
        for record, (features, labels) in zip(training_records(cfg), found, strict=True):
            image = Image.open(record["file_name"])
            scale = 96 / min(image.size)
            image = image.resize(
                [round(side * scale) for side in image.size], Image.Resampling.BILINEAR
            )
            x = (torch.from_numpy(np.array(image)).permute(2, 0, 1) - mean) / std
            if file == FPN:  # batches are padded
                x = torch.nn.functional.pad(x, (0, -x.shape[2] % 32, 0, -x.shape[1] % 32))
            x = net.maxpool(net.relu(net.bn1(net.conv1(x[None]))))
            x = net.layer3(net.layer2(net.layer1(x)))
            boxes = torch.tensor([item["bbox"] for item in record["annotations"]]) * scale
            expected = roi_align(x, [boxes.float()], 7, 1 / 16, 0, aligned=True).mean((2, 3))
            number = len(boxes)
            assert np.allclose(features[:number], expected.numpy(), atol=0.02)
            classes = [item["category_id"] for item in record["annotations"]]
            assert labels.tolist() == classes + [-1] * (len(labels) - number)
    assert sum((labels == -1).sum() for _, labels in found) > 0


def test_the_score_changes_nothing(engine, small_options, r18_file, converted):
    file = "faster_rcnn_R_18_C4_small"
    cfg, own, model = built(file, engine, small_options, str(r18_file), converted)
    model.train()
    state, numpys = torch.get_rng_state(), np.random.get_state()[1].tolist()
    score = score_backbone(cfg, own, model)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == numpys
    model.eval()
    with torch.no_grad():
        features, labels = map(np.concatenate, zip(*box_features(cfg, own, model), strict=True))
    assert score == logme(features, labels) == score_backbone(cfg, own, model)


@pytest.mark.parametrize("name", ["build_vit_fpn_backbone", "build_vit_sfp_backbone"])
def test_a_transformers_map_is_its_own(engine, name, small_options):
    more = {
        k: v for k, v in (SMALL | SMALL_VIT).items() if not k.startswith(("INPUT.LSJ", "SOLVER"))
    }
    more |= {"MODEL.BACKBONE.NAME": name, "INPUT.MAX_SIZE_TRAIN": 128}
    cfg, own, model = built("faster_rcnn_ViT_Ti_small", engine, small_options, "random", None, more)
    network, strides = with_strides(network_of(cfg, model))
    assert set(strides.values()) == {16} and not isinstance(network, type(model.backbone))
    assert np.isfinite(score_backbone(cfg, own, model))


def test_below_the_pyramid_of_a_users_backbone():
    cfg = default_task()
    cfg.MODEL.BACKBONE.NAME = "build_a_users_fpn_backbone"
    model, below = torch.nn.Module(), torch.nn.Conv2d(3, 8, 1)
    model.backbone, below.strides = torch.nn.Module(), {"res4": 16}
    model.backbone.bottom_up = below
    assert with_strides(network_of(cfg, model)) == (below, {"res4": 16})
