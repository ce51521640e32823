"""Bitwise equality of the data pipeline with Detectron2's mapper, sampler and grouping."""

from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from detection.data.batches import (
    evaluation_batches,
    repeat_factors,
    repeat_forever,
    with_keypoints,
)
from detection.data.mapper import (
    Augmentation,
    AugmentationParams,
    LabelMapper,
    Mapper,
    flip_indices,
)
from detection.data.transforms import LargeScaleJitter
from detection.datasets.base import with_objects
from detection.datasets.coco import PERSON_FLIP_MAP, PERSON_KEYPOINTS, COCOSource

pytestmark = [pytest.mark.detectron2, pytest.mark.usefixtures("detectron2")]


@pytest.fixture(scope="module", params=["fractions", "integers"])
def images(request, tmp_path_factory):
    """RGB, gray, palette and rotated images of odd sizes, with boxes at and over the border."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.RandomState(0)
    records = []
    for number in range(12):
        height, width = rng.randint(40, 160, 2)
        image = Image.fromarray(rng.randint(0, 255, (height, width, 3)).astype(np.uint8))
        exif = Image.Exif()
        if number % 3 == 1:
            image = image.convert(("L", "P", "RGBA")[number % 3 - 1])
        elif number % 3 == 2:
            exif[274] = 1 + number % 8
            if exif[274] >= 5:
                height, width = width, height
        path = folder / f"{number}.{'png' if image.mode != 'RGB' else 'jpg'}"
        image.save(path, exif=exif)
        annotations = []
        for _ in range(number % 4):
            x0, y0 = rng.uniform(-3, [width / 2, height / 2])
            x1 = x0 + rng.uniform(1, width / 2 + 9)
            y1 = y0 + rng.uniform(1, height / 2 + 9)
            annotations.append(shaped([x0, y0, x1, y1], int(rng.randint(5)), rng))
        if number == 7:
            annotations.append(shaped([5.0, 5.0, 5.0, 9.0], 1, rng))
        if request.param == "integers":
            annotations = [integers(item, place) for place, item in enumerate(annotations)]
        record = {"file_name": str(path), "image_id": str(number), "annotations": annotations}
        records.append({**record, "height": int(height), "width": int(width)})
    return records


def shaped(box, kind, rng):
    """Return an object with a polygon of floats, one of integers, and 17 keypoints."""
    corner, size = np.array(box[:2]), np.array(box[2:]) - box[:2]
    parts = [(corner + rng.uniform(-0.1, 1.1, (5, 2)) * size).ravel().tolist() for _ in range(2)]
    points = corner + rng.uniform(-0.2, 1.2, (17, 2)) * size
    return {
        "bbox": box,
        "bbox_mode": 0,
        "category_id": kind,
        "segmentation": [parts[0], [int(x) for x in parts[1]]],
        "keypoints": np.column_stack([points, rng.randint(0, 3, 17)]).ravel().tolist(),
    }


def integers(item, place):
    """Convert an object to integers: XYXY, XYWH, and XYWH with one float, in turn."""
    x0, y0, x1, y1 = (int(v) for v in item["bbox"])
    width, height = max(1, x1 - x0), max(1, y1 - y0)
    box, mode = {
        0: ([x0, y0, x0 + width, y0 + height], 0),
        1: ([x0, y0, width, height], 1),
        2: ([x0, y0, width, height + 0.25], 1),
    }[place % 3]
    polygons = [[int(v) for v in polygon] for polygon in item["segmentation"]]
    points = [int(v) for v in item["keypoints"]]
    return {**item, "bbox": box, "bbox_mode": mode, "segmentation": polygons, "keypoints": points}


def with_runs(records):
    """Replace the polygons by random masks in run lengths."""
    import pycocotools.mask

    rng, changed = np.random.RandomState(1), []
    for record in records:
        height, width = record["height"], record["width"]
        masks = np.zeros((height, width, len(record["annotations"])), dtype=np.uint8, order="F")
        for number in range(masks.shape[2]):
            y, x = rng.randint(0, (height * 7 // 8, width * 7 // 8))
            part = masks[y : y + height // 8, x : x + width // 8, number]
            part[:] = rng.rand(*part.shape) < 0.6
        pairs = zip(record["annotations"], pycocotools.mask.encode(masks), strict=True)
        annotations = [{**item, "segmentation": runs} for item, runs in pairs]
        changed.append({**record, "annotations": annotations})
    return changed


def config(order, flip, sampling, sizes):
    from detectron2.config import get_cfg

    keys = {
        "FORMAT": order,
        "RANDOM_FLIP": flip,
        "MIN_SIZE_TRAIN_SAMPLING": sampling,
        "MIN_SIZE_TRAIN": sizes,
        "MAX_SIZE_TRAIN": 170,
        "MIN_SIZE_TEST": 111,
        "MAX_SIZE_TEST": 150,
    }
    cfg = get_cfg()
    cfg.INPUT.update(keys)
    cfg.SEED = 11
    return cfg


def assert_same_sample(theirs, ours):
    assert torch.equal(theirs["image"], ours["image"])
    for name in ("file_name", "image_id", "height", "width"):
        assert theirs[name] == ours[name]
    if "sem_seg" in theirs:
        assert torch.equal(theirs["sem_seg"], ours["sem_seg"])
    if "instances" not in theirs:
        assert "boxes" not in ours
        return
    instances = theirs["instances"]
    assert torch.equal(instances.gt_boxes.tensor, ours["boxes"])
    assert torch.equal(instances.gt_classes, ours["classes"])
    extra = {"masks", "keypoints"} & set(ours)
    assert all(instances.has(f"gt_{name}") or not len(ours[name]) for name in extra)
    if instances.has("gt_keypoints"):
        assert torch.equal(instances.gt_keypoints.tensor, ours["keypoints"])
    if not instances.has("gt_masks"):
        return
    if hasattr(instances.gt_masks, "tensor"):
        assert torch.equal(instances.gt_masks.tensor, ours["masks"])
        return
    for expected, found in zip(instances.gt_masks.polygons, ours["masks"], strict=True):
        for one, other in zip(expected, found, strict=True):
            assert one.dtype == other.dtype and np.array_equal(one, other)


SETTINGS = [
    ("RGB", "horizontal", "choice", (90, 100, 120)),
    ("BGR", "vertical", "range", (60, 140)),
    ("RGB", "none", "choice", (0,)),
]


def learning(cfg, masks, records):
    """Set the keys of masks and keypoints; return records, mask format and order of keypoints."""
    if not masks:
        return records, "", None
    if masks == "runs":
        records, masks = with_runs(records), "bitmask"
    cfg.MODEL.MASK_ON = cfg.MODEL.KEYPOINT_ON = True
    cfg.INPUT.MASK_FORMAT, cfg.DATASETS.TRAIN = masks, ("keypoints_coco_2017_train",)
    return records, masks, flip_indices(PERSON_KEYPOINTS, PERSON_FLIP_MAP)


@pytest.mark.parametrize("masks", ["", "polygon", "bitmask", "runs"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s[0]}-{s[1]}-{s[2]}")
def test_mapper(setting, masks, images):
    """Boxes are equal, and with masks keypoints as well."""
    from detectron2.data import DatasetMapper

    order, flip, sampling, sizes = setting
    cfg = config(*setting)
    images, masks, flips = learning(cfg, masks, images)
    theirs = DatasetMapper(cfg, True)
    ours = Mapper(170, order, masks, flips)
    augmentation = Augmentation(sizes, sampling, flip)
    np.random.seed(5)
    rng = np.random.RandomState(5)
    flipped, visible = set(), []
    for index in [*range(len(images))] * 2:
        params = augmentation.sample_params(rng)
        flipped.add(params.flip)
        sample = ours(images[index], params)
        assert_same_sample(theirs(images[index]), sample)
        visible += sample.get("keypoints", torch.zeros(0, 0, 3))[:, :, 2].flatten().tolist()
    assert flipped == {"none", flip}
    assert set(visible) == ({0, 1, 2} if masks else set())


def jittering(cfg, seg_pad_value=0):
    """Build Detectron2's mapper with the augmentations of ViTDet's configs (configs/common)."""
    from detectron2.data import DatasetMapper
    from detectron2.data import transforms as T

    keys, flip = cfg.INPUT.LSJ, cfg.INPUT.RANDOM_FLIP
    changes = []
    if flip != "none":
        changes = [T.RandomFlip(horizontal=flip == "horizontal", vertical=flip == "vertical")]
    changes.append(T.ResizeScale(*keys.SCALE_RANGE, keys.SIZE, keys.SIZE))
    changes.append(
        T.FixedSizeCrop((keys.SIZE, keys.SIZE), pad=keys.PAD, seg_pad_value=seg_pad_value)
    )
    masks = cfg.MODEL.MASK_ON
    return DatasetMapper(cfg, True, augmentations=changes, recompute_boxes=masks)


@pytest.mark.parametrize(
    ("masks", "flip", "pad"),
    [
        ("", "horizontal", True),
        ("polygon", "horizontal", False),
        ("polygon", "vertical", True),
        ("bitmask", "horizontal", True),
        ("bitmask", "none", False),
        ("runs", "horizontal", True),
        ("runs", "vertical", False),
    ],
)
def test_large_scale_jitter(masks, flip, pad, images):
    """Padding is background; by default Detectron2 pads masks in run lengths with ones."""
    from detection.config.task import add_transfer_config

    cfg = config("BGR", flip, "choice", (90,))
    add_transfer_config(cfg)
    cfg.INPUT.LSJ.update({"ENABLED": True, "SIZE": 100, "SCALE_RANGE": [0.2, 2.0], "PAD": pad})
    reference = (
        [jittering] if masks == "runs" else [jittering, partial(jittering, seg_pad_value=255)]
    )
    images, masks, flips = learning(cfg, masks, images)
    jitter = LargeScaleJitter.from_config(cfg)
    ours, lost = Mapper(1, "BGR", masks, flips, jitter=jitter), 0
    for build in reference:
        mapper = build(cfg)
        np.random.seed(5)
        rng = np.random.RandomState(5)
        for record in [image for image in images if image["annotations"]] * 4:
            params = jitter.sample_params(rng)
            sample = ours(record, params)
            assert_same_sample(mapper(record), sample)
            lost += len(record["annotations"]) - len(sample["boxes"])
            height, width = sample["image"].shape[1:]
            assert (height, width) == (100, 100) if pad else max(height, width) <= 100
            if pad and params.ratio < 0.9:
                assert (sample["image"][:, -5:, -5:] == 128).all()
        assert np.array_equal(np.random.get_state()[1], rng.get_state()[1])
    assert lost > 5  # cropped away, or too small


@pytest.mark.parametrize("order", ["RGB", "BGR"])
def test_label_mapper(order, tmp_path, images):
    from detection.data import sem_seg
    from tests.oracles.sem_seg_mapper import SemSegMapper

    augmentation = sem_seg.Augmentation((0.5, 2.0), True, (90, 120), (120.4, 99.7, 3.2), 255)
    np.random.seed(5)
    rng = np.random.RandomState(5)
    for one in images:
        labels = np.random.RandomState(2).randint(0, 9, (one["height"], one["width"]))
        path = tmp_path / f"{one['image_id']}.png"
        Image.fromarray(labels.astype(np.uint8)).save(path)
        record = {**one, "sem_seg_file_name": str(path)}
        ours = LabelMapper(augmentation, order)
        sample = ours(record, augmentation.sample_params(rng))
        assert_same_sample(SemSegMapper(augmentation, order)(record), sample)
        assert sample["image"].shape[1:] == sample["sem_seg"].shape == (90, 120)
        assert_same_sample(SemSegMapper(None, order)(record), ours(record, None))


@pytest.mark.parametrize("jittered", [False, True], ids=["", "jitter"])
@pytest.mark.parametrize(("masks", "number"), [("polygon", 80), ("bitmask", 20)])
def test_mapper_on_real_images(masks, number, jittered, shared_data):
    """Samples are equal on COCO's own annotations, including crowds."""
    from detectron2.data import DatasetMapper

    from detection.config.task import add_transfer_config

    cfg = config("RGB", "horizontal", "choice", (120, 144, 200))
    add_transfer_config(cfg)
    cfg.MODEL.MASK_ON, cfg.INPUT.MASK_FORMAT = True, masks
    cfg.INPUT.LSJ.update({"ENABLED": jittered, "SIZE": 256})
    records, theirs = real_coco(shared_data), DatasetMapper(cfg, True)
    augmentation, ours = (
        Augmentation((120, 144, 200), "choice", "horizontal"),
        Mapper(170, "RGB", masks),
    )
    if jittered:
        records, theirs = with_objects(records), jittering(cfg)
        augmentation = LargeScaleJitter.from_config(cfg)
        ours = Mapper(1, "RGB", masks, jitter=augmentation)
    np.random.seed(1)
    rng = np.random.RandomState(1)
    for record in records[:number]:
        assert_same_sample(theirs(record), ours(record, augmentation.sample_params(rng)))


def real_coco(shared_data):
    folder = shared_data / "coco"
    annotations = str(folder / "annotations" / "instances_val2017.json")
    split = COCOSource("real", annotations, str(folder / "val2017"), "instances").read()
    return list(split.records)


def test_evaluation_batches(images):
    from detectron2.data import DatasetMapper, build_detection_test_loader

    cfg = config(*SETTINGS[0])
    theirs = build_detection_test_loader(images, mapper=DatasetMapper(cfg, False))
    mapper = Mapper(150, "RGB", learning=False)
    ours = evaluation_batches(images, AugmentationParams(111), mapper, num_workers=0)
    for expected, batch in zip(theirs, ours, strict=True):
        assert_same_sample(expected[0], batch[0])


def test_records_to_learn_from(images):
    from detectron2.data.build import filter_images_with_few_keypoints
    from detectron2.data.samplers import RepeatFactorTrainingSampler as Sampler

    for minimum in (0, 1, 13, 25):
        kept = filter_images_with_few_keypoints(images, minimum)
        assert kept == with_keypoints(images, minimum)
    for threshold, root in ((0.3, True), (0.6, False), (1.0, True)):
        expected = Sampler.repeat_factors_from_category_frequency(images, threshold, root)
        factors = repeat_factors(images, threshold, square_root=root)
        assert torch.equal(expected, torch.tensor(factors))
        assert expected.max() > 1
        stream = repeat_forever(factors, seed=4)
        assert list(islice(Sampler(expected, seed=4), 100)) == list(islice(stream, 100))
