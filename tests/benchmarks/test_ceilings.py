"""Two promises to users, in the CPU time of a new process: the machine may be busy."""

import resource
import subprocess
import sys

import torch

from benchmarks.__main__ import COMMANDS
from moco.common import shipped
from tests.oracles.resnets import make_resnet


def cpu_seconds(*arguments: str) -> float:
    """User and system time of a Python that has to succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    subprocess.run(command, cwd=shipped.ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_takes_less_than_a_second():
    found = {name: cpu_seconds("-m", "benchmarks", name, "--help") for name in COMMANDS}
    assert found and {name: took for name, took in found.items() if took >= 1.0} == {}


def test_inspect_takes_at_most_twice_the_import_of_torch(tmp_path):
    """A ResNet-50; 1.3 times as long was measured (docs/speed.md)."""
    torch.save(make_resnet(50, base=64).state_dict(), tmp_path / "r50.pth")
    took = cpu_seconds("-m", "benchmarks", "inspect", str(tmp_path / "r50.pth"))
    assert took <= 2 * cpu_seconds("-c", "import torch")
