"""`datasets split`: shares of each class, copies together, three layouts, nothing overwritten."""

import json
import os
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

import pytest

from detection.config.resolve import resolve_names
from detection.datasets import read_split
from detection.datasets.__main__ import main
from detection.datasets.split import divide
from moco.common.errors import DataError, UserError
from tests.detection.datasets.conftest import read
from tests.detection.datasets.test_voc import task_with
from tests.oracles.relayout import as_roboflow, as_yolo
from tests.oracles.tiny_voc import write_voc

SHARES = {"train": 0.6, "val": 0.2, "test": 0.2}


def test_each_class_is_divided_by_the_shares():
    classes = [frozenset(("common", "rare")[: 1 + (i < 10)]) for i in range(90)]
    classes += [frozenset()] * 10
    digests = [str(i) for i in range(100)]
    parts = divide(digests, classes, SHARES, seed=0)
    assert sorted(i for chosen in parts.values() for i in chosen) == list(range(100))
    for split, share in SHARES.items():
        counts = Counter(name for i in parts[split] for name in classes[i])
        assert counts == {"rare": 10 * share, "common": 90 * share}
        assert len(parts[split]) == 100 * share
    again = divide(digests[::-1], classes[::-1], SHARES, seed=0)
    assert {99 - i for i in again["test"]} == set(parts["test"])  # in whatever order they come
    assert divide(digests, classes, SHARES, seed=1) != parts


def test_images_of_equal_bytes_stay_together():
    digests = [str(i % 4) for i in range(40)]
    parts = divide(digests, [frozenset("a")] * 40, {"train": 0.5, "test": 0.5}, seed=3)
    assert [len({digests[i] for i in chosen}) for chosen in parts.values()] == [2, 2]


@pytest.fixture
def voc(tmp_path) -> Path:
    """20 images in VOC layout, of which two are equal, without lists."""
    root = write_voc(tmp_path / "voc", {"train": 20}, size=32)
    shutil.copy(root / "JPEGImages/000001.jpg", root / "JPEGImages/000000.jpg")
    shutil.copy(root / "Annotations/000001.xml", root / "Annotations/000000.xml")
    return root


def sizes(*splits) -> list[int]:
    assert len({record["file_name"] for split in splits for record in split.records}) == 20
    return [len(split.records) for split in splits]


def test_three_layouts(voc, tmp_path, capsys):
    whole = {"train": read_split("voc_train", task_with(voc))}
    with pytest.raises(UserError, match=r"ImageSets/Main/train\.txt exists, .*move it away"):
        main(["split", str(voc)])
    shutil.rmtree(voc / "ImageSets")
    assert main(["split", str(voc)]) == 0
    shown = capsys.readouterr().out
    assert "VOC layout, 20 images, 1 of them copies of others, which are kept together" in shown
    assert f"wrote {voc}/ImageSets/Main/val.txt\n" in shown and "blue" in shown
    by_name = [read_split(f"voc_{name}", task_with(voc)) for name in SHARES]
    assert 3 <= min(sizes(*by_name)) and sizes(*by_name)[0] >= 11

    yolo = as_yolo(tmp_path / "yolo", whole)
    assert main(["split", str(yolo.parent), "--test", "0"]) == 0
    file = yolo.with_name("data_split.yaml")
    assert capsys.readouterr().out.endswith(f"doctor --yolo {file}\n")
    found = [read(f"yolo_{name}", YOLO_YAML=file) for name in ("train", "val")]
    assert 4 <= sizes(*found)[1] <= 5
    with pytest.raises(UserError, match=r"train\.txt exists, and is not overwritten"):
        main(["split", str(yolo)])
    with pytest.raises(UserError, match="has splits: train, val"):
        main(["split", str(file)])

    coco = as_roboflow(tmp_path / "coco", whole)
    assert main(["split", str(coco), "--seed", "3"]) == 0
    file = coco / "train/_annotations.coco_test.json"
    assert f"wrote {file}\n" in capsys.readouterr().out
    names = [f"train__annotations.coco_{name}" for name in SHARES]
    files = [coco / "train" / f"_annotations.coco_{name}.json" for name in SHARES]
    found = [read(n, COCO_TRAIN_JSON=file) for n, file in zip(names, files, strict=True)]
    assert 3 <= min(sizes(*found))
    assert sum(len(json.loads(file.read_text())["annotations"]) for file in files) == sum(
        len(record["annotations"]) for record in whole["train"].records
    )


@pytest.mark.parametrize("name", ["img ({})", "a b c {}", "{} "])
def test_names_with_blanks(name, voc):
    """What is written can be read, or nothing is written."""
    shutil.rmtree(voc / "ImageSets")
    for number, path in enumerate(sorted(voc.rglob("*.*"))):
        path.rename(path.with_stem(name.format(number % 20)))
    if name.endswith(" "):
        with pytest.raises(DataError, match=r"'[0-9]+ ': a list cannot have this name"):
            main(["split", str(voc)])
        assert not (voc / "ImageSets").exists()
        return
    assert main(["split", str(voc)]) == 0
    splits = [read_split(f"voc_{split}", task_with(voc)) for split in SHARES]
    assert sum(sizes(*splits)) == 20
    assert main(["doctor", "--voc-dir", str(voc)]) == 0


def test_one_list_of_all_images_as_cvat_writes_it(voc, capsys):
    """The doctor and a task name the command that divides it, and that command divides it."""
    lists = voc / "ImageSets/Main"
    (lists / "train.txt").rename(lists / "default.txt")
    ids = (lists / "default.txt").read_text().split()
    (lists / "red_default.txt").write_text("".join(f"{name} 1\n" for name in ids))
    (lists / "default.txt").write_text("\n".join(ids[:15]))
    command = f"to divide it: python -m benchmarks datasets split {voc}"
    assert main(["doctor", "--voc-dir", str(voc)]) == 3
    shown = capsys.readouterr().out
    assert command in shown and "red_default" not in shown
    with pytest.raises(DataError, match=re.escape(command)):
        resolve_names(task_with(voc), [], eval_only=False)
    assert main(["split", str(voc)]) == 0
    splits = [read_split(f"voc_{split}", task_with(voc)) for split in SHARES]
    assert sum(len(split.records) for split in splits) == 15
    cfg = task_with(voc)
    resolve_names(cfg, [], eval_only=False)
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("voc_train",), ("voc_test",))


@pytest.mark.parametrize("annotations, images", [("annotations", "images"), ("annots", "images")])
def test_folders_of_voc_with_other_names(annotations, images, voc, tmp_path):
    """Without lists, as many archives have them; the divided folder is trained on as it is."""
    shutil.rmtree(voc / "ImageSets")
    (voc / "Annotations").rename(voc / annotations)
    (voc / "JPEGImages").rename(voc / images)
    with pytest.raises(DataError, match=r"to divide it: .* split /"):
        resolve_names(task_with(voc), [], eval_only=False)
    assert main(["split", str(voc)]) == 0
    assert sum(sizes(*(read_split(f"voc_{name}", task_with(voc)) for name in SHARES))) == 20
    assert main(["doctor", "--voc-dir", str(voc), "--verify"]) == 0


def test_images_that_are_elsewhere(voc, tmp_path, capsys):
    """The message asks for --root, which this command has, too."""
    coco = as_roboflow(tmp_path / "coco", {".": read_split("voc_train", task_with(voc))})
    file = (coco / "_annotations.coco.json").rename(tmp_path / "all.json")
    far = tmp_path / "far/away/images"
    far.parent.mkdir(parents=True)
    coco.rename(far)
    with pytest.raises(DataError, match="give --root, the images' folder"):
        main(["split", str(file)])
    assert main(["split", str(file), "--root", str(far)]) == 0
    *_, command = capsys.readouterr().out.splitlines()
    assert main(shlex.split(command.partition("benchmarks ")[2])) == 0
    with pytest.raises(UserError, match="--root belongs to a file in COCO's format"):
        main(["split", str(voc), "--root", str(far)])


@pytest.mark.parametrize("folder", ["v03_splitspaces", "v04_cvat", "v20_official"])
def test_folders_that_others_tools_wrote(folder, shared_data, tmp_path, capsys):
    root = tmp_path / folder
    shutil.copytree(shared_data / "oddities" / folder, root)
    if folder == "v04_cvat":
        assert main(["split", str(root)]) == 0
    assert main(["doctor", "--voc-dir", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "WRONG" not in shown and "red_" not in shown


def test_a_folder_of_label_studio(voc, tmp_path):
    """classes.txt instead of a data.yaml, which is written."""
    whole = {".": read_split("voc_train", task_with(voc))}
    yolo = as_yolo(tmp_path / "studio", whole)
    yolo.unlink()
    yolo.with_name("classes.txt").write_text("blue\ngreen\nred\n")
    assert main(["split", str(yolo.parent), "--val", "0"]) == 0
    sizes(*(read(f"studio_{name}", YOLO_YAML=yolo) for name in ("train", "test")))


@pytest.mark.parametrize(
    "words, error, named",
    [
        (["--val", "0.7", "--test", "0.3"], UserError, "together below 1"),
        (["--val", "nan"], UserError, "--val nan"),
        (["--val", "0", "--test", "0"], UserError, "above 0"),
        (["--val", "0.001"], DataError, "too few: val would have none"),
    ],
)
def test_shares_that_are_refused(words, error, named, voc):
    shutil.rmtree(voc / "ImageSets")
    with pytest.raises(error, match=named):
        main(["split", str(voc), *words])
    assert not (voc / "ImageSets").exists()


def test_no_dataset(tmp_path):
    with pytest.raises(DataError, match="expected a dataset"):
        main(["split", str(tmp_path)])


LAYOUTS = {
    "voc": ("ImageSets/Main/train.txt", "ImageSets/Main/val.txt", "ImageSets/Main/test.txt"),
    "yolo": ("data_split.yaml", "train.txt", "val.txt", "test.txt"),
    "coco": tuple(f"train/_annotations.coco_{name}.json" for name in SHARES),
}


@pytest.fixture
def undivided(voc, tmp_path) -> dict[str, Path]:
    """Return the folder of one dataset in each layout, without splits."""
    whole = {"train": read_split("voc_train", task_with(voc))}
    shutil.rmtree(voc / "ImageSets")
    yolo, coco = as_yolo(tmp_path / "yolo", whole), as_roboflow(tmp_path / "coco", whole)
    return {"voc": voc, "yolo": yolo.parent, "coco": coco}


@pytest.mark.parametrize(("layout", "killed"), [("voc", 1), ("voc", 2), ("yolo", 3), ("coco", 2)])
def test_a_kill_between_two_lists(layout, killed, undivided, tmp_path):
    """What has the name of the training split is written last, and the same command completes."""
    folder, names = undivided[layout], LAYOUTS[layout]
    if (child := os.fork()) == 0:
        replace = os.replace

        def until_killed(source: Path, target: Path) -> None:
            if sum((folder / name).exists() for name in names) == killed:
                os._exit(9)
            replace(source, target)

        os.replace = until_killed
        main(["split", str(folder)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert sum((folder / name).exists() for name in names) == killed
    assert not (folder / names[0]).exists(), "the others would be used without it"
    assert main(["split", str(folder)]) == 0
    assert all((folder / name).is_file() for name in names)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_remains_of_a_write_that_fails(layout, undivided, monkeypatch):
    folder, before, replace = undivided[layout], files_in(undivided[layout]), os.replace
    monkeypatch.setattr(
        os, "replace", lambda a, b: fail() if b == folder / LAYOUTS[layout][0] else replace(a, b)
    )

    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        main(["split", str(folder)])
    assert files_in(folder) == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dangling_link_is_not_replaced(layout, undivided):
    folder, name = undivided[layout], LAYOUTS[layout][-1]
    link = folder / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to("on another disk.txt")
    before = files_in(folder)
    with pytest.raises(UserError, match=f"{link.name} exists, and is not overwritten"):
        main(["split", str(folder)])
    assert files_in(folder) == before and link.is_symlink()


@pytest.mark.parametrize("layout", ["voc", "yolo"])
@pytest.mark.parametrize("name", ["two\nlines", "line\u2028separator", "latin-1 \udce9"])
def test_a_name_that_a_list_cannot_have(layout, name, undivided):
    folder = undivided[layout]
    for path in list(folder.rglob("000003.*")):
        path.rename(path.with_stem(name))
    before = files_in(folder)
    with pytest.raises(DataError, match="a list cannot have this name") as error:
        main(["split", str(folder)])
    assert str(error.value).isprintable() and files_in(folder) == before


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())
