"""Small copies of the user's images, and shorter lists of a VOC folder; the originals stay."""

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.suites.prepare import (
    atomic_folder,
    limit_voc,
    sample,
    shrink_images,
    training_images,
    voc_splits,
)
from moco.common.errors import DataError, UserError
from moco.data.images import find_images


def write_image(path: Path, size=(300, 200), mode="RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, 90 if mode == "L" else (200, 40, 90)).save(path)
    return path


def voc(root: Path, splits: dict[str, list[str]]) -> Path:
    for name, ids in splits.items():
        path = root / "ImageSets" / "Main" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(ids) + "\n")
        for image_id in ids:
            write_image(root / "JPEGImages" / f"{image_id}.jpg")
    (root / "Annotations").mkdir()
    return root


def test_images_of_all_kinds_and_sizes(tmp_path):
    write_image(tmp_path / "in" / "wide.jpg", (1000, 250))
    write_image(tmp_path / "in" / "deep" / "tall.png", (50, 80))
    write_image(tmp_path / "in" / "gray.png", (96, 97), mode="L")
    (tmp_path / "in" / "notes.txt").write_text("no image")
    shrink_images(find_images(tmp_path / "in"), tmp_path / "out", 128)
    sizes = set()
    for path in (tmp_path / "out").iterdir():
        with Image.open(path) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
            sizes.add(image.size)
    assert sizes == {(512, 128), (128, 205), (128, 129)}
    shrink_images(sample(find_images(tmp_path / "in"), 2), tmp_path / "few", 20)
    assert len(list((tmp_path / "few").iterdir())) == 2
    # A damaged image is named, and no part of the folder is left.
    damaged = tmp_path / "in" / "wide.jpg"
    damaged.write_bytes(damaged.read_bytes()[:500])
    with pytest.raises(DataError, match=r"wide\.jpg"):
        shrink_images(find_images(tmp_path / "in"), tmp_path / "other", 128)
    assert not (tmp_path / "other").exists()


def test_sample_is_fixed_and_ordered():
    items = [f"{i:03d}" for i in range(100)]
    assert sample(items, 100) == items
    few = sample(items, 10)
    assert few == sample(items, 10) == sorted(few) and len(set(few)) == 10


def test_never_pre_train_on_the_test_list(tmp_path):
    for number, (names, expected) in enumerate(
        (
            (["train", "val", "trainval", "test"], ("trainval", "test")),
            (["train", "val", "test"], ("train", "test")),
            (["train", "val"], ("train", "val")),
        )
    ):
        root = voc(tmp_path / f"{number}", {name: ["a"] for name in names})
        assert voc_splits(root) == expected
    root = voc(tmp_path / "voc", {"trainval": ["a", "b", "c"], "test": ["c", "d"]})
    assert [path.stem for path in training_images(root)] == ["a", "b"]
    shrink_images(training_images(root), tmp_path / "out", 128)
    assert len(list((tmp_path / "out").iterdir())) == 2
    (root / "JPEGImages" / "b.jpg").unlink()
    with pytest.raises(DataError, match="b is listed, but has no image"):
        training_images(root)


def test_limited_lists_link_to_the_original(tmp_path):
    ids = [f"{i:02d}" for i in range(20)]
    root = voc(tmp_path / "mine", {"train": ids[:12], "val": ids[12:]})
    before = sorted(str(path) for path in root.rglob("*"))
    out = tmp_path / "out" / "mine"
    limit_voc(root, out, max_train=5, max_test=3)
    lists = {p.stem: p.read_text().split() for p in (out / "ImageSets" / "Main").iterdir()}
    assert {name: len(found) for name, found in lists.items()} == {"trainval": 5, "test": 3}
    assert set(lists["trainval"]) < set(ids[:12]) and set(lists["test"]) < set(ids[12:])
    assert (out / "JPEGImages").resolve() == root / "JPEGImages"
    assert sorted(str(path) for path in root.rglob("*")) == before


def test_a_folder_is_whole_or_not_there(tmp_path):
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "x") as part:
        (part / "half").touch()
        raise RuntimeError
    assert not (tmp_path / "x").exists()
    with atomic_folder(tmp_path / "x") as part:
        assert list(part.iterdir()) == []
        (part / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    with pytest.raises(UserError, match="exists already"), atomic_folder(tmp_path / "x"):
        pass
