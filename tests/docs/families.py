"""Table of docs/reference/families.md: every naming scheme, and how its conversion was measured.

    python -m tests.docs.families

converts the networks of tests/oracles/sources.py and writes the page.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convert.convert_to_d2 import convert_file
from convert.families.base import USUAL, families
from convert.verify import build_backbone, read_converted, verification_image
from tests.oracles.sources import SOURCES, Source

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "families.md"
TEXT = """\
# Families and names

Each row is a network of random weights that was saved in the names of a source and converted. The
class in the last but one column computes its features from what was saved; the last column has the
largest difference to those of the converted backbone in all feature maps, divided by the largest
feature. The map of a vision transformer is that of its patches alone, because detectors have no
class token; DINOv3's are computed together with class token and registers.

`python -m tests.docs.families` measures all rows and writes this page, on a CPU in fp32, with
{versions}.
A test compares it with the registry of families. Every conversion compares features for the file at
hand, see [Converting](../guides/converting.md). `python -m tests.oracles.timm_sweep 'resnet*'`
converts all of timm's networks with such names and compares them with timm's forward pass.

| family | names of | network | image, px | compared with | largest difference |
|---|---|---|---|---|---|
"""
OWN = {USUAL: "its own", "timm_model": "timm, by its name"}


class Row(NamedTuple):
    """Result of one conversion; sizes are height and width."""

    family: str
    scheme: str
    network: str
    image: str
    reference: str
    difference: float

    def text(self) -> str:
        """Format it as a row of the table."""
        difference = f"{self.difference:.1g}" if self.difference else "0"
        return f"{self.start()} | {difference} |"

    def start(self) -> str:
        """Format everything but the difference."""
        scheme = OWN.get(self.scheme, self.scheme)
        return f"| {' | '.join((self.family, scheme, *self[2:-1]))}"


def schemes() -> list[tuple[str, str]]:
    """Return the naming schemes of all families; a family without one is known by its option."""
    return [
        (family.name, scheme)
        for family in families()
        for scheme in family.schemes or (family.named_by,)
    ]


def measure(family: str, scheme: str, source: Source, folder: Path) -> Row:
    """Convert a network and compare the features."""
    content, expected = source.make()
    file, result = folder / "some.file", folder / "out.pth"
    if callable(content):
        content(file)
    elif all(hasattr(value, "__array_interface__") for value in content.values()):
        file.write_bytes(pickle.dumps(content, 2))
    else:
        torch.save(content, file)
    convert_file(file, result, overwrite=True, **source.options)
    converted = read_converted(result)
    contract, image = converted.contract, verification_image(converted.contract)
    assert contract.family.name == family
    backbone = build_backbone(contract)
    backbone.load_state_dict(converted.model, strict=False)
    with torch.no_grad():
        made: dict[str, Tensor] = backbone.eval()(image)
        theirs = expected(image)
    difference = 0.0
    for name, value in theirs.items():
        assert made[name].shape == value.shape, (name, made[name].shape, value.shape)
        largest = float(value.abs().max())
        difference = max(difference, float((made[name] - value).abs().max()) / largest)
    size = " x ".join(map(str, image.shape[2:]))
    return Row(family, scheme, str(contract.architecture), size, source.reference, difference)


def rows() -> Iterator[Row]:
    """Measure every source."""
    for (family, scheme), sources in SOURCES.items():
        for source in sources:
            with tempfile.TemporaryDirectory() as folder:
                yield measure(family, scheme, source, Path(folder))


def main() -> None:
    """Write the page."""
    import timm
    import torchvision
    import transformers

    packages: list[Any] = [torch, torchvision, timm, transformers]
    versions = ", ".join(f"{p.__name__} {p.__version__.partition('+')[0]}" for p in packages)
    lines = [row.text() for row in rows()]
    PAGE.write_text(TEXT.format(versions=versions) + "\n".join(lines) + "\n")
    print(f"{PAGE}: {len(lines)} rows", file=sys.stderr)


if __name__ == "__main__":
    main()
