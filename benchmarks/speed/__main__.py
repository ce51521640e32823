"""Measured speed against stated goals.

    python -m benchmarks.speed pretrain                            the whole table
    python -m benchmarks.speed pretrain --goals loss,momentum --quick  two of them, with tiny sizes
    python -m benchmarks.speed pretrain --output docs/speed.md     and its section of the page
    python -m benchmarks.speed input --images DIR                  from a JPEG to two views
    python -m benchmarks.speed precision                           auto and fp32: step, features
    python -m benchmarks.speed convert                             of converting a checkpoint
    python -m benchmarks.speed detection                           the engines, the evaluators
    python -m benchmarks.speed finetune                            both engines in bf16
    python -m benchmarks.speed startup                             commands that read or check
    python -m benchmarks.speed scaling                             1 to 512 GPUs, on paper
    python -m benchmarks.speed gpu                                 what only a GPU can run

Both sides run in turn, so that what else the machine does meets both; the smallest CPU time of
several rounds counts, and of that only the ratio.
"""

import argparse
import dataclasses
import importlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moco.common.errors import UserError, run_cli

if TYPE_CHECKING:
    from benchmarks.speed.measure import Setting
    from benchmarks.speed.results import Result, Run, Table

SUITES = (
    *("pretrain", "precision", "input", "convert", "detection", "finetune", "startup", "scaling"),
    "gpu",
)
MIN_ROUNDS = 5


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description="Measured speed against stated goals.",
    )
    parser.add_argument("suite", choices=SUITES, help="what is measured")
    parser.add_argument("--goals", metavar="loss,momentum", help="only these; default: all")
    parser.add_argument(
        "--images", metavar="DIR", help="input: JPEG images; default: generated ones"
    )
    parser.add_argument(
        "--rounds", type=int, default=MIN_ROUNDS, help=f"of each timing, default {MIN_ROUNDS}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one round: a smoke test, no measurement"
    )
    parser.add_argument(
        "--output", metavar="FILE.md", help="put the section there, and its data into FILE.json"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.rounds < MIN_ROUNDS and not args.quick:
        raise UserError(f"--rounds: got {args.rounds}, expected at least {MIN_ROUNDS}, or --quick")

    if args.goals and args.output and not args.quick:
        raise UserError("--output replaces a whole section of the page; leave --goals out")

    from benchmarks.speed.measure import Setting, description, present
    from benchmarks.speed.results import Result, Table, page, text
    from moco.common.files import atomic_write_text

    goals = importlib.import_module(f"benchmarks.speed.{args.suite}").GOALS
    names = args.goals.split(",") if args.goals else goals
    for name in names:
        if name not in goals:
            raise UserError(f"--goals: got {name!r}, choices are {', '.join(goals)}")
    rounds = 1 if args.quick else args.rounds
    with tempfile.TemporaryDirectory() as scratch:
        setting = Setting(Path(scratch), rounds, args.quick, args.images)
        found = measure({name: goals[name] for name in names}, setting)
    results = [one for one in found if isinstance(one, Result)]
    tables = [one for one in found if isinstance(one, Table)]
    print(text(results, tables))
    if args.output:
        output = Path(args.output)
        data = output.with_suffix(".json")
        content = json.loads(data.read_text(encoding="utf-8")) if data.exists() else {}
        rows = [dataclasses.asdict(result) for result in results]
        content[args.suite] = {"facts": description(rounds), "quick": args.quick, "results": rows}
        if tables:
            content[args.suite]["tables"] = [dataclasses.asdict(table) for table in tables]
        content = {name: content[name] for name in SUITES if name in content}
        rendered = page(content)
        atomic_write_text(data, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        atomic_write_text(output, rendered)
        print(f"wrote {output} and {data}")
    if args.suite == "gpu" and "a GPU" not in present():
        raise UserError(
            "no GPU here: nothing of it was run; run the same command on a machine with one"
        )


def measure(runs: "Mapping[str, Run | None]", setting: "Setting") -> "list[Result | Table]":
    """The rows and tables of these goals, with progress on the terminal."""
    import torch

    from benchmarks.speed.measure import present
    from benchmarks.speed.results import Result, goals

    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    results: list[Result | Table] = []
    start = time.monotonic()
    for name, run in runs.items():
        print(f"{time.monotonic() - start:4.0f} s  {name} ...", flush=True)
        mine = {key: goal for key, goal in goals().items() if key.split()[0] == name}
        if run is None or not {goal.get("needs", "") for goal in mine.values()} <= present():
            results += [Result(key) for key in mine]
        else:
            torch.manual_seed(0)
            results += run(setting)
    return results


if __name__ == "__main__":
    run_cli(main)
