"""Goals of conversion: mostly the time that importing torch takes, memory at most 3x the file."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.measure import children_seconds, description, interleaved, wall_seconds
from benchmarks.speed.report import Row, duration
from convert.detectron2_backbone import installed
from moco.modeling.encoder import EncoderSpec, build_encoder

TITLE = "Conversion"
ABOUT = """
Each conversion is a process of its own, from the file to the verified file, in turn with the least
that any conversion has to do: a process that imports torch and torchvision, reads the file with
`torch.load` and writes the tensors of one network with `torch.save`. The smallest CPU time of
all rounds was taken. Memory is the peak of a process over what it has after its imports.
"""
ROOT = Path(__file__).resolve().parents[2]
DIM, QUEUE_LENGTH = 128, 65536

MINIMUM = """
import sys, torch, torchvision
content = torch.load(sys.argv[1], weights_only=True)
state = content.get("state_dict", content)
torch.save({key: value for key, value in state.items()
            if not key.startswith(("module.encoder_k", "module.queue"))}, sys.argv[2])
"""
# Without Detectron2's backbone, whose import takes as long as all of the rest.
ALONE = """
import sys
sys.modules["detectron2"] = None
from convert.convert_to_d2 import convert_file
convert_file(sys.argv[1], sys.argv[2], overwrite=True)
"""
# "VmHWM" is this program's own peak; getrusage starts with that of the process before it.
PEAK = """
import json, sys
sys.modules["detectron2"] = None
def peak_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
import convert.families.resnet_network, convert.inspect_file, convert.verify
import safetensors.torch
from convert.convert_to_d2 import convert_file
before = peak_bytes()
convert_file(sys.argv[1], sys.argv[2], overwrite=True)
print(json.dumps(peak_bytes() - before))
"""


@dataclass(frozen=True)
class Setting:
    """What to measure with.

    Args:
        scratch: folder for checkpoints.
        rounds: of each timing.
        quick: tiny networks.
    """

    scratch: Path
    rounds: int
    quick: bool

    @cached_property
    def sources(self) -> dict[str, Path]:
        """Generated checkpoints by the layout they have."""
        spec = EncoderSpec("resnet50", width=0.125 if self.quick else 1.0)
        paths: dict[str, Path] = {}
        for name, make in (("torchvision", plain_state), ("facebookresearch/moco v2", official)):
            paths[name] = self.scratch / f"{len(paths)}.pth"
            torch.save(make(spec), paths[name])
        return paths

    def description(self) -> list[str]:
        """Hardware, versions, command; what was read."""
        sizes = ", ".join(f"{name} {mebibytes(path)}" for name, path in self.sources.items())
        return [
            *description(self.rounds),
            f"generated checkpoints of {'a narrow' if self.quick else 'a'} ResNet-50: {sizes}",
        ]


def plain_state(spec: EncoderSpec, seed: int = 0) -> dict[str, Tensor]:
    """torchvision's state dict, every tensor random, the same for the same seed."""
    torch.manual_seed(seed)
    state: dict[str, Tensor] = build_encoder(spec, 1000, mlp=False).state_dict()
    return randomized(state)


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
    return {
        "epoch": 200,
        "arch": spec.arch,
        "state_dict": state,
        "optimizer": optimizer.state_dict(),
    }


def randomized(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Batch norms as of a trained network (in place): no start values, and sums that stay small."""
    for key, value in state.items():
        if value.dim() == 1:
            value.uniform_(0.1, 0.3) if key.endswith("bn3.weight") else value.uniform_(0.5, 1.5)
    return state


def seconds(setting: Setting, goal: str, name: str) -> list[Row]:
    """A conversion without Detectron2 ÷ the least there is to do."""
    path = setting.sources[name]
    contenders = {
        "ours": partial(_run, ALONE, path, setting.scratch / "ours.pth"),
        "minimum": partial(_run, MINIMUM, path, setting.scratch / "minimum.pth"),
    }
    found = interleaved(contenders, setting.rounds, clock=children_seconds)
    ratio = found["ours"] / found["minimum"]
    return [
        Row(
            goal,
            f"convert and verify {name}, {mebibytes(path)}; CPU time",
            duration(found["ours"]),
            duration(found["minimum"]),
            f"{ratio:.2f}",
            "<= 2",
            ratio <= 2,
        )
    ]


def witness(setting: Setting) -> list[Row]:
    """What the user waits for, with Detectron2's backbone as a witness and without."""
    path = setting.sources["torchvision"]
    what = (
        f"the same, {mebibytes(path)}, as time that passes; ours: verified by Detectron2's own "
        "backbone as well; reference: without"
    )
    if not installed():
        return [Row("V3", f"{what}: needs Detectron2")]
    target = setting.scratch / "witness.pth"
    whole = ALONE.replace('sys.modules["detectron2"] = None\n', "")
    contenders = {
        "with": partial(_run, whole, path, target),
        "without": partial(_run, ALONE, path, target),
    }
    found = interleaved(contenders, setting.rounds, clock=wall_seconds)
    return [
        Row(
            "V3",
            what,
            duration(found["with"]),
            duration(found["without"]),
            f"{found['with'] / found['without']:.2f}",
            note="both processes import at the same time, where there are two cores",
        )
    ]


def memory(setting: Setting) -> list[Row]:
    """Peak memory over the imports ÷ size of the file."""
    rows = []
    for name, path in setting.sources.items():
        for suffix in (".pth", ".pkl", ".safetensors"):
            peak = peak_bytes(path, setting.scratch / f"memory{suffix}")
            share = peak / path.stat().st_size
            rows.append(
                Row(
                    "V4",
                    f"memory for {name} to {suffix} ÷ the file",
                    f"{peak / 2**20:.0f} MiB",
                    mebibytes(path),
                    f"{share:.2f}",
                    "<= 3",
                    share <= 3,
                )
            )
    return rows


def peak_bytes(source: Path, target: Path) -> int:
    """Memory that converting `source` takes at its peak, over what the imports take. Linux only."""
    return int(json.loads(_run(PEAK, source, target)))


GOALS: Mapping[str, Callable[[Setting], list[Row]]] = {
    "V1": lambda setting: seconds(setting, "V1", "torchvision"),
    "V2": lambda setting: seconds(setting, "V2", "facebookresearch/moco v2"),
    "V3": witness,
    "V4": memory,
}


def measure(setting: Setting, goals: Sequence[str]) -> list[Row]:
    """The rows of these goals, with progress on the terminal."""
    rows: list[Row] = []
    start = time.monotonic()
    for goal in goals:
        print(f"{time.monotonic() - start:4.0f} s  {goal} ...", flush=True)
        rows += GOALS[goal](setting)
    return rows


def mebibytes(path: Path) -> str:
    """A file's size."""
    return f"{path.stat().st_size / 2**20:.1f} MiB"


def _run(program: str, source: Path, target: Path) -> str:
    """What a new Python prints."""
    command = [sys.executable, "-c", program, str(source.resolve()), str(target.resolve())]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
