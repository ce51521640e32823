"""`moco-transfer doctor` without a dataset: this machine, and what each task lacks on it."""

import importlib.util
import re

import pytest

from benchmarks import doctor
from benchmarks.list_configs import HIDDEN
from detection import train_net
from moco import __version__
from moco.common import shipped
from tests.oracles.tiny_voc import write_voc


@pytest.fixture(autouse=True)
def embedded(monkeypatch):
    """Leave out the import of Detectron2, which takes seconds."""
    monkeypatch.setattr(train_net, "choose_engine", lambda wanted: ("embedded", "no Detectron2"))


def lacking(text: str) -> dict[str, set[str]]:
    """Return the tasks by what they lack, as the text has them."""
    found = re.findall(r"^tasks that lack (.+):\n((?:  .+\n)+)", text, re.M)
    return {lacks: set(re.findall(r"\w+/[\w.]+", names)) for lacks, names in found}


def test_tasks_are_listed_by_what_they_lack(tmp_path, capsys):
    write_voc(tmp_path / "VOC2007", {"trainval": 2, "test": 1})
    (tmp_path / "imagenet").mkdir()
    assert doctor.main(["--root", str(tmp_path)]) == 0
    found = lacking(capsys.readouterr().out)
    [ready] = [names for lacks, names in found.items() if lacks.startswith("nothing")]
    assert ready >= {"voc/faster_rcnn_R_50_C4_9k", "imagenet/linear"}
    [(lacks, _)] = [item for item in found.items() if "voc/faster_rcnn_R_50_C4_24k" in item[1]]
    assert lacks.startswith("voc_2012_trainval (")
    assert lacks.endswith(f"datasets fetch voc2012 --root {tmp_path})")
    [(lacks, _)] = [item for item in found.items() if "inaturalist/finetune_2018" in item[1]]
    assert lacks.startswith(f"{tmp_path}/inaturalist2018")
    listed = [name for names in found.values() for name in names]
    every = [name for name in shipped.names() if not name.startswith(HIDDEN)]
    left_out = ("suites/", "pretrain/")
    assert sorted(listed) == [name for name in every if not name.startswith(left_out)]


def test_a_missing_package_is_named_with_its_extra(tmp_path, capsys, monkeypatch):
    find, hidden = importlib.util.find_spec, ("hotcoco", "cityscapesscripts", "densepose")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in hidden else find(name)
    )
    doctor.main(["--root", str(tmp_path)])
    found = lacking(capsys.readouterr().out)
    of = {name: lacks for lacks, names in found.items() for name in names}
    assert (
        "hotcoco; install it with: pip install 'moco-transfer[metrics]'"
        in of["lvis/mask_rcnn_R_50_FPN_1x"]
    )
    assert "[cityscapes]" in of["cityscapes/mask_rcnn_R_50_FPN_24k"]
    assert "[cityscapes]" not in of["cityscapes/fcn16s_R_50_90k"]
    assert "DensePose" in of["coco/densepose_rcnn_R_50_FPN_s1x"]


def test_the_machine_is_described(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "data"))
    monkeypatch.setenv("MOCO_TRANSFER_CACHE", str(tmp_path / "cache"))
    doctor.main([])
    text = capsys.readouterr().out
    assert text.startswith(f"moco-transfer {__version__} (")
    for pattern in (
        r"^versions: python 3\.\d+\.\d+, torch \d",
        r"^cores of this process: \d+$",
        r"^GPU",
        r"^engine of --engine auto: embedded \(no Detectron2\)$",
        rf"^disk: [\d.]+ GB free for datasets \({tmp_path}/data\)$",
        rf"^disk: [\d.]+ GB free for downloaded weights \({tmp_path}/cache\)$",
        rf"^datasets in {tmp_path}/data:\n  present: none\n  in part: none\n  absent: voc2007, ",
    ):
        assert re.search(pattern, text, re.M), pattern
    assert not any(tmp_path.iterdir())
