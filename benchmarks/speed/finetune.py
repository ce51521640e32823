"""Goals of fine-tuning on a CPU: time and memory in bf16 and in fp32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.detection import (
    ENGINES,
    KEYS,
    VIT_B,
    VOC_C4,
    build_side,
    generated_datasets,
    task_config,
    with_noise,
)
from benchmarks.speed.measure import Setting, every_round, run_python
from benchmarks.speed.memory import peak_bytes
from benchmarks.speed.results import Result, Run, compare

FAST = (VOC_C4, "Faster R-CNN dilated C5", "Mask R-CNN FPN", VIT_B)
MEASURED = (VOC_C4, "Mask R-CNN FPN", VIT_B)
FP32 = {"SOLVER.PRECISION": "fp32"}
PROCESSES = 3  # of each side, for its memory
PEAK = """
import sys
from benchmarks.speed.finetune import iteration_bytes
print(iteration_bytes(*sys.argv[1:]))
"""


def fast_training(setting: Setting) -> list[Result]:
    """Iterations of both engines in bf16, against Detectron2's own in fp32."""
    rows = []
    tasks = {name: KEYS["tasks"][name] for name in FAST}
    tasks |= KEYS["quick_fast_tasks" if setting.quick else "fast_tasks"]
    for name, task in tasks.items():
        sides = {"reference": ("detectron2", FP32)}
        sides |= {engine: (engine, KEYS["fast"]) for engine in ENGINES.values()}
        seconds = _seconds(setting, task, sides)
        for engine in ENGINES.values():
            both = {"ours": seconds[engine], "reference": seconds["reference"]}
            rows.append(with_noise("fast_training", both, f"{name}; engine {engine}"))
    return rows


def vit_training(setting: Setting) -> list[Result]:
    """Iterations of a ViT-B of both engines in fp32."""
    sides = {side: (engine, FP32) for side, engine in ENGINES.items()}
    return [with_noise("vit_training", _seconds(setting, KEYS["tasks"][VIT_B], sides), VIT_B)]


def _seconds(
    setting: Setting, task: dict[str, Any], sides: Mapping[str, tuple[str, dict[str, str]]]
) -> dict[str, list[float]]:
    """CPU seconds of an iteration of each side, an engine and its precision, in every round."""
    small = KEYS["small"] | (KEYS["quick"] if setting.quick else KEYS["fast_cpu"])
    steps = {}
    with generated_datasets(setting):
        for side, (engine, precision) in sides.items():
            one = build_side(task_config(setting, engine, small, task, precision), engine)
            one.model.train()
            one.step()
            steps[side] = one.step
    return every_round(steps, setting.rounds)


def training_memory(setting: Setting) -> list[Result]:
    """Iterations of the embedded engine in either precision, and of Detectron2 in fp32."""
    return [row for precision in ("fp32", "bf16") for row in _memory(setting, precision)]


def _memory(setting: Setting, precision: str) -> list[Result]:
    """Iterations of ours in this precision and of Detectron2 in fp32.

    Each in processes of its own, in turn, the smallest peak counting: how much the allocator takes
    from the system differs by some percent from process to process.
    """
    rows = []
    sides = {"ours": ("embedded", precision), "reference": ("detectron2", "fp32")}
    for name in MEASURED[: 1 if setting.quick else None]:
        with generated_datasets(setting):
            of_task = (name, str(setting.scratch), "quick" if setting.quick else "")
            peaks: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(1 if setting.quick else PROCESSES):
                for side, engine in sides.items():
                    found = int(run_python("-c", PEAK, *engine, *of_task))
                    peaks[side].append(found / 2**20)
        smallest = {side: min(found) for side, found in peaks.items()}
        rows.append(compare(f"training_memory {precision}", smallest, sizes=name))
    return rows


def iteration_bytes(engine: str, precision: str, name: str, scratch: str, quick: str) -> int:
    """Peak memory of this process for a model and two iterations of its training.

    Over what the same took with a tiny model, and so without imports.
    """
    torch.set_num_threads(1)
    setting, before = Setting(Path(scratch), 1, bool(quick)), 0
    task = KEYS["small"], KEYS["tasks"][name], {"SOLVER.PRECISION": precision}
    for sizes in ([KEYS["quick"]], [KEYS["quick"]] * setting.quick + [KEYS["fast_cpu"]]):
        before = peak_bytes()
        side = build_side(task_config(setting, engine, *task, *sizes), engine)
        side.model.train()
        for _ in range(2):
            side.step()
        del side
    return peak_bytes() - before


GOALS: dict[str, Run | None] = {
    "fast_training": fast_training,
    "vit_training": vit_training,
    "training_memory": training_memory,
}
