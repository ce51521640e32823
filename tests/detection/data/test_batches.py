"""The data pipeline without Detectron2, against values by hand."""

import json
import multiprocessing
import os
import signal
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from detection.data.batches import (
    evaluation_batches,
    plan_batches,
    repeat_factors,
    repeat_forever,
    shuffle_forever,
    training_batches,
)
from detection.data.mapper import (
    Augmentation,
    AugmentationParams,
    LabelMapper,
    Mapper,
    flip_indices,
    resized_size,
)
from detection.data.pipeline import TrainingData, training_records
from detection.data.records import PackedRecords
from moco.common.errors import DataError, UserError
from tests.oracles import tiny_detector as tiny
from tests.oracles.tiny_coco import write_coco


def thing(box, kind=2, **more):
    """Return an annotation with an XYXY box."""
    return {"bbox": list(box), "bbox_mode": 0, "category_id": kind, **more}


def record(folder, size, number=0, annotations=None, **more):
    """Write an image of `size` = (width, height) and return its record, updated by `more`."""
    path = folder / f"{number}.png"
    columns, rows = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    pixels = np.stack([columns * 2, rows * 2, np.full_like(rows, number)], axis=-1)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return {
        "file_name": str(path),
        "image_id": str(number),
        "width": size[0],
        "height": size[1],
        "annotations": [thing((10.0, 4.0, 30.0, 20.0))] if annotations is None else annotations,
        **more,
    }


def load(one, params, order="RGB", **options):
    return Mapper(1000, order, **options)(one, params)


@pytest.mark.parametrize(
    ("size", "short_edge", "limit", "expected"),
    [
        ((480, 640), 800, 1333, (800, 1067)),
        ((640, 480), 800, 1333, (1067, 800)),
        ((375, 500), 600, 1000, (600, 800)),
        ((300, 1200), 600, 1000, (250, 1000)),  # the longer side decides
        ((333, 333), 0, 10, (333, 333)),  # 0: as it is
        ((3, 2), 5, 100, (8, 5)),  # 7.5 rounds up
    ],
)
def test_resized_size(size, short_edge, limit, expected):
    assert resized_size(size, short_edge, limit) == expected


def test_boxes_follow_the_image(tmp_path):
    one = record(tmp_path, (60, 40))
    plain = load(one, AugmentationParams(0))
    assert plain["boxes"].tolist() == [[10, 4, 30, 20]]
    assert plain["classes"].tolist() == [2]
    assert plain["image"].shape == (3, 40, 60)
    assert plain["image"].dtype == torch.uint8
    flipped = load(one, AugmentationParams(0, "horizontal"))
    assert flipped["boxes"].tolist() == [[30, 4, 50, 20]]
    assert torch.equal(flipped["image"], plain["image"].flip(2))
    upside_down = load(one, AugmentationParams(0, "vertical"))
    assert upside_down["boxes"].tolist() == [[10, 20, 30, 36]]
    assert torch.equal(upside_down["image"], plain["image"].flip(1))
    doubled = load(one, AugmentationParams(80, "horizontal"))
    assert doubled["boxes"].tolist() == [[60, 8, 100, 40]]
    assert doubled["image"].shape == (3, 80, 120)
    assert torch.equal(load(one, AugmentationParams(0), "BGR")["image"], plain["image"].flip(0))
    assert (doubled["height"], doubled["width"]) == (40, 60)  # of the original, for the metric
    with pytest.raises(DataError, match="60x40, but its annotation has 50x40"):
        load(record(tmp_path, (60, 40), width=50), AugmentationParams(0))


def test_boxes_are_clipped_and_empty_ones_dropped(tmp_path):
    boxes = [[-5.0, -5.0, 20.0, 99.0], [70.0, 3.0, 80.0, 9.0], [5.0, 5.0, 5.0, 9.0]]
    annotations = [thing(box, kind) for kind, box in enumerate(boxes)]
    sample = load(record(tmp_path, (60, 40), annotations=annotations), AugmentationParams(0))
    assert sample["boxes"].tolist() == [[0, 0, 20, 40]]
    assert sample["classes"].tolist() == [0]
    none = load(record(tmp_path, (60, 40), annotations=[]), AugmentationParams(20))
    assert none["boxes"].shape == (0, 4) and none["classes"].shape == (0,)
    assert none["classes"].dtype == torch.int64


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_worker_stays_one_line(num_workers, tmp_path):
    broken = record(tmp_path, (60, 40), file_name=str(tmp_path / "gone.png"))
    batches = evaluation_batches(
        [broken], AugmentationParams(0), Mapper(99, "RGB"), num_workers=num_workers
    )
    with pytest.raises(DataError) as caught:
        next(batches)
    assert "gone.png" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not multiprocessing.active_children()  # although the traceback is still held


def test_the_shuffled_stream():
    """The stream is a sequence of whole permutations, fixed by the seed."""
    indices = list(islice(shuffle_forever(5, seed=3), 15))
    generator = torch.Generator().manual_seed(3)
    expected = [torch.randperm(5, generator=generator).tolist() for _ in range(3)]
    assert indices == [index for permutation in expected for index in permutation]
    assert expected[0] != expected[1]
    assert indices != list(islice(shuffle_forever(5, seed=4), 15))


def plan(*sizes, **options):
    """40 batches of images of these (width, height)."""
    is_wide = [width > height for width, height in sizes]
    sample_params = Augmentation((10, 20, 30), "choice", "horizontal").sample_params
    indices = shuffle_forever(len(sizes), seed=5)
    rng = np.random.RandomState(5)
    return list(islice(plan_batches(is_wide, indices, sample_params, rng=rng, **options), 40))


def test_wide_and_tall_images_do_not_share_a_batch_and_none_is_lost():
    sizes = (3, 2), (2, 3), (3, 2), (2, 2), (2, 3)  # a square one counts as tall
    batches = plan(*sizes, batch_size=2)
    kinds = [{index in {0, 2} for index, _ in batch} for batch in batches]
    assert {True} in kinds and {False} in kinds and {True, False} not in kinds
    batches = plan(*[(3, 2), (2, 3), (4, 2)] * 4, batch_size=3)
    counts = np.bincount([index for batch in batches for index, _ in batch])
    assert counts.min() >= counts.max() - 2  # the current epoch, and incomplete batches


@pytest.mark.parametrize(
    ("settings", "edges", "flips"),
    [
        (((10, 20, 30), "choice", "vertical"), {10, 20, 30}, {"vertical", "none"}),
        (((10, 12), "range", "none"), {10, 11, 12}, {"none"}),
    ],
)
def test_sampled_sizes_and_flips_cover_the_choices(settings, edges, flips):
    rng = np.random.RandomState(0)
    samples = [Augmentation(*settings).sample_params(rng) for _ in range(60)]
    assert {params.short_edge_px for params in samples} == edges
    assert {params.flip for params in samples} == flips


def stream(records, short_edges_px=(30, 40), **options):
    """Training batches of two."""
    return training_batches(
        records,
        [record["width"] > record["height"] for record in records],
        lambda: shuffle_forever(len(records), seed=1),
        Augmentation(short_edges_px, "choice", "horizontal").sample_params,
        Mapper(60, "RGB"),
        **{"batch_size": 2, "num_workers": 0, "rng": np.random.RandomState(1), **options},
    )


def test_workers_and_skipping_change_nothing(tmp_path):
    records = [record(tmp_path, (40 + i, 44), i) for i in range(9)]

    def batches(num_workers, skip):
        return list(islice(stream(records, num_workers=num_workers, skip=skip), 7 - skip))

    straight = batches(0, 0)
    for other in (batches(2, 0), [*straight[:3], *batches(0, 3)], [*straight[:4], *batches(2, 4)]):
        for one, two in zip(straight, other, strict=True):
            assert [s["image_id"] for s in one] == [s["image_id"] for s in two]
            assert all(torch.equal(a["image"], b["image"]) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("skip", [0, 2])
def test_batches_again_have_the_random_numbers_after_the_last_batch_taken(task_cfg, workers, skip):
    """Workers plan ahead of the training; the stream is that of the batches it has taken."""
    keys, taken = task_cfg.INPUT, 5
    records, data = training_records(task_cfg), TrainingData(task_cfg)

    def plan(rng, number):
        wide = [record["width"] > record["height"] for record in records]
        order = shuffle_forever(len(records), task_cfg.SEED)
        sizes = tuple(keys.MIN_SIZE_TRAIN), keys.MIN_SIZE_TRAIN_SAMPLING
        sample_params = Augmentation(*sizes, keys.RANDOM_FLIP).sample_params
        size = task_cfg.SOLVER.IMS_PER_BATCH
        return list(
            islice(plan_batches(wide, order, sample_params, batch_size=size, rng=rng), number)
        )

    rng = np.random.RandomState(task_cfg.SEED % 2**32)
    plan(rng, taken)
    expected = plan(rng, 2)
    with closing(data.batches(workers, skip=skip)) as batches:
        for _ in range(taken - skip):
            next(batches)
        again = list(islice(data.batches_again(), 2))
    mapper = Mapper(keys.MAX_SIZE_TRAIN, keys.FORMAT)
    for planned, batch in zip(expected, again, strict=True):
        for (index, params), sample in zip(planned, batch, strict=True):
            assert torch.equal(sample["image"], mapper(records[index], params)["image"])


@pytest.mark.race
def test_workers_outlive_a_stop_signal_but_not_their_batches(tmp_path):
    """A scheduler signals every process; the trainer still has to save."""
    before = set(multiprocessing.active_children())
    batches = stream([record(tmp_path, (40, 44), i) for i in range(4)], num_workers=1)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGTERM)
    assert len(list(islice(batches, 6))) == 6
    assert worker.is_alive()
    batches.close()
    worker.join(timeout=300)
    assert not worker.is_alive()


def test_packed_records_are_the_same_in_one_array():
    """Each access unpickles a new record."""
    objects = [{"bbox": [0.5, 2], "counts": b"x"}]
    records = [{"image_id": i, "annotations": objects * i} for i in range(4)]
    packed = PackedRecords(records)
    assert list(packed) == records and packed[-1] == records[3] and packed[1:3] == records[1:3]
    assert packed[2] is not packed[2]
    with pytest.raises(IndexError):
        packed[4]
    assert list(PackedRecords([])) == []


def test_training_leaves_out_what_has_no_object_or_no_keypoint(tmp_path, fresh_cache):
    write_coco(tmp_path, {"train2017": 4}, keypoints=True)
    path = tmp_path / "coco" / "annotations" / "person_keypoints_train2017.json"
    content = json.loads(path.read_text())
    crowded, hidden, *others = [image["id"] for image in content["images"]]
    for item in content["annotations"]:
        if item["image_id"] == crowded:
            item["iscrowd"] = 1
        if item["image_id"] == hidden:
            item["keypoints"] = [0] * len(item["keypoints"])
    path.write_text(json.dumps(content))
    keys = {
        "DATASETS.COCO_TRAIN_JSON": str(path),
        "DATASETS.COCO_TRAIN_ROOT": str(tmp_path / "coco" / "train2017"),
        "DATASETS.TRAIN": (f"annotations_{path.stem}",),
    }

    def kept(**more):
        given = {f"MODEL.{name}": value for name, value in more.items()}
        return {r["image_id"] for r in training_records(tiny.task({**keys, **given}))}

    assert kept() == {hidden, *others}
    assert kept(KEYPOINT_ON=True) == set(others)
    with pytest.raises(UserError, match=r"DATASETS.TRAIN has no image with labeled keypoints"):
        kept(KEYPOINT_ON=True, **{"ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE": 1000})
    keys["DATALOADER.FILTER_EMPTY_ANNOTATIONS"] = False
    assert kept() == {crowded, hidden, *others}


def test_rare_classes_are_repeated():
    def one(*classes):
        return {"annotations": [{"category_id": c} for c in classes]}

    records = [one(0), one(0, 1), one(0), one()]
    # Class 0 is in 3 of 4 images, class 1 in 1 of 4.
    assert repeat_factors(records, 0.5, square_root=False) == [1.0, 2.0, 1.0, 1.0]
    assert repeat_factors(records, 1.0, square_root=True)[1] == 2.0
    stream = list(islice(repeat_forever([1.0, 2.0, 1.5], seed=0), 4000))
    counts = np.bincount(stream)
    assert counts / counts[0] == pytest.approx([1, 2, 1.5], rel=0.03)


def test_masks_follow_the_image(tmp_path):
    square = [10.5, 4.0, 30.0, 4.0, 30.0, 20.0, 10.5, 20.0]
    runs = {"size": [40, 60], "counts": [40 * 10 + 4, 1, 40 * 60 - 40 * 10 - 5]}
    box = (10.0, 4.0, 30.0, 20.0)
    one = record(tmp_path, (60, 40), annotations=[thing(box, segmentation=[square])])
    sample = load(one, AugmentationParams(80, "horizontal"), masks="polygon")
    ((polygon,),) = sample["masks"]
    assert polygon.tolist() == [99, 8, 60, 8, 60, 40, 99, 40]
    bitmap = load(one, AugmentationParams(0, "vertical"), masks="bitmask")["masks"]
    assert (bitmap.dtype, bitmap.shape) == (torch.bool, (1, 40, 60))
    assert bitmap[0].any(dim=1).nonzero().flatten().tolist() == list(range(20, 36))
    import pycocotools.mask

    encoded = pycocotools.mask.frPyObjects(runs, 40, 60)
    one = record(tmp_path, (60, 40), annotations=[thing(box, segmentation=encoded)])
    bitmap = load(one, AugmentationParams(0, "horizontal"), masks="bitmask")["masks"]
    assert bitmap[0].nonzero().tolist() == [[4, 49]]
    with pytest.raises(
        DataError, match=r"0\.png: got a run-length encoded mask.*MASK_FORMAT to bitmask"
    ):
        load(one, AugmentationParams(0), masks="polygon")


def test_an_object_without_box_or_mask_is_no_object(tmp_path):
    shape = [[10.0, 4.0, 30.0, 4.0, 30.0, 20.0]]
    outside = [[-9.0, 4.0, -1.0, 4.0, -1.0, 20.0]]
    things = ([5.0, 5.0, 5.0, 9.0], shape), ([1.0, 1.0, 9.0, 9.0], outside), ([1, 1, 9, 9], shape)
    annotations = [
        thing(box, kind, segmentation=polygons) for kind, (box, polygons) in enumerate(things)
    ]
    one = record(tmp_path, (60, 40), annotations=annotations)
    for masks, classes in (("bitmask", [2]), ("polygon", [1, 2]), ("", [1, 2])):
        sample = load(one, AugmentationParams(0), masks=masks)
        assert sample["classes"].tolist() == classes
        assert len(sample.get("masks", classes)) == len(classes)


def test_keypoints_follow_the_image(tmp_path):
    flips = flip_indices(["nose", "left_eye", "right_eye", "left_ear"], [("left_eye", "right_eye")])
    assert flips == (0, 2, 1, 3)
    points = [10.5, 4.5, 2, 60.0, 40.0, 1, 60.5, 4.0, 2, 7.0, 7.0, 0]
    annotations = [thing((10.0, 4.0, 30.0, 20.0), keypoints=points)]
    one = record(tmp_path, (60, 40), annotations=annotations)
    plain = load(one, AugmentationParams(0), flip_indices=flips)["keypoints"]
    assert plain.tolist() == [[[10.5, 4.5, 2], [60, 40, 1], [0, 0, 0], [0, 0, 0]]]
    flipped = load(one, AugmentationParams(80, "horizontal"), flip_indices=flips)["keypoints"]
    assert flipped.tolist() == [[[99, 9, 2], [0, 0, 0], [0, 80, 1], [0, 0, 0]]]
    none = record(tmp_path, (60, 40), annotations=[])
    assert load(none, AugmentationParams(0), flip_indices=flips)["keypoints"].shape == (0, 4, 3)


def test_labels_follow_the_image(tmp_path):
    from detection.data import sem_seg

    one = record(tmp_path, (60, 40))
    labels = np.arange(40 * 60).reshape(40, 60) % 7
    Image.fromarray(labels.astype(np.uint8)).save(tmp_path / "labels.png")
    one["sem_seg_file_name"] = str(tmp_path / "labels.png")
    augmentation = sem_seg.Augmentation((1.0, 1.0), True, (50, 50), (9.2, 7.6, 7.0), 255)
    for order in ("RGB", "BGR"):
        mapper = LabelMapper(augmentation, order)
        whole = mapper(one, None)
        assert "sem_seg" not in whole and whole["image"].shape == (3, 40, 60)
        cut = mapper(one, sem_seg.AugmentationParams(1.0, True, (0.0, 0.99)))
        assert torch.equal(cut["image"][:, :40], whole["image"].flip(2)[:, :, 10:])
        assert (
            cut["image"][:, 40:, 0].T.tolist() == [[9, 8, 7]] * 10
        )  # rounded, in the model's order
        assert cut["sem_seg"].dtype == torch.int64
        assert cut["sem_seg"][:40].tolist() == labels[:, ::-1][:, 10:].tolist()
        assert (cut["sem_seg"][40:] == 255).all()
