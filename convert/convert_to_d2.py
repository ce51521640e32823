"""Convert a pre-trained ResNet checkpoint into weights for Detectron2, and prove it.

    python convert/convert_to_d2.py checkpoint_0199.pth.tar weights.pth

Reads this project's and the official MoCo's checkpoints and torchvision's ResNets, recognised by
their content. Writes `.pth` (tensors) or `.pkl` (numpy arrays, as the official MoCo converter) in
Detectron2's names with the input contract beside them. The file appears only after it was read
back, compared with the source and shown to give the same features.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from convert import keymap
from convert.contract import CHANNEL_ORDERS, STEMS, InputContract
from convert.sources import SOURCES, is_converted, read_file, recognise
from moco.errors import DataError, UserError, run_cli
from moco.fileio import (
    TEMPORARY_PREFIX,
    PathLike,
    atomic_torch_save,
    atomic_write,
    sha256_file,
)

if TYPE_CHECKING:
    from torch import Tensor

    from convert.sources import Recognised
    from convert.verify import Converted, FeatureCheck

AUTHOR = "moco-transfer"
SUFFIXES = (".pth", ".pkl")
# torchvision's files carry the start of their sha256 in their names: resnet50-11ad3fa6.pth. Only
# the whole file tells V2 from V1; their tensors have the same names and shapes.
TORCHVISION_V2 = "11ad3fa6"


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
    output_path: Path
    output_sha256: str

    def text(self) -> str:
        """The report for people, ending in the next command."""
        c = self.contract
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        order = f"{c.channel_order}, stride in the {'1x1' if c.stride_in_1x1 else '3x3'}"
        difference = max(check.max_abs_diff for check in self.features.values())
        bitwise = all(check.bitwise for check in self.features.values())
        strides = ", ".join(f"{name} /{check.stride}" for name, check in self.features.items())
        lines = [
            f"source        {self.source_path}: {c.source} checkpoint{epoch}, {self.head}",
            f"encoder       {c.encoder}",
            f"architecture  {c.architecture()}",
            f"tensors       {self.mapped} mapped; dropped: {_counts(self.dropped)}; "
            f"left at init: {_counts(self.left)}",
            f"contract      {order}, mean {_numbers(c.pixel_mean)}, std {_numbers(c.pixel_std)} "
            "(0..255)",
            *(f"note          {note}" for note in self.notes),
            "verified      read back and inverted: bitwise equal",
            f"verified      features of one image at {strides}: "
            f"{'bitwise equal' if bitwise else 'equal within rounding'} "
            f"(max abs difference {difference:g})",
            f"output        {self.output_path} sha256 {self.output_sha256}",
            f"next          {self.next_command()}",
        ]
        return "\n".join(lines)

    def next_command(self) -> str:
        """Fine-tune a detector from these weights."""
        task = "R_50_C4_24k" if self.contract.depth >= 50 else "R_18_C4_small"
        return (
            f"python detection/train_net.py --config-file configs/voc/faster_rcnn_{task}.yaml "
            f"MODEL.WEIGHTS {shlex.quote(str(self.output_path))}"
        )


def convert_file(
    src: PathLike,
    dst: PathLike,
    *,
    encoder: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    channel_order: str | None = None,
    stem: str | None = None,
) -> ConversionReport:
    """Convert, verify, and only then put the file at `dst`.

    Args:
        src: a checkpoint of one of SOURCES.
        dst: ends in `.pth` or `.pkl`; the output of an earlier conversion is replaced, any other
            existing file is refused.
        encoder: "query" or "key"; None: the layout's default.
        mean, std: three numbers, 0..255 in channel order, instead of the source's.
        channel_order: "RGB" or "BGR" instead of the source's; a mean and std that are not given
            stay with their colours.
        stem: "cifar" or "stride2" for a 3x3 stem of a source that does not say.

    Raises UserError or DataError, in one line; what was at `dst` before is then untouched.
    """
    src, dst = Path(src), Path(dst)
    _check_output(src, dst)
    found, model = _convert(
        src,
        read_file(src),
        encoder=encoder,
        mean=mean,
        std=std,
        channel_order=channel_order,
        stem=stem,
    )
    from convert import verify  # imports torchvision

    contract, notes = model.contract, list(model.notes)
    with _scratch_folder(dst) as folder:
        scratch = Path(folder) / dst.name
        _write(scratch, model.model, contract)
        converted = verify.read_converted(scratch)
        verify.check_round_trip(found.state, converted, str(src))
        if converted.contract != contract:
            raise DataError(f"{src}: verification failed: read back, the contract is another one")
        features = verify.check_features(
            found.state, converted, str(src), stride_in_1x1=found.stride_in_1x1
        )
        sha256 = sha256_file(scratch)
        if dst.exists():
            notes.append("replaced the output of an earlier conversion")
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
        output_path=dst,
        output_sha256=sha256,
    )


def convert_in_memory(src: PathLike, raw: Any = None) -> Converted:
    """What `convert_file` would write, without a file: the same recognition, contract and proof.

    `raw`: what `read_file` returned for `src`, when it is already open. The notes say what was
    done. Raises UserError or DataError, in one line.
    """
    from convert import verify

    src = Path(src)
    found, converted = _convert(src, read_file(src) if raw is None else raw)
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


def _convert(
    src: Path,
    raw: Any,
    *,
    encoder: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    channel_order: str | None = None,
    stem: str | None = None,
) -> tuple[Recognised, Converted]:
    """Recognise, translate, give a contract, and check every tensor; see `convert_file`."""
    found = recognise(raw, str(src), encoder=encoder, stem=stem)
    from convert import verify  # after the input is known to be readable: it imports torchvision

    notes = list(found.notes)
    sha256 = sha256_file(src)
    if sha256.startswith(TORCHVISION_V2):
        notes.append(
            "these are torchvision's IMAGENET1K_V2 weights, another recipe than any baseline of "
            "the paper's time; IMAGENET1K_V1 is resnet50-0676ba61.pth"
        )
    order = channel_order or found.channel_order
    reverse = order != found.channel_order
    for name, given in (("mean", mean), ("std", std), ("channel order", channel_order)):
        if given is not None:
            notes.append(f"{name} is the command line's, not the source's")
    try:
        contract = InputContract(
            pixel_mean=_triple(mean if mean is not None else found.mean, reverse and mean is None),
            pixel_std=_triple(std if std is not None else found.std, reverse and std is None),
            channel_order=order,
            stride_in_1x1=found.stride_in_1x1,
            source=found.source,
            source_sha256=sha256,
            encoder=found.encoder,
            **found.shape,
        )
    except UserError as error:
        raise UserError(f"{src}: {error}") from error
    model = {keymap.to_detectron2(key) or key: value for key, value in found.state.items()}
    verify.check_model(model, contract, str(src))
    return found, verify.Converted(model, contract, tuple(notes))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="convert_to_d2.py",
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog="Sources, recognised by content: " + ", ".join(s.name for s in SOURCES) + ".",
    )
    parser.add_argument("input", help="checkpoint to convert")
    parser.add_argument(
        "output",
        help="file to write: .pth (tensors) or .pkl (numpy); an earlier conversion is replaced, "
        "any other existing file is refused",
    )
    parser.add_argument(
        "--encoder",
        choices=["query", "key"],
        help="which encoder of a MoCo checkpoint (default: query)",
    )
    parser.add_argument(
        "--mean",
        nargs=3,
        type=float,
        metavar="X",
        help="pixel mean, 0..255, in channel order (default: the source's)",
    )
    parser.add_argument(
        "--std",
        nargs=3,
        type=float,
        metavar="X",
        help="pixel standard deviation, 0..255, in channel order (default: the source's)",
    )
    parser.add_argument(
        "--channel-order",
        choices=CHANNEL_ORDERS,
        help="order of the colours the network was trained on (default: the source's)",
    )
    parser.add_argument(
        "--stem",
        choices=STEMS,
        help="stem of the network where tensors cannot tell: a 3x3 stem is taken for cifar "
        "(stride 1) unless the checkpoint or this option says stride2",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; raises UserError for run_cli."""
    args = build_parser().parse_args(argv)
    report = convert_file(
        args.input,
        args.output,
        encoder=args.encoder,
        mean=args.mean,
        std=args.std,
        channel_order=args.channel_order,
        stem=args.stem,
    )
    print(report.text())
    return 0


def _check_output(src: Path, dst: Path) -> None:
    """Refuse an output that is the input, or that would destroy something else."""
    if dst.suffix not in SUFFIXES:
        raise UserError(f"{dst}: output must end in {' or '.join(SUFFIXES)}, got {dst.suffix!r}")
    if not dst.exists():
        return
    if dst.is_dir():
        raise UserError(f"{dst}: is a folder; give the name of a file in it")
    if src.exists() and os.path.samefile(src, dst):
        raise UserError(f"{dst}: is the input itself; give another output")
    try:
        replaceable = is_converted(read_file(dst))
    except DataError:
        replaceable = False
    if not replaceable:
        raise UserError(
            f"{dst}: exists and is not the output of an earlier conversion; "
            "delete it or choose another name"
        )


def _scratch_folder(dst: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder beside `dst`, so that moving the finished file is one atomic step."""
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=dst.parent)
    except OSError as error:
        raise UserError(f"cannot write {dst}: {error.strerror or error}") from error


def _write(path: Path, model: dict[str, Tensor], contract: InputContract) -> None:
    # The same four keys as the official converter's .pkl, and the contract; Detectron2's
    # DetectionCheckpointer matches names by their endings because of "matching_heuristics".
    content: dict[str, Any] = {
        "model": model,
        "__author__": AUTHOR,
        "matching_heuristics": True,
        "contract": contract.to_dict(),
    }
    if path.suffix == ".pth":
        atomic_torch_save(path, content)
        return
    import pickle

    content["model"] = {key: value.numpy() for key, value in model.items()}

    def write(file: BinaryIO) -> None:
        pickle.dump(content, file, protocol=4)

    atomic_write(path, write)


def _triple(values: Sequence[float], reverse: bool) -> tuple[float, float, float]:
    first, second, third = reversed(values) if reverse else values
    return (first, second, third)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {rule}" for rule, number in counts.items()) or "nothing"


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


if __name__ == "__main__":
    run_cli(main)
