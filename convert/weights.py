"""Pre-trained weights by name: list them, fetch them.

    python -m convert.weights list
    python -m convert.weights fetch moco_v2_r50_800ep supervised_torchvision_r50

Runs download their weights themselves; fetching them first is for machines without a network.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moco.common.command import RANDOM, command_parser
from moco.common.download import CACHE, OFFLINE, cache_folder
from moco.common.errors import UserError, echo, run_cli
from moco.common.pretrained import HttpWeights, find_remote, inits, locate_weights

EPILOG = f"""\
Weights (MODEL.WEIGHTS, --init, --checkpoint, input of convert and inspect) are one of
  my/checkpoint.pth.tar                   your own file or folder, which comes before a name
  moco_v2_r50_800ep                       a name from the list
  https://host/r50.pth#sha256=0676ba61    an address with the file's hash, or #md5=...
  hf://user/repo[/file.safetensors][@rev] the network of a repository of the Hugging Face Hub
  timm://resnet50.tv_in1k                 a model of timm, from the Hub
  detectron2://ImageNetPretrained/...     a backbone of Detectron2's model zoo

{CACHE}=DIR sets the cache folder. With {OFFLINE}=1 nothing is downloaded.
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser of the command line."""
    parser = command_parser(
        "weights",
        "List named pre-trained weights, or download some.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser(
        "list", help="list names, sources, input contracts, and whether they are cached"
    )
    fetch = commands.add_parser("fetch", help="download weights to the cache and print the paths")
    fetch.add_argument("names", nargs="+", metavar="NAME", help="name from the list, or address")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = build_parser().parse_args(argv)
    if args.command == "list":
        print(listing())
        return
    for name in args.names:
        if find_remote(name) is None:
            raise UserError(
                f"{name}: not a name or address of weights; choices are {', '.join(fetchable())}"
            )
    for name in args.names:
        echo(f"{name}: {locate_weights(name).path}")


def fetchable() -> list[str]:
    """Return the names of published weights."""
    return [name for name, init in inits().items() if init["weights"] not in (None, RANDOM)]


def listing() -> str:
    """Format a table of all names, followed by the path of the cache."""
    from tabulate import tabulate

    rows = []
    for name in fetchable():
        remote, contract = find_remote(name), inits()[name]["contract"]
        assert isinstance(remote, HttpWeights)
        mean, std = (
            " ".join(f"{x:g}" for x in contract[f"pixel_{key}"]) for key in ("mean", "std")
        )
        stride = "1x1" if contract["stride_in_1x1"] else "3x3"
        published = remote.digest or "no published hash"
        published += f", {remote.size_mb:g} MB" if remote.size_mb else ""
        rows.append(
            (
                f"{name}\n  {inits()[name]['source']}",
                f"{contract['channel_order']}, mean {mean}\nstd {std}, stride in the {stride}",
                f"{urlsplit(remote.address).hostname}\n{published}",
                "yes" if remote.cached() else "no",
            )
        )
    table = tabulate(rows, ["name, source", "input contract", "from", "cached"], "simple")
    return f"{table}\n\ncache: {cache_folder()} ({CACHE})"


if __name__ == "__main__":
    run_cli(main)
