"""Goals of conversion: mostly the time that importing torch takes, memory at most 3x the file."""

import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.measure import Setting, children_seconds, interleaved, run_python
from benchmarks.speed.results import Result, Run, compare
from moco.modeling.encoder import EncoderSpec, build_encoder

DIM, QUEUE_LENGTH = 128, 65536
TORCHVISION, OFFICIAL = "torchvision", "facebookresearch/moco v2"

MINIMUM = """
import sys, torch, torchvision
content = torch.load(sys.argv[1], weights_only=True)
state = content.get("state_dict", content)
torch.save({key: value for key, value in state.items()
            if not key.startswith(("module.encoder_k", "module.queue"))}, sys.argv[2])
"""
WITH_DETECTRON2 = """
import sys
from convert.convert_to_d2 import convert_file
convert_file(sys.argv[1], sys.argv[2], overwrite=True)
"""
# Without Detectron2's backbone, whose import takes as long as all of the rest.
ALONE = 'import sys; sys.modules["detectron2"] = None' + WITH_DETECTRON2
PEAK = """
import sys
sys.modules["detectron2"] = None
from benchmarks.speed.memory import peak_bytes
import convert.families.resnet_network, convert.inspect_file, convert.verify
import safetensors.torch, torchvision
from convert.convert_to_d2 import convert_file
before = peak_bytes()
convert_file(sys.argv[1], sys.argv[2], overwrite=True)
print(peak_bytes() - before)
"""


@cache
def checkpoint(setting: Setting, layout: str) -> Path:
    """A generated file."""
    spec = EncoderSpec("resnet50", width=0.125 if setting.quick else 1.0)
    path = setting.scratch / f"{layout.replace('/', ' ')}.pth"
    torch.save(plain_state(spec) if layout == TORCHVISION else official(spec), path)
    return path


def plain_state(spec: EncoderSpec) -> dict[str, Tensor]:
    """torchvision's state dict, every tensor random, the same each time."""
    torch.manual_seed(0)
    return randomized(build_encoder(spec, 1000, mlp=False).state_dict())


def official(spec: EncoderSpec) -> dict[str, Any]:
    """facebookresearch/moco@7397dfe main_moco.py:382, v2: both encoders, queue, optimizer."""
    torch.manual_seed(0)
    encoders = {name: build_encoder(spec, DIM, mlp=True) for name in ("encoder_q", "encoder_k")}
    optimizer = torch.optim.SGD(encoders["encoder_q"].parameters(), 0.03, momentum=0.9)
    for parameter in encoders["encoder_q"].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {
        f"module.{name}.{key}": value
        for name, encoder in encoders.items()
        for key, value in randomized(encoder.state_dict()).items()
    }
    state["module.queue"] = torch.randn(DIM, QUEUE_LENGTH)
    state["module.queue_ptr"] = torch.zeros(1, dtype=torch.long)
    kept = {"arch": spec.arch, "state_dict": state, "optimizer": optimizer.state_dict()}
    return {"epoch": 200, **kept}


def randomized(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Batch norms as of a trained network (in place): no start values, and sums that stay small."""
    for key, value in state.items():
        if value.dim() == 1:
            value.uniform_(0.1, 0.3) if key.endswith("bn3.weight") else value.uniform_(0.5, 1.5)
    return state


def processes(setting: Setting, goal: str, layout: str, ours: str, reference: str) -> list[Result]:
    """CPU time of two programs; wall time where the second of ours asks Detectron2."""
    path, target = checkpoint(setting, layout), setting.scratch / "converted.pth"
    programs = {"ours": ours, "reference": reference}
    files = str(path.resolve()), str(target.resolve())
    contenders = {side: partial(run_python, "-c", each, *files) for side, each in programs.items()}
    timer = time.monotonic if goal == "with_detectron2" else children_seconds
    seconds = interleaved(contenders, setting.rounds, timer=timer)
    return [compare(goal, seconds, sizes=f"{path.stat().st_size / 2**20:.1f} MiB")]


def memory(setting: Setting) -> list[Result]:
    """Peak memory over the imports ÷ size of the file."""
    rows = []
    for layout in (TORCHVISION, OFFICIAL):
        path = checkpoint(setting, layout)
        for suffix in (".pth", ".pkl", ".safetensors"):
            peak = peak_bytes(path, setting.scratch / f"memory{suffix}")
            size = path.stat().st_size
            rows.append(Result("memory", peak / 2**20, size / 2**20, f"{layout} to {suffix}"))
    return rows


def peak_bytes(source: Path, target: Path) -> int:
    """Memory that converting `source` takes at its peak, over what the imports take. Linux only."""
    return int(run_python("-c", PEAK, str(source.resolve()), str(target.resolve())))


GOALS: dict[str, Run | None] = {
    "torchvision": partial(
        processes, goal="torchvision", layout=TORCHVISION, ours=ALONE, reference=MINIMUM
    ),
    "moco": partial(processes, goal="moco", layout=OFFICIAL, ours=ALONE, reference=MINIMUM),
    "with_detectron2": partial(
        processes, goal="with_detectron2", layout=TORCHVISION, ours=WITH_DETECTRON2, reference=ALONE
    ),
    "memory": memory,
}
