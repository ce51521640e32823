"""Speed of a frozen backbone's cached maps: iterations of `voc/frozen_small` with networks.

Without the cache an iteration takes T, of which the backbone takes B, so that the cache can make it
T / (T - B) times as fast at most. `--images` is a dataset in VOC's layout with the splits train
and test, by default a generated one of a single image.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from benchmarks.speed.detection import IMAGE_PX, VIT_B, Generated, task_config
from benchmarks.speed.measure import Row, Setting, compare, interleaved
from benchmarks.suites.suite import EMBEDDED
from detection.config.engines import find_engine
from detection.data.pipeline import TrainingData
from detection.data.random_state import seed_all
from detection.engine.per_image import PerImage, run_per_image
from detection.engine.trainer import Trainer
from moco.engine.device import autocast
from moco.engine.stop import StopRequest

TASK = {"config": "voc/frozen_small", "SOLVER.PRECISION": "auto"}
VIT = {
    "MODEL.BACKBONE.NAME": "build_vit_sfp_backbone",
    "MODEL.BACKBONE.FREEZE_AT": -1,
    "MODEL.BACKBONE.SQUARE_PAD": 320,
    "MODEL.VIT.WINDOW_SIZE": 0,
    "MODEL.VIT.REL_POS": False,
}
VIT_S = {"MODEL.VIT.EMBED_DIM": 384, "MODEL.VIT.NUM_HEADS": 6, "MODEL.VIT.MLP_DIM": 1536}
# Network → its keys, and the goal of the speed.
NETWORKS: dict[str, tuple[dict[str, Any], float | None]] = {
    "R18": ({}, 2.0),
    "R50": ({"MODEL.RESNETS.DEPTH": 50, "MODEL.RESNETS.RES2_OUT_CHANNELS": 256}, 3.0),
    "ViT-S/16": ({**VIT, **VIT_S}, None),
    "ViT-B/16": ({**VIT, **VIT_B}, 5.0),
}
OF_LIMIT = 0.9
FILLING = 20  # iterations, more than are timed


def measure(name: str, setting: Setting) -> list[Row]:
    """Measure training iterations with and without the cache, and the backbone by itself."""
    own, goal = NETWORKS[name]
    keys = {**TASK, **own, "SEED": 1}
    if setting.quick:
        keys |= {"SOLVER.IMS_PER_BATCH": 1, "MODEL.VIT.DEPTH": 4}
    data = Generated("cached", setting.scratch, 32, IMAGE_PX)
    if setting.images:
        folder = Path(setting.images).resolve()
        keys |= {"DATASETS.VOC_DIR": str(folder)}
        keys |= {f"DATASETS.{key.upper()}": [f"{folder.name}_{key}"] for key in ("train", "test")}
    maps = str(setting.scratch / name.replace("/", "_"))
    cached = task_config(data, EMBEDDED, keys, {"MODEL.BACKBONE.CACHE_DIR": maps})
    without = task_config(data, EMBEDDED, keys, {"MODEL.BACKBONE.CACHE_GB": 0.0})
    fill, _ = iteration(cached)
    for _ in range(2 if setting.quick else FILLING):
        fill()
    sides = {"cached": iteration(cached)[0]}
    sides["not cached"], sides["backbone"] = iteration(without)
    found = interleaved(sides, setting.rounds)
    row = compare(f"iteration; {name}", found, "cached", "not cached", goal)
    limit = row.reference - found["backbone"].seconds
    return [
        row,
        Row(
            f"iteration; {name}; limit {row.reference / limit:.2f} x",
            row.ours,
            limit,
            "without the backbone",
            OF_LIMIT,
            "floor",
            noise=row.noise,
        ),
    ]


def iteration(cfg: CfgNode) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that run a training iteration, and the backbone on the first batch."""
    seed_all(cfg.SEED)
    model = find_engine(EMBEDDED).build_model(cfg)
    per_image = run_per_image(model, cfg, EMBEDDED)
    trainer = Trainer(cfg, EMBEDDED, model.train(), StopRequest())
    numbers, batches = count(), TrainingData(cfg).batches(0)
    samples = next(TrainingData(cfg).batches(0))
    batch = model.get_submodule("images")(samples)[1]
    return (
        lambda: trainer.step(next(numbers), batches),
        lambda: backbone(per_image, samples, batch, cfg),
    )


def backbone(per_image: PerImage, samples: Any, batch: torch.Tensor, cfg: CfgNode) -> None:
    """Compute the maps of a batch in the precision of the training."""
    per_image.see(samples)
    with autocast(torch.device(cfg.MODEL.DEVICE), cfg.SOLVER.PRECISION):
        per_image(batch)


CASES: dict[str, Callable[[Setting], list[Row]]] = {
    name: partial(measure, name) for name in NETWORKS
}
