"""Goals of fine-tuning in bf16, on a CPU."""

from benchmarks.speed.detection import (
    ENGINES,
    KEYS,
    VOC_C4,
    build_side,
    generated_datasets,
    task_config,
    with_noise,
)
from benchmarks.speed.measure import Setting, every_round
from benchmarks.speed.results import Result, Run

FAST = (VOC_C4, "Faster R-CNN dilated C5", "Mask R-CNN FPN")


def fast_training(setting: Setting) -> list[Result]:
    """Iterations of both engines in bf16, against Detectron2's own in fp32."""
    rows = []
    for name, task in ({name: KEYS["tasks"][name] for name in FAST} | KEYS["fast_tasks"]).items():
        small = KEYS["small"] | (KEYS["quick"] if setting.quick else KEYS["fast_cpu"])
        fp32 = {"SOLVER.PRECISION": "fp32"}
        sides = {"reference": ("detectron2", fp32)}
        sides |= {engine: (engine, KEYS["fast"]) for engine in ENGINES.values()}
        steps = {}
        with generated_datasets(setting):
            for side, (engine, precision) in sides.items():
                one = build_side(task_config(setting, engine, small, task, precision), engine)
                one.model.train()
                one.step()
                steps[side] = one.step
        seconds = every_round(steps, setting.rounds)
        for engine in ENGINES.values():
            both = {"ours": seconds[engine], "reference": seconds["reference"]}
            rows.append(with_noise("fast_training", both, f"{name}; engine {engine}"))
    return rows


GOALS: dict[str, Run | None] = {"fast_training": fast_training}
