"""iNaturalist 2018's lists: labels, order, and what is refused."""

import json

import pytest

from moco.classification.run import open_labeled_sets
from moco.data.inaturalist import find_inaturalist
from tests.moco.classification.classify_runs import write_labeled

CATEGORIES = [{"id": 7, "name": "7"}, {"id": 2, "name": "2"}, {"id": 5, "name": "5"}]


def listing(files, categories=CATEGORIES):
    """`files`: (image id, file name, category id)."""
    return {
        "info": {},
        "categories": categories,
        "images": [{"id": i, "file_name": name} for i, name, _ in files],
        "annotations": [
            {"id": i, "image_id": i, "category_id": category} for i, _, category in reversed(files)
        ],
    }


@pytest.fixture
def root(tmp_path):
    """Three images for training and one for validation, in the layout of the archive."""
    images = write_labeled(tmp_path / "p", {"a": (2, 1, 1)}, noise=10)
    for number, file in enumerate(sorted(images.rglob("*.png"))):
        folder = tmp_path / "train_val2018" / "Plantae" / str(number)
        folder.mkdir(parents=True)
        file.rename(folder / "x.png")
    name = "train_val2018/Plantae/{}/x.png"
    train = [(30, name.format(0), 7), (10, name.format(1), 2), (20, name.format(2), 5)]
    write(tmp_path, train, [(40, name.format(3), 5)])
    return tmp_path


def write(root, train, val, **changes):
    for name, files in (("train2018.json", train), ("val2018.json", val)):
        (root / name).write_text(json.dumps(listing(files) | changes))


def test_labels_follow_the_ids_of_the_categories(root):
    sets = open_labeled_sets(root)
    assert sets.classes == ["2", "5", "7"]
    assert sets.train_labels == [0, 1, 2] and sets.val_labels == [1]
    assert [sets.train.name(i).split("/")[-2] for i in range(3)] == ["1", "2", "0"]
    assert sets.val.read(0).shape == (16, 16, 3)


def test_folders_are_read_without_lists(root, tmp_path):
    (root / "val2018.json").unlink()
    assert find_inaturalist(root) is None
    data = write_labeled(tmp_path / "folders", {"train": (1, 1, 1), "val": (1, 1, 1)}, noise=10)
    assert open_labeled_sets(data).classes == ["blue", "green", "red"]
