"""Missing requirements of DensePose are one-line errors before the training."""

import socket
import time

import pytest

from detection.config.task import load_task
from detection.train_net import main
from moco.common.errors import UserError
from tests.detection.conftest import ROOT
from tests.oracles.small_tasks import options

pytestmark = [pytest.mark.detectron2, pytest.mark.usefixtures("detectron2")]

DENSEPOSE = "coco/densepose_rcnn_R_50_FPN_s1x"


@pytest.fixture
def arguments(narrow_r50_file, data_of):
    """Return the arguments of the task, cut down to seconds."""
    data_of(DENSEPOSE)

    def build(folder, *flags):
        values = options(DENSEPOSE) | {"MODEL.WEIGHTS": narrow_r50_file, "OUTPUT_DIR": folder}
        argv = ["--config-file", str(ROOT / "configs" / f"{DENSEPOSE}.yaml"), *flags]
        return argv + [str(item) for pair in values.items() for item in pair]

    return build


def test_densepose_without_its_surface_and_without_a_network(arguments, tmp_path, monkeypatch):
    pytest.importorskip("densepose")
    from detectron2.utils.file_io import PathManager

    def unreachable(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    for handler in PathManager._path_handlers.values():
        if hasattr(handler, "cache_map"):  # files that another test has fetched
            monkeypatch.setattr(handler, "cache_map", {})
    begin = time.monotonic()
    with pytest.raises(UserError) as caught:
        main(arguments(tmp_path / "run"))
    assert time.monotonic() - begin < 20
    message = str(caught.value)
    assert "https://dl.fbaipublicfiles.com/densepose/data/UV_symmetry_transforms.mat" in message
    assert str(tmp_path / "cache" / "densepose" / "data") in message
    assert "Name or service not known" in message and "\n" not in message
    assert not (tmp_path / "run").exists()


def test_a_metric_of_one_process_alone_is_refused(arguments, tmp_path, monkeypatch):
    """DensePose's own trainer would let the first process test all images."""
    pytest.importorskip("densepose")
    from detection.d2 import densepose, engine

    monkeypatch.setattr(densepose, "fetch_surface", lambda: None)
    argv = arguments(tmp_path, "DENSEPOSE_EVALUATION.DISTRIBUTED_INFERENCE", "False")
    task = load_task(argv[1], argv[2:], "detectron2")
    monkeypatch.setattr("moco.common.distributed.world_size", lambda: 2)
    with pytest.raises(UserError, match="DISTRIBUTED_INFERENCE False: each of 2 processes"):
        engine.build_model(task.cfg)
