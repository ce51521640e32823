"""Changes that people make, each as the edits that make it and the code that shows it works.

docs/architecture.md prints what they touch; `python -m tests.docs.changes` prints that table from
here, and tests/docs/test_architecture.py makes every change in a copy of the project.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Before(NamedTuple):
    """Text that goes before the first occurrence of an anchor in a file."""

    anchor: str
    text: str


class Change(NamedTuple):
    """A change.

    Attributes:
        title: What the table calls it.
        edits: Path → the text to append (to a new file: all of it), or where else it goes. The
            first path is the one to open first.
        proof: Python code that fails without the change.
    """

    title: str
    edits: Mapping[str, str | Before]
    proof: str


CHANGES = (
    Change(
        "a contrastive mechanism",
        {
            "moco/modeling/mechanisms/twins.py": "def make(encoder):\n    return encoder\n",
            "moco/modeling/mechanisms/build.py": """

@MECHANISMS.register()
def twins(cfg, encoder, num_images):
    from moco.modeling.mechanisms.twins import make

    return make(encoder)
""",
        },
        """
from moco.common.errors import lookup
from moco.modeling.mechanisms.build import MECHANISMS
from moco.pretraining.config import load_pretrain_cfg

cfg = load_pretrain_cfg(None, ["MOCO.MECHANISM", "twins"])
assert lookup(MECHANISMS, cfg.MOCO.MECHANISM, "")(cfg, "encoder", 1) == "encoder"
""",
    ),
    Change(
        "an optimizer of the pre-training",
        {
            "moco/engine/solver.py": """

@OPTIMIZERS.register()
def adagrad(parameters, solver):
    import torch

    return torch.optim.Adagrad(parameters, solver.BASE_LR)
"""
        },
        """
import torch
from moco.common.errors import lookup
from moco.engine.solver import OPTIMIZERS
from moco.pretraining.config import load_pretrain_cfg

cfg = load_pretrain_cfg(None, ["SOLVER.OPTIMIZER", "adagrad"])
made = lookup(OPTIMIZERS, cfg.SOLVER.OPTIMIZER, "")([torch.zeros(1)], cfg.SOLVER)
assert isinstance(made, torch.optim.Adagrad)
""",
    ),
    Change(
        "a learning-rate schedule of the pre-training",
        {
            "moco/engine/solver.py": """

@SCHEDULES.register()
def constant(solver, length):
    return lambda step: 1.0
"""
        },
        """
from moco.engine.solver import LearningRate, Length
from moco.pretraining.config import load_pretrain_cfg

cfg = load_pretrain_cfg(None, ["SOLVER.SCHEDULE", "constant"])
assert LearningRate(cfg.SOLVER, Length(10, 5))(9) == cfg.SOLVER.BASE_LR
""",
    ),
    Change(
        "a metric logger",
        {
            "moco/engine/loggers.py": """

@LOGGERS.register()
def silent(folder, config, run_id):
    return Logger(lambda values, iteration: None, lambda done: None)
"""
        },
        """
from pathlib import Path
from moco.engine.loggers import Loggers

Loggers(["silent"], Path("."), {}).close()
""",
    ),
    Change(
        "a key of a detection task",
        {
            "detection/config/keys.py": Before(
                '    "SEED": Key(',
                '    "SOLVER.PATIENCE": Key(0, "Number of evaluations to wait."),\n',
            )
        },
        """
from detection.config.task import default_task
from moco.common.cfgnode import load_cfg

assert load_cfg(default_task(), None, ["SOLVER.PATIENCE", "3"]).SOLVER.PATIENCE == 3
""",
    ),
    Change(
        "a project's checkpoint",
        {
            "convert/projects.py": Before(
                "    Project(\n",
                '    Project("a/new-project", ({"student": "weights/student."},), {"by": ...}),\n',
            )
        },
        """
import torch
from convert.inspect_file import inspect_file
from tests.oracles.resnets import make_resnet

state = {f"student.{name}": value for name, value in make_resnet().state_dict().items()}
torch.save({"by": "me", "weights": state}, "new.pth")
assert "a/new-project" in inspect_file("new.pth")
""",
    ),
    Change(
        "a backbone family",
        {
            "convert/families/toy.py": (ROOT / "tests/example_family/toy.py").read_text(),
            "configs/voc/toy_small.yaml": (
                ROOT / "tests/example_family/toy_small.yaml"
            ).read_text(),
        },
        """
from detection.config.task import default_task
from moco.common import shipped
from moco.common.cfgnode import load_cfg

cfg = load_cfg(default_task(), shipped.resolve("toy_small"), ["MODEL.DEVICE", "cpu"])
from detection.embedded.build import build_model

build_model(cfg)
""",
    ),
    Change(
        "a format of datasets",
        {
            "detection/datasets/folders.py": """from detection.datasets.base import FORMATS, Format


@FORMATS.register()
def folders():
    return Format(lambda root: (), {}, "", {})
""",
            "detection/datasets/__init__.py": "\nfrom detection.datasets import folders\n",
        },
        """
from detection.datasets.base import formats
import detection.datasets

assert "folders" in formats()
""",
    ),
    Change(
        "an evaluator",
        {
            "detection/evaluation/evaluators.py": """

@EVALUATORS.register()
def counting(cfg):
    return Metric(("bbox",), lambda split, folder: None)
"""
        },
        """
from detection.evaluation.base import EVALUATORS
import detection.evaluation.evaluators

assert "counting" in EVALUATORS
""",
    ),
    Change(
        "an executor of a suite",
        {
            "benchmarks/suites/executors/elsewhere.py": """
from benchmarks.suites.executors import base


@base.EXECUTORS.register()
def elsewhere(options):
    return base.Anywhere()
""",
            "benchmarks/suites/executors/__init__.py": """
from benchmarks.suites.executors import elsewhere
""",
        },
        """
from benchmarks.run_suite import build_parser

assert build_parser().parse_args(["s", "--executor", "elsewhere"]).executor == "elsewhere"
""",
    ),
    Change(
        "a format of tables",
        {
            "benchmarks/report/export.py": """

@RENDERERS.register()
def count(report):
    return {"table.count": str(len(report.tables))}
"""
        },
        """
from benchmarks.report.export import find_renderers

find_renderers(["count"])
""",
    ),
    Change(
        "weights with a name",
        {
            "configs/inits.yaml": """
  mine:
    weights: https://example.org/mine.pth
    source: null
    contract: {channel_order: RGB, pixel_mean: [0, 0, 0], pixel_std: [1, 1, 1]}
    paper: null
    cite: none
    notes: []
"""
        },
        """
from moco.common.pretrained import find_remote

assert find_remote("mine").address == "https://example.org/mine.pth"
""",
    ),
    Change(
        "a task, a pre-training recipe, a suite",
        {"configs/voc/my_task.yaml": "# My task.\n_BASE_: faster_rcnn_R_50_C4_24k.yaml\n"},
        """
from detection.config.task import default_task
from moco.common import shipped
from moco.common.cfgnode import load_cfg

load_cfg(default_task(), shipped.resolve("my_task"), [])
""",
    ),
    Change(
        "a command",
        {
            "benchmarks/count_runs.py": """import argparse


def build_parser():
    return argparse.ArgumentParser()


def main(argv=None):
    build_parser().parse_args(argv)
""",
            "benchmarks/__main__.py": Before(
                '    "completion"',
                '    "count": ("benchmarks.count_runs", "count the runs"),\n',
            ),
        },
        """
from benchmarks.__main__ import main

main(["count"])
""",
    ),
    Change(
        "a page of these docs",
        {
            "docs/guides/mine.md": "# Mine\n",
            "mkdocs.yml": Before("      - Suites:", "      - Mine: guides/mine.md\n"),
        },
        """
import pathlib, re

assert pathlib.Path("docs/guides/mine.md").exists()
assert "guides/mine.md" in pathlib.Path("mkdocs.yml").read_text()
""",
    ),
)


def apply(change: Change, project: Path) -> dict[str, bytes | None]:
    """Make a change in a copy of the project; return what its files held, None for a new one."""
    before = {}
    for name, edit in change.edits.items():
        path = project / name
        before[name] = path.read_bytes() if path.exists() else None
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if isinstance(edit, Before):
            assert edit.anchor in text, f"{name}: no {edit.anchor!r}"
            text = text.replace(edit.anchor, edit.text + edit.anchor, 1)
        else:
            text += edit
        path.write_text(text, encoding="utf-8")
    return before


def row(change: Change, touched: Mapping[str, bool]) -> str:
    """Return the row of a change that touches these files (path → whether it is new)."""
    names = (
        f"a new file in `{Path(k).parent}/`" if new else f"`{k}`" for k, new in touched.items()
    )
    return f"| {change.title} | {len(touched)} | {', '.join(names)} |"


def table() -> list[str]:
    """Return the rows of all changes."""
    return [
        row(change, {name: not (ROOT / name).exists() for name in change.edits})
        for change in CHANGES
    ]


if __name__ == "__main__":
    print("\n".join(table()))
