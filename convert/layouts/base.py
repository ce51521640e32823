"""One checkpoint layout, and what several of them have in common.

Wrappers are taken off the keys before they are compared, so no layout has them. A rule is what a
report calls the dropped tensors -> patterns of their keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from convert.contract import IMAGENET_MEAN, IMAGENET_STD
from convert.families.base import USUAL
from convert.recorded import Recorded
from moco.modeling.soundness import Triple

# Keys beside a network that no layout needs.
TOP_DROPPED = {
    "optimizer": "optimizer optimizers optimizer_states optim",
    "schedule": "lr_scheduler lr_schedulers scheduler schedulers",
    "loss scaling": "scaler grad_scaler loss_scaler amp amp_scaler fp16_scaler",
    "training record": "callbacks loops rng_state random_state",
}


def beside(prefixes: str, **others: str) -> dict[str, str]:
    """A rule for each start of keys, called as it; `others`: rules of another name."""
    rules = {prefix.replace("_", " "): f"{prefix}.*" for prefix in prefixes.split()}
    return rules | {rule.replace("_", " "): patterns for rule, patterns in others.items()}


# Heads under the names that people give them, dropped from a plain state dict.
PLAIN_DROPPED = {
    "Detectron2's head": "stem.fc.*",
    **beside("head classifier projector projection_head predictor prediction_head neck decoder"),
    "queue": "queue*",
    "batch counter": "*.num_batches_tracked",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """One checkpoint layout: how it is recognized and which of its tensors are the backbone.

    Attributes:
        networks: choice of --encoder -> start of its tensors in the flattened file, as
            "state_dict/encoder_q."; the first is the one that the project itself transfers.
        dropped: rules for keys beside the networks.
        has: starts of keys that must be in a network's dict; they tell it from layouts alike.
        marks: paths ("a/b") to plain values of the file: this value, ... for any, None for none.
        scheme: of the family's schemes of names.
        epoch: path to the number of epochs finished; `epoch_offset`: 1 where the file numbers its
            epochs from 0.
        order: keys of the default network in the order of the file. Converters from other
            frameworks leave one that no PyTorch module has.
        note: what every user of this source has to know.
        says: what its code says of its networks beside their tensors, in the words of a family's
            `recognize`.
        recorded: what a file says of its pixels and strides, see convert/recorded.py.
        channel_order, mean, std: what the network was trained with, where the file does not say.
        families: whose networks alone it has; none: any.
        plain: made for a plain state dict, which no row of the table fits.
        any_network: its files hold networks of many projects, so that a name alone says which.
    """

    name: str
    networks: Mapping[str, str]
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has: tuple[str, ...] = ()
    marks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scheme: str = USUAL
    epoch: str = "epoch"
    epoch_offset: int = 0
    order: tuple[str, ...] = ()
    note: str = ""
    says: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    recorded: Callable[[Mapping[Any, Any]], Recorded] | None = None
    channel_order: str = "RGB"
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    plain: bool = False
    any_network: bool = False
    families: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether it is this project's own, versioned format."""
        return isinstance(self.marks.get("format"), str)


# The networks and marks of files that may have an average beside the model.
EMA_FIRST: tuple[dict[str, str], dict[str, Any]] = (
    {"ema": "model_ema/", "model": "model/"},
    {"model_ema": ...},
)
ONE_MODEL: tuple[dict[str, str], dict[str, Any]] = ({"single": "model/"}, {})
