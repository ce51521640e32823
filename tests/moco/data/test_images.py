"""Folders and lists of images, CIFAR-10's own files, and labels."""

import numpy as np
import pytest

from moco.common.errors import DataError
from moco.data.images import (
    describe_images,
    find_images,
    find_labeled_images,
    open_images,
    read_labeled_sets,
)
from tests.moco.data.test_decode import save


@pytest.mark.parametrize(
    ("found", "skipped"),
    [
        (["a.JPG", "b.png", "c.webp"], [".d.png"]),
        (["n01/x.jpg", "n02/deep/y.jpg"], ["n01/.x.jpg", ".cache/z.jpg"]),
        (["val/cat/v.jpg"], []),
        (["train/cat/t.jpg"], ["val/cat/v.jpg", "test/u.jpg"]),
        (["plane/p.jpg", "train/t.jpg"], []),  # vehicles: `train` is a class among others
    ],
)
def test_images_of_a_folder(tmp_path, found, skipped):
    paths = [save(tmp_path / name) for name in (*found, *skipped)]
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "empty_class").mkdir()
    assert find_images(tmp_path) == paths[: len(found)]


def test_links_are_followed_once(tmp_path):
    image = save(tmp_path / "real/x.jpg")
    (tmp_path / "real/loop").symlink_to(tmp_path / "real")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(image.parent)
    assert find_images(root) == [root / "link/x.jpg"]


def test_labels(tmp_path):
    images = [save(tmp_path / name) for name in ("cat/1.jpg", "cat/sub/2.jpg", "dog/3.jpg")]
    (tmp_path / "ant").mkdir()
    save(tmp_path / ".git/x.jpg")
    assert find_labeled_images(tmp_path) == (images, [0, 0, 1], ["cat", "dog"], "")


def test_images_are_read_and_named(tmp_path):
    path = save(tmp_path / "a.png", size=(5, 3), color=(1, 2, 3))
    (tmp_path / "b.png").write_bytes(b"")
    images = open_images(tmp_path)
    assert len(images) == 2
    assert images.name(0) == str(path)
    assert images.read(0).shape == (3, 5, 3)
    assert images.read(0)[2, 4].tolist() == [1, 2, 3]
    with pytest.raises(DataError, match=r"b\.png: the file is empty"):
        images.read(1)


def test_the_order_of_an_epoch_of_a_list(tmp_path):
    """Earlier runs are resumed in it."""
    b, a = save(tmp_path / "b.jpg"), save(tmp_path / "sub/a.jpg")
    (tmp_path / "list.txt").write_text(f"b.jpg\n\n{a}\n" * 5)
    assert find_images(tmp_path / "list.txt") == [b, a] * 5
    order = open_images(tmp_path / "list.txt").epoch_order(seed=3, epoch=5)
    assert order.tolist() == np.random.default_rng([3, 5]).permutation(10).tolist()


def test_a_list_that_starts_with_a_byte_order_mark(tmp_path):
    """As Notepad and PowerShell write it."""
    image = save(tmp_path / "a.jpg")
    (tmp_path / "list.txt").write_text("a.jpg\n", encoding="utf-8-sig")
    assert find_images(tmp_path / "list.txt") == [image]


def test_labeled_folders(tmp_path):
    for name in ("train/cat/1.png", "train/dog/2.png", "val/dog/3.png"):
        save(tmp_path / name)
    sets = read_labeled_sets(tmp_path)
    assert sets.classes == ["cat", "dog"]
    assert (sets.train_labels, sets.val_labels) == ([0, 1], [1])
    assert sets.val.name(0) == str(tmp_path / "val/dog/3.png")


def test_files_of_other_suffixes_are_counted(tmp_path):
    for name in ("train/cat/1.png", "train/dog/2.png", "val/cat/3.png"):
        save(tmp_path / name, color=(200, 0, 0))
    for name in ("train/cat/4.HEIC", "train/dog/deep/5.heic", "train/dog/list", "val/cat/6.avif"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"other")
    (tmp_path / "train/.hidden.heic").write_bytes(b"other")
    note = f"{tmp_path}/train: left out by suffix: 3 files (.heic 2, none 1)"
    sets = read_labeled_sets(tmp_path)
    assert describe_images(open_images(tmp_path)) == describe_images(sets.train) == [note]
    assert describe_images(sets.val) == [f"{tmp_path}/val: left out by suffix: 1 file (.avif 1)"]


def test_gray_of_12_bits_in_files_of_16_is_noted(tmp_path):
    """4095 of 65535 is 16 of 255."""
    for name in ("a.png", "b.png"):
        save(tmp_path / name, "I;16", color=4095)
    (tmp_path / "bad.png").write_bytes(b"\x89PNG")
    [note] = describe_images(open_images(tmp_path))
    assert "no value is above 16 of 255 in 2 sampled images" in note and "12-bit" in note
    save(tmp_path / "b.png", "I;16", color=17 * 257)
    assert describe_images(open_images(tmp_path)) == []
