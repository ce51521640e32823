"""Command that plots curves of pre-training runs: loss, pretext accuracy, learning rate, kNN.

    python -m benchmarks.plot_curves RUN [RUN ...] --output curves.png

RUN is the OUTPUT_DIR of a run, finished or not. A quantity that no run has logged gets no panel.
The figure is written as PNG and SVG.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.report.plots import Curve, Plot, new_figure, read_curve
from benchmarks.report.style import PALETTE, figure_label
from moco.common.command import command_parser
from moco.common.errors import DataError, UserError, echo, run_cli
from moco.common.files import PathLike, expand_home
from moco.common.run import METRICS_NAME

# Name in metrics.json → title of the panel.
PANELS = {
    "loss": "loss",
    "pretext_accuracy": "pretext accuracy (%)",
    "lr": "learning rate",
    "knn/top1": "kNN top-1 (%)",
}


def read_curves(run: PathLike) -> dict[str, Curve]:
    """Read the epochs and values of all quantities in `PANELS` that a run has logged.

    Raises:
        DataError: If the folder does not exist or has no metrics, or no quantity is logged yet.
    """
    path = Path(run) / METRICS_NAME
    if not path.is_file():
        raise DataError(f"{run}: no {METRICS_NAME} in it; expected the OUTPUT_DIR of a run")
    found = {name: read_curve(path, [name], x="epoch") for name in PANELS}
    curves = {name: curve for name, curve in found.items() if len(curve[0])}
    if not curves:
        raise DataError(f"{path}: nothing to plot yet ({', '.join(PANELS)})")
    return curves


def plot_curves(runs: Mapping[str, Mapping[str, Curve]]) -> Plot:
    """Plot one panel per quantity and one color per run; `runs` is label → curves."""
    panels = [name for name in PANELS if any(name in curves for curves in runs.values())]
    figure, axes = new_figure(len(panels), width=4.2, height=3.4)
    for axis, name in zip(axes, panels, strict=True):
        for number, (label, curves) in enumerate(runs.items()):
            if name in curves:
                axis.plot(
                    *curves[name],
                    color=PALETTE[number % len(PALETTE)],
                    linestyle=("-", "--", ":")[number // len(PALETTE) % 3],
                    marker="o" if name == "knn/top1" else "",  # measured every few epochs
                    markersize=3,
                    linewidth=1.5,
                    label=figure_label(label),
                )
        axis.set(title=PANELS[name], xlabel="epoch")
        axis.margins(x=0.01)
        if name != "loss":  # the level of the loss depends on K and T; zero means nothing there
            axis.set_ylim(bottom=0)
        if len(runs) > 1:
            axis.legend(frameon=False, fontsize=8)
    return Plot(figure)


def label_runs(runs: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that distinguish the runs."""
    paths = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        labels = ["/".join(parts[-length:]) for parts in paths]
        if len(set(labels)) == len(labels):
            return labels
    raise UserError("the same run is given twice")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer plot`."""
    parser = command_parser(
        "plot",
        "Plot loss, pretext accuracy, learning rate and kNN of pre-training runs.",
    )
    parser.add_argument(
        "runs", nargs="+", type=expand_home, metavar="RUN", help="OUTPUT_DIR of a run"
    )
    parser.add_argument(
        "--output",
        type=expand_home,
        default="curves.png",
        metavar="FILE",
        help="default: %(default)s",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Plot the given runs, and write the figure."""
    args = build_parser().parse_args(argv)
    if args.output.suffix.lower() != ".png":
        raise UserError(f"--output: got {args.output}, expected a name that ends in .png")
    curves = [read_curves(run) for run in args.runs]
    plot = plot_curves(dict(zip(label_runs(args.runs), curves, strict=True)))
    for path in plot.save(args.output):
        echo(f"wrote {path}")


if __name__ == "__main__":
    run_cli(main)
