"""Convert a pre-trained ResNet checkpoint into weights for Detectron2, and prove it.

    python convert/convert_to_d2.py checkpoint_0199.pth.tar weights.pth
    python convert/convert_to_d2.py --inspect checkpoint_0199.pth.tar

Reads what self-supervised projects, torchvision, timm and Detectron2 write (docs/converting.md),
recognized by content. Writes Detectron2's names with the input contract beside them, or with
`--to torchvision` a plain state dict. The file appears only after it was read back, compared with
the source and shown to give the same features.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from convert import targets
from convert.contract import CHANNEL_ORDERS, STEMS, InputContract
from convert.families import keymap
from convert.files import is_converted, read_file
from convert.layouts import LAYOUTS
from convert.lookalikes import source_file
from convert.sources import Given
from moco.common.errors import DataError, UserError, run_cli
from moco.common.files import TEMPORARY_PREFIX, PathLike, sha256_file

if TYPE_CHECKING:
    from convert.verify import Converted, FeatureCheck

YES_NO = {"yes": True, "no": False}


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What one conversion found, did and checked."""

    source_path: Path
    epoch: int | None  # as written in the file: epochs finished
    head: str
    contract: InputContract
    mapped: int
    dropped: dict[str, int]  # rule -> number of entries of the source
    left: dict[str, int]  # rule -> number of tensors of the target
    features: dict[str, FeatureCheck]
    notes: list[str]
    warnings: list[str]
    encoders: tuple[str, ...]  # every choice of --encoder that the source has
    to: str  # "detectron2" or "torchvision"
    not_checked: str  # why Detectron2's own backbone was not asked; "" when it was
    output_path: Path
    output_sha256: str

    def text(self) -> str:
        """The report for people, ending in the next command."""
        c = self.contract
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        difference = max(check.max_abs_diff for check in self.features.values())
        bitwise = all(check.bitwise for check in self.features.values())
        strides = ", ".join(f"{name} /{check.stride}" for name, check in self.features.items())
        asked = "the embedded backbone" if self.not_checked else "both engines' backbones"
        others = [choice for choice in self.encoders if choice != c.encoder]
        lines = [
            f"source        {self.source_path}: {c.source} checkpoint{epoch}, {self.head}",
            f"sha256        {c.source_sha256}",
            f"encoder       {c.encoder}"
            + (f" (--encoder takes {' or '.join(others)} instead)" if others else ""),
            f"architecture  {c.architecture()}",
            f"tensors       {self.mapped} mapped; dropped: {_counts(self.dropped)}; "
            f"left at init: {_counts(self.left)}",
            f"contract      {c.convention()}",
            *(f"note          {note}" for note in self.notes),
            *(f"warning       {warning}" for warning in self.warnings),
            "verified      read back and inverted: bitwise equal",
            f"verified      features of one image in {asked} beside torchvision's network at "
            f"{strides}: {'bitwise equal' if bitwise else 'equal within rounding'} "
            f"(max abs difference {difference:g})",
            *([f"not verified  {self.not_checked}"] if self.not_checked else []),
            f"output        {self.output_path} sha256 {self.output_sha256}",
            f"next          {self.next_command()}",
        ]
        return "\n".join(lines)

    def next_command(self) -> str:
        """Fine-tune a detector from these weights, or classify with them."""
        from convert import translate

        if self.to == "torchvision":
            return translate.classify_command(self.contract, self.output_path)
        return translate.fine_tune_command(self.contract, self.output_path)


def convert_file(
    src: PathLike,
    dst: PathLike,
    *,
    to: str = "detectron2",
    encoder: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    channel_order: str | None = None,
    stride_in_1x1: bool | None = None,
    stem: str | None = None,
    overwrite: bool = False,
) -> ConversionReport:
    """Convert, verify, and only then put the file at `dst`.

    Args:
        src: a checkpoint of one of LAYOUTS, a plain state dict, or a converted file; or the folder
            of a pre-training or classification, whose last checkpoint is taken.
        dst: its ending is the format, see convert/targets.py; the output of an earlier conversion
            for Detectron2 is replaced, any other existing file only with `overwrite`.
        to: "detectron2" or "torchvision": whose names the file has.
        encoder: one of the layout's networks, e.g. "query" or "key"; None: the layout's default.
        mean, std: three numbers, 0..255 in channel order, instead of the source's.
        channel_order: "RGB" or "BGR" instead of the source's; a mean and std that are not given
            stay with their colors.
        stride_in_1x1: where the source's bottlenecks have their stride, if not where its layout
            says.
        stem: "cifar" or "stride2" for a 3x3 stem of a source that does not say.

    Raises UserError or DataError, in one line; what was at `dst` before is then untouched.
    """
    from convert.detectron2_backbone import Detectron2Backbone

    src, dst = source_file(Path(src)), Path(dst)
    _check_output(src, dst, to, overwrite)
    given = Given(
        encoder=encoder,
        stem=stem,
        mean=None if mean is None else _triple(mean),
        std=None if std is None else _triple(std),
        channel_order=channel_order,
        stride_in_1x1=stride_in_1x1,
    )
    with contextlib.ExitStack() as stack:
        # Started first: importing Detectron2 takes as long as everything here.
        real = stack.enter_context(Detectron2Backbone()) if to == "detectron2" else None
        objects: set[str] = set()
        raw = read_file(src, objects)
        from convert import translate, verify  # after the file is known to be readable: torchvision

        found, model = translate.translate(src, raw, given, objects)

        contract, notes = model.contract, list(found.notes)
        if to == "torchvision":
            notes += targets.lost_in_torchvision(contract)
        folder = stack.enter_context(_scratch_folder(dst))
        scratch = Path(folder) / dst.name
        targets.write(scratch, model, to)
        if real is not None:
            real.show(scratch)
        converted = targets.read_back(scratch, contract, to)
        verify.check_round_trip(found.state, converted, str(src))
        if converted.contract != contract:
            raise DataError(f"{src}: verification failed: read back, the contract is another one")
        features = verify.check_features(
            found.state,
            converted,
            str(src),
            stride_in_1x1=found.stride_in_1x1,
            detectron2=real.features if real is not None else None,
        )
        sha256 = sha256_file(scratch)
        if dst.exists():
            notes.append("replaced a file of that name")
        os.replace(scratch, dst)

    left: dict[str, int] = {keymap.FOLDED_RULE: found.filled} if found.filled else {}
    for key in verify.target_tensors(contract):
        if rule := keymap.left_rule(key):
            left[rule] = left.get(rule, 0) + 1
    return ConversionReport(
        source_path=src,
        epoch=found.epoch,
        head=found.head,
        contract=contract,
        mapped=len(model.model) - found.filled,
        dropped=found.dropped,
        left=left,
        features=features,
        notes=notes,
        warnings=found.warnings,
        encoders=found.encoders,
        to=to,
        not_checked=real.skipped if real is not None else targets.NOT_FOR_DETECTRON2,
        output_path=dst,
        output_sha256=sha256,
    )


def convert_in_memory(src: PathLike, raw: Any = None, objects: set[str] | None = None) -> Converted:
    """What `convert_file` would write, without a file: the same recognition, contract and proof.

    `raw`, `objects`: what `read_file` gave for `src`, when it is already open. The notes say what
    was done. Raises UserError or DataError, in one line.
    """
    from convert import translate, verify

    src = Path(src)
    objects = set() if objects is None else objects
    raw = read_file(src, objects) if raw is None else raw
    found, converted = translate.translate(src, raw, Given(), objects)
    verify.check_round_trip(found.state, converted, str(src))
    features = verify.check_features(
        found.state, converted, str(src), stride_in_1x1=found.stride_in_1x1
    )
    bitwise = all(check.bitwise for check in features.values())
    encoder = "" if found.encoder == "single" else f", {found.encoder} encoder"
    note = (
        f"MODEL.WEIGHTS converted in memory: {found.source} checkpoint{encoder}, "
        f"{converted.contract.architecture()}, {len(converted.model) - found.filled} tensors; "
        f"features of one image {'bitwise equal' if bitwise else 'equal within rounding'}"
    )
    return dataclasses.replace(converted, notes=(note, *converted.notes))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    sources = ", ".join(dict.fromkeys(layout.name for layout in LAYOUTS))
    encoders = ", ".join(
        sorted({choice for layout in LAYOUTS for choice in layout.networks} - {"single"})
    )
    parser = argparse.ArgumentParser(
        prog="convert_to_d2.py",
        usage="%(prog)s [options] INPUT OUTPUT\n       %(prog)s --inspect FILE",
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog=f"Sources, recognized by content: {sources}, and plain state dicts of a ResNet "
        "under any one prefix. docs/converting.md has the command for each.",
    )
    parser.add_argument(
        "input",
        metavar="INPUT",
        nargs="?",
        help="checkpoint to convert, or a run folder, whose last checkpoint is taken",
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
        metavar="FILE",
        help="describe any checkpoint and what could be done with it; nothing is written",
    )
    parser.add_argument(
        "--to",
        choices=targets.SUFFIXES,
        default="detectron2",
        help="whose names of tensors: detectron2 (with the input contract beside them) or "
        "torchvision (a plain state dict, without fc) (default: %(default)s)",
    )
    parser.add_argument(
        "--encoder",
        metavar="NAME",
        help=f"which network of a checkpoint that has several: {encoders}, or what the error "
        "message of an unknown layout lists (default: the one that the project itself transfers)",
    )
    parser.add_argument(
        "--mean",
        nargs=3,
        type=float,
        metavar="X",
        help="pixel mean, in channel order (default: the source's)",
    )
    parser.add_argument(
        "--std",
        nargs=3,
        type=float,
        metavar="X",
        help="pixel standard deviation, in channel order (default: the source's)",
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
    parser.add_argument(
        "--stride-in-1x1",
        choices=YES_NO,
        help="whether a bottleneck's stride sits in its first 1x1 (MSRA) or in its 3x3 "
        "(torchvision) (default: the source's)",
    )
    parser.add_argument(
        "--stem",
        choices=STEMS,
        help="stem of the network where tensors cannot tell: a 3x3 stem is taken for cifar "
        "(stride 1) unless the checkpoint or this option says stride2",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace any file of OUTPUT's name"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; raises UserError for run_cli."""
    args = build_parser().parse_args(argv)
    if args.inspect is not None:
        if args.input is not None:
            raise UserError(f"--inspect takes one file; got also {args.input}, expected nothing")
        from convert.inspect_file import inspect_file

        _announce(args.inspect)
        print(inspect_file(args.inspect))
        return 0
    if args.output is None:
        raise UserError(
            "INPUT and OUTPUT are needed, e.g. checkpoint_0199.pth.tar weights.pth; "
            "--inspect FILE only describes a file"
        )
    pixels = {
        name: None if values is None else [value * 255 / args.scale for value in values]
        for name, values in (("mean", args.mean), ("std", args.std))
    }
    _announce(args.input)
    report = convert_file(
        args.input,
        args.output,
        to=args.to,
        encoder=args.encoder,
        channel_order=args.channel_order,
        stride_in_1x1=YES_NO[args.stride_in_1x1] if args.stride_in_1x1 else None,
        stem=args.stem,
        overwrite=args.overwrite,
        **pixels,
    )
    print(report.text())
    return 0


def _announce(source: str) -> None:
    """The first line, before torch is imported, which takes seconds."""
    if Path(source).exists():
        print(f"reading {source}", flush=True)


def _check_output(src: Path, dst: Path, to: str, overwrite: bool) -> None:
    """Refuse an output that is the input, or that would destroy something else."""
    if to not in targets.SUFFIXES:
        raise UserError(f"--to {to}: expected one of {', '.join(targets.SUFFIXES)}")
    suffixes = targets.SUFFIXES[to]
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


def _triple(values: Sequence[float]) -> tuple[float, float, float]:
    first, second, third = values
    return (first, second, third)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {rule}" for rule, number in counts.items()) or "nothing"


if __name__ == "__main__":
    run_cli(main)
