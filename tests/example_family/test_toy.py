"""A family is its file, its config, its test and a row of the docs: converted and trained so."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from moco.common.run import read_record
from tests.oracles.python import run_python
from tests.oracles.tiny_voc import write_voc

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def run(folder: Path, *arguments: object) -> str:
    """Run `moco-transfer` in a process that imports the family first; return its output."""
    code = "import tests.example_family.toy; from benchmarks.__main__ import cli; cli()"
    return run_python("-c", code, *arguments, cwd=folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a training checkpoint in the toy's own names, under an unknown prefix."""
    torch.manual_seed(0)
    dims, state = (3, 8, 16, 16, 32), {"classify.weight": torch.randn(5, 32)}
    for i, (before, dim) in enumerate(itertools.pairwise(dims), start=1):
        side = 4 if i == 1 else 2
        shapes = {"embed.weight": (dim, before, side, side), "embed.bias": (dim,)}
        shapes |= {"norm.weight": (dim,), "norm.bias": (dim,)}
        shapes |= {"mix.in_proj_weight": (3 * dim, dim), "mix.in_proj_bias": (3 * dim,)}
        shapes |= {"mix.out_proj.weight": (dim, dim), "mix.out_proj.bias": (dim,)}
        state |= {f"level{i}.{name}": torch.randn(shape) / 4 for name, shape in shapes.items()}
    path = tmp_path_factory.mktemp("toy") / "epoch_3.pth"
    torch.save({"epoch": 3, "weights": {f"module.trunk.{k}": v for k, v in state.items()}}, path)
    return path


@pytest.fixture(scope="module")
def converted(checkpoint: Path) -> tuple[Path, str]:
    """Convert the checkpoint; return the file and the report."""
    out = checkpoint.with_name("toy.pth")
    return out, run(checkpoint.parent, "convert", checkpoint, out)


@pytest.mark.slow
def test_it_is_converted_and_verified(converted: tuple[Path, str], checkpoint: Path) -> None:
    out, report = converted
    assert "Toy of widths (8, 16, 16, 32)" in report and "1 head" in report
    assert "to those of torch's MultiheadAttention" in report
    assert "assumed       two heads" in report and "MODEL.WEIGHTS" in report
    model, raw = (torch.load(path, weights_only=True) for path in (out, checkpoint))
    mapped = model["model"]["stages.2.attention.in_proj_weight"]
    assert torch.equal(mapped, raw["weights"]["module.trunk.level3.mix.in_proj_weight"])
    assert list(model["contract"]["architecture"]["dims"]) == [8, 16, 16, 32]


@pytest.mark.slow
def test_both_engines_train_it(converted: tuple[Path, str], tmp_path: Path) -> None:
    """Both engines train it from these weights with bitwise identical losses and detections."""
    pytest.importorskip("detectron2")
    data = write_voc(tmp_path / "voc", {"trainval": 6, "test": 3}, one_large=True)
    rows, records = [], []
    for engine in ("embedded", "detectron2"):
        folder = tmp_path / engine
        keys = ("DATASETS.VOC_DIR", data, "MODEL.WEIGHTS", converted[0], "MODEL.DEVICE", "cpu")
        keys += ("SEED", 1, "OUTPUT_DIR", folder)
        run(tmp_path, "train", "--engine", engine, "--config-file", HERE / "toy_small.yaml", *keys)
        lines = (folder / "metrics.json").read_text().splitlines()
        losses = [json.loads(line) for line in lines]
        rows.append([{k: v for k, v in line.items() if "loss" in k} for line in losses])
        records.append(read_record(folder / "run.json"))
    assert rows[0] == rows[1] and rows[0][0]["total_loss"] > 0
    assert records[0].metrics == records[1].metrics
    assert records[0].weights_sha256 == records[1].weights_sha256
