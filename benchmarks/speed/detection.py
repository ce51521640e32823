"""Goals of detection: the embedded engine against Detectron2, the evaluators, a GPU's levers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.speed import engines, evaluators, scenes
from benchmarks.speed.measure import Setting, every_round, interleaved
from benchmarks.speed.results import Result, Run, compare
from detection.datasets.layout import DATASETS_VARIABLE

WARMUP_ITERS = 3  # after which the weights are compared
VOC_C4, FCN = "Faster R-CNN C4, extra BN", "FCN-16s"
LOADED = (VOC_C4, "Mask R-CNN FPN", "Keypoint R-CNN FPN", FCN)


@cache
def keys() -> dict[str, dict[str, Any]]:
    """Content of tasks.yaml."""
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text())
    return content


@contextmanager
def generated_datasets(setting: Setting) -> Iterator[None]:
    """While open, $DETECTRON2_DATASETS has the generated ones."""
    before = os.environ.get(DATASETS_VARIABLE)
    os.environ[DATASETS_VARIABLE] = str(_datasets(setting))
    try:
        yield
    finally:
        del os.environ[DATASETS_VARIABLE]
        if before is not None:
            os.environ[DATASETS_VARIABLE] = before


@cache
def _datasets(setting: Setting) -> Path:
    root = setting.scratch / "datasets"
    scenes.write_datasets(root, 4 if setting.quick else 16, mean_objects=7.0)
    return root


@cache
def pair(setting: Setting, name: str) -> tuple[engines.Side, engines.Side]:
    """The embedded engine and Detectron2 with a task of tasks.yaml and the same weights."""
    given = {
        **keys()["small"],
        **(keys()["quick"] if setting.quick else {}),
        **keys()["tasks"][name],
    }
    config = given.pop("config")
    with generated_datasets(setting):
        ours, theirs = (
            engines.BUILD[engine](engines.task_config(engine, config, given, setting.scratch))
            for engine in ("embedded", "detectron2")
        )
    engines.imitate_training(ours)
    theirs.model.load_state_dict(ours.model.state_dict())
    return ours, theirs


def training(setting: Setting) -> list[Result]:
    """D1."""
    rows = []
    for name in keys()["tasks"]:
        ours, theirs = pair(setting, name)
        for side in (ours, theirs):
            side.model.train()
            for _ in range(WARMUP_ITERS):
                side.step()
        differs = not same(ours.model.state_dict(), theirs.model.state_dict())
        seconds = every_round({"ours": ours.step, "reference": theirs.step}, setting.rounds)
        sizes = f"{name}; weights after {WARMUP_ITERS} of them compared"
        rows.append(with_noise("D1", seconds, sizes, differs))
    return rows


def inference(setting: Setting) -> list[Result]:
    """D2."""
    rows = []
    for name in keys()["tasks"]:
        ours, theirs = pair(setting, name)
        theirs.model.load_state_dict(ours.model.state_dict())
        for side in (ours, theirs):
            side.model.eval()
        found = ours.infer()
        differs = not same(found, theirs.infer())
        number = f"{len(found['scores'])} detections" if "scores" in found else "label map"
        seconds = every_round({"ours": ours.infer, "reference": theirs.infer}, setting.rounds)
        rows.append(with_noise("D2", seconds, f"{name}; {number} compared", differs))
    return rows


def loading(setting: Setting) -> list[Result]:
    """D3: the generated images once."""
    rows = []
    for name in LOADED:
        given = {**keys()["loading"], **keys()["tasks"][name]}
        config = given.pop("config")
        if given.pop("INPUT.SEM_SEG_CROP_SIZE", None):
            del given["INPUT.MIN_SIZE_TRAIN"]  # crops have their own size
        count = len(list((_datasets(setting) / "images").iterdir()))
        with generated_datasets(setting):
            contenders = {}
            for side, engine in (("ours", "embedded"), ("reference", "detectron2")):
                cfg = engines.task_config(engine, config, given, setting.scratch)
                batches = engines.BATCHES[engine](cfg)
                contenders[side] = partial(_fetch, batches, count // cfg.SOLVER.IMS_PER_BATCH)
            found = every_round(contenders, setting.rounds)
        seconds = {side: [value / count for value in all_] for side, all_ in found.items()}
        rows.append(with_noise("D3", seconds, name))
    return rows


def evaluation(setting: Setting) -> list[Result]:
    """C9."""
    voc, coco = ((30, 3), (8, 30)) if setting.quick else ((4952, 20), (1000, 30))
    rows = [evaluators.voc_row(*voc, setting.scratch, setting.rounds)]
    return rows + evaluators.coco_rows(*coco, setting.scratch, setting.rounds)


def gpu_training(setting: Setting) -> list[Result]:
    """G9."""
    plain = {**keys()["gpu"], **(keys()["quick"] if setting.quick else {})}
    fast = {**plain, **keys()["fast"]}
    config = keys()["tasks"][VOC_C4]["config"]
    sides = {}
    with generated_datasets(setting):
        for name, engine, given in (
            ("default", "detectron2", plain),
            ("detectron2", "detectron2", fast),
            ("embedded", "embedded", fast),
        ):
            cfg = engines.task_config(engine, config, given, setting.scratch)
            sides[name] = engines.BUILD[engine](cfg)
            sides[name].model.train()
    steps = {name: side.step for name, side in sides.items()}
    seconds = interleaved(steps, setting.rounds, "cuda")
    return [
        compare("G9", seconds, name, "default", f"engine {name}")
        for name in ("embedded", "detectron2")
    ]


def with_noise(
    goal: str, seconds: Mapping[str, list[float]], sizes: str, differs: bool = False
) -> Result:
    """A row of the fastest rounds, from all rounds of each side."""
    best = {side: min(all_) for side, all_ in seconds.items()}
    noise = max(sorted(all_)[:2][-1] / min(all_) - 1 for all_ in seconds.values())
    return Result(goal, best["ours"], best["reference"], sizes, noise, differs)


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Bitwise identical, be they tensors, arrays or lists."""
    return set(a) == set(b) and all(
        np.array_equal(value, b[name])
        if isinstance(value, np.ndarray | torch.Tensor)
        else value == b[name]
        for name, value in a.items()
    )


GOALS: dict[str, Run | None] = {
    "D1": training,
    "D2": inference,
    "D3": loading,
    "C9": evaluation,
    "G9": gpu_training,
}


def _fetch(batches: Iterator[Any], count: int) -> None:
    for _ in islice(batches, count):
        pass
