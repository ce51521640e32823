"""`python -m detection.datasets doctor`: what exists, is complete, is wrong, and the exit code."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detection import train_net
from detection.config.task import default_task
from detection.datasets import coco, doctor
from detection.datasets.__main__ import main
from detection.datasets.base import ABSENT, NOTE, OK, PART, WRONG, formats, published_formats
from detection.train_net import main as train
from tests.oracles.python import run_python
from tests.oracles.real_voc import with_links
from tests.oracles.tiny_ade import write_ade
from tests.oracles.tiny_cityscapes import write_cityscapes
from tests.oracles.tiny_coco import write_coco
from tests.oracles.tiny_lvis import write_lvis
from tests.oracles.tiny_voc import VOC_NAMES, write_voc
from tests.oracles.tiny_voc_seg import write_voc_seg

ROOT = Path(__file__).resolve().parents[3]
VAL2017 = "coco/annotations/instances_val2017.json"


def voc(root: Path, **splits: int) -> Path:
    """Rectangles under VOC's own class names."""
    return write_voc(root / "VOC2007", splits, names=VOC_NAMES)


def good(kind: str, root: Path) -> None:
    if kind == "voc":
        voc(root, trainval=3, test=2)
        write_voc_seg(root, {"train_aug": 3, "val": 2})
    elif kind == "coco":
        write_coco(root, {"train2017": 3, "val2017": 2}, keypoints=True)
    elif kind == "lvis":
        write_lvis(root, {"train": 3, "val": 2})
    elif kind == "ade20k":
        write_ade(root, {"train": 3, "val": 2})
    else:
        pytest.importorskip("shapely")
        write_cityscapes(root, {"train": 3, "val": 2})


def edit(file: Path, change) -> None:
    """Let `change` edit the content of a JSON file in place."""
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def states(kind: str, root: Path, *, verify: bool = False) -> dict[str, tuple[str, str]]:
    findings = doctor.examine(formats()[kind], str(root), verify=verify)
    return {finding.name: (finding.state, finding.text) for finding in findings}


def run_next(shown: str, monkeypatch) -> None:
    """Run the doctor's next command as it is printed."""
    words = shlex.split(shown.splitlines()[-1].removeprefix("next: "))
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert words[:4] == ["python", "-m", "benchmarks", "train"]
    assert train_net.main(words[4:]) == 0


@pytest.mark.parametrize("kind", published_formats())
def test_what_is_right_but_a_part(kind, tmp_path, capsys, monkeypatch):
    good(kind, tmp_path)
    assert main(["doctor", kind, "--root", str(tmp_path), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "expected in" in shown and "WRONG" not in shown
    assert "3 images" in shown and "(official count: " in shown
    config = next(iter(formats()[kind].tasks)).replace("24k", "9k" if kind == "voc" else "24k")
    check = f"python -m benchmarks train --config-file {config} --check-only"
    assert shown.splitlines()[-1] == (
        f"next: DETECTRON2_DATASETS={tmp_path} {check} MODEL.WEIGHTS random"
    )
    run_next(shown, monkeypatch)


@pytest.mark.parametrize("kind", published_formats())
def test_nothing_exists(kind, tmp_path, capsys):
    assert main(["doctor", kind, "--root", str(tmp_path)]) == 3
    shown = capsys.readouterr().out
    assert "nothing" in shown and "benchmarks datasets fetch " in shown.splitlines()[-1]
    assert shown.splitlines()[-1].endswith(f"python -m benchmarks doctor {kind} --root {tmp_path}")


def test_official_counts_are_marked(tmp_path, monkeypatch):
    write_coco(tmp_path, {"val2017": 2})
    monkeypatch.setitem(coco._COUNTS, ("instances", "2017_val"), (2, 9))
    state, text = states("coco", tmp_path)["coco_2017_val"]
    assert state == OK and text.startswith("2 images") and "(official count)" in text


def test_something_is_wrong(tmp_path, capsys):
    good("coco", tmp_path)
    edit(tmp_path / VAL2017, lambda content: content["annotations"][0].update(category_id=12))
    assert main(["doctor", "coco", "--root", str(tmp_path)]) == 3
    shown = capsys.readouterr().out
    assert "WRONG  coco_2017_val" in shown and "category_id 12" in shown
    assert "part   coco_2017_train" in shown
    assert "WRONG" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    "kind, write, name, named",
    [
        ("coco", "coco/train2017", "coco/train2017/", "annotations/*_train2017.json"),
        ("lvis", "lvis", "lvis/", "none of the files"),
        ("voc", "VOC2012/JPEGImages", "VOC2012/", "have no lists"),
        ("voc", lambda at: voc(at / "VOCdevkit", trainval=1), "VOCdevkit/", "too many"),
        (
            "voc",
            lambda at: (voc(at, trainval=2, test=1) / "Annotations" / "000002.xml").unlink(),
            "voc_2007_test",
            "VOCtest_06-Nov-2007.tar",
        ),
    ],
    ids=["no annotations", "no files", "no lists", "a folder too many", "test set apart"],
)
def test_folders_that_are_not_whole(kind, write, name, named, tmp_path):
    if isinstance(write, str):
        (tmp_path / write).mkdir(parents=True)
    else:
        write(tmp_path)
    state, text = states(kind, tmp_path)[name]
    assert state == WRONG and named in text


def test_cityscapes_without_train_ids_or_annotations(tmp_path):
    pytest.importorskip("shapely")
    write_cityscapes(tmp_path, {"train": 2}, train_ids=False)
    found = states("cityscapes", tmp_path)
    assert found["cityscapes_fine_instance_seg_train"][0] == PART
    assert found["cityscapes_fine_sem_seg_train"][0] == ABSENT
    state, text = found["gtFine/train/"]
    assert state == NOTE and "csCreateTrainIdLabelImgs" in text
    (tmp_path / "cityscapes" / "gtFine").rename(tmp_path / "gtFine")
    state, text = states("cityscapes", tmp_path)["leftImg8bit/train/"]
    assert state == WRONG and "gtFine/train/" in text


def test_lists_of_voc_2007_that_contradict_each_other(tmp_path):
    lists = voc(tmp_path, trainval=3, test=2) / "ImageSets" / "Main"
    assert states("voc", tmp_path)["VOC2007/"][0] == OK
    trainval, test = (lists / f"{split}.txt" for split in ("trainval", "test"))
    ids = trainval.read_text().split()
    test.write_text(test.read_text() + ids[0] + "\n")
    state, text = states("voc", tmp_path)["VOC2007/"]
    assert state == WRONG and text.endswith(f"1 image ({ids[0]})")
    test.unlink()
    for split, part in {"train": ids[:1], "val": ids[1:]}.items():
        (lists / f"{split}.txt").write_text("\n".join(part))
    assert "VOC2007/" not in states("voc", tmp_path)
    trainval.write_text("\n".join(ids[:2]))
    state, text = states("voc", tmp_path)["VOC2007/"]
    assert state == WRONG and "trainval.txt" in text


@pytest.mark.parametrize("kind", ["voc", "coco", "lvis"])
def test_verify_decodes_every_image(kind, tmp_path):
    """An image that is cut off, and one of another size: its header alone is not enough."""
    good(kind, tmp_path)
    folder = tmp_path / ("VOC2007/JPEGImages" if kind == "voc" else "coco/train2017")
    images = sorted(folder.iterdir())
    name = {"voc": "voc_2007_trainval", "coco": "coco_2017_train", "lvis": "lvis_v0.5_train"}[kind]
    whole = images[0].read_bytes()
    images[0].write_bytes(whole[: len(whole) // 2])
    assert states(kind, tmp_path)[name][0] == PART
    state, text = states(kind, tmp_path, verify=True)[name]
    assert state == WRONG and images[0].name in text
    images[0].write_bytes(whole)
    if kind != "voc":  # there the sizes are compared before training
        for image in images[1:3]:
            Image.new("RGB", (50, 50)).save(image)
        state, text = states(kind, tmp_path, verify=True)[name]
        assert state == WRONG and "50x50" in text and "1 more images" in text


def test_verify_checks_every_label_map(tmp_path, monkeypatch):
    write_voc_seg(tmp_path, {"val": 3})
    monkeypatch.setattr("detection.datasets.labels._SAMPLE", 1)
    mask = tmp_path / "VOC2012" / "SegmentationClass" / "2012_000002.png"
    Image.fromarray(np.full(np.asarray(Image.open(mask)).shape, 77, np.uint8)).save(mask)
    name = "voc_2012_sem_seg_val"
    assert states("voc", tmp_path)[name][0] == PART
    state, text = states("voc", tmp_path, verify=True)[name]
    assert state == WRONG and "2012_000002.png: label 77" in text


@pytest.mark.slow
def test_real_data(shared_data, tmp_path):
    with_links(shared_data / "VOC2007", tmp_path / "VOC2007")
    assert main(["doctor", "voc", "--root", str(tmp_path), "--verify"]) == 0
    assert main(["doctor", "coco", "--root", str(shared_data), "--verify"]) == 0


def test_without_heavy_packages():
    code = (
        "import sys; import detection.datasets.__main__;"
        "print([m for m in ('torch', 'pycocotools', 'shapely', 'cv2') if m in sys.modules])"
    )
    assert run_python("-c", code).strip() == "[]"


@pytest.fixture
def custom(tmp_path) -> Path:
    return write_voc(tmp_path / "own data", {"train": 4, "val": 2, "test": 2})


def examine(*arguments: object, capsys) -> tuple[int, str]:
    code = main(["doctor", *map(str, arguments), "--verify"])
    return code, capsys.readouterr().out


def test_a_custom_folder_that_is_right(custom, capsys, monkeypatch):
    for path in sorted((custom / "Annotations").iterdir())[:4]:
        path.write_text(path.read_text().replace("<name>red<", "<name>blue<"))
    code, shown = examine("--voc-dir", custom, capsys=capsys)
    assert code == 0 and "WRONG" not in shown
    for name in ("own data_train", "own data_val", "own data_test"):
        assert f"ok     {name}" in shown
    assert shown.count("classes: ") == 3 and "no object of red" in shown
    assert f"DATASETS.VOC_DIR '{custom}'" in shown
    run_next(shown, monkeypatch)


def test_a_custom_folder_to_train_or_to_test_on_alone(custom, capsys):
    lists = custom / "ImageSets" / "Main"
    (lists / "val.txt").unlink()
    (lists / "test.txt").rename(lists / "mine.txt")
    code, shown = examine("--voc-dir", custom, capsys=capsys)
    expected = "has mine, train; expected trainval or train, and test or val"
    assert code == 0 and expected in shown.splitlines()[-1]  # DATASETS.TEST may name it
    (lists / "mine.txt").unlink()
    code, shown = examine("--voc-dir", custom, capsys=capsys)
    assert code == 3 and "WRONG  own data_train" in shown and "has train; expected" in shown


@pytest.mark.parametrize(
    "split, change, why",
    [
        ("test", ("<difficult>0", "<difficult>1"), r"all of its \d objects are difficult"),
        ("train", ("<object>.*</object>", ""), "no annotated objects"),
        ("test", ("<object>.*</object>", ""), "no annotated objects"),
    ],
)
def test_a_custom_folder_with_nothing_to_train_or_test_on(split, change, why, custom, capsys):
    for image_id in (custom / f"ImageSets/Main/{split}.txt").read_text().split():
        path = custom / "Annotations" / f"{image_id}.xml"
        path.write_text(re.sub(*change, path.read_text()))
    code, shown = examine("--voc-dir", custom, capsys=capsys)
    assert code == 3 and "next: fix what is WRONG" in shown
    assert re.search(f"WRONG  own data_{split} .*; {why}, so nothing can be trained or", shown)


def test_difficult_objects_are_trained_on(custom, capsys):
    for image_id in (custom / "ImageSets/Main/train.txt").read_text().split():
        path = custom / "Annotations" / f"{image_id}.xml"
        path.write_text(path.read_text().replace("<difficult>0", "<difficult>1"))
    assert examine("--voc-dir", custom, capsys=capsys)[0] == 0


@pytest.mark.parametrize("flaw", ["crowds (iscrowd 1)", "without area"])
def test_a_custom_file_with_nothing_to_train_or_test_on(flaw, tmp_path, capsys):
    write_coco(tmp_path, {"val2017": 3}, crowd=False)

    def spoil(content):
        for row in content["annotations"]:
            if flaw == "without area":
                row |= {"bbox": [1, 1, 0, 5], "segmentation": []}
            else:
                row["iscrowd"] = 1

    edit(tmp_path / VAL2017, spoil)
    code, shown = examine("--coco-json", tmp_path / VAL2017, capsys=capsys)
    number = len(json.loads((tmp_path / VAL2017).read_text())["annotations"])
    assert code == 3 and f"; all of its {number} objects are {flaw}, so nothing can be" in shown


@pytest.mark.parametrize("images, warned", [(29, True), (30, False)])
def test_a_test_split_of_few_images_is_noted(images, warned, tmp_path, capsys):
    """Not only by the doctor, but by the task, whose notes are in the record."""
    root = write_voc(tmp_path / "own", {"train": 2, "test": images}, size=24)
    for path in (root / "Annotations").iterdir():
        text = path.read_text()
        objects = text[text.index("<object>") : text.rindex("</annotation>")]
        path.write_text(text.replace(objects, 2 * objects))
    _, shown = examine("--voc-dir", root, capsys=capsys)
    text = f"small test split: own_test has {images} images and "
    assert (text in shown) == warned and "small test split: own_train" not in shown
    argv = ["--config-file", "faster_rcnn_R_18_C4_small", "MODEL.WEIGHTS", "random"]
    argv += ["DATASETS.VOC_DIR", str(root), "--engine", "embedded", "--check-only"]
    assert train(argv) == 0
    assert (f"note: {text}" in capsys.readouterr().out) == warned


def test_oddities_that_leave_nothing(shared_data, capsys):
    for folder, flag, word in (
        ("c01_allcrowd", "--coco-json", "crowds"),
        ("v08_difficult", "--voc-dir", "difficult"),
    ):
        assert main(["doctor", flag, str(shared_data / "oddities" / folder)]) == 3
        assert f"objects are {word}" in capsys.readouterr().out


@pytest.mark.parametrize("masks", ["polygons", "run lengths", "none", "none to test on"])
def test_the_next_command_of_custom_files(masks, tmp_path, capsys, monkeypatch):
    write_coco(tmp_path, {"train2017": 3, "val2017": 3}, crowd=False)
    files = [tmp_path / f"coco/annotations/instances_{s}2017.json" for s in ("train", "val")]

    def change(content):
        sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
        for row in content["annotations"]:
            if masks == "run lengths":
                x, y, w, h = map(int, row["bbox"])
                H, W = sizes[row["image_id"]]
                counts = [H * x + y, *[h, H - h] * (w - 1), h]
                counts.append(H * W - sum(counts))
                row["segmentation"] = {"size": [H, W], "counts": counts}
            elif masks != "polygons":
                del row["segmentation"]

    for file in files if masks != "none to test on" else files[1:]:
        edit(file, change)
    arguments = [word for file in files for word in ("--coco-json", file)]
    code, shown = examine(*arguments, capsys=capsys)
    assert code == 0
    assert ("mask_rcnn" in shown.splitlines()[-1]) == (masks in ("polygons", "run lengths"))
    run_next(shown, monkeypatch)


def test_a_folder_of_json_files(tmp_path, capsys, monkeypatch):
    """COCO's and DETR's: annotations/*_train*.json and *_val*.json."""
    write_coco(tmp_path, {"train2017": 3, "val2017": 3}, crowd=False)
    code, shown = examine("--coco-json", tmp_path / "coco", capsys=capsys)
    assert code == 0 and shown.count("  ok     annotations_instances_") == 2
    run_next(shown, monkeypatch)


def test_custom_images_that_are_elsewhere(tmp_path, capsys):
    """The doctor has --root for the folder that a task has a key for."""
    write_coco(tmp_path, {"val2017": 3})
    images = tmp_path / "far" / "away" / "images"
    images.parent.mkdir(parents=True)
    (tmp_path / "coco/val2017").rename(images)
    code, shown = examine("--coco-json", tmp_path / VAL2017, capsys=capsys)
    assert code == 3 and "give --root, the images' folder" in shown and "DATASETS." not in shown
    code, shown = examine("--coco-json", tmp_path / VAL2017, "--root", images.parent, capsys=capsys)
    assert code == 3 and "give --root, the images' folder" in shown and "DATASETS." not in shown
    code, shown = examine("--coco-json", tmp_path / VAL2017, "--root", images, capsys=capsys)
    assert code == 0 and "train_net" not in shown  # which needs a second file
    again = f"doctor --root {images} --coco-json {tmp_path / VAL2017} --coco-json"
    assert again in shown.splitlines()[-1]


def test_custom_images_of_16_bits(tmp_path, capsys):
    write_coco(tmp_path, {"val2017": 3})
    image = sorted((tmp_path / "coco/val2017").iterdir())[0]
    Image.fromarray(np.full((50, 60), 999, np.uint16)).save(image.with_suffix(".png"))
    file = tmp_path / VAL2017
    file.write_text(file.read_text().replace(image.name, f"{image.stem}.png"))
    code, shown = examine("--coco-json", file, capsys=capsys)
    assert code == 3 and f"{image.stem}.png: " in shown


def test_images_twice_in_a_custom_folder(custom, capsys):
    images, annotations = custom / "JPEGImages", custom / "Annotations"
    (images / "000001.jpg").write_bytes((images / "000000.jpg").read_bytes())
    size = re.search(r"<size>.*</size>", (annotations / "000000.xml").read_text())[0]
    (annotations / "000001.xml").write_text(f"<annotation>{size}</annotation>")
    test = custom / "ImageSets" / "Main" / "test.txt"
    test.write_text(test.read_text() + "000002\n")
    code, shown = examine("--voc-dir", custom, capsys=capsys)
    assert code == 0
    assert "000000.jpg and" in shown and "000001.jpg" in shown
    assert "own data_test, own data_train  in both: 1 image, the first" in shown


def test_images_twice_in_a_custom_file(tmp_path, capsys):
    write_coco(tmp_path, {"val2017": 3})
    file = tmp_path / VAL2017

    def twice(content):
        first, second = content["images"][:2]
        first |= {key: second[key] for key in ("file_name", "width", "height")}
        rows = content["annotations"]
        content["annotations"] = [a for a in rows if a["image_id"] != first["id"]]

    edit(file, twice)
    second = json.loads(file.read_text())["images"][1]["file_name"]
    code, shown = examine("--coco-json", file, capsys=capsys)
    assert code == 0 and "listed under several ids: 1 image, the first is" in shown
    assert second in shown


def test_names_of_others_do_not_reach_the_terminal_raw(tmp_path, capsys):
    """Neither by the doctor nor by a task: they could clear it, or say what is not so."""
    write_coco(tmp_path, {"val2017": 3}, crowd=False)
    file = tmp_path / VAL2017

    def rename(content):
        for category in content["categories"]:
            category["name"] += "\x1b[2J\x00\nfound: nothing"

    edit(file, rename)
    _, doctors = examine("--coco-json", file, capsys=capsys)
    json_keys = [f"DATASETS.COCO_{role}_JSON={file}" for role in ("TRAIN", "TEST")]
    task = ["--config-file", "faster_rcnn_R_18_C4_small", "MODEL.WEIGHTS=random", *json_keys]
    assert train(["--engine", "embedded", "--check-only", *task]) == 0
    for shown in (doctors, capsys.readouterr().out):
        assert "person\\x1b[2J\\x00\\nfound: nothing" in shown
        assert not {"\x1b", "\x00"} & set(shown) and "\nfound: nothing" not in shown


def test_classes_of_two_files(tmp_path, capsys):
    write_coco(tmp_path, {"train2017": 2, "val2017": 2})
    train = tmp_path / "coco/annotations/instances_train2017.json"
    arguments = ["--coco-json", train, "--coco-json", tmp_path / VAL2017]
    edit(train, lambda content: [annotation.pop("area") for annotation in content["annotations"]])
    code, shown = examine(*arguments, capsys=capsys)
    assert code == 0 and "areas that are missing" in shown

    def without_the_last_class(content):
        last = content["categories"].pop()["id"]
        rows = content["annotations"]
        content["annotations"] = [row for row in rows if row["category_id"] != last]

    edit(train, without_the_last_class)
    code, shown = examine(*arguments, capsys=capsys)
    assert code == 3 and "have different classes" in shown


def test_the_command_in_messages_is_for_this_data():
    cfg = default_task()
    assert doctor.command(cfg) == ""
    cfg.DATASETS.VOC_DIR = "my data"
    assert doctor.command(cfg) == ("python -m benchmarks doctor --voc-dir 'my data' --verify")
    cfg.DATASETS.VOC_DIR = ""
    cfg.DATASETS.COCO_TRAIN_JSON, cfg.DATASETS.COCO_TRAIN_ROOT = "a.json", "images"
    cfg.DATASETS.COCO_TEST_JSON = "b.json"
    first, second = doctor.command(cfg).split(" && ")
    assert first.endswith("doctor --root images --coco-json a.json --verify")
    assert second.endswith("doctor --coco-json b.json --verify")
    cfg.DATASETS.COCO_TEST_ROOT = "images"
    both = "doctor --root images --coco-json a.json --coco-json b.json --verify"
    assert doctor.command(cfg).endswith(both)
