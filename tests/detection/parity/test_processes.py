"""Two gloo processes on the embedded engine: equality with Detectron2's, stops, faults."""

import json
import os
import shutil
import signal
import socket

import pytest

from detection.train_net import main
from moco.common.errors import DataError
from moco.common.run import read_record
from tests.golden.regenerate_embedded import FOLDER, two_processes
from tests.oracles.commands import SECONDS, start, wait
from tests.oracles.small_tasks import CONFIGS, assert_same_run, options

pytestmark = pytest.mark.slow

# In fp32, test_plain_detectron2.py compares other tasks with plain Detectron2, but not PreciseBN.
TASKS = (("coco/mask_rcnn_R_50_C4_1x", "bf16"), ("lvis/mask_rcnn_R_50_FPN_1x", "fp32"))
KEYS = {
    "SOLVER.IMS_PER_BATCH": 4,
    "SOLVER.MAX_ITER": 3,
    "SOLVER.STEPS": (2,),
    "SOLVER.WARMUP_ITERS": 1,
    "TEST.PRECISE_BN.ENABLED": True,
    # Images of several sizes: the processes then weigh their statistics differently.
    "INPUT.MIN_SIZE_TRAIN": (64, 96, 128),
}


@pytest.fixture
def arguments(narrow_r50_file, data_of, tmp_path):
    """Return arguments of train_net.py for a task; `name` is the folder and has the engine."""

    def get(task, name, *flags, **keys):
        data_of(task)
        given = options(task) | KEYS | {"MODEL.WEIGHTS": narrow_r50_file} | keys
        given["OUTPUT_DIR"] = tmp_path / name
        engine = "detectron2" if "detectron2" in name else "embedded"
        start = ["--config-file", str(CONFIGS / f"{task}.yaml"), "--engine", engine, *flags]
        return [*start, *(str(item) for pair in given.items() for item in pair)]

    return get


@pytest.mark.detectron2
@pytest.mark.parametrize(("task", "precision"), TASKS)
def test_two_processes_equal_detectron2s(task, precision, arguments, tmp_path, detectron2):
    """Synchronized BN, DDP, sharding, random streams, PreciseBN and evaluation are equal."""
    for name in ("detectron2", "embedded"):
        keys = {"SOLVER.PRECISION": precision}
        assert main(arguments(task, name, "--num-gpus", "2", **keys)) == 0
    assert_same_run(tmp_path / "detectron2", tmp_path / "embedded")


@pytest.mark.stored
def test_two_processes_equal_detectron2s_numbers(tmp_path):
    """Stored numbers are for machines without Detectron2; processors differ by up to 3e-7."""
    expected = json.loads((FOLDER / "two_processes.json").read_text())
    actual = two_processes("embedded", tmp_path)
    for part in ("losses", "moved"):
        assert actual[part] == pytest.approx(expected[part], rel=1e-3)


# Faults; tests/test_stop_and_resume.py has stops and kills.

SHORT = {
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,
    "SOLVER.MAX_ITER": 12,
    "SOLVER.STEPS": (10,),
    "SOLVER.CHECKPOINT_PERIOD": 2,
}


@pytest.fixture
def small(small_config, small_options, narrow_r18_file, tmp_path):
    """Return arguments of the small task, which is fast."""

    def get(name, *flags, **keys):
        given = SHORT | {"MODEL.WEIGHTS": narrow_r18_file, "OUTPUT_DIR": tmp_path / name} | keys
        given |= {"DATALOADER.NUM_WORKERS": 0}
        argv = ["--config-file", small_config, "--engine", "embedded", *flags, *small_options]
        return [*argv, *(str(item) for pair in given.items() for item in pair)]

    return get


def test_an_unreadable_image_of_one_process(small, voc_folder, tmp_path):
    broken = tmp_path / "shapes"
    shutil.copytree(voc_folder, broken)
    victim = sorted((broken / "JPEGImages").iterdir())[2]
    victim.write_bytes(victim.read_bytes()[:-200])  # its head, which is looked at before, is whole
    with pytest.raises(DataError, match=rf"{victim.name}.* \(process [01]\)$"):
        main(small("run", "--num-gpus", "2", **{"DATASETS.VOC_DIR": broken}))
    assert read_record(tmp_path / "run" / "run.json").status == "failed"


@pytest.mark.race
def test_told_to_stop_while_it_waits_for_the_first_machine(small, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as first:  # it says nothing
        first.settimeout(SECONDS)
        url = f"tcp://127.0.0.1:{first.getsockname()[1]}"
        flags = ("--num-machines", "2", "--machine-rank", "1", "--dist-url", url)
        process = start(["detection.train_net", *small("run", *flags)], tmp_path)
        connection, _ = first.accept()
        with connection:
            os.kill(process.pid, signal.SIGTERM)
            done = wait(process, tmp_path)
    assert done.code == 85 and "nothing was saved since the last checkpoint" in done.last
