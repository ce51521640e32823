"""Command that tests detectors on corrupted images (Michaelis et al. 2019, arXiv 1907.07484).

    python -m benchmarks.robustness RUN [RUN ...] [--severity 3]

RUN is the OUTPUT_DIR of a finished run with its `model_final.pth`, or a folder of several. The
engine that trained the model evaluates the test split once for each of the 15 corruptions; existing
evaluations are reused. The result is written to `RUN/robustness.json`, which the reports read
(benchmarks/report/analysis.py), and the evaluations to `RUN/corrupted/`.

Deviation: the paper averages over five severities; that is five times the evaluations.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moco.common.command import command_parser
from moco.common.errors import DataError, echo, run_cli
from moco.common.files import expand_home

if TYPE_CHECKING:
    from benchmarks.report.records import FinishedRun


def measure(run: "FinishedRun", severity: int, failing: dict[str, str]) -> dict[str, Any]:
    """Evaluate a run's model on every corruption.

    Args:
        run: Finished run of a detector.
        severity: Severity of the corruptions, 1 to 5.
        failing: Corruption → why it cannot be made here. These are skipped.

    Returns:
        Content of robustness.json: `run`, `severity`, `failing`, and the headline metrics, `clean`
        and by corruption `corrupted`.

    Raises:
        DataError: If the folder has no trained model, or an evaluation raises it.
    """
    from detection import train_net
    from detection.data.corruptions import NAMES
    from detection.evaluation.metrics import CORRUPTED, headline_names
    from moco.common.files import sha256_file
    from moco.common.run import RECORD_NAME, read_record

    record, model = run.record, run.folder / "model_final.pth"
    if not model.is_file():
        raise DataError(f"{model}: no such file; corrupted images need the trained model")
    shown, sha256 = headline_names(record.metrics), sha256_file(model)
    corrupted = {}
    for name in NAMES:
        if name in failing:
            continue
        out = run.folder / CORRUPTED / f"{name}.{severity}"
        found = out / "inference" / RECORD_NAME
        before = read_record(found) if found.is_file() else None
        if before is None or (before.status, before.weights_sha256) != ("done", sha256):
            where = ["MODEL.WEIGHTS", str(model), "OUTPUT_DIR", str(out)]
            where += ["INPUT.CORRUPTION", out.name, "DATASETS.PART", ""]
            config = ["--config-file", str(run.folder / "config.yaml")]
            train_net.main(["--eval-only", "--engine", record.engine, *config, *where])
        metrics = read_record(found).metrics
        corrupted[name] = {metric: metrics.get(metric) for metric in shown}
    clean = {metric: record.metrics.get(metric) for metric in shown}
    numbers = {"clean": clean, "corrupted": corrupted}
    return {"run": run.digest, "severity": severity, **numbers, "failing": failing}


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate the given runs, and write one file next to each record."""
    args = build_parser().parse_args(argv)
    from benchmarks.report.analysis import robustness
    from benchmarks.report.records import finished_detectors
    from detection.data.corruptions import find_failing, parse_corruption
    from detection.evaluation.metrics import ROBUSTNESS_NAME
    from moco.common.files import atomic_write_json

    parse_corruption(f"fog.{args.severity}")  # raises if the corruptions' package is missing
    runs = finished_detectors(args.runs)
    broken = find_failing()
    for name, reason in broken.items():
        print(f"note: {name} cannot be made here, so there is no mPC ({reason})")
    for run in runs:
        found = measure(run, args.severity, broken)
        atomic_write_json(run.folder / ROBUSTNESS_NAME, found)
        for metric in found["clean"]:
            numbers = robustness(run, metric)
            shown = "  ".join(f"{name} {value:.1f}" for name, value in numbers.items())
            echo(f"{run.folder}: {metric} at severity {args.severity}: {shown}")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer robustness`."""
    parser = command_parser(
        "robustness",
        "Evaluate trained detectors on the test images under 15 corruptions: P on "
        "clean images, mPC the mean over the corruptions, rPC their ratio.",
    )
    parser.add_argument(
        "runs", nargs="+", type=expand_home, metavar="RUN", help="OUTPUT_DIR of a run"
    )
    severity = "severity of the corruptions (default: %(default)s)"
    parser.add_argument("--severity", type=int, choices=range(1, 6), default=3, help=severity)
    return parser


if __name__ == "__main__":
    run_cli(main)
