"""Runs on different data have different ids, on equal data the same, wherever it is."""

import json
import os
import shutil
from pathlib import Path

import pytest

from benchmarks.suites import data_digest
from benchmarks.suites.data_digest import data_digests, folder_digest
from benchmarks.suites.suite_file import load_suite
from moco.common.errors import UserError
from tests.benchmarks.suites.lab import ROOT, Lab, from_random, write_suite


def voc(folder: Path) -> Path:
    """Write a folder in VOC layout."""
    for name, text in (
        ("Annotations/1.xml", "<annotation><name>cat</name></annotation>"),
        ("ImageSets/Main/trainval.txt", "1\n"),
        ("ImageSets/Main/test.txt", "2\n"),
        ("JPEGImages/1.jpg", "pixels"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_what_is_in_the_data_counts(tmp_path):
    folder = voc(tmp_path / "a")
    shutil.copytree(folder, tmp_path / "elsewhere")
    linked = tmp_path / "linked"
    linked.mkdir()
    for part in folder.iterdir():
        (linked / part.name).symlink_to(part)
    (linked / ".cache").write_text("hidden")
    before = folder_digest(str(folder))
    assert folder_digest(str(tmp_path / "elsewhere")) == folder_digest(str(linked)) == before
    found = {before}
    for name, text in (
        ("Annotations/1.xml", "<annotation><name>dog</name></annotation>"),  # of the same size
        ("ImageSets/Main/test.txt", "3\n"),
        ("JPEGImages/1.jpg", "more pixels"),
        ("JPEGImages/2.jpg", "pixels"),
    ):
        (folder / name).write_text(text)
        found.add(folder_digest(str(folder)))
    assert len(found) == 5


def test_a_large_folder_is_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(data_digest, "MAX_FILES", 10)
    for index in range(95):
        (tmp_path / f"{index:02d}.jpg").write_text("pixels")
    (tmp_path / "list.txt").write_text("of them")
    (tmp_path / "loop").symlink_to(tmp_path)
    inspected, stat = [], os.stat

    def counted(path, *arguments, **keys):
        inspected.append(str(path))
        return stat(path, *arguments, **keys)

    monkeypatch.setattr(data_digest.os, "stat", counted)
    before = folder_digest(str(tmp_path))
    monkeypatch.undo()
    assert len([path for path in inspected if path.endswith(".jpg")]) == 10
    (tmp_path / "94.jpg").rename(tmp_path / "95.jpg")  # every name counts
    assert folder_digest(str(tmp_path)) != before


@pytest.mark.parametrize("key", ["DATASETS.VOC_DIR", "DATA.ROOT"])
def test_ids(key, tmp_path, monkeypatch):
    """Two folders under one key are two experiments, one folder in two places is one."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))

    def ids(place: str) -> list[str]:
        own = {"name": "own", "overrides": {key: place}}
        suite = load_suite(write_suite(tmp_path, own, {"name": "known"}))
        return [run.id for run in from_random(suite, data=data_digests(suite, None))]

    first, other = voc(tmp_path / "first"), voc(tmp_path / "other")
    (other / "JPEGImages" / "1.jpg").write_text("other pixels")
    shutil.copytree(first, tmp_path / "copy")
    assert ids(str(first)) == ids("$DETECTRON2_DATASETS/copy")
    own, known = zip(ids(str(first)), ids(str(other)), strict=True)
    assert own[0] != own[1] and known[0] == known[1]
    plain = from_random(load_suite(write_suite(tmp_path, {"name": "known"})))
    assert known[0] == plain[0].id, "a task of a known dataset keeps its id"


def test_a_data_yaml_covers_its_folder(tmp_path):
    file, label = tmp_path / "data.yaml", tmp_path / "labels" / "1.txt"
    label.parent.mkdir()
    file.write_text("train: images")
    digests = set()
    for text in ("0 0.5 0.5 0.5 0.5", "0 0.5 0.5 0.5 0.6"):
        label.write_text(text)
        digests.add(data_digest.data_digest({"DATASETS.YOLO_YAML": str(file)}))
    assert len(digests) == 2 and "" not in digests


def coco(folder: Path, name: str = "cat") -> Path:
    """Write a file in COCO's format, a folder of its image, and an index of subsets."""
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "1.jpg").write_text("pixels")
    image = {"id": 1, "file_name": "1.jpg", "width": 4, "height": 4}
    content = {"images": [image], "annotations": [], "categories": [{"id": 1, "name": name}]}
    (folder / "own.json").write_text(json.dumps(content))
    (folder / "index.txt").write_text("{}")
    return folder


@pytest.mark.parametrize("root", ["", "images"])
@pytest.mark.parametrize(
    ("changed", "old", "new"),
    [
        ("own.json", "cat", "dog"),
        ("images/1.jpg", "pixels", "other pixels"),
        ("index.txt", "{}", '{"10": {}}'),
    ],
)
def test_ids_of_files_in_cocos_format(root, changed, old, new, tmp_path):
    """A file that is edited in place is other data, and so are images of other sizes."""

    def digest(folder: Path) -> str:
        keys = {"COCO_TRAIN_JSON": "own.json", "COCO_TEST_JSON": "own.json"}
        keys |= {"COCO_TRAIN_ROOT": root, "COCO_TEST_ROOT": root} if root else {}
        opts = {f"DATASETS.{key}": str(folder / value) for key, value in keys.items()}
        index = folder / "index.txt"
        task = {"name": "own", "overrides": {**opts, "DATASETS.PART_INDEX": str(index)}}
        suite = load_suite(write_suite(tmp_path, task))
        [data] = data_digests(suite, None).values()
        return data

    first = coco(tmp_path / "first" / "data")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    before = digest(first)
    assert before and digest(tmp_path / "copy" / "data") == before
    path = first / changed
    path.write_text(path.read_text().replace(old, new))
    assert digest(first) != before
    path.write_text("")
    assert digest(first) != before, "an invalid file has a digest, too"


def test_a_suite_of_other_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    data, lab = voc(tmp_path / "data"), Lab(tmp_path, inits=("random",), trials=1)
    opts = ["--opts", "DATASETS.VOC_DIR", str(data)]
    lab.run(*opts)
    assert len(lab.count("done")) == 2
    shutil.move(data, tmp_path / "moved")
    lab.run(*opts)  # done, and what the data was is known
    lab.run("--opts", "DATASETS.VOC_DIR", str(tmp_path / "moved"))
    assert set(lab.count("done").values()) == {1} and len(lab.count("done")) == 2
    (tmp_path / "moved" / "JPEGImages" / "1.jpg").write_text("other pixels")
    with pytest.raises(UserError, match=r"tasks\.a\.data: "):
        lab.run("--opts", "DATASETS.VOC_DIR", str(tmp_path / "moved"))
