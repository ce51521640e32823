"""COCO DensePose through Detectron2's own DensePose project, which is installed separately."""

import contextlib
import io
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MapDataset, MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import get_cache_dir

from detection.datasets.base import Record, Split
from moco.common.errors import UserError

INSTALL = (
    "python -m pip install --no-build-isolation "
    "'git+https://github.com/facebookresearch/detectron2.git#subdirectory=projects/DensePose'"
)
# The body's surface: symmetries for training; vertices and their distances for the metric.
SURFACE = "https://dl.fbaipublicfiles.com/densepose/data/"
SURFACE_FILES = (
    "UV_symmetry_transforms.mat",
    "SMPL_subdiv.mat",
    "SMPL_SUBDIV_TRANSFORM.mat",
    "Pdist_matrix.pkl",
)
TIMEOUT_SECONDS = 10.0  # of one connection or read, not of the download


def add_keys(cfg: CfgNode) -> None:
    """DensePose's keys (in place); importing the project registers its heads and datasets.

    Raises:
        UserError: the project is not installed.
    """
    try:
        from densepose import add_densepose_config
    except ImportError as error:
        raise UserError(
            f"MODEL.DENSEPOSE_ON needs Detectron2's DensePose project, which cannot be imported "
            f"({error}); install it with {INSTALL}"
        ) from error
    add_densepose_config(cfg)


def check_processes(cfg: CfgNode, number: int) -> None:
    """Raise UserError where the metric would be that of the first process's images alone."""
    if number > 1 and not cfg.DENSEPOSE_EVALUATION.DISTRIBUTED_INFERENCE:
        raise UserError(
            f"DENSEPOSE_EVALUATION.DISTRIBUTED_INFERENCE False: each of {number} processes tests "
            "its share of the images; set it True"
        )


def fetch_surface() -> None:
    """Have the files of the body's surface at hand before training, and not at its end.

    Raises:
        UserError: they are neither in iopath's cache nor to be had.
    """
    # Its evaluator passes a time limit that not every handler of paths knows.
    PathManager.set_strict_kwargs_checking(False)
    for name in SURFACE_FILES:
        try:
            # iopath's progress bar would come before the one line of an error.
            with _socket_timeout(), contextlib.redirect_stderr(io.StringIO()):
                PathManager.get_local_path(SURFACE + name)
        except Exception as error:  # of the network, of the file system, of iopath
            cache = Path(get_cache_dir()) / "densepose" / "data"
            raise UserError(
                f"DensePose needs {SURFACE}{name}, which cannot be fetched ({error}); download it "
                f"by hand into {cache} (the first part is $FVCORE_CACHE)"
            ) from error


def register(split: Split) -> None:
    """Register a split under its name from where this project found it.

    The project's own registration always looks in `./datasets`.

    Raises:
        UserError: the files of the body's surface cannot be had.
    """
    from densepose.data.datasets.coco import CocoDatasetInfo, register_dataset

    fetch_surface()
    if split.name in DatasetCatalog:
        DatasetCatalog.remove(split.name)
        MetadataCatalog.remove(split.name)
    files = split.metadata
    register_dataset(CocoDatasetInfo(split.name, files["image_root"], files["json_file"]))


def records_and_mapper(cfg: CfgNode) -> tuple[list[Record], Callable[[Record], Any]]:
    """Return the records that DensePose's own loader trains on, and its mapper."""
    from densepose.data import DatasetMapper, build_detection_train_loader

    # The loader alone chooses the records; it hands each to a mapper, here one that keeps it.
    loader: Any = build_detection_train_loader(cfg, mapper=_kept)
    while not isinstance(loader, MapDataset):
        loader = loader.dataset
    return [loader[index] for index in range(len(loader))], DatasetMapper(cfg, True)


def _kept(record: Record) -> Record:
    return record


def build_evaluator(cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
    """Return DensePose's own evaluators of box AP and DensePose AP (GPS)."""
    from densepose.data import build_detection_test_loader
    from densepose.engine import Trainer

    # The loader, which is not used, writes the categories into the metadata.
    build_detection_test_loader(cfg, dataset_name, mapper=_kept)
    return Trainer.build_evaluator(cfg, dataset_name)


@contextlib.contextmanager
def _socket_timeout() -> Iterator[None]:
    """iopath opens its connections without a timeout of their own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
