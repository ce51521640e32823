"""Parts of the families whose networks have four stages of strides 4 to 32, under an FPN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from convert.families.base import STRIDES, Architecture
from moco.common.errors import UserError, shown
from moco.common.keys import Key, below

FEATURES = (*STRIDES,)
DROP_PATH = Key(
    0.0,
    "Stochastic depth: drop probability of the last block; increases linearly from 0 at the first "
    "block.",
    below(0, 1),
)


@dataclasses.dataclass(frozen=True)
class StagedArchitecture(Architecture):
    """Architecture whose fields are the keys of a node of MODEL; tuples have one value per stage.

    Raises:
        UserError: If a value is out of its range.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            if field.type != "tuple[int, ...]":
                continue
            values = getattr(self, field.name)
            four = isinstance(values, list | tuple) and len(values) == len(FEATURES)
            if not four or not all(type(v) is int and 1 <= v <= 2**16 for v in values):
                raise UserError(
                    f"{field.name}: got {shown(values)}, expected four integers, 1..65536"
                )
            object.__setattr__(self, field.name, tuple(values))

    def d2_keys(self) -> dict[str, Any]:
        """Return the keys of the fields, in the node of `task_key`."""
        node = self.task_key()[0].rpartition(".")[0]
        return {
            f"{node}.{name.upper()}": list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }


def network_arguments(
    architecture: type[StagedArchitecture], node: str
) -> Callable[[Any, Any], dict[str, Any]]:
    """Return `Pyramid.arguments` of a network that takes such an architecture.

    Args:
        architecture: Class of the architecture.
        node: Name of its node of the configuration, e.g. "MODEL.SWIN".
    """

    def arguments(keys: Any, backbone: Any) -> dict[str, Any]:
        fields = {
            field.name: keys[field.name.upper()] for field in dataclasses.fields(architecture)
        }
        try:
            built = architecture(**fields)
        except UserError as error:
            raise UserError(f"{node}: {error}") from error
        return {
            "architecture": built,
            "drop_path": keys.DROP_PATH,
            "output_norms": True,
            "freeze_at": backbone.FREEZE_AT,
        }

    return arguments
