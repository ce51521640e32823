"""The data pipeline without Detectron2: expected values written out, and its own promises."""

import multiprocessing
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from detection.embedded import data
from moco.errors import DataError, UserError


def record(folder: Path, size: tuple[int, int], number: int = 0, **more: Any) -> dict[str, Any]:
    """A picture of `size` = (width, height) with one object; `more` replaces its entries."""
    path = folder / f"{number}.png"
    columns, rows = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    pixels = np.stack([columns * 2, rows * 2, np.full_like(rows, number)], axis=-1)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return {
        "file_name": str(path),
        "image_id": str(number),
        "width": size[0],
        "height": size[1],
        "annotations": [{"bbox": [10.0, 4.0, 30.0, 20.0], "bbox_mode": 0, "category_id": 2}],
        **more,
    }


def load(one: dict[str, Any], draw: data.Draw, order: str = "RGB") -> data.Sample:
    return data.load_sample(one, draw, max_size_px=1000, channel_order=order)


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
def test_resized_size(
    size: tuple[int, int], short_edge: int, limit: int, expected: tuple[int, int]
) -> None:
    assert data.resized_size(size, short_edge, limit) == expected


def test_boxes_follow_the_picture(tmp_path: Path) -> None:
    one = record(tmp_path, (60, 40))
    plain = load(one, data.Draw(0, 0))
    assert plain["boxes"].tolist() == [[10, 4, 30, 20]]
    assert plain["classes"].tolist() == [2]
    assert plain["image"].shape == (3, 40, 60)
    assert plain["image"].dtype == torch.uint8
    flipped = load(one, data.Draw(0, 0, "horizontal"))
    assert flipped["boxes"].tolist() == [[30, 4, 50, 20]]
    assert torch.equal(flipped["image"], plain["image"].flip(2))
    upside_down = load(one, data.Draw(0, 0, "vertical"))
    assert upside_down["boxes"].tolist() == [[10, 20, 30, 36]]
    assert torch.equal(upside_down["image"], plain["image"].flip(1))
    doubled = load(one, data.Draw(0, 80, "horizontal"))
    assert doubled["boxes"].tolist() == [[60, 8, 100, 40]]
    assert doubled["image"].shape == (3, 80, 120)
    assert torch.equal(load(one, data.Draw(0, 0), "BGR")["image"], plain["image"].flip(0))
    assert (doubled["height"], doubled["width"]) == (40, 60)  # of the original, for the metric


def test_boxes_are_clipped_and_empty_ones_dropped(tmp_path: Path) -> None:
    boxes = [[-5.0, -5.0, 20.0, 99.0], [70.0, 3.0, 80.0, 9.0], [5.0, 5.0, 5.0, 9.0]]
    annotations = [{"bbox": b, "bbox_mode": 0, "category_id": i} for i, b in enumerate(boxes)]
    sample = load(record(tmp_path, (60, 40), annotations=annotations), data.Draw(0, 0))
    assert sample["boxes"].tolist() == [[0, 0, 20, 40]]
    assert sample["classes"].tolist() == [0]


def test_a_picture_without_objects(tmp_path: Path) -> None:
    sample = load(record(tmp_path, (60, 40), annotations=[]), data.Draw(0, 20))
    assert sample["boxes"].shape == (0, 4)
    assert sample["classes"].shape == (0,)
    assert sample["classes"].dtype == torch.int64


def test_exif_orientation(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6  # to be turned by 90 degrees clockwise
    pixels = np.zeros((2, 3, 3), dtype=np.uint8)
    pixels[0, 0] = 255
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    image = np.asarray(data.read_picture(str(tmp_path / "turned.png")))
    assert image.shape == (3, 2, 3)
    assert image[0, 1].tolist() == [255, 255, 255]


def test_bad_pictures_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.jpg.*No such file"):
        data.read_picture(str(tmp_path / "missing.jpg"))
    (tmp_path / "text.jpg").write_text("not a picture")
    with pytest.raises(DataError, match=r"text\.jpg: cannot be read"):
        data.read_picture(str(tmp_path / "text.jpg"))
    Image.fromarray(np.random.RandomState(0).randint(0, 255, (90, 90, 3)).astype(np.uint8)).save(
        tmp_path / "whole.jpg"
    )
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:2000])
    with pytest.raises(DataError, match=r"cut\.jpg.*truncated"):
        data.read_picture(str(tmp_path / "cut.jpg"))
    with pytest.raises(DataError, match="60x40, its annotation says 50x40"):
        load(record(tmp_path, (60, 40), width=50), data.Draw(0, 0))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_worker_stays_one_line(num_workers: int, tmp_path: Path) -> None:
    broken = record(tmp_path, (60, 40), file_name=str(tmp_path / "gone.png"))
    batches = data.evaluation_batches(
        [broken], short_edge_px=0, max_size_px=99, channel_order="RGB", num_workers=num_workers
    )
    with pytest.raises(DataError) as caught:
        next(batches)
    assert "gone.png" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not multiprocessing.active_children()  # although the traceback is still held


def test_the_shuffled_stream() -> None:
    """Whole permutations, one after the other, fixed by the seed."""
    stream = list(islice(data.shuffled_forever(5, seed=3), 15))
    assert [sorted(stream[i : i + 5]) for i in (0, 5, 10)] == [list(range(5))] * 3
    assert stream[:5] != stream[5:10]
    generator = torch.Generator().manual_seed(3)
    assert stream[:5] == torch.randperm(5, generator=generator).tolist()
    assert stream == list(islice(data.shuffled_forever(5, seed=3), 15))
    assert stream != list(islice(data.shuffled_forever(5, seed=4), 15))


def sizes(*pairs: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"width": w, "height": h} for w, h in pairs]


def plan(records: list[dict[str, Any]], **options: Any) -> list[list[data.Draw]]:
    augmentation = data.Augmentation((10, 20, 30), "choice", "horizontal")
    return list(islice(data.plan_batches(records, augmentation, **options), 40))


def test_wide_and_tall_pictures_do_not_share_a_batch() -> None:
    records = sizes((3, 2), (2, 3), (3, 2), (2, 2), (2, 3))  # a square one counts as tall
    wide = {0, 2}
    batches = plan(records, batch_size=2, group_by_shape=True, seed=0)
    kinds = [{draw.index in wide for draw in batch} for batch in batches]
    assert all(len(kind) == 1 for kind in kinds)
    assert {True, False} == {kind.copy().pop() for kind in kinds}
    mixed = plan(records, batch_size=2, group_by_shape=False, seed=0)
    assert any(len({draw.index in wide for draw in batch}) == 2 for batch in mixed)


def test_grouping_loses_no_picture() -> None:
    records = sizes(*[(3, 2), (2, 3), (4, 2)] * 4)
    batches = plan(records, batch_size=3, group_by_shape=True, seed=5)
    counts = np.bincount([draw.index for batch in batches for draw in batch])
    assert counts.min() >= counts.max() - 2  # the epoch that has begun, and those waiting


def test_draws_cover_sizes_and_flips() -> None:
    rng = np.random.RandomState(0)
    augmentation = data.Augmentation((10, 20, 30), "choice", "vertical")
    draws = [augmentation.draw(0, rng) for _ in range(60)]
    assert {draw.short_edge_px for draw in draws} == {10, 20, 30}
    assert {draw.flip for draw in draws} == {"vertical", "none"}
    ranged = data.Augmentation((10, 12), "range", "none")
    draws = [ranged.draw(0, rng) for _ in range(60)]
    assert {draw.short_edge_px for draw in draws} == {10, 11, 12}
    assert {draw.flip for draw in draws} == {"none"}


def test_workers_and_skipping_change_nothing(tmp_path: Path) -> None:
    records = [record(tmp_path, (40 + i, 44), i) for i in range(9)]
    augmentation = data.Augmentation((30, 40), "choice", "horizontal")

    def batches(num_workers: int, skip: int) -> list[list[data.Sample]]:
        stream = data.training_batches(
            records,
            augmentation,
            max_size_px=60,
            channel_order="RGB",
            batch_size=2,
            group_by_shape=True,
            num_workers=num_workers,
            seed=1,
            skip=skip,
        )
        return list(islice(stream, 7 - skip))

    straight = batches(0, 0)
    for other in (batches(2, 0), [*straight[:3], *batches(0, 3)], [*straight[:4], *batches(2, 4)]):
        for one, two in zip(straight, other, strict=True):
            assert [s["image_id"] for s in one] == [s["image_id"] for s in two]
            assert all(torch.equal(a["image"], b["image"]) for a, b in zip(one, two, strict=True))


def test_workers_outlive_a_stop_signal_but_not_their_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler signals every process; the trainer still has to save."""
    monkeypatch.setattr(data, "STOP_AFTER_SECONDS", 5)
    before = set(multiprocessing.active_children())
    stream = data.training_batches(
        [record(tmp_path, (40, 44), i) for i in range(4)],
        data.Augmentation((30,), "choice", "none"),
        max_size_px=60,
        channel_order="RGB",
        batch_size=2,
        group_by_shape=False,
        num_workers=1,
        seed=1,
    )
    next(stream)
    (worker,) = set(multiprocessing.active_children()) - before
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGTERM)
    assert len(list(islice(stream, 6))) == 6
    assert worker.is_alive()
    stream.close()
    worker.join(timeout=20)
    assert not worker.is_alive()


def test_no_record_is_an_error() -> None:
    with pytest.raises(UserError, match=r"DATASETS\.TRAIN holds no picture with an object"):
        data.training_batches(
            data.with_objects([{"annotations": []}]),
            data.Augmentation((1,), "choice", "none"),
            max_size_px=1,
            channel_order="RGB",
            batch_size=1,
            group_by_shape=False,
            num_workers=0,
            seed=0,
        )
