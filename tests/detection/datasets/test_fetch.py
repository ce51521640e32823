"""`datasets fetch` from a real server: archives with the layout of the official ones."""

import io
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

from detection.datasets import doctor, download
from detection.datasets.__main__ import main
from detection.datasets.base import formats
from detection.datasets.download import datasets, fetch_command
from moco.common.errors import DataError, LockedError, UserError
from tests.oracles.commands import ROOT
from tests.oracles.file_server import Served, file_server
from tests.oracles.tiny_archives import (
    SBD_ONLY,
    VOC_TRAIN,
    packed,
    tiny_archives,
    write_facts,
)

TRAINVAL = "VOCtrainval_06-Nov-2007.tar"


@pytest.fixture
def offer(tmp_path, monkeypatch):
    """Serve the tiny archives of a dataset, with their sizes and hashes in archives.yaml."""
    facts = tmp_path / "facts.yaml"
    with file_server({}) as served:

        def offer(contents: dict[str, bytes]) -> dict[str, bytes]:
            write_facts(contents, facts)
            monkeypatch.setattr(download, "FILE", facts)
            datasets.cache_clear()
            served.files.update({f"/{name}": content for name, content in contents.items()})
            return contents

        yield SimpleNamespace(
            served=served,
            facts=facts,
            dataset=lambda name: offer(tiny_archives(name, tmp_path / "made")),
            change=lambda archive, content: offer({archive: content}),
        )
    datasets.cache_clear()


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "root"


def run(root: Path, served: Served, *arguments: str) -> int:
    return main(["fetch", "--root", str(root), "--mirror", served.url, *arguments])


def files(root: Path) -> set[str]:
    """Return the files below `root` except the lock."""
    found = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    return found - {"archives/.lock"}


def states(name: str, root: Path) -> dict[str, str]:
    dataset = datasets()[name]
    findings = doctor.examine(formats()[dataset.doctor], str(root), splits=dataset.splits)
    return {finding.name: finding.state for finding in findings}


@pytest.mark.parametrize("name", datasets())
def test_fetched_and_then_not_again(name, offer, root, capsys):
    if name == "cityscapes":
        pytest.importorskip("shapely")
    contents = offer.dataset(name)
    assert run(root, offer.served, name) == 0
    shown = capsys.readouterr().out
    assert "WRONG" not in shown and all(file in shown for file in contents)
    present = {split for split, state in states(name, root).items() if state in ("ok", "part")}
    absent = set(datasets()[name].splits) - present
    # Not in the tiny ones, and labels that csCreateTrainIdLabelImgs makes.
    assert {s for s in absent if "sem_seg" not in s} <= {"voc_2007_train", "voc_2007_val"}
    assert not (root / "archives" / next(iter(contents))).exists()
    assert not any(".tmp-" in file or "archives/" in file for file in files(root))
    unhashed = [a.name for a in datasets()[name].archives if not (a.hash or a.contents)]
    assert ("no hash is published" in shown) == bool(unhashed)

    before = files(root)
    offer.served.requests.clear()
    assert run(root, offer.served, name) == 0 and not offer.served.requests
    assert files(root) == before
    capsys.readouterr()
    assert main(["list", "--root", str(root)]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.split()[:1] == [name])
    assert line.split()[1] == "present"


def test_masks_of_train_aug(offer, root, capsys):
    offer.dataset("voc2012_aug")
    assert run(root, offer.served, "voc2012_aug") == 0
    assert "voc_2007" not in capsys.readouterr().out
    voc = root / "VOC2012"
    listed = (voc / "ImageSets/Segmentation/train_aug.txt").read_text().split()
    assert listed == sorted(VOC_TRAIN + SBD_ONLY)
    for image_id in listed:
        got = np.array(Image.open(voc / "SegmentationClassAug" / f"{image_id}.png"))
        # VOC's own mask has borders, SBD's has none.
        assert (got == 255).any() == (image_id in VOC_TRAIN) and got.max() > 0


def test_a_damaged_mask(offer, root):
    offer.dataset("voc2012_aug")
    names = ["train.txt", "val.txt", "cls/2012_000004.mat"]
    content = {f"benchmark_RELEASE/dataset/{name}": SBD_ONLY[0].encode() for name in names}
    offer.change("benchmark.tgz", packed("benchmark.tgz", content))
    with pytest.raises(DataError, match=r"2012_000004\.mat"):
        run(root, offer.served, "voc2012_aug")
    assert not (root / "VOC2012/SegmentationClassAug").exists()
    assert not any(".tmp-" in file for file in files(root))


def test_another_content_than_published(offer, root):
    contents = offer.dataset("voc2007")
    changed = bytearray(contents[TRAINVAL])
    changed[1000] ^= 1
    offer.served.files[f"/{TRAINVAL}"] = bytes(changed)
    with pytest.raises(DataError, match=f"{TRAINVAL}.*sha256"):
        run(root, offer.served, "voc2007")
    assert not {f for f in files(root) if not f.endswith(".lock")}


@pytest.mark.parametrize("keep", [False, True])
def test_no_space(keep, offer, root, monkeypatch):
    contents = offer.dataset("voc2007")
    trainval, test = (len(content) for content in contents.values())
    # At the worst moment: both, and the second archive, or both archives.
    needed = 2 * (trainval + test) if keep else max(2 * trainval, trainval + 2 * test)
    flags = ["--keep"] * keep
    free = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(UserError, match="--root"):
        run(root, offer.served, "voc2007", *flags)
    assert not root.exists() and not offer.served.requests
    free.free += 1
    assert run(root, offer.served, "voc2007", *flags) == 0


def test_archives_that_exist_are_used_and_kept(offer, root, capsys, monkeypatch):
    contents = offer.dataset("voc2007")
    (root / "archives").mkdir(parents=True)
    for name, content in contents.items():
        (root / "archives" / name).write_bytes(content)
    free = SimpleNamespace(free=sum(map(len, contents.values())))  # for what is in them
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert run(root, offer.served, "voc2007", "--keep") == 0 and not offer.served.requests
    assert "0:00 at" in capsys.readouterr().out
    assert {f"archives/{name}" for name in contents} <= files(root)


def test_an_account_is_needed(offer, root, capsys):
    pytest.importorskip("shapely")
    contents = offer.dataset("cityscapes")
    folder, arguments = root / "archives", ["fetch", "cityscapes", "--root", str(root)]
    first, second = contents
    folder.mkdir(parents=True)
    (folder / first).write_bytes(contents[first])
    with pytest.raises(UserError, match=f"account.*download {second} into {folder}.*fetch city"):
        main(arguments)
    (folder / second).write_bytes(contents[second] + b"x")
    with pytest.raises(DataError, match=f"{second}.*md5"):
        main(arguments)
    (folder / second).write_bytes(contents[second])
    assert main(arguments) == 0
    assert "csCreateTrainIdLabelImgs" in capsys.readouterr().out
    assert (folder / first).exists() and (folder / second).exists()
    assert not (root / "cityscapes" / "README").exists()


def test_files_in_the_way(offer, root):
    offer.dataset("coco2017")
    assert run(root, offer.served, "coco2017") == 0
    folder = root / "coco" / "annotations"
    equal, other = folder / "instances_val2017.json", folder / "person_keypoints_val2017.json"
    (folder / "instances_train2017.json").unlink()
    before = equal.stat()
    other.write_text("{}")
    with pytest.raises(DataError, match=str(other)):
        run(root, offer.served, "coco2017")
    assert other.read_text() == "{}" and not (folder / "instances_train2017.json").exists()
    assert "archives/annotations_trainval2017.zip" in files(root)  # for the next call
    other.unlink()
    offer.served.requests.clear()
    assert run(root, offer.served, "coco2017") == 0 and not offer.served.requests
    assert equal.stat() == before


def test_missing_files_are_added_again(offer, root, capsys):
    offer.dataset("voc2007")
    assert run(root, offer.served, "voc2007") == 0
    image, other = (root / "VOC2007/JPEGImages" / f"00000{i}.jpg" for i in (0, 1))
    before = other.stat()
    image.unlink()
    assert run(root, offer.served, "voc2007") == 3
    assert "WRONG  voc_2007_trainval" in (shown := capsys.readouterr().out) and "--again" in shown
    assert run(root, offer.served, "voc2007", "--again") == 0
    assert image.is_file() and other.stat() == before


def test_folders_that_are_links(offer, root, tmp_path):
    offer.dataset("coco2017")
    root.mkdir()
    (tmp_path / "disk").mkdir()
    (root / "coco").symlink_to(tmp_path / "disk")
    assert run(root, offer.served, "coco2017") == 0
    assert (tmp_path / "disk/val2017").is_dir() and (root / "coco").is_symlink()


def test_a_dry_run_writes_nothing(offer, root, capsys):
    offer.dataset("coco2017")
    assert main(["fetch", "coco2017", "lvis_v0.5", "--root", str(root), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("http://images.cocodataset.org/zips/train2017.zip") == 1
    assert "100 Mbit/s" in shown and "are free" in shown and "#termsofuse" in shown
    assert not root.exists()


def test_another_process_fetches(offer, root):
    offer.dataset("voc2007")
    (root / "archives").mkdir(parents=True)
    with FileLock(root / "archives" / ".lock"), pytest.raises(LockedError, match="archives"):
        run(root, offer.served, "voc2007")


def test_stopped_between_two_moves(offer, root, monkeypatch):
    """A partly moved archive does not count as present, and the next call moves the rest."""
    offer.dataset("voc2007")
    trainval = datasets()["voc2007"].archives[0]
    rename, left = Path.rename, 0

    def stop(path: Path, target: Path) -> Path:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return rename(path, target)

    for moves in (0, 1, 1):  # of Annotations, JPEGImages, ImageSets
        left = moves
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Path, "rename", stop)
            run(root, offer.served, "voc2007")
        assert not trainval.present(root) and f"archives/{TRAINVAL}" in files(root)
    assert run(root, offer.served, "voc2007") == 0


@pytest.mark.slow
def test_killed_while_it_unpacks(offer, root, tmp_path):
    """Nothing is under its final name, and the next call does not download again."""
    offer.dataset("voc2007")
    program = f"""
import sys, time
from pathlib import Path
import tarfile
from detection.datasets import download
from detection.datasets.__main__ import main
download.FILE = Path({str(offer.facts)!r})
extract, extracted = tarfile.TarFile.extract, []
def hold(*arguments, **settings):
    extract(*arguments, **settings)
    extracted.append(1)
    if len(extracted) == 5:
        print("held", flush=True)
        time.sleep(300)
tarfile.TarFile.extract = hold
main(sys.argv[1:])
"""
    out = tmp_path / "out.txt"
    arguments = ["fetch", "voc2007", "--root", str(root), "--mirror", offer.served.url]
    with out.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], cwd=ROOT, stdout=file, stderr=file
        )
    while "held" not in out.read_text():
        assert process.poll() is None, out.read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = files(root)
    assert f"archives/{TRAINVAL}" in left
    assert all(f.startswith(("archives/", "VOC2007/.tmp-")) for f in left) and len(left) > 5
    offer.served.requests.clear()
    assert run(root, offer.served, "voc2007") == 0
    assert [path for path, _ in offer.served.requests] == ["/VOCtest_06-Nov-2007.tar"]
    assert not any(".tmp-" in file for file in files(root))


def test_the_facts_have_sources():
    """Sizes and hashes have a source, archives without https have a hash, and splits exist."""
    every = {archive for dataset in datasets().values() for archive in dataset.archives}
    for archive in every:
        assert archive.source or not (archive.size or archive.about or archive.hash), archive.name
        assert archive.url.startswith("https://") or archive.hash, archive.name
        assert not archive.url or archive.url.endswith(f"/{archive.name}")
        assert not (archive.size and archive.about)
    for dataset in datasets().values():
        splits = {source.name for source in formats()[dataset.doctor].sources("x")}
        assert splits.issuperset(dataset.splits)
        assert dataset.account or all(archive.url for archive in dataset.archives)


def test_every_task_can_be_fetched(monkeypatch):
    known = {split for dataset in datasets().values() for split in dataset.splits}
    tasks = [splits for format_ in formats().values() for splits in format_.tasks.values()]
    assert len(tasks) >= 9 and all(known.issuperset(splits) for splits in tasks)
    assert fetch_command("mine") == ""
    for argv, program in {
        "x.py": "python -m benchmarks datasets",
        "moco-transfer": "moco-transfer datasets",
    }.items():
        monkeypatch.setattr(sys, "argv", [argv])
        splits = "voc_2012_trainval", "mine", "voc_2007_test", "voc_2012_val"
        shown = fetch_command(*splits, root="a b")
        assert shown == f"{program} fetch voc2012 voc2007 --root 'a b'"


def test_other_contents_of_an_archive_that_is_packed_anew(offer, root):
    [(name, content)] = offer.dataset("bccd").items()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = {each: archive.read(each) for each in archive.namelist()}
    last = max(each for each in parts if each.endswith(".xml"))
    offer.served.files[f"/{name}"] = packed(name, parts | {last: parts[last] + b" "})
    with pytest.raises(DataError, match="not the published files: got contents sha256:"):
        run(root, offer.served, "bccd")
    assert not [file for file in files(root) if file.startswith("bccd")]
