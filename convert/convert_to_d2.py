"""Convert a pre-trained checkpoint to Detectron2 weights and verify the result.

    python convert/convert_to_d2.py checkpoint_0199.pth.tar weights.pth

Checkpoints of self-supervised projects, torchvision, timm and Detectron2 are recognized by content
(docs/guides/converting.md). The output has Detectron2's names and the input contract, or with
`--to torchvision` is a plain state dict. The file gets its name only after it has been
read back, compared with the source and shown to give the same features.
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
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from convert import write
from convert.contract import Overrides
from convert.families.base import LEFT_AT_INIT, TIMM, Option, families, first_rule
from convert.projects import PROJECTS
from convert.read import find_file, is_converted, read_file, source_file
from convert.report import ConversionReport, agreement
from moco.common.command import command_parser
from moco.common.errors import DataError, UserError, echo, run_cli
from moco.common.files import TEMPORARY_PREFIX, PathLike, sha256_file
from moco.modeling.soundness import CHANNEL_ORDERS

if TYPE_CHECKING:
    from convert.verify import Converted


def convert_file(
    src: PathLike,
    dst: PathLike,
    *,
    to: str = "detectron2",
    overwrite: bool = False,
    **overrides: Any,
) -> ConversionReport:
    """Convert and verify a checkpoint; `dst` is written only if verification succeeds.

    Args:
        src: Checkpoint of one of PROJECTS, plain state dict, or converted file; a folder with one
            (convert/read.py); or any name or address that moco/common/pretrained.py downloads.
        dst: Output file, whose extension selects the format (convert/write.py). The output of an
            earlier conversion to Detectron2 is replaced.
        to: Naming scheme of the tensors, "detectron2" or "torchvision".
        overwrite: Replace any existing file, not only the output of an earlier conversion.
        overrides: Fields of `convert.contract.Overrides`, and options of the family by name,
            for what the file does not record.

    Raises:
        UserError: If the output cannot be written or an override does not fit.
        DataError: If the checkpoint is unknown, damaged or fails verification. In both cases an
            existing file at `dst` is left untouched.
    """
    located, dst = find_file(src), Path(dst)
    src = located.path
    _check_output(src, dst, to, overwrite)
    objects: set[str] = set()
    raw = read_file(src, objects)
    from convert import (  # import torchvision only once the file is known to be readable
        translate,
        verify,
    )
    from convert.source_module import check_source

    found = translate.translate(src, raw, Overrides.from_options(**overrides), objects)
    contract, notes = found.contract, [*located.notes, *found.notes]
    if to == "torchvision" and (options := write.lost_options(contract)):
        notes.append(
            "a plain state dict does not hold the input contract; to convert this one to "
            f"Detectron2, give {' '.join(options)}"
        )
    with _scratch_folder(dst) as folder:
        scratch = Path(folder) / dst.name
        write.write(scratch, found.converted, to)
        converted = write.read_back(scratch, contract, to)
        verify.check_round_trip(found.state, converted, str(src))
        if converted.contract != contract:
            raise DataError(f"{src}: verification failed: read back, the contract is another one")
        features = verify.check_features(*found.source_network(), converted, str(src))
        if found.configuration:
            requested = Overrides.from_options(**overrides)
            found, check = check_source(None, raw, found, requested, str(src))
            notes.append(check.text)
        notes += found.effect_of_tokens()
        sha256 = sha256_file(scratch)
        if dst.exists():
            notes.append("replaced a file of that name")
        os.replace(scratch, dst)

    rules = (first_rule(key, LEFT_AT_INIT) for key in verify.target_tensors(contract))
    left = Counter(rule for rule in rules if rule)
    if found.filled:
        left["BN statistics (0 and 1)"] = found.filled
    return ConversionReport(
        source_path=src,
        epoch=found.epoch,
        head=found.head,
        contract=contract,
        mapped=len(found.state) - found.filled,
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
        is_verified=found.is_verified,
    )


def convert_in_memory(
    src: PathLike,
    raw: Any = None,
    objects: set[str] | None = None,
    module: Any = None,
    **overrides: Any,
) -> Converted:
    """Return the result of `convert_file` with the same verification, without writing a file.

    Args:
        src: File or folder to convert.
        raw: Contents of `src` as `read_file` returned them, if it is already open.
        objects: Names of objects that `read_file` collected for `raw`.
        module: Module whose tensors the file has, to be compared with as well.
        overrides: See `convert_file`.

    Returns:
        The converted weights, with notes that describe the conversion.

    Raises:
        UserError: If an option is needed or does not fit.
        DataError: If the checkpoint is unknown, damaged or fails verification.
    """
    from convert import translate, verify
    from convert.source_module import check_source, with_pixels

    src = source_file(Path(src))
    objects = set() if objects is None else objects
    raw = read_file(src, objects) if raw is None else raw
    found = translate.translate(src, raw, Overrides.from_options(**overrides), objects)
    converted = found.converted
    verify.check_round_trip(found.state, converted, str(src))
    features = verify.check_features(*found.source_network(), converted, str(src))
    text, contract = "", found.contract
    if module is not None or found.configuration:
        requested = Overrides.from_options(**overrides)
        found, check = check_source(module, raw, found, requested, str(src))
        text, contract = f"; {check.text}", with_pixels(found.contract, check.pixels)
    converted = dataclasses.replace(converted, contract=contract)
    encoder = "" if contract.encoder == "single" else f", {contract.encoder} encoder"
    note = (
        f"MODEL.WEIGHTS converted: {contract.source} checkpoint{encoder}, "
        f"{contract.architecture}, {len(converted.model) - found.filled} tensors; "
        f"features of one image {agreement(features)} to those of {found.reference}"
        + text
        + (f"; assumed: {found.assumed}" if found.assumed else "")
    )
    notes = (note, *converted.notes, *found.effect_of_tokens())
    return dataclasses.replace(converted, notes=notes, origin=(note,))


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser of the command line."""
    sources = ", ".join(dict.fromkeys(project.name for project in PROJECTS))
    roles = {role for project in PROJECTS for roles in project.roles for role in roles}
    encoders = ", ".join(sorted(roles - {"single"}))
    parser = command_parser(
        "convert",
        (__doc__ or "").split("\n\n", 1)[0],
        epilog=f"Sources, recognized by content: {sources}, and plain state dicts of a backbone "
        "under any one prefix. docs/guides/converting.md has the command for each.",
    )
    parser.add_argument(
        "input",
        metavar="INPUT",
        help="checkpoint to convert; a folder with one, of the Hugging Face Hub or of a training; "
        "or weights by name or address, see moco-transfer weights --help",
    )
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        help="file to write; its ending is the format: .pth (tensors), .pkl (numpy arrays, as the "
        "official MoCo converter), .safetensors; an earlier conversion is replaced",
    )
    parser.add_argument(
        "--to",
        choices=write.SUFFIXES,
        default="detectron2",
        help="naming scheme of the tensors: detectron2 (with the input contract) or torchvision (a "
        "plain state dict without fc) (default: %(default)s)",
    )
    parser.add_argument(
        "--encoder",
        metavar="NAME",
        help=f"network to convert if the checkpoint has several: {encoders}, or a name listed by "
        "the error message of an ambiguous file (default: the one that the project transfers)",
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
        help="pixel range of --mean and --std: 1 for 0..1, 255 for 0..255 (default: %(default)s)",
    )
    parser.add_argument(
        "--channel-order",
        choices=CHANNEL_ORDERS,
        help="channel order that the network was trained with (default: the source's)",
    )
    parser.add_argument(
        "--as",
        dest="family",
        choices=[TIMM],
        help="read the file as the network of timm that it or --timm-model names, also where a "
        "family of this project has it (default: that family)",
    )
    for option in _family_options():
        if option.is_text:
            parser.add_argument(option.flag, metavar="NAME", help=option.help)
        elif option.choices is None:
            parser.add_argument(option.flag, type=int, metavar="N", help=option.help)
        else:
            parser.add_argument(option.flag, choices=option.choices, help=option.help)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace OUTPUT even if it is any other file"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = build_parser().parse_args(argv)
    scale = 255 / args.scale
    options: dict[str, Any] = {}
    for option in _family_options():
        value = getattr(args, option.name)
        options[option.name] = value if option.choices is None else option.choices.get(value)
    announce(args.input)
    report = convert_file(
        args.input,
        args.output,
        to=args.to,
        overwrite=args.overwrite,
        encoder=args.encoder,
        mean=args.mean and [value * scale for value in args.mean],
        std=args.std and [value * scale for value in args.std],
        channel_order=args.channel_order,
        family=args.family,
        **options,
    )
    print(report.text())
    return 0


def _family_options() -> list[Option]:
    return [option for family in families() for option in family.options]


def announce(source: str) -> None:
    """Print the first line before torch is imported, which takes seconds."""
    if Path(source).exists():
        echo(f"reading {source}")


def _check_output(src: Path, dst: Path, to: str, overwrite: bool) -> None:
    """Raise UserError if the output is the input or would overwrite an unrelated file."""
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
        raise UserError(f"{dst}: is a folder, expected a file name")
    if src.exists() and os.path.samefile(src, dst):
        raise UserError(f"{dst}: output is the input file; choose another name")
    if overwrite:
        return
    try:
        replaceable = is_converted(read_file(dst))
    except DataError:
        replaceable = False
    if not replaceable:
        raise UserError(
            f"{dst}: exists and is not the output of an earlier conversion to Detectron2; "
            "delete it, choose another name, or give --overwrite"
        )


def _scratch_folder(dst: Path) -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder next to `dst`, from which a rename is atomic."""
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=dst.parent)
    except OSError as error:
        raise UserError(f"cannot write {dst}: {error.strerror or error}") from error


if __name__ == "__main__":
    run_cli(main)
