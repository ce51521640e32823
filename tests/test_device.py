"""Trainings on a pretended GPU (tests/oracles/pretend_cuda.py), each in a process of its own.

They mix no devices, and the CPU waits for the GPU at the places listed here and nowhere else.
"""

import json
import zipfile
from collections.abc import Callable

import pytest
import torch

from tests.moco.conftest import write_images
from tests.oracles import commands, device_cases
from tests.oracles.commands import Done
from tests.oracles.device_collectives import collectives
from tests.oracles.processes import run_on
from tests.oracles.python import run_python

pytestmark = [pytest.mark.device, pytest.mark.slow]

# Waits of one step. That of the report is for the step before, which is done by then.
REPORT = 1
OVERFLOW = 1  # torch's GradScaler asks for it
# Of two images: 2 in the matching of boxes, 8 in the sampling of foreground and background among
# anchors and regions, 5 in encoding and decoding, where torchvision sends the weights of deltas,
# 10 in the losses and the choice of proposals, 2 in the losses of the regions.
EMBEDDED = 27
LOSSES = 1  # whether they are finite


@pytest.fixture
def run(tmp_path) -> Callable[[str], Done]:
    """`run(case)`: run a case to its end."""
    return lambda case: commands.run(["tests.oracles.device_cases", case, tmp_path], tmp_path)


def waits(done: Done, package: str = "") -> float:
    """Return the number of waits of one step, in the files of one package or in all."""
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    return sum(number for place, number in found.items() if place.startswith(package))


@pytest.mark.parametrize(
    "case", ["bf16", "fp16", "deterministic", "memory_bank", "memory_bank_nce"]
)
def test_pretraining(run, case):
    assert waits(run(case)) == REPORT + (OVERFLOW if case == "fp16" else 0)


def test_a_tensor_without_its_device_is_found(run):
    done = run("mutated")
    assert done.code and "DeviceMix: aten.add_" in done.err
    assert f"{device_cases.MUTATED[0].replace('.', '/')}.py" in done.last


def test_a_resumed_run_is_one_without_a_stop(run):
    assert not waits(run("resume"))


@pytest.mark.parametrize("command", ["linear", "finetune"])
def test_classification(run, command):
    assert waits(run(command)) == REPORT


def test_pretraining_whose_file_is_converted_without_a_gpu(run, tmp_path):
    from convert.convert_to_d2 import convert_file

    assert waits(run("fp32")) == REPORT
    file = next((tmp_path / "long").glob("checkpoint_*.pth.tar"))
    with zipfile.ZipFile(file) as content:
        (pickled,) = (name for name in content.namelist() if name.endswith("/data.pkl"))
        assert b"cuda:0" in content.read(pickled)
    convert_file(file, tmp_path / "backbone.pth")
    model = torch.load(tmp_path / "backbone.pth", weights_only=True)["model"]
    assert all(x.device.type == "cpu" for x in map(torch.as_tensor, model.values()))


@pytest.mark.parametrize("mechanism", ["momentum_queue", "memory_bank", "moco_v3"])
def test_the_collectives_of_two_gpus_are_those_of_the_cpu(tmp_path, mechanism):
    """Each process calls the same ones in the same order; NCCL gets those of the GPU's tensors."""
    write_images(tmp_path / "images")
    cpu, gpu = (
        run_on(2, collectives, tmp_path, kind, mechanism, connect=False) for kind in ("cpu", "cuda")
    )
    for ours, theirs in zip(gpu, cpu, strict=True):
        assert [call[:2] for call in ours] == [call[:2] for call in theirs]
        found = {(place.split()[1], kind) for place, _, kinds in ours for kind in kinds}
        on_cpu = {function for function, kind in found if kind == "cpu"}
        # Counts and requests, and colors' parameters, which gloo brings where the images go.
        assert on_cpu - {"exchange_rows"} == {"max_over_ranks"}
        gradients = "Pretraining.forward_backward"  # DDP's
        expected = {"sum_over_ranks", "gather_rows", gradients}
        assert expected <= {function for function, kind in found if kind == "cuda"}


def test_the_embedded_engine(run):
    assert waits(run("embedded")) == EMBEDDED + LOSSES


def test_detectron2s_engine(run, detectron2):
    """Its model waits more often than the embedded engine's, and our loop once."""
    done = run("detectron2")
    own = LOSSES + 2  # two in its model's backward
    assert waits(done, "detection/") == own and waits(done) - own > EMBEDDED


def test_speed_of_a_gpu_is_measured_by_one_command(tmp_path):
    """Its numbers mean nothing here; on a GPU it runs the same lines with larger sizes."""
    table, file = tmp_path / "table.md", tmp_path / "gpu.json"
    words = ["--goals", "step,momentum,grouped_bn,files", "--output", table, "--json", file]
    run_python("-m", "tests.oracles.pretend_run", "speed", "gpu", "--quick", *words)
    found = json.loads(file.read_text())
    assert found["hardware"]["gpus"] == ["pretended GPU"]
    assert "GPU pretended GPU" in table.read_text()
    assert all(row["what"] in table.read_text() for row in found["rows"])
    against = {row["against"].partition(" as ")[0] for row in found["rows"]}
    assert {
        "official code",
        "official code, autocast",
        "lightly",
        "step on random images",
    } < against
    floor = next(row for row in found["rows"] if row["kind"] == "floor")
    assert floor["reference"] > 0 and floor["value"] == floor["reference"] / floor["ours"]
