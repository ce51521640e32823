"""Runs of each training on the pretended GPU: `python -m tests.oracles.device_cases CASE FOLDER`.

The last line of the output is JSON: by source line, how often the CPU waited for the GPU in a step,
which is the difference of two runs of different length.
"""

import functools
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.oracles import pretend_cuda, pretend_driver

MUTATED = ("moco.pretraining.run", "torch.zeros(2, device=self.device)", "torch.zeros(2)")
PRETRAIN: dict[str, dict[str, object]] = {
    "fp32": {},
    "bf16": {"SOLVER.PRECISION": "bf16", "SOLVER.CHANNELS_LAST": True},
    "fp16": {"SOLVER.PRECISION": "fp16"},
    "deterministic": {"DETERMINISTIC": True},
    "memory_bank": {"MOCO.MECHANISM": "memory_bank"},
    "memory_bank_nce": {"MOCO.MECHANISM": "memory_bank", "MOCO.LOSS": "nce"},
    "mutated": {},
}


def _words(keys: dict[str, object]) -> list[str]:
    return [str(word) for pair in keys.items() for word in pair]


def _per_step(run: Callable[[str, int], object], short: int, long: int) -> dict[str, float]:
    """Return the waits of one step, by line and reason."""
    counts = []
    for name, steps in (("short", short), ("long", long)):
        pretend_cuda.waits.clear()
        run(name, steps)
        counts.append(Counter(pretend_cuda.waits))
    counts[1].subtract(counts[0])
    return {
        f"{place} {why}": number / (long - short)
        for (place, why), number in counts[1].items()
        if number
    }


def pretrain(folder: Path, **keys: object) -> Callable[..., None]:
    """Return `run(name, steps, *flags)`, a pre-training on small images."""
    from tests.moco.commands import pretrain as main
    from tests.moco.conftest import TINY, write_images

    images = folder / "images"
    if not images.exists():
        write_images(images)
    # The first scale overflows, and a run of a few steps would be refused for skipping most.
    start = functools.partialmethod(torch.amp.GradScaler.__init__, init_scale=1.0)
    torch.amp.GradScaler.__init__ = start
    own = {"DEVICE": "cuda", "AUG.KIND": "v2", "SOLVER.BATCH_SIZE": 4, "LOG.EVERY_ITERS": 20}

    def run(name: str, steps: int, *flags: str, **more: object) -> None:
        made = {"DATA.ROOT": images, "OUTPUT_DIR": folder / name, "SOLVER.MAX_ITERS": steps}
        main([*_words(TINY | own | keys | made | more), *flags])

    return run


def resume(folder: Path) -> dict[str, float]:
    """Stop a run and resume it: it ends with the weights of one that was not stopped."""
    from moco.common.errors import Preempted
    from tests.oracles.training import weights

    run = pretrain(folder)
    run("straight", 8)
    try:
        run("stopped", 8, **{"SOLVER.STOP_AT_ITERS": 5})
    except Preempted:
        run("stopped", 8, "--resume")
    assert weights(folder / "stopped") == weights(folder / "straight")
    return {}


def classify(folder: Path, command: str) -> dict[str, float]:
    """Train a linear classifier or fine-tune, with an evaluation at the end."""
    from tests.moco import commands
    from tests.moco.classification import classify_runs as runs

    data = runs.write_labeled(folder / "labeled", {"train": (24, 24, 16), "val": (3, 2, 2)})
    file = runs.write_pretrained(folder / "moco.pth.tar")
    own = {"DEVICE": "cuda", "SOLVER.BASE_LR": 0.1, "LOG.EVERY_ITERS": 20}

    def run(name: str, images: int) -> None:
        # A run is a number of epochs: two of 2 and 8 batches.
        keys = own | {"SOLVER.BATCH_SIZE": 64 // images, "SOLVER.MAX_EPOCHS": 1}
        changes = {key.replace(".", "__"): value for key, value in keys.items()}
        changes |= {"SOLVER__MILESTONES_EPOCHS": "()"}
        getattr(commands, command)(runs.words(folder / name, data, file, **changes))

    return _per_step(run, 2, 8)


def detect(folder: Path, engine: str) -> dict[str, float]:
    """Fine-tune a detector in bf16 and evaluate it."""
    from detection.train_net import main
    from moco.common.run import read_record
    from tests.oracles.small_tasks import CONFIGS, SMALL_VOC, narrow_file
    from tests.oracles.tiny_voc import write_voc

    data = write_voc(folder / "shapes", {"trainval": 6, "test": 3})
    own = {"MODEL.DEVICE": "cuda", "SOLVER.PRECISION": "bf16", "DATALOADER.NUM_WORKERS": 0}
    own |= {"MODEL.RESNETS.RES2_OUT_CHANNELS": 16, "TEST.PRECISE_BN.ENABLED": False}
    own |= {"SOLVER.STEPS": "()", "SOLVER.CHECKPOINT_PERIOD": 100, "DATASETS.VOC_DIR": data}
    own |= {"MODEL.WEIGHTS": narrow_file(18, folder), "LOG.LOGGERS": "()"}
    config = CONFIGS / "voc" / "faster_rcnn_R_18_C4_small.yaml"

    def run(name: str, steps: int) -> None:
        keys = {**SMALL_VOC, **own, "SOLVER.MAX_ITER": steps, "OUTPUT_DIR": folder / name}
        assert main(["--config-file", str(config), "--engine", engine, *_words(keys)]) == 0
        assert "bbox/AP" in read_record(folder / name / "run.json").metrics

    return _per_step(run, 2, 5)


def mutate(module: str, before: str, after: str) -> None:
    """Execute a module with a change of its source."""
    loaded = importlib.import_module(module)
    source = Path(str(loaded.__file__)).read_text(encoding="utf-8")
    assert source.count(before) == 1
    exec(compile(source.replace(before, after), str(loaded.__file__), "exec"), loaded.__dict__)


def main(case: str, folder: Path) -> None:
    pretend_driver.install()
    torch.set_num_threads(1)
    if case == "mutated":
        mutate(*MUTATED)
    cases: dict[str, Callable[[], Any]] = {
        **{
            name: lambda keys=keys: _per_step(pretrain(folder, **keys), 2, 5)
            for name, keys in PRETRAIN.items()
        },
        "resume": lambda: resume(folder),
        **{name: lambda name=name: classify(folder, name) for name in ("linear", "finetune")},
        **{name: lambda name=name: detect(folder, name) for name in ("embedded", "detectron2")},
    }
    print(json.dumps(cases[case]()))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
