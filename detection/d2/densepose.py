"""COCO DensePose by Detectron2's DensePose project, which is installed separately."""

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
TIMEOUT_SECONDS = 10.0  # per connection attempt or read, not for the whole download


def add_keys(cfg: CfgNode) -> None:
    """Add DensePose's keys (in place). Importing the project registers its heads and datasets.

    Raises:
        UserError: If the project is not installed.
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
    """Raise UserError if the metric would cover only the images of the first process."""
    if number > 1 and not cfg.DENSEPOSE_EVALUATION.DISTRIBUTED_INFERENCE:
        raise UserError(
            f"DENSEPOSE_EVALUATION.DISTRIBUTED_INFERENCE False: each of {number} processes tests "
            "its share of the images; set it to True"
        )


def fetch_surface() -> None:
    """Download the body-surface files into iopath's cache, before training instead of at its end.

    Raises:
        UserError: If a file is not cached and cannot be downloaded.
    """
    # DensePose's evaluator passes a timeout that not every path handler accepts.
    PathManager.set_strict_kwargs_checking(False)
    for name in SURFACE_FILES:
        try:
            # Hide iopath's progress bar, which would precede the one-line error message.
            with _socket_timeout(), contextlib.redirect_stderr(io.StringIO()):
                PathManager.get_local_path(SURFACE + name)
        except Exception as error:  # the network, the file system and iopath raise many kinds
            cache = Path(get_cache_dir()) / "densepose" / "data"
            raise UserError(
                f"DensePose needs {SURFACE}{name}, which cannot be downloaded ({error}); download "
                f"it manually into {cache} ($FVCORE_CACHE sets its first part)"
            ) from error


def register(split: Split) -> None:
    """Register a split with the paths at which this project found it.

    DensePose's own registration always looks in `./datasets`.

    Raises:
        UserError: If the body-surface files cannot be downloaded.
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

    # Only the loader filters the records; a mapper that returns its input gives access to them.
    loader: Any = build_detection_train_loader(cfg, mapper=_identity)
    while not isinstance(loader, MapDataset):
        loader = loader.dataset
    return [loader[index] for index in range(len(loader))], DatasetMapper(cfg, True)


def _identity(record: Record) -> Record:
    return record


def build_evaluator(cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
    """Build DensePose's own evaluators of box AP and DensePose AP (GPS)."""
    from densepose.data import build_detection_test_loader
    from densepose.engine import Trainer

    # Building the loader writes the categories into the metadata; the loader itself is unused.
    build_detection_test_loader(cfg, dataset_name, mapper=_identity)
    return Trainer.build_evaluator(cfg, dataset_name)


@contextlib.contextmanager
def _socket_timeout() -> Iterator[None]:
    """Set a default socket timeout, because iopath opens connections without one."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
