"""A backbone family that is registered from outside is recognized, named and put in a contract."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert.contract import InputContract, Overrides
from convert.convert_to_d2 import build_parser
from convert.families.base import (
    FAMILIES,
    PLAIN,
    USUAL,
    Family,
    Hints,
    Names,
    Option,
    Scheme,
    register,
)
from convert.recognize import recognize
from moco.common.errors import DataError, UserError


@dataclasses.dataclass(frozen=True)
class ToyArchitecture:
    width: int

    def __str__(self) -> str:
        return f"Toy-{self.width}"

    def d2_keys(self) -> dict[str, Any]:
        return {"MODEL.TOY.WIDTH": self.width}

    def details(self) -> str:
        return "a toy"


NAMES = {"patch.weight": "patch_embed.weight", "norm.weight": "norm.weight"}
OPTION = Option("toy_color", {"red": "red"}, "the toy's color", convention=True)


class Toy(Family):
    """Family of one file, which registers it."""

    name = "toy"
    networks = "toys"
    architecture = ToyArchitecture
    schemes = MappingProxyType(
        {
            USUAL: Scheme(
                ("patch.weight", "norm.weight"),
                lambda key: key if key in NAMES else None,
                re.compile(r"patch\.|norm\."),
                plain=PLAIN,
            )
        }
    )
    dropped = MappingProxyType({"head": "fc.*"})
    heads = MappingProxyType({"fc.weight": "linear head", "": "no fc"})
    owner = "nobody's"
    features = MappingProxyType({})
    detectron2 = Names([(new, old) for old, new in NAMES.items()])
    options = (OPTION,)
    lookalikes = (("a brick", "studs.weight", "walls.weight"),)

    def recognize(self, state: Mapping[str, Tensor], hints: Hints) -> ToyArchitecture:
        return ToyArchitecture(len(state["patch.weight"]))

    def build(self, architecture: ToyArchitecture) -> nn.Module:
        return nn.Identity()

    def reference(self, architecture: ToyArchitecture) -> nn.Module:
        return nn.Identity()


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    register(Toy)
    yield
    FAMILIES.pop("toy")


def state(prefix: str) -> dict[str, torch.Tensor]:
    shapes = {"patch.weight": (6, 3, 4, 4), "norm.weight": (6,), "fc.weight": (2, 6)}
    return {prefix + key: torch.randn(shape) for key, shape in shapes.items()}


@pytest.mark.parametrize(
    ("raw", "source"),
    [
        # A row of the table serves every family: the same project trains several.
        ({"state_dict": state("module.base_encoder.")}, "facebookresearch/moco-v3"),
        ({"weights": state("net.")}, "state dict"),
    ],
)
def test_a_family_from_outside(raw: dict[str, Any], source: str) -> None:
    found = recognize(raw, "a.file", sha256="0" * 64)
    contract = found.contract
    assert (contract.source, str(contract.architecture)) == (source, "Toy-6")
    assert found.state.keys() == {"patch.weight", "norm.weight"}
    assert (found.dropped, found.head) == ({"head": 1}, "linear head")
    written = contract.to_dict()
    assert (written["version"], written["family"]) == (2, "toy")
    assert written["architecture"] == {"width": 6}
    again = InputContract.from_dict(written)
    assert again.d2_keys()["MODEL.TOY.WIDTH"] == 6
    assert again.architecture == contract.architecture


def test_its_options_and_lookalikes() -> None:
    raw = {"weights": state("net.")}
    with pytest.raises(UserError, match=r"--stem: .*--toy-color"):
        recognize(raw, "a.file", Overrides.from_options(stem="cifar"))
    assert Overrides.from_options(toy_color="red").missing_convention(Toy())[-1] != "--toy-color"
    assert Overrides().missing_convention(Toy())[-1] == "--toy-color"
    args = build_parser().parse_args(["a", "b", "--toy-color", "red"])
    assert args.toy_color == "red"
    brick = {f"net.{name}.weight": torch.ones(2) for name in ("studs", "walls")}
    with pytest.raises(DataError, match="a brick"):
        recognize(brick, "a.file")
