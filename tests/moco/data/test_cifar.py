"""CIFAR-10's own files, binary and pickled as Python 2 pickled them, and damaged ones."""

import pickle
import struct

import numpy as np
import pytest
import torch

from moco.common.errors import DataError
from moco.data import cifar
from moco.data.images import labeled_sets, open_images

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
PER_FILE = 4


def short(text):
    """Python 2's opcode of a str."""
    return b"U" + bytes([len(text)]) + text


def python2_batch(rows, labels):
    """A batch byte by byte as cPickle of Python 2 wrote CIFAR-10: protocol 2, str for bytes."""
    pixels = rows.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R"
        b"(K\x01M" + struct.pack("<H", len(rows)) + b"M\x00\x0c\x86"
        b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R"
        b"(K\x03" + short(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<I", len(pixels)) + pixels + b"tb"
    )
    return (
        b"\x80\x02}(" + short(b"batch_label") + short(b"training batch 1 of 5")
        + short(b"labels") + b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
        + short(b"data") + array
        + short(b"filenames") + b"]" + short(b"leptodactylus_s_000004.png") + b"au."
    )  # fmt: skip


def python2_meta():
    names = b"".join(short(name.encode()) for name in NAMES)
    return (
        b"\x80\x02}("
        + short(b"num_vis")
        + b"M\x00\x0c"
        + short(b"label_names")
        + b"]("
        + names
        + b"eu."
    )


@pytest.fixture(scope="module")
def truth():
    """(6 * PER_FILE, 32, 32, 3) images, the last PER_FILE those of the test, and labels."""
    rng = np.random.default_rng(0)
    return (
        rng.integers(0, 256, (6 * PER_FILE, 32, 32, 3), dtype=np.uint8),
        rng.integers(0, 10, 6 * PER_FILE).tolist(),
    )


def write_files(folder, truth):
    """Both versions, in the two folders that the archives hold."""
    for number, name in enumerate((*cifar.TRAIN, *cifar.TEST)):
        part = slice(number * PER_FILE, (number + 1) * PER_FILE)
        rows = truth[0][part].transpose(0, 3, 1, 2).reshape(PER_FILE, -1)
        labels = truth[1][part]
        for version in cifar.FOLDERS:
            (folder / version).mkdir(exist_ok=True)
        (folder / cifar.FOLDERS[1] / name).write_bytes(python2_batch(rows, labels))
        (folder / cifar.FOLDERS[0] / f"{name}.bin").write_bytes(
            b"".join(
                bytes([label]) + row.tobytes() for label, row in zip(labels, rows, strict=True)
            )
        )
    (folder / cifar.FOLDERS[1] / "batches.meta").write_bytes(python2_meta())
    (folder / cifar.FOLDERS[0] / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")


@pytest.fixture
def files(tmp_path, truth):
    write_files(tmp_path, truth)
    return tmp_path


@pytest.mark.parametrize("version", cifar.FOLDERS)
def test_both_versions_hold_the_same(files, truth, version):
    pixels, labels = truth
    folder = files / version
    images = open_images(folder)
    assert len(images) == 5 * PER_FILE  # never the test's
    sets = labeled_sets(folder)
    assert sets.classes == NAMES
    assert sets.train_labels + sets.val_labels == labels
    for index in range(5 * PER_FILE):
        assert torch.equal(images.read(index), torch.from_numpy(pixels[index]))
        assert torch.equal(sets.train.read(index), images.read(index))
    for index in range(PER_FILE):
        assert torch.equal(sets.val.read(index), torch.from_numpy(pixels[5 * PER_FILE + index]))
    assert images.name(PER_FILE + 2) == str(folder / f"data_batch_2{folder_suffix(version)}:2")


def folder_suffix(version):
    return ".bin" if version.endswith("bin") else ""


def test_the_folder_above_will_do(files):
    assert len(open_images(files)) == 5 * PER_FILE
    assert cifar.find_cifar(files) == files / cifar.FOLDERS[0]
    assert cifar.find_cifar(files / "elsewhere") is None


def test_order_is_that_of_files(files):
    order = open_images(files).epoch_order(seed=3, epoch=5)
    assert order.tolist() == np.random.default_rng([3, 5]).permutation(20).tolist()


def test_pickles_of_python_3_are_read(files, truth):
    folder = files / cifar.FOLDERS[1]
    for name in cifar.TRAIN:
        rows = truth[0][:3].transpose(0, 3, 1, 2).reshape(3, -1)
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": [0, 1, 2]}))
    assert torch.equal(open_images(folder).read(1), torch.from_numpy(truth[0][1]))


def test_damaged_files_are_named(files):
    binary, pickled = (files / version for version in cifar.FOLDERS)
    rows = np.zeros((2, 3072), np.uint8)
    cases = [
        (binary / "data_batch_3.bin", b"", "0 bytes, expected a multiple of 3073"),
        (binary / "data_batch_3.bin", bytes(3072), "3072 bytes, expected a multiple of 3073"),
        (binary / "data_batch_3.bin", bytes(3073), "1 images, 1 labels"),
        (binary / "data_batch_3.bin", b"\x0a" * 3073 * 4, "labels outside 0..9"),
        (pickled / "data_batch_3", pickle.dumps(print), "refused, .*builtins.print"),
        (pickled / "data_batch_3", pickle.dumps([1]), r"expected data \(N, 3072\) uint8"),
        (pickled / "data_batch_3", python2_batch(rows, [1]), "2 images, 1 labels"),
        (pickled / "data_batch_3", python2_batch(rows, [1, 99]), "labels outside"),
        (pickled / "data_batch_3", b"not a pickle", "this is a text file"),
    ]
    for path, content, reason in cases:
        before = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{path.name}: .*{reason}"):
            open_images(path.parent)
        path.write_bytes(before)
    (binary / "data_batch_5.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_5\.bin: cannot be read"):
        open_images(binary)
    (pickled / "batches.meta").write_bytes(pickle.dumps({"label_names": ["cat"]}))
    with pytest.raises(DataError, match=r"batches\.meta: expected the names of 10 classes"):
        labeled_sets(pickled)
