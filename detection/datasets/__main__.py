"""Datasets by name: `moco-transfer datasets list`, `fetch`, `doctor` and `split`."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from detection.datasets import doctor
from detection.datasets.base import NOTE, WRONG, Finding, Split, formats, published_formats
from detection.datasets.download import Fetcher, datasets, format_listing
from detection.datasets.files import DATASETS_VARIABLE, datasets_root
from detection.datasets.split import divide_fetched, write_splits
from detection.evaluation.reachable import doctor_config, evaluate_perfect, is_measurable
from moco.common.command import command_parser
from moco.common.errors import DataError, UserError, echo, run_cli


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `list`, `fetch`, `doctor` and `split`."""
    parser = command_parser(
        "datasets",
        "Get published datasets, and check datasets before training.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    names = commands.add_parser("list", help="list the datasets that can be fetched")
    _add_common(names)
    get = commands.add_parser(
        "fetch",
        help="download, unpack and check published datasets",
        description="Download what is missing of published datasets, verify the published hashes, "
        "unpack and check the files. Existing archives in ROOT/archives are used.",
    )
    get.add_argument("names", nargs="+", choices=list(datasets()), metavar="NAME")
    get.add_argument(
        "--mirror", default="", metavar="URL", help="URL of a folder with the same files"
    )
    get.add_argument("--keep", action="store_true", help="keep the archives after unpacking")
    get.add_argument(
        "--again",
        action="store_true",
        help="fetch what is present too: add missing files, overwrite none",
    )
    get.add_argument("--dry-run", action="store_true", help="only print what would be done")
    _add_common(get)
    check = commands.add_parser(
        "doctor",
        help="show what exists, is complete, is wrong",
        description="Show the expected tree, and what exists, is complete, is wrong. Exit code 0: "
        "everything found is right; 3: something is wrong, or nothing exists.",
    )
    add_doctor_arguments(check, required=True)
    divide = commands.add_parser(
        "split",
        help="divide a custom dataset that has no splits",
        description="Write lists of images to train on, for validation and to test on, for a "
        "dataset in YOLO layout, VOC layout or COCO's format that has none. Each class is divided "
        "by the shares, and images of equal bytes stay together. No file is overwritten.",
    )
    divide.add_argument("path", metavar="DIR", help="its folder, or its data.yaml or JSON file")
    for name in ("val", "test"):
        divide.add_argument(
            f"--{name}", type=float, default=0.2, metavar="SHARE", help=f"share of {name}, or 0"
        )
    images = "folder of the images of a file in COCO's format; default: found near the file"
    divide.add_argument("--root", default="", metavar="DIR", help=images)
    divide.add_argument("--seed", type=int, default=0, help="default 0")
    for each in (names, get, check, divide):
        each.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_doctor_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the arguments of `doctor`, one of which names the dataset."""
    what = parser.add_mutually_exclusive_group(required=required)
    published = list(published_formats())
    kinds = "{" + ",".join(published) + "}"
    what.add_argument("kind", nargs="?", choices=published, metavar=kinds)
    for kind, format_ in formats().items():
        if format_.custom:
            what.add_argument(format_.custom.flag, dest=f"custom_{kind}", **format_.custom.options)
    what.add_argument(
        "--images",
        metavar="PATH",
        help="images for pre-training, as in DATA.ROOT: a folder, a list or shards",
    )
    more = ". With --coco-json, the folder of the images; default: found near the file"
    _add_common(parser, more)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="also decode every image, and compare its size with the annotations; check every "
        "label map, and look for copies of images",
    )


def _add_common(parser: argparse.ArgumentParser, more: str = "") -> None:
    root = f"the folder of the datasets; default ${DATASETS_VARIABLE}, else ./datasets"
    parser.add_argument("--root", metavar="DIR", help=root + more)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = build_parser().parse_args(argv)
    if args.command == "split":
        write_splits(args.path, _shares(args.val, args.test), args.seed, args.root)
        return 0
    root = os.path.expanduser(args.root or datasets_root())
    if args.command == "list":
        echo(f"in {root}:", *format_listing(Path(root)).splitlines())
        return 0
    if args.command == "fetch":
        flags = args.mirror, args.keep, args.again, args.dry_run
        fetcher = Fetcher(Path(root), *flags, divide_fetched)
        return 0 if _fetch(fetcher, args.names) else DataError.exit_code
    return examine(args)


def examine(args: argparse.Namespace) -> int:
    """Examine the dataset that the arguments of `doctor` name, and return the exit code."""
    root = os.path.expanduser(args.root or datasets_root())
    if args.images is not None:
        tree = []
        images = os.path.expanduser(args.images)
        findings, following = doctor.examine_images(images, verify=args.verify)
    elif args.kind is not None:
        format_ = formats()[args.kind]
        echo(f"reading {args.kind} in {root}")
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


def _fetch(fetcher: Fetcher, names: Sequence[str]) -> bool:
    """Fetch what is missing of datasets, and print the doctor's reports; return if all is right."""
    wanted, root = [datasets()[name] for name in dict.fromkeys(names)], fetcher.root
    fetched = fetcher.fetch(wanted)
    if fetcher.dry_run:
        return True
    reports = []
    for dataset in filter(lambda d: d.custom, wanted):
        custom = formats()[dataset.doctor].custom
        assert custom is not None
        flags = ["doctor", custom.flag, str(root / dataset.custom)]
        value = getattr(build_parser().parse_args(flags), f"custom_{dataset.doctor}")
        reports.append(doctor.examine_custom(custom, value, ""))
    for kind in dict.fromkeys(dataset.doctor for dataset in wanted if not dataset.custom):
        splits = {split for dataset in wanted for split in dataset.splits}
        findings = doctor.examine(formats()[kind], str(root), splits=splits)
        reports.append((findings, doctor.next_step(kind, formats()[kind], str(root), findings)))
    for findings, following in reports:
        print(f"\n{doctor.report(findings, following)}", flush=True)
    right = all(doctor.all_right(findings) for findings, _ in reports)
    if not (right or fetched):
        print("to add files that are missing, run the same command with --again")
    return right


def _shares(val: float, test: float) -> dict[str, float]:
    """Return the share of each split; raise UserError unless they leave images to train on."""
    if not (0 <= val < 1 and 0 <= test < 1 and 0 < val + test < 1):
        raise UserError(f"--val {val:g} --test {test:g}: expected shares above 0, together below 1")
    shares = {"train": 1 - val - test, "val": val, "test": test}
    return {split: share for split, share in shares.items() if share}


def _score(split: Split) -> Iterator[Finding]:
    """Yield the score of perfect predictions on a split."""
    if not is_measurable(split) or not split.records:
        return
    try:
        scored = evaluate_perfect(split, doctor_config(split))
    except DataError as error:
        yield Finding(split.name, WRONG, str(error))
    except UserError as error:  # a package or a key of the configuration is missing
        yield Finding(split.name, NOTE, f"perfect predictions were not scored: {error}")
        if split.has_keypoints:
            yield from _score(dataclasses.replace(split, has_keypoints=False))
    else:
        yield Finding(split.name, NOTE, str(scored))


if __name__ == "__main__":
    run_cli(main)
