"""Errors in a command line are reported before torch is imported, which takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracles.tiny_voc import write_voc

ROOT = Path(__file__).resolve().parent.parent
PRETRAIN = ("pretrain", "--config-file", "configs/pretrain/small_r18.yaml")
LINEAR = ("linear", "--config-file", "configs/imagenet/linear.yaml", "--checkpoint", "random")
VOC = ("train", "--config-file", "configs/voc/faster_rcnn_R_50_C4_24k.yaml")
SMALL = ("train", "--config-file", "configs/voc/faster_rcnn_R_18_C4_small.yaml")
COCO = ("train", "--config-file", "configs/coco/mask_rcnn_R_50_FPN_1x.yaml")
RANDOM = ("MODEL.WEIGHTS", "random")
USED = (*SMALL, *RANDOM, "DATASETS.VOC_DIR", "{folder}/shapes", "OUTPUT_DIR", "{folder}/run")
# One of each stage of each command; tests/refusals has the others.
CASES = (
    ((*PRETRAIN, "DATA.ROOT", "{folder}", "SOLVER.BASELR", "1"), "SOLVER.BASELR"),
    ((*PRETRAIN, "DATA.ROOT", "missing"), "missing: no such folder"),
    ((*PRETRAIN, "DATA.ROOT", "{folder}", "--resume", "no.pth.tar"), "no.pth.tar"),
    ((*LINEAR[:-1], "no.pth", "DATA.ROOT", "{folder}"), "no.pth"),
    (("knn", "--checkpoint", "no.pth", "--data", "{folder}"), "no.pth"),
    ((*VOC, *RANDOM, "SOLVER.BASELR", "1"), "SOLVER.BASELR"),
    ((*VOC, "MODEL.WEIGHTS", "no.pth"), "MODEL.WEIGHTS no.pth"),
    ((*VOC, *RANDOM), "{folder}/VOC2007"),
    (
        (*COCO, *RANDOM, "DATASETS.COCO_TRAIN_JSON", "no.json",
         "DATASETS.COCO_TEST_JSON", "no.json"),
        "no.json",
    ),
    (USED, "{folder}/run is not empty"),
)  # fmt: skip
# One process runs all cases; an import by one would be seen in all later ones.
CODE = """
import json, sys
from benchmarks.__main__ import main
from moco.common.errors import UserError
for argv in json.load(sys.stdin):
    try:
        main(argv)
    except UserError as error:
        print("error:", json.dumps([str(error), "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[list]:
    """Return each case's message, and whether torch was imported by then; {folder} stays a name."""
    folder = tmp_path_factory.mktemp("early")
    write_voc(folder / "shapes", {"trainval": 2, "test": 1})
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    cases = [[arg.format(folder=folder) for arg in args] for args, _ in CASES]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DETECTRON2_DATASETS": str(folder)}
    how = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", CODE], input=json.dumps(cases), **how)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    return [json.loads(line[7:].replace(str(folder), "{folder}")) for line in lines]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_an_error_is_reported_before_torch_is_imported(case, errors):
    assert len(errors) == len(CASES)
    message, torch_imported = errors[case]
    assert CASES[case][1] in message
    assert not torch_imported
