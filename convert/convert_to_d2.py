"""Convert a pre-trained checkpoint into weights for Detectron2, and prove it.

    python convert/convert_to_d2.py checkpoint_0199.pth.tar weights.pth
    python convert/convert_to_d2.py --inspect checkpoint_0199.pth.tar

Reads what self-supervised projects, torchvision, timm and Detectron2 write, recognized by content
(docs/guides/converting.md). Writes Detectron2's names with the input contract beside them, or with
`--to torchvision` a plain state dict. The file appears only after it was read back, compared with
the source and shown to give the same features.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from convert import write
from convert.contract import Given
from convert.families.base import LEFT_AT_INIT, Option, families, first_rule
from convert.projects import PROJECTS
from convert.read import is_converted, read_file, source_file
from convert.report import ConversionReport, agreement
from moco.common.command import program
from moco.common.errors import DataError, UserError, run_cli
from moco.common.files import TEMPORARY_PREFIX, PathLike, sha256_file
from moco.common.pretrained import locate
from moco.modeling.soundness import CHANNEL_ORDERS

if TYPE_CHECKING:
    from convert.prove import Converted


def convert_file(
    src: PathLike,
    dst: PathLike,
    *,
    to: str = "detectron2",
    overwrite: bool = False,
    **given: Any,
) -> ConversionReport:
    """Convert, verify, and only then put the file at `dst`.

    Args:
        src: a checkpoint of one of PROJECTS, a plain state dict, or a converted file; the folder of
            a pre-training or classification, whose last checkpoint is taken; or what
            moco/common/pretrained.py downloads.
        dst: its ending is the format, see convert/write.py; the output of an earlier conversion
            for Detectron2 is replaced, any other existing file only with `overwrite`.
        to: "detectron2" or "torchvision": whose names the file has.
        given: for what the file does not say: fields of `convert.contract.Given`, and by their
            names the family's options.

    Raises UserError or DataError, in one line; what was at `dst` before is then untouched.
    """
    given_file, dst = locate(src), Path(dst)
    src = source_file(given_file.path)
    _check_output(src, dst, to, overwrite)
    objects: set[str] = set()
    raw = read_file(src, objects)
    from convert import prove, translate  # after the file is known to be readable: torchvision

    found, model = translate.translate(src, raw, Given.of(**given), objects)
    contract, notes = model.contract, [*given_file.notes, *found.notes]
    if to == "torchvision" and (options := write.lost_options(contract)):
        notes.append(
            "a plain state dict does not hold the input contract; to convert this one to "
            f"Detectron2, give {' '.join(options)}"
        )
    with _scratch_folder(dst) as folder:
        scratch = Path(folder) / dst.name
        write.write(scratch, model, to)
        converted = write.read_back(scratch, contract, to)
        prove.check_round_trip(found.state, converted, str(src))
        if converted.contract != contract:
            raise DataError(f"{src}: verification failed: read back, the contract is another one")
        features = prove.check_features(*found.source_network(), converted, str(src))
        notes += found.effect_of_tokens()
        sha256 = sha256_file(scratch)
        if dst.exists():
            notes.append("replaced a file of that name")
        os.replace(scratch, dst)

    rules = (first_rule(key, LEFT_AT_INIT) for key in prove.target_tensors(contract))
    left = Counter(rule for rule in rules if rule)
    if found.filled:
        left["BN statistics (0 and 1)"] = found.filled
    return ConversionReport(
        source_path=src,
        epoch=found.epoch,
        head=found.head,
        contract=contract,
        mapped=len(model.model) - found.filled,
        dropped=found.dropped,
        left=dict(left),
        features=features,
        notes=notes,
        warnings=found.warnings,
        encoders=found.encoders,
        to=to,
        output_path=dst,
        output_sha256=sha256,
        reference=found.reference,
        assumed=found.assumed,
    )


def convert_in_memory(
    src: PathLike,
    raw: Any = None,
    objects: set[str] | None = None,
    timm_model: str | None = None,
) -> Converted:
    """What `convert_file` would write, without a file: the same recognition, contract and proof.

    `raw`, `objects`: what `read_file` gave for `src`, when it is already open; `timm_model`: timm's
    name of its network. The notes say what was done.

    Raises UserError or DataError, in one line.
    """
    from convert import prove, translate

    src = Path(src)
    objects = set() if objects is None else objects
    raw = read_file(src, objects) if raw is None else raw
    try:
        given = Given.of(timm_model=timm_model)
        found, converted = translate.translate(src, raw, given, objects)
    except UserError as error:
        if "; give --" not in str(error):
            raise
        advice = f"{error}; that is an option of `{program('convert', 'convert_to_d2.py')}`: "
        raise type(error)(f"{advice}convert the file first, and give what it writes") from error
    prove.check_round_trip(found.state, converted, str(src))
    contract = found.contract
    features = prove.check_features(*found.source_network(), converted, str(src))
    encoder = "" if contract.encoder == "single" else f", {contract.encoder} encoder"
    note = (
        f"MODEL.WEIGHTS converted in memory: {contract.source} checkpoint{encoder}, "
        f"{contract.architecture}, {len(converted.model) - found.filled} tensors; "
        f"features of one image {agreement(features)} to those of {found.reference}"
        + (f"; assumed: {found.assumed}" if found.assumed else "")
    )
    return dataclasses.replace(converted, notes=(note, *converted.notes, *found.effect_of_tokens()))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    sources = ", ".join(dict.fromkeys(project.name for project in PROJECTS))
    roles = {role for project in PROJECTS for roles in project.roles for role in roles}
    encoders = ", ".join(sorted(roles - {"single"}))
    parser = argparse.ArgumentParser(
        prog=program("convert", "convert_to_d2.py"),
        usage="%(prog)s [options] INPUT OUTPUT\n       %(prog)s --inspect FILE",
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog=f"Sources, recognized by content: {sources}, and plain state dicts of a backbone "
        "under any one prefix. docs/guides/converting.md has the command for each.",
    )
    parser.add_argument(
        "input",
        metavar="INPUT",
        nargs="?",
        help="checkpoint to convert; a run folder, whose last checkpoint is taken; or weights by "
        "name or address, see moco-transfer weights --help",
    )
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        nargs="?",
        help="file to write; its ending is the format: .pth (tensors), .pkl (numpy arrays, as the "
        "official MoCo converter), .safetensors; an earlier conversion is replaced",
    )
    parser.add_argument(
        "--inspect",
        action="store_true",
        help="describe INPUT, any checkpoint and what could be done with it; nothing is written",
    )
    parser.add_argument(
        "--to",
        choices=write.SUFFIXES,
        default="detectron2",
        help="whose names of tensors: detectron2 (with the input contract beside them) or "
        "torchvision (a plain state dict, without fc) (default: %(default)s)",
    )
    parser.add_argument(
        "--encoder",
        metavar="NAME",
        help=f"which network of a checkpoint that has several: {encoders}, or what the error "
        "message of an ambiguous file lists (default: the one that the project itself transfers)",
    )
    for name, what in (("mean", "mean"), ("std", "standard deviation")):
        parser.add_argument(
            f"--{name}",
            nargs=3,
            type=float,
            metavar="X",
            help=f"pixel {what}, in channel order (default: the source's)",
        )
    parser.add_argument(
        "--scale",
        type=int,
        choices=[1, 255],
        default=255,
        help="pixel range that --mean and --std speak of: 0..255 or 0..1 (default: %(default)s)",
    )
    parser.add_argument(
        "--channel-order",
        choices=CHANNEL_ORDERS,
        help="order of the colors the network was trained on (default: the source's)",
    )
    for option in _family_options():
        if option.is_text:
            parser.add_argument(option.flag, metavar="NAME", help=option.help)
        elif option.choices is None:
            parser.add_argument(option.flag, type=int, metavar="N", help=option.help)
        else:
            parser.add_argument(option.flag, choices=option.choices, help=option.help)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace any file of OUTPUT's name"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; raises UserError for run_cli."""
    args = build_parser().parse_args(argv)
    if args.inspect:
        given = [file for file in (args.input, args.output) if file is not None]
        if len(given) != 1:
            raise UserError(f"--inspect: expected one file, got {' and '.join(given) or 'none'}")
        from convert.inspect_file import inspect_file

        _announce(args.input)
        print(inspect_file(args.input))
        return 0
    if args.output is None:
        raise UserError(
            "INPUT and OUTPUT are needed, e.g. checkpoint_0199.pth.tar weights.pth; "
            "--inspect FILE only describes a file"
        )
    scale = 255 / args.scale
    options: dict[str, Any] = {}
    for option in _family_options():
        said = getattr(args, option.name)
        options[option.name] = said if option.choices is None else option.choices.get(said)
    _announce(args.input)
    report = convert_file(
        args.input,
        args.output,
        to=args.to,
        overwrite=args.overwrite,
        encoder=args.encoder,
        mean=args.mean and [value * scale for value in args.mean],
        std=args.std and [value * scale for value in args.std],
        channel_order=args.channel_order,
        **options,
    )
    print(report.text())
    return 0


def _family_options() -> list[Option]:
    return [option for family in families() for option in family.options]


def _announce(source: str) -> None:
    """The first line, before torch is imported, which takes seconds."""
    if Path(source).exists():
        print(f"reading {source}", flush=True)


def _check_output(src: Path, dst: Path, to: str, overwrite: bool) -> None:
    """Refuse an output that is the input, or that would destroy something else."""
    if to not in write.SUFFIXES:
        raise UserError(f"--to {to}: expected one of {', '.join(write.SUFFIXES)}")
    suffixes = write.SUFFIXES[to]
    if dst.suffix not in suffixes:
        raise UserError(
            f"{dst}: output for {to} must end in {' or '.join(suffixes)}, got {dst.suffix!r}"
        )
    if not dst.exists():
        return
    if dst.is_dir():
        raise UserError(f"{dst}: is a folder; give the name of a file in it")
    if src.exists() and os.path.samefile(src, dst):
        raise UserError(f"{dst}: is the input itself; give another output")
    if overwrite:
        return
    try:
        replaceable = is_converted(read_file(dst))
    except DataError:
        replaceable = False
    if not replaceable:
        raise UserError(
            f"{dst}: exists and is not the output of an earlier conversion for Detectron2; "
            "delete it, choose another name, or give --overwrite"
        )


def _scratch_folder(dst: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder beside `dst`, so that moving the finished file is one atomic step."""
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=dst.parent)
    except OSError as error:
        raise UserError(f"cannot write {dst}: {error.strerror or error}") from error


if __name__ == "__main__":
    run_cli(main)
