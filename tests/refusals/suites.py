"""Refusals of `suite`, `quickstart`, `weights`, `configs` and of the console command itself."""

from typing import Any

import yaml

from tests.oracles.refused_files import Edit, both, text
from tests.refusals.rows import Row, rows

TASK = text("task.yaml", "_BASE_: base.yaml\nSOLVER: {MAX_ITER: 40}\n")
BASE = both(TASK, text("base.yaml", "SOLVER: {BASE_LR: 0.02}\n"), text("mine.pth", "weights"))
ONE = {"config": "task.yaml"}


def suite(**changes: Any) -> Edit:
    content = {"name": "s", "trials": 2, "tasks": [ONE], **changes}
    return both(BASE, text("suite.yaml", yaml.safe_dump(content)))


def task(**keys: Any) -> Edit:
    return suite(tasks=[{**ONE, **keys}])


SUITE = "suite suite.yaml --engine embedded --executor cpu --output out --init random"
FILES = rows(
    SUITE,
    *(
        (edit, rf"suite\.yaml.*{words}")
        for edit, words in (
            (suite(task=[]), "unknown key 'task'.*the nearest is tasks"),
            (suite(tasks=["task.yaml"]), "task 1: got 'task.yaml'"),
            (suite(tasks=[{}]), "task 1: config: "),
            (task(config="no.yaml"), "config no.yaml: "),
            (task(gpu=1), "unknown key 'gpu'.*nearest is gpus"),
            (task(gpus=-1), "gpus: got -1"),
            (task(program="x"), "program: got 'x'"),
            (task(engines=["x"]), r"engines: got \['x'\]"),
            (task(without="x"), "without: got 'x'"),
            (task(overrides={"SEED": 1}), "overrides: SEED"),
            (suite(tasks=[ONE] * 2), "two tasks are called task"),
            (task(name="../x"), r"name: got '\.\./x'"),
            (suite(name="a b"), "name: got 'a b'"),
            (suite(trials=0), "trials: got 0"),
            (suite(inits=["x"]), r"inits: got \['x'\]"),
            (suite(inits={"mine": ""}), "no weights; expected mine=FILE"),
            (suite(steps=[]), "unknown key 'steps'"),
            (suite(tune={"share": 0}), "tune"),
            (suite(tune={"share": 2}), "tune"),
            (suite(tune={"steps": 3}), "tune"),
            (suite(tune={"values": {"SOLVER.BASE_LR": 3}}), "tune"),
            (suite(tune={"values": {"SOLVER.BASE_LR": []}}), "tune"),
            (suite(tune={"values": {"SOLVER.MAX_ITER": [3]}}), "tune"),
        )
    ),
    (suite(tasks=[{**ONE, "engines": ["detectron2"]}]), "task runs on detectron2 only; got --engi"),
    (task(without=["rand*"]), "nothing to run for random"),
)


def with_suite(command: str, *cases: tuple[str, str], **fields: Any) -> list[Row]:
    return rows(command, *cases, edit=suite(), **fields)


OPTIONS = [
    *with_suite(
        "suite suite.yaml --engine embedded --executor cpu --output out",
        ("--dry-run", "names no init; give --init"),
        ("--init '*.pth'", r"--init \*\.pth: a pattern needs a name"),
        *(
            (
                " ".join(f"--init {each}" for each in options),
                f"--init.*{options[-1].partition('=')[0]}",
            )
            for options in (
                ("a=1", "a=2"),
                ("a=1,2", "a=3"),
                ("a=3", "a=1,2"),
                *((each,) for each in ("x=random", "random=x", "=x", "a/b=x", "mine.pth=x")),
                *((each,) for each in ("x=1,1", "x=1,", "x=1,random", "random=random,random")),
            )
        ),
    ),
    *with_suite(
        "suite suite.yaml --engine embedded --executor cpu --output out",
        ("--init x=no.pth --init y=no.pth", r"--init x=no\.pth.*--init y=no\.pth"),
        ("--init 'x=no_*.pth'", r"--init x=no_\*\.pth: no file has such a name"),
        code=3,
    ),
    *with_suite(
        SUITE,
        ("--status", r"suite\.json"),
        ("--skip c", "--skip c: no such task; .* task$"),
        ("--skip task", "no task of"),
        ("--baseline x", "--baseline x"),
        ("--gpus-per-run 2", "--gpus-per-run: got 2"),
        ("--workers -1", "--workers"),
        ("--slurm partition=x", "--slurm partition=x"),
        ("--opts SOLVER.BASELR 1", "SOLVER.BASELR"),
        ("--opts SEED 1", "SEED"),
        ("--opts SOLVER.BASE_LR", "SOLVER.BASE_LR"),
        ("--seconds-per-iteration c=1", "c: no such task; choices are task"),
        ("--output mine.pth/out --dry-run", "mine.pth: is a file"),
        ("--engine tensorflow", "invalid choice: 'tensorflow'"),
    ),
    *with_suite(
        SUITE, ("--init a=~nobody_here/mine.pth", "~nobody_here/mine.pth: no such f"), code=3
    ),
    *with_suite(
        SUITE.replace("suite.yaml", "~nobody_here/x.yaml"), ("", "~nobody_here/x.yaml: no such")
    ),
    *with_suite(
        SUITE.replace("suite.yaml", "~/x.yaml"),
        ("", "home folder is unknown; set HOME"),
        env={"HOME": "~"},
    ),
    *with_suite(SUITE.replace("cpu", "local"), ("", "--executor local")),
    *with_suite(
        SUITE.replace("cpu", "slurm"),
        ("--dry-run", "--executor slurm: sbatch .*PATH"),
        env={"PATH": "{tmp}"},
    ),
    *with_suite(
        SUITE.replace("cpu", "slurm"),
        *(
            (f"--slurm {options}", f"--slurm {options}: ")
            for options in (
                "partition",
                "nodes=2",
                "sbatch.signal=USR1",
                "gpus_per_node=x",
                "signal_delay_s=5",
            )
        ),
    ),
    *rows(SUITE, (both(suite(), text("out/thesis.tex", "")), r"thesis\.tex")),
    *rows(f"{SUITE} --tune", (task(program="linear"), "no detection task")),
    *rows("suite no_such_suite", ("", "no_such_suite")),
]
QUICKSTART = [
    *rows("quickstart --out out", ("--seeds 0", "--seeds: got 0")),
    *rows("quickstart --out out", ("--images none", "none"), ("--voc images", "images"), code=3),
    *rows("quickstart --out out --images images", ("", "--images .*: found 9 images")),
    *rows("quickstart --out images --smoke", ("", "holds other files")),
    *rows("quickstart --out images --smoke --overwrite", ("", "holds other files")),
]
OTHERS = [
    *with_suite("watch none", ("--task task.yaml", "none: no such folder")),
    *with_suite("watch '*.pth'", ("--task no.yaml", r"no\.yaml")),
    *rows("trian", ("", "invalid choice: 'trian'")),
    *rows("--debug", ("", "COMMAND|unrecognized")),
    *rows("configs", ("nothing_like_it", "nothing_like_it")),
    *rows("weights fetch", ("min", "min: "), ("moco_v2_r50_800ep min", "min: ")),
    *rows("completion bash", ("", r"\[completion\]"), without=("shtab",)),
]
SUITES: list[Row] = [*FILES, *OPTIONS, *QUICKSTART, *OTHERS]
