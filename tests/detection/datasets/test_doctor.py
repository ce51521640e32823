"""`python -m detection.datasets doctor`: what is there, complete, wrong, and the exit code."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from detection.config.task import default_task
from detection.datasets import base, coco, doctor
from detection.datasets.__main__ import main
from detection.datasets.base import formats
from moco.common.errors import DataError, UserError
from tests.oracles.processes import processor_seconds
from tests.oracles.real_voc import with_links
from tests.oracles.tiny_cityscapes import write_cityscapes
from tests.oracles.tiny_coco import write_coco
from tests.oracles.tiny_lvis import write_lvis
from tests.oracles.tiny_voc import write_voc
from tests.oracles.tiny_voc_seg import write_voc_seg

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """The folder is the one that is given; the variable stays as it is."""
    monkeypatch.setenv("DETECTRON2_DATASETS", "/nonexistent")
    yield
    assert os.environ["DETECTRON2_DATASETS"] == "/nonexistent"


VOC_NAMES = {"red": "cat", "green": "dog", "blue": "car"}


def voc(root: Path, year: int = 2007, **splits: int) -> Path:
    """Rectangles under VOC's own class names."""
    folder = write_voc(root / f"VOC{year}", splits)
    for path in (folder / "Annotations").iterdir():
        text = path.read_text()
        for color, name in VOC_NAMES.items():
            text = text.replace(f"<name>{color}<", f"<name>{name}<")
        path.write_text(text)
    return folder


def good(kind: str, root: Path) -> None:
    if kind == "voc":
        voc(root, trainval=3, test=2)
        write_voc_seg(root, {"train_aug": 3, "val": 2})
    elif kind == "coco":
        write_coco(root, {"train2017": 3, "val2017": 2}, keypoints=True)
    elif kind == "lvis":
        write_lvis(root, {"train": 3, "val": 2})
    else:
        pytest.importorskip("shapely", reason="shapely is not installed")
        write_cityscapes(root, {"train": 3, "val": 2})


def states(kind: str, root: Path, *, verify: bool = False) -> dict[str, tuple[str, str]]:
    return {
        f.name: (f.state, f.text) for f in doctor.examine(formats()[kind], str(root), verify=verify)
    }


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", list(formats()))
def test_what_is_right_but_a_part(kind, verify, tmp_path, capsys):
    good(kind, tmp_path)
    assert main(["doctor", kind, "--root", str(tmp_path), *["--verify"] * verify]) == 0
    shown = capsys.readouterr().out
    assert "expected in" in shown and "WRONG" not in shown
    assert "3 images" in shown and "(official count: " in shown
    config = next(iter(formats()[kind].tasks)).replace("24k", "9k" if kind == "voc" else "24k")
    command = f"python detection/train_net.py --config-file {config} --check-only"
    assert shown.splitlines()[-1] == (
        f"next: DETECTRON2_DATASETS={tmp_path} {command} MODEL.WEIGHTS random"
    )


@pytest.mark.parametrize("kind", list(formats()))
def test_nothing_is_there(kind, tmp_path, capsys):
    assert main(["doctor", kind, "--root", str(tmp_path)]) == 3
    shown = capsys.readouterr().out
    assert "nothing" in shown and "http" in shown.splitlines()[-1]
    assert shown.splitlines()[-1].endswith(
        f"python -m detection.datasets doctor {kind} --root {tmp_path}"
    )


def test_official_counts_are_marked(tmp_path, monkeypatch):
    write_coco(tmp_path, {"val2017": 2})
    monkeypatch.setitem(coco._COUNTS, ("instances", "2017_val"), (2, 9))
    state, text = states("coco", tmp_path)["coco_2017_val"]
    assert state == base.OK and text.startswith("2 images") and "(official count)" in text


def test_something_is_wrong(tmp_path, capsys):
    good("coco", tmp_path)
    file = tmp_path / "coco" / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["category_id"] = 12
    file.write_text(json.dumps(content))
    assert main(["doctor", "coco", "--root", str(tmp_path)]) == 3
    shown = capsys.readouterr().out
    assert "WRONG  coco_2017_val" in shown and "category 12 is not in the file" in shown
    assert "part   coco_2017_train" in shown
    assert shown.splitlines()[-1].startswith("next: fix what is WRONG")


def test_half_of_coco(tmp_path):
    good("coco", tmp_path)
    for image in (tmp_path / "coco" / "val2017").iterdir():
        image.unlink()
    for path in (tmp_path / "coco" / "annotations").glob("*_train2017.json"):
        path.unlink()
    found = states("coco", tmp_path)
    assert found["coco_2017_val"][0] == base.WRONG
    assert "missing (2 of the 2 images" in found["coco_2017_val"][1]
    assert found["coco/train2017/"] == (
        base.WRONG,
        "exists, but no annotations/*_train2017.json",
    )


def test_one_version_of_lvis_under_the_others_name(tmp_path):
    write_lvis(tmp_path, {"train": 1}, version="v1")
    file = tmp_path / "lvis" / "lvis_v1_train.json"
    file.rename(file.with_name("lvis_v0.5_train.json"))
    state, text = states("lvis", tmp_path)["lvis_v0.5_train"]
    assert state == base.WRONG and "LVIS v1 has 1203" in text
    file.with_name("lvis_v0.5_train.json").rename(file.with_name("train.json"))
    assert states("lvis", tmp_path)["lvis/"][0] == base.WRONG


def test_cityscapes_without_train_ids_or_annotations(tmp_path):
    pytest.importorskip("shapely", reason="shapely is not installed")
    write_cityscapes(tmp_path, {"train": 2}, train_ids=False)
    found = states("cityscapes", tmp_path)
    assert found["cityscapes_fine_instance_seg_train"][0] == base.PART
    assert found["cityscapes_fine_sem_seg_train"][0] == base.ABSENT
    state, text = found["gtFine/train/"]
    assert state == base.NOTE and "csCreateTrainIdLabelImgs" in text
    (tmp_path / "cityscapes" / "gtFine").rename(tmp_path / "gtFine")
    assert states("cityscapes", tmp_path)["leftImg8bit/train/"] == (
        base.WRONG,
        "exists, but gtFine/train/ does not",
    )


def test_trainval_and_test_of_voc_2007_in_one_folder(tmp_path):
    folder = voc(tmp_path, trainval=3, test=2)
    lists = folder / "ImageSets" / "Main"
    assert states("voc", tmp_path)["VOC2007/"][0] == base.OK
    trainval, test = (lists / f"{split}.txt" for split in ("trainval", "test"))
    first = trainval.read_text().split()[0]
    test.write_text(test.read_text() + first + "\n")
    state, text = states("voc", tmp_path)["VOC2007/"]
    assert state == base.WRONG
    assert text == f"1 images are in trainval.txt and in test.txt ({first})"


def test_the_annotations_of_the_test_set_come_separately(tmp_path):
    folder = voc(tmp_path, trainval=3, test=2)
    for image_id in (folder / "ImageSets" / "Main" / "test.txt").read_text().split():
        (folder / "Annotations" / f"{image_id}.xml").unlink()
    state, text = states("voc", tmp_path)["voc_2007_test"]
    assert state == base.WRONG and "VOCtest_06-Nov-2007.tar" in text


def test_lists_that_contradict_each_other(tmp_path):
    folder = voc(tmp_path, train=2, val=2)
    lists = folder / "ImageSets" / "Main"
    ids = [(lists / f"{split}.txt").read_text() for split in ("train", "val")]
    (lists / "trainval.txt").write_text("".join(ids))
    assert "VOC2007/" not in states("voc", tmp_path)
    (lists / "trainval.txt").write_text(ids[0])
    assert states("voc", tmp_path)["VOC2007/"] == (
        base.WRONG,
        "trainval.txt is not train.txt and val.txt together",
    )


def test_a_folder_too_many_or_without_lists(tmp_path):
    voc(tmp_path / "VOCdevkit", trainval=1)
    assert states("voc", tmp_path)["VOCdevkit/"][0] == base.WRONG
    (tmp_path / "VOC2012" / "JPEGImages").mkdir(parents=True)
    found = states("voc", tmp_path)
    assert found["VOC2012/"][0] == base.WRONG and "no lists" in found["VOC2012/"][1]


def test_malformed_xml(tmp_path):
    folder = voc(tmp_path, trainval=2, test=1)
    (folder / "Annotations" / "000001.xml").write_text("<annotation>")
    found = states("voc", tmp_path)
    assert found["voc_2007_trainval"][0] == base.WRONG
    assert "000001.xml: not valid XML" in found["voc_2007_trainval"][1]
    assert found["voc_2007_test"][0] == base.PART


@pytest.mark.parametrize("kind", ["voc", "coco", "lvis"])
def test_verify_decodes_every_image(kind, tmp_path):
    """An image that is cut off, and one of another size: its header alone is not enough."""
    good(kind, tmp_path)
    folder = tmp_path / ("VOC2007/JPEGImages" if kind == "voc" else "coco/train2017")
    images = sorted(folder.iterdir())
    name = {"voc": "voc_2007_trainval", "coco": "coco_2017_train", "lvis": "lvis_v0.5_train"}[kind]
    whole = images[0].read_bytes()
    images[0].write_bytes(whole[: len(whole) // 2])
    assert states(kind, tmp_path)[name][0] == base.PART
    state, text = states(kind, tmp_path, verify=True)[name]
    assert state == base.WRONG and f"{images[0].name}: not an image or damaged" in text
    images[0].write_bytes(whole)
    if kind != "voc":  # there the sizes are compared before training
        Image.new("RGB", (50, 50)).save(images[1])
        Image.new("RGB", (50, 50)).save(images[2])
        state, text = states(kind, tmp_path, verify=True)[name]
        assert state == base.WRONG
        assert "50x50 contradicts its annotations" in text and "(and 1 more images)" in text


def test_verify_looks_at_every_label(tmp_path, monkeypatch):
    write_voc_seg(tmp_path, {"val": 3})
    monkeypatch.setattr("detection.datasets.labels._SAMPLE", 1)
    mask = tmp_path / "VOC2012" / "SegmentationClass" / "2012_000002.png"
    Image.fromarray(np.full(np.asarray(Image.open(mask)).shape, 77, np.uint8)).save(mask)
    name = "voc_2012_sem_seg_val"
    assert states("voc", tmp_path)[name][0] == base.PART
    state, text = states("voc", tmp_path, verify=True)[name]
    assert state == base.WRONG and "2012_000002.png: label 77" in text


def datasets_of(config: Path) -> dict[str, tuple[str, ...]]:
    """DATASETS of a YAML file and of those that it is based on."""
    content = yaml.safe_load(config.read_text())
    found = datasets_of(config.parent / content["_BASE_"]) if "_BASE_" in content else {}
    own = content.get("DATASETS", {}).items()
    return found | {key: tuple(ast.literal_eval(value)) for key, value in own}


def test_the_proposed_tasks_name_these_splits():
    for format_ in formats().values():
        for config, splits in format_.tasks.items():
            datasets = datasets_of(ROOT / config)
            assert (*datasets["TRAIN"], *datasets["TEST"]) == splits


def test_the_official_counts_are_of_known_names(monkeypatch):
    for format_ in formats().values():
        assert {source.name for source in format_.sources("x")} == set(format_.counts)


def test_real_data(shared_data, tmp_path):
    with_links(shared_data / "VOC2007", tmp_path / "VOC2007")
    assert main(["doctor", "voc", "--root", str(tmp_path), "--verify"]) == 0
    assert main(["doctor", "coco", "--root", str(shared_data), "--verify"]) == 0


def run(*argv: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "detection.datasets", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        **kwargs,
    )


def test_help_is_fast_and_without_torch():
    shown = run("doctor", "--help")
    assert shown.returncode == 0 and "--verify" in shown.stdout
    assert processor_seconds(lambda: run("doctor", "--help")) < 1
    code = (
        "import sys; import detection.datasets.__main__;"
        "print([m for m in ('torch', 'pycocotools', 'shapely', 'cv2') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"


def test_the_command_line(tmp_path):
    good("coco", tmp_path)
    environment = {**os.environ, "DETECTRON2_DATASETS": str(tmp_path)}
    shown = run("doctor", "coco", env=environment)
    assert shown.returncode == 0 and "coco_2017_val" in shown.stdout
    assert run("doctor", "lvis", env=environment).returncode == 3
    unknown = run("doctor", "imagenet")
    assert unknown.returncode == 2 and "voc" in unknown.stderr and "Traceback" not in unknown.stderr


@pytest.fixture
def own_voc(tmp_path) -> Path:
    return write_voc(tmp_path / "own data", {"train": 4, "val": 2, "test": 2})


def examine(*arguments: object, capsys) -> tuple[int, str]:
    code = main(["doctor", *map(str, arguments), "--verify"])
    return code, capsys.readouterr().out


def test_a_custom_folder_that_is_right(own_voc, capsys):
    code, shown = examine("--voc-dir", own_voc, capsys=capsys)
    assert code == 0 and "WRONG" not in shown
    for name in ("own data_train", "own data_val", "own data_test"):
        assert f"ok     {name}" in shown
    assert shown.count("classes: ") == 3 and f"DATASETS.VOC_DIR '{own_voc}'" in shown


def wide(path: Path) -> None:
    with Image.open(path) as image:
        gray = np.full(image.size[::-1], 999, np.uint16)
    path.unlink()
    Image.fromarray(gray).save(path.with_suffix(".png"))


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-900])


def another_size(path: Path) -> None:
    Image.new("RGB", (50, 50)).save(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [(wide, "8 bits"), (half, "damaged"), (another_size, "50x50"), (Path.unlink, "missing")],
)
@pytest.mark.parametrize("kind", ["voc", "coco"])
def test_custom_images_that_are_wrong(kind, change, said, own_voc, tmp_path, capsys):
    arguments = ["--voc-dir", own_voc]
    image = own_voc / "JPEGImages" / "000001.jpg"
    if kind == "coco":
        write_coco(tmp_path, {"val2017": 3})
        arguments = ["--coco-json", tmp_path / "coco/annotations/instances_val2017.json"]
        arguments += ["--root", tmp_path / "coco/val2017"]
        image = sorted((tmp_path / "coco/val2017").iterdir())[0]
        file = arguments[1]
        if change is wide:  # under the name that the file has
            file.write_text(file.read_text().replace(image.name, f"{image.stem}.png"))
    change(image)
    code, shown = examine(*arguments, capsys=capsys)
    assert code == 3 and "WRONG" in shown and image.stem in shown and said in shown


def test_boxes_outside_and_classes_without_an_object(own_voc, capsys):
    annotation = own_voc / "Annotations" / "000005.xml"
    text = annotation.read_text()
    for path in sorted((own_voc / "Annotations").iterdir())[:4]:
        path.write_text(path.read_text().replace("<name>red<", "<name>blue<"))
    _, shown = examine("--voc-dir", own_voc, capsys=capsys)
    assert "no object of red" in shown
    start = text.index("<xmin>")
    annotation.write_text(text[:start] + "<xmin>9" + text[start + len("<xmin>") :])
    annotation.write_text(re.sub(r"<xmax>\d+", "<xmax>99999", text))
    annotation.write_text(re.sub(r"<xmin>\d+", "<xmin>9999", annotation.read_text()))
    code, shown = examine("--voc-dir", own_voc, capsys=capsys)
    assert code == 3 and "000005.xml" in shown and "outside" in shown


def test_duplicates_are_found(own_voc, tmp_path, capsys):
    folder = own_voc / "JPEGImages"
    (folder / "000001.jpg").write_bytes((folder / "000000.jpg").read_bytes())
    size = re.compile(r"<size>.*</size>")
    texts = [(own_voc / "Annotations" / f"00000{i}.xml") for i in (0, 1)]
    found = size.search(texts[0].read_text())
    texts[1].write_text(f"<annotation>{found[0]}</annotation>")
    lists = own_voc / "ImageSets" / "Main"
    (lists / "test.txt").write_text((lists / "test.txt").read_text() + "000002\n")
    code, shown = examine("--voc-dir", own_voc, capsys=capsys)
    assert code == 0
    assert "000000.jpg and" in shown and "000001.jpg" in shown
    assert "own data_test, own data_train  1 images are in both" in shown

    write_coco(tmp_path, {"val2017": 3})
    file = tmp_path / "coco" / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    first, second = content["images"][:2]
    first["file_name"], first["width"], first["height"] = (
        second[key] for key in ("file_name", "width", "height")
    )
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != first["id"]]
    file.write_text(json.dumps(content))
    code, shown = examine("--coco-json", file, capsys=capsys)
    assert code == 3 and "listed more than once" in shown and second["file_name"] in shown


def test_a_file_to_train_on_only(tmp_path, capsys):
    write_coco(tmp_path, {"train2017": 2, "val2017": 2})
    folder = tmp_path / "coco" / "annotations"
    train, val = (folder / f"instances_{split}2017.json" for split in ("train", "val"))
    content = json.loads(train.read_text())
    for annotation in content["annotations"]:
        del annotation["area"]
    train.write_text(json.dumps(content))
    code, shown = examine("--coco-json", train, "--coco-json", val, capsys=capsys)
    assert code == 0 and "not for DATASETS.COCO_TEST_JSON" in shown and "area" in shown
    content["categories"] = content["categories"][:-1]
    used = {category["id"] for category in content["categories"]}
    content["annotations"] = [a for a in content["annotations"] if a["category_id"] in used]
    train.write_text(json.dumps(content))
    code, shown = examine("--coco-json", train, "--coco-json", val, capsys=capsys)
    assert code == 3 and "classes are not the same" in shown


def test_one_dataset_at_a_time(own_voc, capsys):
    for arguments in ([], ["voc", "--voc-dir", "x"], ["--voc-dir", "x", "--coco-json", "y"]):
        with pytest.raises(SystemExit):
            main(["doctor", *arguments])
    with pytest.raises(UserError, match="--root"):
        main(["doctor", "--voc-dir", str(own_voc), "--root", "x"])
    with pytest.raises(DataError, match="ImageSets/Main"):
        main(["doctor", "--voc-dir", str(own_voc / "nothing")])


def test_the_command_in_messages_is_for_this_data(tmp_path):
    cfg = default_task()
    assert doctor.command(cfg) == ""
    cfg.DATASETS.VOC_DIR = "my data"
    assert doctor.command(cfg) == (
        "python -m detection.datasets doctor --voc-dir 'my data' --verify"
    )
    cfg.DATASETS.VOC_DIR = ""
    cfg.DATASETS.COCO_TRAIN_JSON, cfg.DATASETS.COCO_TRAIN_ROOT = "a.json", "images"
    cfg.DATASETS.COCO_TEST_JSON = "b.json"
    first, second = doctor.command(cfg).split(" && ")
    assert first.endswith("--root images --coco-json a.json --verify")
    assert second.endswith("--coco-json b.json --verify")
    cfg.DATASETS.COCO_TEST_ROOT = "images"
    both = "--root images --coco-json a.json --coco-json b.json --verify"
    assert doctor.command(cfg).endswith(both)
