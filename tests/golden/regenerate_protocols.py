"""Golden names of the shipped experiments: defaults, protocol hashes, recipe labels, run ids.

    python -m tests.golden.regenerate_protocols

writes protocols.json next to this file. Run it only if an experiment is intended to become another
one, or for a new key or task; earlier records then belong to another protocol.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.suites.suite import DETECTION_ENGINES, Init, expand
from benchmarks.suites.suite_file import load_suite
from detection.config import keys
from detection.config.recipe import compare_with_recipe
from detection.config.task import resolve_without_data
from moco import finetune, linear
from moco.classification import config as classification
from moco.common.cfgnode import flatten
from moco.common.command import RANDOM
from moco.common.keys import defaults_of
from moco.engine.config import protocol_sha256
from moco.engine.keys import CLASSIFICATION, PRETRAIN
from moco.pretraining import config as pretraining

FILE = Path(__file__).with_name("protocols.json")
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TASKS = ("voc", "coco", "lvis", "cityscapes", "ade20k")
CLASSIFICATIONS = {
    "imagenet/linear": linear.LINEAR,
    "imagenet/finetune": finetune.FINETUNE,
    "inaturalist/finetune_2018": finetune.FINETUNE,
}
INITS = {RANDOM: Init(RANDOM, None), "moco": Init("moco.pth", 64 * "a")}


def defaults() -> dict[str, Any]:
    """Return every default as JSON, because hashes omit values that equal the default."""
    found = {
        "detection": defaults_of(keys.KEYS),
        "pretrain": flatten(pretraining.default_cfg()),
        "classification": flatten(classification.default_cfg({})),
    }
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def tasks(engine: str) -> dict[str, list[str]]:
    """Return the protocol hash without the data, and the recipe's label, of all tasks of an engine.

    SOLVER.PRECISION is fp32 also where it is auto, which is another one on another machine.
    """
    found = {}
    for path in (path for folder in TASKS for path in sorted((CONFIGS / folder).glob("*.yaml"))):
        if engine == "embedded" and "densepose" in path.name:
            continue
        opts = ["MODEL.WEIGHTS", RANDOM, "MODEL.DEVICE", "cpu", "SOLVER.PRECISION", "fp32"]
        cfg = flatten(resolve_without_data(path, opts, engine, num_processes=8))
        found[_name(path)] = [keys.protocol_sha256(cfg), compare_with_recipe(cfg, None).label]
    return found


def trainings() -> dict[str, str]:
    """Return the protocol hash of each recipe of pre-training and of classification."""
    found = {}
    for path in sorted((CONFIGS / "pretrain").glob("*.yaml")):
        cfg = pretraining.load_pretrain_cfg(path, [])
        found[_name(path)] = protocol_sha256(cfg, pretraining.default_cfg(), PRETRAIN)
    for name, protocol in CLASSIFICATIONS.items():
        path = CONFIGS / f"{name}.yaml"
        cfg = classification.load_classify_cfg(protocol.defaults, path, [])
        found[name] = protocol_sha256(cfg, classification.default_cfg({}), CLASSIFICATION)
    return found


def run_ids() -> dict[str, dict[str, str]]:
    """Return the id of the first trial's run by suite and `<task>/<init> (<engine>)`."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted((CONFIGS / "suites").glob("*.yaml")):
        runs = expand(load_suite(path), INITS, DETECTION_ENGINES, version="1", available=8)
        found[path.stem] = {
            f"{run.task}/{run.init} ({run.engine})": run.id for run in runs if run.seed == 0
        }
    return found


def main() -> None:
    content = {
        "defaults": defaults(),
        "tasks": tasks("detectron2"),
        "trainings": trainings(),
        "run_ids": run_ids(),
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
