"""Fixtures of the detection tests: small datasets, converted weights and runs."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moco.common.run import RunRecord
from tests.oracles.processes import start_processes
from tests.oracles.small_tasks import SMALL_VOC, narrow_file
from tests.oracles.tiny_voc import write_voc

ROOT = Path(__file__).resolve().parents[2]
SLOW = pytest.mark.skipif(
    os.environ.get("MOCO_SLOW_TESTS") != "1", reason="minutes; set MOCO_SLOW_TESTS=1 to run it"
)


@pytest.fixture(autouse=True)
def _catalogs_stay_detectron2s():
    """Restore Detectron2's catalogs and loggers, which runs and its trainer change."""
    try:
        from detectron2.data import DatasetCatalog, MetadataCatalog
    except ImportError:
        yield
        return
    before = [(catalog, dict(catalog.data)) for catalog in (DatasetCatalog, MetadataCatalog)]
    loggers = [logging.getLogger(name) for name in ("detectron2", "fvcore", "densepose")]
    handlers = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for catalog, content in before:
        catalog.data.clear()
        catalog.data.update(content)
    for logger, level, own in handlers:
        logger.setLevel(level)
        logger.handlers[:] = own


@pytest.fixture(autouse=True)
def _ranks_begin_with_everything_imported(monkeypatch):
    """Start the processes of --num-gpus from a server with all imports."""
    monkeypatch.setattr(torch.multiprocessing, "start_processes", start_processes)


@pytest.fixture(params=["embedded", pytest.param("detectron2", marks=pytest.mark.detectron2)])
def engine(request) -> str:
    """Name of each engine; Detectron2 only if it is installed."""
    if request.param == "detectron2":
        request.getfixturevalue("detectron2")
    return request.param


@pytest.fixture
def fresh_cache():
    """Clear the cache of splits for tests that rewrite files in place."""
    from detection.datasets import cache_clear

    cache_clear()
    yield
    cache_clear()


@pytest.fixture(scope="session")
def r18_file(tmp_path_factory) -> Path:
    """Convert a torchvision ResNet-18 with random weights and BN statistics."""
    from torchvision.models import resnet18

    from convert.convert_to_d2 import convert_file

    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(5)
    net = resnet18()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    torch.save(net.state_dict(), folder / "resnet18.pth")
    convert_file(folder / "resnet18.pth", folder / "r18.pth")
    return folder / "r18.pth"


@pytest.fixture(scope="session")
def converted(r18_file):
    """Contents of `r18_file`."""
    from convert.verify import read_converted

    return read_converted(r18_file)


@pytest.fixture(scope="session")
def voc_folder(tmp_path_factory) -> Path:
    """Colored rectangles in VOC layout: 6 training images, 3 test images, 3 classes."""
    return write_voc(tmp_path_factory.mktemp("data") / "shapes", {"trainval": 6, "test": 3})


@pytest.fixture(scope="session")
def small_config() -> str:
    return str(ROOT / "configs" / "voc" / "faster_rcnn_R_18_C4_small.yaml")


@pytest.fixture(scope="session")
def small_options(voc_folder) -> list[str]:
    """Options that shorten the small task: 3 iterations of 2 images at about 100 px."""
    values = {"DATASETS.VOC_DIR": voc_folder, "DATASETS.VOC_METRIC": "voc", **SMALL_VOC}
    return [str(item) for pair in values.items() for item in pair]


@pytest.fixture(scope="session")
def task_cfg(r18_file, small_config, small_options):
    """Resolve the small task with `r18_file`."""
    from detection.config.task import load_task

    return load_task(small_config, [*small_options, "MODEL.WEIGHTS", str(r18_file)], "embedded").cfg


def task_files() -> list[str]:
    """Return the names of all task files that Detectron2 can run."""
    folders = ("voc", "coco", "lvis", "cityscapes", "ade20k")
    files = [path for folder in folders for path in (ROOT / "configs" / folder).glob("*.yaml")]
    names = [f"{path.parent.name}/{path.stem}" for path in files]
    return sorted(name for name in names if "quickstart" not in name)


@pytest.fixture(scope="session")
def narrow_r50_file(tmp_path_factory) -> Path:
    """Convert a ResNet-50 of a quarter of the width, from this project's pre-training."""
    return narrow_file(50, tmp_path_factory.mktemp("narrow"))


@pytest.fixture(scope="session")
def narrow_r18_file(tmp_path_factory) -> Path:
    """Convert a narrow ResNet-18, which needs MODEL.RESNETS.RES2_OUT_CHANNELS 16."""
    return narrow_file(18, tmp_path_factory.mktemp("narrow"))


@pytest.fixture(scope="session")
def layouts_root(tmp_path_factory) -> Path:
    """Folder with tiny datasets in the layouts of Detectron2's own datasets."""
    return write_layouts(tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def data_of(layouts_root, monkeypatch) -> Callable[[str], None]:
    """Set `$DETECTRON2_DATASETS` to the tiny data for a task file."""

    def use(task: str) -> None:
        folder = "of_lvis" if task.startswith("lvis") else "of_all_others"
        monkeypatch.setenv("DETECTRON2_DATASETS", str(layouts_root / folder))

    return use


@pytest.fixture(scope="session")
def task_run(narrow_r50_file, layouts_root, tmp_path_factory):
    """Return folder and record of a small run by engine and task; each is run once."""
    from tests.oracles.small_tasks import run

    runs: dict[tuple[str, str], tuple[Path, RunRecord]] = {}

    def get(engine: str, task: str) -> tuple[Path, RunRecord]:
        if (engine, task) not in runs:
            folder = tmp_path_factory.mktemp(engine) / "run"
            layout = "of_lvis" if task.startswith("lvis") else "of_all_others"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("DETECTRON2_DATASETS", str(layouts_root / layout))
                runs[engine, task] = folder, run(task, narrow_r50_file, folder, engine)
        return runs[engine, task]

    return get


def write_layouts(root: Path) -> Path:
    """Write a few images in the layout of every dataset that a task file names."""
    from tests.oracles.tiny_ade import write_ade
    from tests.oracles.tiny_cityscapes import write_cityscapes
    from tests.oracles.tiny_coco import write_coco
    from tests.oracles.tiny_lvis import write_lvis
    from tests.oracles.tiny_voc import VOC_NAMES
    from tests.oracles.tiny_voc_seg import write_voc_seg

    lvis = root / "of_lvis"  # LVIS shares COCO's folder of images.
    for version in ("v0.5", "v1"):
        write_lvis(lvis, {"train": 4, "val": 2}, version=version)
    others = root / "of_all_others"
    write_voc(others / "VOC2007", {"trainval": 3, "test": 3}, names=VOC_NAMES)
    write_voc(others / "VOC2012", {"trainval": 3}, names=VOC_NAMES)
    write_voc_seg(others, {"train_aug": 4, "val": 2})
    write_coco(others, {"train2017": 4, "val2017": 2}, keypoints=True)
    densepose = {"train2014": 3, "valminusminival2014": 2, "minival2014": 2}
    write_coco(others, densepose, densepose=True)
    write_cityscapes(others, {"train": 4, "val": 2})
    write_ade(others, {"train": 4, "val": 2})
    return root
