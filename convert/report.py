"""Report of a conversion, and the rows that the description of a file has as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from convert.contract import IMAGENET_MEAN, IMAGENET_STD, InputContract
from convert.initial_weights import encoder_spec
from convert.write import lost_options
from moco.common.command import converter, program, quote
from moco.common.errors import UserError, printable
from moco.common.shipped import display_name
from moco.modeling.archs import EncoderSpec, Spec

if TYPE_CHECKING:
    from convert.verify import FeatureCheck


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """Results of one conversion: source, architecture, tensors, verification and output."""

    source_path: Path
    epoch: int | None  # epochs finished, as recorded in the file
    head: str
    contract: InputContract
    mapped: int
    dropped: dict[str, int]  # rule -> number of entries of the source
    left: dict[str, int]  # rule -> number of tensors of the target
    features: dict[str, FeatureCheck]
    notes: list[str]
    warnings: list[str]
    encoders: tuple[str, ...]  # all choices of --encoder for the source
    to: str  # "detectron2" or "torchvision"
    output_path: Path
    output_sha256: str
    reference: str  # network that the features are compared with
    assumed: str = ""  # properties that neither file nor features determine
    is_verified: bool = True  # nothing but the pixels is assumed

    def text(self) -> str:
        """Format the report, ending with the next command to run."""
        c = self.contract
        difference = max(check.max_abs_diff for check in self.features.values())
        strides = ", ".join(f"{name} /{check.stride}" for name, check in self.features.items())
        others = " or ".join(choice for choice in self.encoders if choice != c.encoder)
        compared = "verified" if self.is_verified else "equal"
        rows = [
            source_row(f"{self.source_path}: {c.source} checkpoint", self.epoch, self.head),
            ("sha256", c.source_sha256),
            ("encoder", c.encoder + (f" (--encoder selects {others})" if others else "")),
            ("architecture", str(c.architecture)),
            (
                "tensors",
                f"{self.mapped} mapped; dropped: {_counts(self.dropped)}; "
                f"left at init: {_counts(self.left)}",
            ),
            *contract_rows(c, self.notes, self.warnings),
            (compared, "read back and inverted: bitwise equal"),
            (
                compared,
                f"features of one image at {strides}: {agreement(self.features)} to those of "
                f"{self.reference} (max abs difference {difference:g})",
            ),
            *assumed_rows(self.assumed),
            ("output", f"{self.output_path} sha256 {self.output_sha256}"),
            ("next", self.next_command()),
        ]
        return lines(rows)

    def next_command(self) -> str:
        """Return the command that fine-tunes a detector, or classifies, with these weights."""
        make = classify_command if self.to == "torchvision" else fine_tune_command
        return make(self.contract, self.output_path)


def source_row(source: str, epoch: int | None, head: str) -> tuple[str, str]:
    """Return the row about the source of a network."""
    return "source", f"{source}{'' if epoch is None else f', epoch {epoch}'}, {head}"


def contract_rows(
    contract: InputContract, notes: Iterable[str], warnings: Iterable[str]
) -> list[tuple[str, str]]:
    """Return the rows about the input contract, with the notes and warnings of a conversion."""
    return [
        ("contract", contract.convention()),
        *(("note", note) for note in notes),
        *(("warning", warning) for warning in warnings),
    ]


def assumed_rows(assumed: str) -> list[tuple[str, str]]:
    """Return the row about properties that neither file nor features determine, if any."""
    return [("assumed", assumed)] if assumed else []


def lines(rows: Iterable[tuple[str, str]]) -> str:
    """Format rows of a report as aligned lines, without control characters."""
    return "\n".join(printable(f"{name:14}{text}") for name, text in rows)


def agreement(features: dict[str, FeatureCheck]) -> str:
    """Describe the agreement of features."""
    bitwise = all(check.bitwise for check in features.values())
    return "bitwise equal" if bitwise else "equal within rounding"


def fine_tune_command(contract: InputContract, path: Path) -> str:
    """Return the complete command that fine-tunes a detector from a converted file."""
    config, _, data = contract.architecture.example_task()
    keys = contract.architecture.keys_to_set()
    others = "".join(f"{key} {quote(value)} " for key, value in keys.items())
    train = program("train")
    return (
        f"{train} --config-file {display_name(config)} {data}"
        f"MODEL.WEIGHTS {quote(path)} {others}OUTPUT_DIR {_run_folder(path)}"
    )


def classify_command(contract: InputContract, path: Path) -> str:
    """Return the command that trains a linear classifier, or converts if that is not supported."""
    file = quote(path)
    try:
        spec: Spec | None = encoder_spec(contract.architecture)
    except UserError:
        spec = None
    readable = contract.pixels.channel_order == "RGB" and not contract.architecture.in_torchvision()
    if not readable or not isinstance(spec, EncoderSpec):
        options = " ".join(lost_options(contract))
        return f"{converter()} {file} weights.pth {options}".rstrip()
    keys = f"MODEL.STEM {spec.stem} " if spec.stem != "imagenet" else ""
    for key, values, usual in (
        ("MEAN", contract.pixels.mean, IMAGENET_MEAN),
        ("STD", contract.pixels.std, IMAGENET_STD),
    ):
        if values != usual:
            keys += f"AUG.{key} '({','.join(f'{value / 255:.6g}' for value in values)})' "
    linear = program("linear")
    return (
        f"{linear} --config-file {display_name('imagenet/linear')} "
        f"--checkpoint {file} {keys}DATA.ROOT path/to/imagenet OUTPUT_DIR {_run_folder(path)}"
    )


def _run_folder(path: Path) -> str:
    return quote(f"runs/{path.stem}_0")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {rule}" for rule, number in counts.items()) or "nothing"
