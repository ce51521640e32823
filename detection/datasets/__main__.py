"""Datasets by name: `moco-transfer datasets list`, `fetch` and `doctor`."""

import argparse
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from detection.datasets import doctor, fetch
from detection.datasets.archives import datasets
from detection.datasets.base import NOTE, WRONG, Finding, Split, formats
from detection.datasets.layout import DATASETS_VARIABLE, datasets_root
from detection.evaluation.reachable import doctor_config, measurable, reachable
from moco.common.command import program
from moco.common.errors import DataError, UserError, run_cli


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("datasets", "python -m detection.datasets"),
        description="Get published datasets, and check datasets before training.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    names = commands.add_parser("list", help="say what can be fetched, and what is present")
    _add_common(names)
    get = commands.add_parser(
        "fetch",
        help="download, unpack and check published datasets",
        description="Download what is missing of published datasets, compare it with the published "
        "hashes, unpack and check it. Archives that exist in ROOT/archives are used.",
    )
    get.add_argument("names", nargs="+", choices=list(datasets()), metavar="NAME")
    get.add_argument("--mirror", default="", metavar="URL", help="folder with the same files")
    get.add_argument("--keep", action="store_true", help="keep the archives")
    get.add_argument(
        "--again",
        action="store_true",
        help="get what is present too: files of it that are missing are added, none is overwritten",
    )
    get.add_argument("--dry-run", action="store_true", help="only say what would be done")
    _add_common(get)
    check = commands.add_parser(
        "doctor",
        help="say what exists, is complete, is wrong",
        description="Show the expected tree, and what exists, is complete, is wrong. Exit code 0: "
        "everything found is right; 3: something is wrong, or nothing exists.",
    )
    what = check.add_mutually_exclusive_group(required=True)
    kinds = "{" + ",".join(formats()) + "}"
    what.add_argument("kind", nargs="?", choices=list(formats()), metavar=kinds)
    for kind, format_ in formats().items():
        if format_.custom:
            what.add_argument(format_.custom.flag, dest=f"custom_{kind}", **format_.custom.options)
    what.add_argument(
        "--images",
        metavar="PATH",
        help="images for pre-training, what DATA.ROOT is: a folder, a list or shards",
    )
    _add_common(check, ". With --coco-json the folder of the images; default: near the file")
    check.add_argument(
        "--verify",
        action="store_true",
        help="also decode every image, and compare its size with the annotations; check every "
        "label map, and look for copies of images",
    )
    return parser


def _add_common(parser: argparse.ArgumentParser, more: str = "") -> None:
    root = f"the folder of the datasets; default ${DATASETS_VARIABLE}, else ./datasets"
    parser.add_argument("--root", metavar="DIR", help=root + more)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = build_parser().parse_args(argv)
    root = os.path.expanduser(args.root or datasets_root())
    if args.command == "list":
        print(f"in {root}:\n{fetch.listing(Path(root))}")
        return 0
    if args.command == "fetch":
        get = fetch.Fetch(Path(root), args.mirror, args.keep, args.again, args.dry_run)
        return 0 if get(args.names) else DataError.exit_code
    if args.images is not None:
        tree = []
        images = os.path.expanduser(args.images)
        findings, following = doctor.examine_images(images, verify=args.verify)
    elif args.kind is not None:
        format_ = formats()[args.kind]
        print(f"reading {args.kind} in {root}", flush=True)
        findings = doctor.examine(format_, root, verify=args.verify, score=_score)
        following = doctor.next_step(args.kind, format_, root, findings)
        tree = [f"expected in {root}:", *("  " + line for line in format_.tree.splitlines()), ""]
    else:
        custom, value = next(
            (format_.custom, value)
            for kind, format_ in formats().items()
            if format_.custom and (value := getattr(args, f"custom_{kind}")) is not None
        )
        root, tree = args.root or "", []
        findings, following = doctor.examine_custom(
            custom, value, root, verify=args.verify, score=_score
        )
    print(doctor.report(findings, following, tree))
    return 0 if doctor.all_right(findings) else DataError.exit_code


def _score(split: Split) -> Iterator[Finding]:
    """Yield what perfect predictions score on a split, as each training on it checks first."""
    if not measurable(split) or not split.records:
        return
    try:
        scored = reachable(split, doctor_config(split))
    except DataError as error:
        yield Finding(split.name, WRONG, str(error))
    except UserError as error:  # a package is missing, or keys that the doctor does not have
        yield Finding(split.name, NOTE, f"perfect predictions were not scored: {error}")
        if split.has_keypoints:
            yield from _score(dataclasses.replace(split, has_keypoints=False))
    else:
        yield Finding(split.name, NOTE, str(scored))


if __name__ == "__main__":
    run_cli(main)
