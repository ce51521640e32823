"""Two gloo processes on the embedded engine: Detectron2's run of two, stops, faults."""

import json
import os
import shutil
import signal
import socket
import sys

import pytest

from detection.train_net import main
from moco.common.errors import DataError
from moco.common.files import load_torch
from moco.common.run import read_record
from tests.golden.regenerate_embedded import FOLDER, two_processes
from tests.oracles.small_tasks import CONFIGS, assert_same_run, options
from tests.oracles.stopping import SECONDS, TRAIN_NET, children, held, nobody_left, start, wait_for

pytestmark = pytest.mark.slow

TASKS = (
    *("coco/mask_rcnn_R_50_C4_1x", "lvis/mask_rcnn_R_50_FPN_1x", "voc/fcn16s_R_50_30k"),
    *("coco/mask_rcnn_ViT_B_100ep", "coco/mask_rcnn_ViT_B_FPN_25ep"),
)
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
    """Arguments of train_net.py for a task and engine; its folder is named so too."""

    def get(task, name, *flags, **keys):
        data_of(task)
        weights = "random" if "ViT" in task else narrow_r50_file
        given = options(task) | KEYS | {"MODEL.WEIGHTS": weights} | keys
        given["OUTPUT_DIR"] = tmp_path / name
        engine = "detectron2" if "detectron2" in name else "embedded"
        start = ["--config-file", str(CONFIGS / f"{task}.yaml"), "--engine", engine, *flags]
        return [*start, *(str(item) for pair in given.items() for item in pair)]

    return get


@pytest.mark.detectron2
@pytest.mark.parametrize(
    ("task", "precision"), [*((task, "fp32") for task in TASKS), (TASKS[0], "bf16")]
)
def test_two_processes_equal_detectron2s(task, precision, arguments, tmp_path, detectron2):
    """Synchronized BN, DDP, shares of the data, random streams, PreciseBN, evaluation."""
    if "ViT" in task:
        pytest.importorskip("timm")
    for name in ("detectron2", "embedded"):
        keys = {"SOLVER.PRECISION": precision}
        assert main(arguments(task, name, "--num-gpus", "2", **keys)) == 0
    folders = tmp_path / "detectron2", tmp_path / "embedded"
    assert_same_run(*folders)
    theirs, ours = (read_record(folder / "run.json") for folder in folders)
    assert theirs.metrics == ours.metrics
    assert theirs.coverage == ours.coverage
    last = []
    for folder in folders:
        lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
        last.append({name: value for line in lines for name, value in line.items()})
    assert last[1]["total_loss"] == pytest.approx(last[0]["total_loss"], rel=1e-6)


@pytest.mark.stored
def test_two_processes_equal_detectron2s_numbers(tmp_path):
    """For machines without it; another processor adds in another order (seen: 3e-7)."""
    expected = json.loads((FOLDER / "two_processes.json").read_text())
    actual = two_processes("embedded", tmp_path)
    for part in ("losses", "moved"):
        assert actual[part] == pytest.approx(expected[part], rel=1e-3)


# Stops and faults.

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SHORT = {
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,
    "SOLVER.MAX_ITER": 12,
    "SOLVER.STEPS": (10,),
    "SOLVER.CHECKPOINT_PERIOD": 2,
}


@pytest.fixture
def small(small_config, small_options, narrow_r18_file, tmp_path):
    """Arguments for the small task, which is fast."""

    def get(name, *flags, **keys):
        given = SHORT | {"MODEL.WEIGHTS": narrow_r18_file, "OUTPUT_DIR": tmp_path / name} | keys
        given |= {"DATALOADER.NUM_WORKERS": 0}
        argv = ["--config-file", small_config, "--engine", "embedded", *flags, *small_options]
        return [*argv, *(str(item) for pair in given.items() for item in pair)]

    return get


@pytest.mark.race
def test_stopped_and_resumed_bitwise_identical(small, tmp_path):
    """By torchrun, stopped; resumed by --num-gpus and stopped again; finished by torchrun."""
    folder, out = tmp_path / "run", tmp_path / "out.txt"
    with_torchrun = [sys.executable, *TORCHRUN, TRAIN_NET[1]]
    process = start([*with_torchrun, *small("run")], out, hold=3)
    wait_for(held(2, out), process, out)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) != 0
    assert "stopped after iteration 2" in out.read_text()
    first = load_torch(folder / (folder / "last_checkpoint").read_text())
    assert len(first["random"]) == 2 and first["iteration"] == 2

    process = start([*TRAIN_NET, *small("run", "--resume", "--num-gpus", "2")], out, hold=4)
    wait_for(held(2, out), process, out)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 85, out.read_text()[-2000:]
    said = out.read_text()
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("error: stopped after iteration 6 ")
    assert nobody_left(process)
    assert not (folder / "run.json").exists()

    process = start([*with_torchrun, *small("run", "--resume")], out)
    assert process.wait(SECONDS) == 0, out.read_text()[-2000:]
    assert out.read_text().count("next: python -m benchmarks.make_table") == 1
    assert main(small("whole", "--num-gpus", "2")) == 0
    assert_same_run(tmp_path / "whole", folder)
    ours, theirs = (read_record(tmp_path / name / "run.json") for name in ("run", "whole"))
    assert ours.metrics == theirs.metrics


def test_another_number_of_processes_is_said(small, tmp_path):
    assert main(small("run", "--num-gpus", "2", **{"SOLVER.MAX_ITER": 2, "SOLVER.STEPS": ()})) == 0
    (tmp_path / "run" / "run.json").unlink()
    assert main(small("run", "--resume", **{"SOLVER.MAX_ITER": 3, "SOLVER.STEPS": ()})) == 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "other images and random numbers (number of processes that wrote it: 2, now: 1)" in log


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
    out = tmp_path / "out.txt"
    with socket.create_server(("127.0.0.1", 0)) as first:  # it says nothing
        first.settimeout(SECONDS)
        url = f"tcp://127.0.0.1:{first.getsockname()[1]}"
        flags = ("--num-machines", "2", "--machine-rank", "1", "--dist-url", url)
        process = start([*TRAIN_NET, *small("run", *flags)], out)
        connection, _ = first.accept()
        with connection:
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 85, out.read_text()[-2000:]
            assert nobody_left(process)
    assert "nothing was saved since the last checkpoint" in out.read_text().splitlines()[-1]


@pytest.mark.race
def test_a_process_that_dies_is_named(small, tmp_path):
    folder, out = tmp_path / "run", tmp_path / "out.txt"
    process = start([*TRAIN_NET, *small("run", "--num-gpus", "2", **{"SOLVER.MAX_ITER": 500})], out)
    wait_for((folder / "model_0000001.pth").is_file, process, out)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    assert process.wait(SECONDS) == 2, out.read_text()[-2000:]
    assert nobody_left(process)
    said = out.read_text().splitlines()[-1]
    assert "process 0 of 2: process 1 of this run died" in said and "--resume" in said
