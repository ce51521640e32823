"""Memory: a conversion takes at most three times its file, beside what importing torch takes."""

from pathlib import Path

import pytest
import torch

from benchmarks.speed.convert import peak_bytes, plain_state
from moco.modeling.encoder import EncoderSpec


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("suffix", [".pkl", ".safetensors"])
def test_at_most_three_times_the_file(suffix: str, tmp_path: Path) -> None:
    """Of 53 MB: a network of three quarters of the width. The formats that take most."""
    torch.save(plain_state(EncoderSpec("resnet50", width=0.75)), tmp_path / "weights.pth")
    size = (tmp_path / "weights.pth").stat().st_size
    assert 45e6 < size < 70e6
    peak = peak_bytes(tmp_path / "weights.pth", tmp_path / f"out{suffix}")
    assert size < peak <= 3 * size
