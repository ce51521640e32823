"""SOLVER.PRECISION auto and fp32: the time of a step, and the features of a short pre-training."""

import subprocess
import sys
from functools import partial
from statistics import mean, stdev

import torch

from benchmarks.speed import reference, step
from benchmarks.speed.measure import Setting, interleaved
from benchmarks.speed.results import Result, Run, compare
from moco.common.run import RECORD_NAME, read_record
from moco.engine.device import has_fast_bf16
from moco.modeling.encoder import EncoderSpec, build_encoder, contiguous_last_stages

GROUPS, K, SEEDS, STEPS = 8, 4096, 5, 300
SIZES = {"resnet50": (32, 112), "resnet18": (64, 64)}  # images per step, crop in pixels
PRECISIONS = ("fp32", "auto")


def steps(setting: Setting) -> list[Result]:
    """The official step, whose BN sees the batch as a whole, and ours with BN in groups."""
    rows = []
    for arch, (N, P) in {"resnet10": (16, 32)}.items() if setting.quick else SIZES.items():
        contenders = {"reference": step_of("reference", arch, N, P)}
        contenders |= {precision: step_of(precision, arch, N, P) for precision in PRECISIONS}
        seconds = interleaved(contenders, setting.rounds)
        sizes = f"{arch}, {P} px, N={N}, K={K}"
        rows += [compare(f"step {key}", seconds, key, sizes=sizes) for key in PRECISIONS]
    return rows


def step_of(side: str, arch: str, N: int, P: int) -> partial[torch.Tensor]:
    """A call that makes one training step on random images."""
    spec, views = EncoderSpec(arch), step.random_batch(N, P)
    torch.manual_seed(0)
    encoder = build_encoder(
        spec, step.DIM, mlp=False, bn_splits=1 if side == "reference" else GROUPS
    )
    if side == "reference":
        queue = step.unit_columns(K)
        return partial(reference.Step(encoder, queue, step.M, step.T, step.LR), *views)
    bf16 = side == "auto" and has_fast_bf16(torch.device("cpu"))
    ours = step.OurStep(encoder, K, torch.bfloat16 if bf16 else None)
    if bf16:
        contiguous_last_stages(ours.model, spec, N, P)
    return partial(ours, *views)


def features(setting: Setting) -> list[Result]:
    """The quickstart's pre-training, cut short, and its kNN accuracy over seeds."""
    data, seeds, length = setting.scratch / "data", range(SEEDS), STEPS
    few: list[str] = []
    if setting.quick:
        seeds, length = range(2), 2
        few = ["--images=600", "--knn-train=60", "--knn-val=60"]
    _run("benchmarks.suites.synthetic", str(data), "--trainval=0", *few)
    top1: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for seed in seeds:
        for precision, found in top1.items():
            out = setting.scratch / f"{precision}_{seed}"
            keys: dict[str, object] = {"DATA.ROOT": data / "images", "DATA.KNN_ROOT": data / "knn"}
            keys |= {"OUTPUT_DIR": out, "SEED": seed, "SOLVER.MAX_ITERS": length}
            pairs = [str(part) for pair in keys.items() for part in pair]
            precise = ["SOLVER.PRECISION", precision]
            _run("moco.pretrain", "--config-file", "pretrain/quickstart", *pairs, *precise)
            found.append(float(read_record(out / RECORD_NAME).metrics["knn/top1"] or 0))
    said = [f"{name} {mean(found):.1f} ± {stdev(found):.1f}" for name, found in top1.items()]
    spread, apart = max(0.1, *map(stdev, top1.values())), mean(top1["auto"]) - mean(top1["fp32"])
    sizes = f"{', '.join(said)} over {len(seeds)} seeds; {length} steps"
    return [Result("features", abs(apart), spread, sizes)]


def _run(module: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", module, *words], check=True, capture_output=True)


GOALS: dict[str, Run | None] = {"step": steps, "features": features}
