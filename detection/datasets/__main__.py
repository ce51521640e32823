"""Check the datasets before training.

    python -m detection.datasets doctor coco --root /path/to/datasets
    python -m detection.datasets doctor --voc-dir my_dataset --verify
    python -m detection.datasets doctor --coco-json train.json --coco-json test.json --verify

Exit code 0: everything found is right; 3: something is wrong, or nothing is there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from detection.datasets import doctor, doctor_custom
from detection.datasets.layout import DATASETS_VARIABLE, datasets_root
from moco.common.errors import DataError, UserError, run_cli


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m detection.datasets", description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "doctor",
        help="say what is there, complete, wrong",
        description="Show the expected tree, and what is there, complete, wrong. Exit code 0: "
        "everything found is right; 3: something is wrong, or nothing is there.",
    )
    what = check.add_mutually_exclusive_group(required=True)
    kinds = "{" + ",".join(doctor.KINDS) + "}"
    what.add_argument("kind", nargs="?", choices=doctor.KINDS, metavar=kinds)
    what.add_argument("--voc-dir", metavar="DIR", help="a custom dataset, as DATASETS.VOC_DIR")
    what.add_argument(
        "--coco-json",
        metavar="FILE",
        action="append",
        help="a custom dataset, as DATASETS.COCO_TRAIN_JSON; again for its other files",
    )
    check.add_argument(
        "--root",
        metavar="DIR",
        help=f"the folder of the datasets; default ${DATASETS_VARIABLE}, else ./datasets. With "
        "--coco-json the folder of the images; default: near the file",
    )
    check.add_argument(
        "--verify",
        action="store_true",
        help="also decode every image, and compare its size with the annotations; look at every "
        "label map, and for copies of images",
    )
    check.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = build_parser().parse_args(argv)
    if args.kind is None:
        return _custom(args)
    root = Path(args.root if args.root is not None else datasets_root()).expanduser()
    print(f"reading {args.kind} in {root}", flush=True)
    findings = doctor.examine(args.kind, root, verify=args.verify)
    print(doctor.report(args.kind, root, findings))
    return 0 if doctor.all_right(findings) else DataError.exit_code


def _custom(args: argparse.Namespace) -> int:
    """The doctor for a custom dataset."""
    if args.voc_dir is not None:
        if args.root is not None:
            raise UserError("--root belongs to --coco-json, or to the name of a published dataset")
        config, keys = "configs/voc/faster_rcnn_R_18_C4_small.yaml", {"VOC_DIR": args.voc_dir}
        findings = doctor_custom.examine_voc(Path(args.voc_dir).expanduser(), verify=args.verify)
    else:
        config, keys = "configs/coco/mask_rcnn_R_50_FPN_1x.yaml", {}
        for role, file in zip(("TRAIN", "TEST"), args.coco_json, strict=False):
            keys |= {f"COCO_{role}_JSON": file}
            keys |= {f"COCO_{role}_ROOT": args.root} if args.root else {}
        files = [Path(file).expanduser() for file in args.coco_json]
        findings = doctor_custom.examine_coco(files, args.root or "", verify=args.verify)
    print(doctor_custom.report(findings, config, keys))
    return 0 if doctor.all_right(findings) else DataError.exit_code


if __name__ == "__main__":
    run_cli(main)
