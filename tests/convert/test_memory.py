"""Memory: a conversion takes at most three times its file, besides what importing torch takes."""

from pathlib import Path

import pytest
import torch

from tests.oracles.python import run_python
from tests.oracles.resnets import make_resnet

# The most memory that a process had so far; getrusage starts with that of the process before it.
PROGRAM = """
import re, sys
sys.modules["detectron2"] = None
import convert.modeling.resnet, convert.inspect_file, convert.verify
import safetensors.torch, torchvision
from convert.convert_to_d2 import convert_file

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])

before = peak_bytes()
convert_file(sys.argv[1], sys.argv[2], overwrite=True)
print(peak_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("suffix", [".pkl", ".safetensors"])
def test_at_most_three_times_the_file(suffix: str, tmp_path: Path) -> None:
    """A network of 59 MB, in the formats that take the most memory, stays within the bound."""
    source, target = tmp_path / "weights.pth", tmp_path / f"out{suffix}"
    net = make_resnet(50, base=48)
    net.fc = torch.nn.Linear(net.fc.in_features, 1000)  # the head of a file that is released
    torch.save(net.state_dict(), source)
    size = source.stat().st_size
    assert 45e6 < size < 70e6
    assert size < int(run_python("-c", PROGRAM, source, target)) <= 3 * size
