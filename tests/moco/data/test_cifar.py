"""CIFAR-10's files, and other files with their names."""

import hashlib
import pickle

import numpy as np
import pytest
import torch
from torchvision import datasets

from moco.common.errors import DataError
from moco.data import cifar
from moco.data.images import open_images, read_labeled_sets

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
PER_FILE = 4


@pytest.fixture(scope="module")
def truth():
    """(6 * PER_FILE, 32, 32, 3) images, the last PER_FILE those of the test, and labels."""
    rng = np.random.default_rng(0)
    return (
        rng.integers(0, 256, (6 * PER_FILE, 32, 32, 3), dtype=np.uint8),
        rng.integers(0, 10, 6 * PER_FILE).tolist(),
    )


@pytest.fixture
def files(tmp_path, truth, monkeypatch):
    """Write small files whose MD5 torchvision expects, and return the folder above them."""
    folder = tmp_path / cifar.FOLDER
    folder.mkdir()

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    batches = []
    for number in range(6):
        part = slice(number * PER_FILE, (number + 1) * PER_FILE)
        rows = truth[0][part].transpose(0, 3, 1, 2).reshape(PER_FILE, -1)
        name = "test_batch" if number == 5 else f"data_batch_{number + 1}"
        batches.append(write(name, {"data": rows, "labels": truth[1][part]}))

    class Small(datasets.CIFAR10):
        train_list, test_list = batches[:5], batches[5:]
        md5 = write("batches.meta", {"label_names": NAMES})[1]
        meta = datasets.CIFAR10.meta | {"md5": md5}

    monkeypatch.setattr(datasets, "CIFAR10", Small)
    return tmp_path


def test_images_and_labels(files, truth):
    pixels, labels = truth
    folder = files / cifar.FOLDER
    images = open_images(folder)
    assert len(images) == 5 * PER_FILE  # never the test's
    sets = read_labeled_sets(folder)
    assert sets.classes == NAMES
    assert sets.train_labels + sets.val_labels == labels
    for index in range(5 * PER_FILE):
        assert torch.equal(images.read(index), torch.from_numpy(pixels[index]))
        assert torch.equal(sets.train.read(index), images.read(index))
    for index in range(PER_FILE):
        assert torch.equal(sets.val.read(index), torch.from_numpy(pixels[5 * PER_FILE + index]))
    assert images.name(PER_FILE + 2) == str(folder / "data_batch_2:2")
    assert sets.val.name(1) == str(folder / "test_batch:1")
    order = images.epoch_order(seed=3, epoch=5)
    assert order.tolist() == np.random.default_rng([3, 5]).permutation(20).tolist()


def test_the_folder_above_will_do_and_another_name(files):
    assert len(open_images(files)) == 5 * PER_FILE
    assert cifar.find_cifar(files) == files / cifar.FOLDER
    (files / cifar.FOLDER).rename(files / "mine")
    assert len(open_images(files / "mine")) == 5 * PER_FILE
    assert cifar.find_cifar(files / "elsewhere") is None


class Opened:
    """Payload that creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("name", ["data_batch_1", "data_batch_5", "test_batch", "batches.meta"])
@pytest.mark.parametrize("read", [open_images, read_labeled_sets])
def test_only_the_published_files_are_unpickled(files, name, read):
    marker, path = files / "marker", files / cifar.FOLDER / name
    path.write_bytes(pickle.dumps(Opened(marker)))
    with pytest.raises(DataError, match="missing or is not the published one") as caught:
        read(files)
    assert "\n" not in str(caught.value) and str(path.parent) in str(caught.value)
    assert not marker.exists()
    pickle.loads(path.read_bytes()).close()
    assert marker.exists(), "the payload has no effect, so this test proves nothing"
    path.unlink()
    if name != "data_batch_1":  # which tells the layout
        with pytest.raises(DataError, match="missing or is not the published one"):
            read_labeled_sets(files)


def test_torchvision_knows_the_published_files():
    listed = datasets.CIFAR10.train_list + datasets.CIFAR10.test_list
    assert len(listed) == 6 and all(len(md5) == 32 for _, md5 in listed)
    assert len(datasets.CIFAR10.meta["md5"]) == 32
