"""Pre-trained weights by name: list them, fetch them.

    python -m convert.weights list
    python -m convert.weights fetch moco_v2_r50_800ep supervised_torchvision_r50

A run fetches what it is given; to fetch it before is for machines that later have no network.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from moco.common.command import RANDOM, program
from moco.common.download import CACHE, OFFLINE, cache_folder
from moco.common.errors import UserError, run_cli
from moco.common.pretrained import Web, find_remote, inits, locate

EPILOG = f"""\
Wherever weights are given (MODEL.WEIGHTS, --init, --checkpoint, INPUT of convert) they are one of
  my/checkpoint.pth.tar                   your own file; a path that exists comes before a name
  moco_v2_r50_800ep                       a name of the list
  https://host/r50.pth#sha256=0676ba61    an address with the file's hash, or #md5=...
  hf://user/repo/file.safetensors[@rev]   a file of the Hugging Face Hub
  timm://resnet50.tv_in1k                 a model of timm, from the Hub
  detectron2://ImageNetPretrained/...     a backbone of Detectron2's model zoo

{CACHE}=DIR is where they are kept. With {OFFLINE}=1 nothing is downloaded.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=program("weights", "python -m convert.weights"),
        description="List pre-trained weights that have a name, or fetch some.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("list", help="names, where they are from, input contract, cached or not")
    fetch = commands.add_parser("fetch", help="download to the cache and print the files")
    fetch.add_argument("names", nargs="+", metavar="NAME", help="a name of the list, or an address")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = build_parser().parse_args(argv)
    if args.command == "list":
        print(listing())
        return
    for name in args.names:
        if find_remote(name) is None:
            raise UserError(f"{name}: nothing to fetch; choices are {', '.join(fetchable())}")
    for name in args.names:
        print(f"{name}: {locate(name).path}", flush=True)


def fetchable() -> list[str]:
    """The names of weights that are published."""
    return [name for name, init in inits().items() if init["weights"] not in (None, RANDOM)]


def listing() -> str:
    """A table of every name, and where the cache is."""
    from tabulate import tabulate

    rows = []
    for name in fetchable():
        remote, contract = find_remote(name), inits()[name]["contract"]
        assert isinstance(remote, Web)
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
