"""Speed of detection: both engines against plain Detectron2's `DefaultTrainer`.

All records have the same generated image and different objects, so that no dataset is needed.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from multiprocessing import active_children, get_context, set_start_method
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode

from benchmarks.speed.input import write_image
from benchmarks.speed.measure import ROOT, Row, Setting, compare, interleaved
from detection.config.engines import find_engine
from detection.config.task import load_task
from detection.data.pipeline import TrainingData
from detection.data.random_state import seed_all
from detection.data.records import records_forgotten
from detection.datasets import register_source
from detection.datasets.base import XYXY_ABS, Split
from detection.datasets.voc import VOC_CLASSES
from detection.engine.trainer import Trainer
from detection.modeling.norms import with_process_norms
from moco.common.files import read_text
from moco.engine.stop import StopRequest

IMAGE_PX, SMALL_PX = (500, 375), (64, 48)  # a typical image of VOC; one that takes no time to read
OBJECTS, CORNERS, BATCH, WORKERS = 7, 24, 16, 4  # objects of an image, corners of their polygons
PLAIN, DETECTRON2, EMBEDDED = "plain Detectron2", "detectron2", "embedded"
MASK_FPN = {"config": "coco/mask_rcnn_R_50_FPN_1x"}
VIT_B = {"MODEL.VIT.EMBED_DIM": 768, "MODEL.VIT.NUM_HEADS": 12, "MODEL.VIT.MLP_DIM": 3072}
TASKS: dict[str, dict[str, Any]] = {
    "Faster R-CNN C4, extra BN": {"config": "voc/faster_rcnn_R_50_C4_9k"},
    "Mask R-CNN FPN": MASK_FPN,
    "Faster R-CNN ViT-B, 320 px": {"config": "voc/faster_rcnn_ViT_Ti_small", **VIT_B},
}


@dataclass(frozen=True)
class Generated:
    """Dataset of `number` records with one image of `size` (width, height) in `folder`."""

    name: str
    folder: Path
    number: int
    size: tuple[int, int]

    def present(self) -> bool:
        """Return True, as nothing has to be downloaded."""
        return True

    def read(self) -> Split:
        """Write the image; sample polygons of up to half the image's size as objects."""
        width, height = self.size
        path = self.folder / f"{self.name}.jpg"
        write_image(path, self.size, seed=0)
        rng, shape = np.random.default_rng(0), (self.number, OBJECTS)
        points = (rng.random((*shape, 1, 2)) + rng.random((*shape, CORNERS, 2))) * self.size / 2
        boxes = np.concatenate([points.min(2), points.max(2)], axis=2).tolist()
        columns = {"bbox": boxes, "segmentation": points.reshape(*shape, 1, -1).tolist()}
        records = []
        for number, rows in enumerate(zip(*columns.values(), strict=True)):
            objects = [
                {**dict(zip(columns, one, strict=True)), "bbox_mode": XYXY_ABS, "category_id": kind}
                for kind, one in enumerate(zip(*rows, strict=True))
            ]
            own = {"file_name": str(path), "image_id": f"{number:06d}", "annotations": objects}
            records.append({**own, "width": width, "height": height})
        facts = (self.name, "pascal_voc", VOC_CLASSES, tuple(records), "", (), {"year": 2007})
        return Split(*facts, has_masks=True)


def task_config(data: Generated, engine: str, *overrides: dict[str, Any]) -> CfgNode:
    """Load the configuration of a task in `TASKS` with overrides, of which the last ones count."""
    register_source(
        data
    )  # before an engine is built, as entries of Detectron2's catalog take precedence
    keys: dict[str, Any] = {"DATASETS.TRAIN": [data.name], "DATASETS.TEST": [data.name]}
    keys |= {"MODEL.WEIGHTS": "random", "OUTPUT_DIR": data.folder, "SEED": 0}
    keys |= {"MODEL.DEVICE": "cpu", "DATALOADER.NUM_WORKERS": 0, "SOLVER.PRECISION": "fp32"}
    for each in overrides:
        keys |= each
    config = ROOT / "configs" / f"{keys.pop('config')}.yaml"
    pairs = [str(item) for pair in keys.items() for item in pair]
    return load_task(config, pairs, EMBEDDED if engine == EMBEDDED else DETECTRON2).cfg


def training_iteration(cfg: CfgNode, engine: str) -> Callable[[], object]:
    """Return a function that runs one training iteration: batch, losses, backward, update, log."""
    if engine == PLAIN:
        from detection.d2 import measured

        return measured.training_iteration(cfg)
    cfg = with_process_norms(cfg, 1)
    seed_all(cfg.SEED)
    model = find_engine(engine).build_model(cfg).train()
    trainer = Trainer(cfg, engine, model, StopRequest())
    numbers, batches = count(), TrainingData(cfg).batches(cfg.DATALOADER.NUM_WORKERS)
    return lambda: trainer.step(next(numbers), batches)


def training_loader(cfg: CfgNode, engine: str, start: int = 0) -> Callable[[], Iterator[Any]]:
    """Return a function that starts Detectron2's loader, or ours at iteration `start`."""
    if engine == PLAIN:
        from detection.d2 import measured

        loader = measured.training_loader(cfg)
        return lambda: iter(loader)
    return partial(TrainingData(cfg).batches, cfg.DATALOADER.NUM_WORKERS, skip=start)


def iteration(setting: Setting, device: str = "cpu") -> list[Row]:
    """Measure training iterations of both engines.

    On a GPU, ResNets are measured with the recipe's batch size per GPU and with workers.
    """
    on_cpu, count = device == "cpu", 1 if setting.quick else 3 if device == "cpu" else 2
    px = 96 if setting.quick else 240 if on_cpu else 800
    faster = 2.0 if on_cpu else 1.3
    keys = {"INPUT.MIN_SIZE_TRAIN": [px], "SOLVER.IMS_PER_BATCH": 2, "MODEL.DEVICE": device}
    keys["DATALOADER.NUM_WORKERS"] = 0 if on_cpu or setting.quick else WORKERS
    if on_cpu or setting.quick:  # with few regions, the network takes a small share of the time
        keys |= {"MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 32, "SOLVER.CLIP_GRADIENTS.ENABLED": True}
    data = Generated("timed", setting.scratch, 32, IMAGE_PX)
    sides = [(PLAIN, "fp32")]
    sides += [(engine, kind) for kind in ("fp32", "bf16") for engine in (DETECTRON2, EMBEDDED)]
    configs = {
        (name, *side): task_config(data, side[0], keys, task, {"SOLVER.PRECISION": side[1]})
        for name, task in list(TASKS.items())[:count]
        for side in sides
    }
    rows = []
    for name in dict.fromkeys(key[0] for key in configs):
        runs = {", ".join(s): training_iteration(configs[name, *s], s[0]) for s in sides}
        torch.backends.cudnn.benchmark = False  # as in trainings
        found = interleaved(runs, setting.rounds, device)
        reference, *others = runs
        for side in others:
            goal, kind = (1.02, "share") if side.endswith("fp32") else (faster, "times")
            what = f"training iteration; {name}; {side}"
            rows.append(compare(what, found, side, reference, goal, kind))
    return rows


def resume(setting: Setting) -> list[Row]:
    """Measure the time to the first batch at a late iteration, against iteration 0."""
    number, late = (100, 270) if setting.quick else (100_000, 270_000)
    data = Generated("resumed", setting.scratch, number, SMALL_PX)
    keys = {"SOLVER.IMS_PER_BATCH": BATCH, "INPUT.MIN_SIZE_TRAIN": [48]}
    cfg = task_config(data, EMBEDDED, MASK_FPN, keys)

    def first_batch(start: int) -> None:
        next(training_loader(cfg, EMBEDDED, start)())

    starts = {f"iteration {i}": partial(first_batch, i) for i in (0, late)}
    found = interleaved(starts, setting.rounds)
    what = f"first batch at iteration {late}, {BATCH} of {number} images"
    return [compare(what, found, f"iteration {late}", "iteration 0", kind="share")]


def loader_memory(setting: Setting) -> list[Row]:
    """Measure the memory of the data-loader workers, in a separate process for each side."""
    number, mapped = (100, 50) if setting.quick else (100_000, 20_000)
    mib = {}
    for engine in (PLAIN, EMBEDDED):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            call = process.submit(worker_bytes, engine, setting.scratch, number, mapped)
            mib[engine] = call.result() / 2**20
    what = f"memory (PSS) of {WORKERS} workers, {number} records, {mapped} of them read"
    return [Row(what, mib[EMBEDDED], mib[PLAIN], PLAIN, kind="share", unit="MiB")]


def worker_bytes(engine: str, folder: Path, number: int, mapped: int) -> int:
    """Return the proportional set size of this process's workers after `mapped` records (Linux)."""
    set_start_method("fork", force=True)  # the commands fork; spawning this process set `spawn`
    torch.set_num_threads(1)
    keys = {"SOLVER.IMS_PER_BATCH": BATCH, "DATALOADER.NUM_WORKERS": WORKERS}
    data = Generated("shared", folder, number, SMALL_PX)
    cfg = task_config(data, engine, MASK_FPN, keys, {"INPUT.MIN_SIZE_TRAIN": [48]})
    start = training_loader(cfg, engine)
    with records_forgotten(WORKERS):
        batches = start()
    for _ in islice(batches, mapped // BATCH):
        pass
    files = [Path(f"/proc/{worker.pid}/smaps_rollup") for worker in active_children()]
    texts = [read_text(file) for file in files]
    return sum(1024 * int(text.partition("\nPss:")[2].split()[0]) for text in texts)


CASES = {"resume": resume, "loader_memory": loader_memory, "iteration": iteration}
