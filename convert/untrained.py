"""Layers that look as if nobody had trained them.

A backbone that was never trained loads as well as any other, and so does one of which a part was
left out of training or of the file. Batch norm gives both away: its statistics start at mean 0 and
variance 1, its scale at 1 and its shift at 0, and a single training step moves them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from convert.files import names
from moco.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


def check_trained(state: Mapping[str, Tensor], where: str, *, folded: bool = False) -> list[str]:
    """Warnings about batch norms (torchvision's names) that are as initialisation left them.

    `folded`: the statistics were filled in, so they say nothing.

    Raises DataError: every batch norm of the network is so; it is a random initialisation.
    """
    norms = [key.removesuffix(".bias") for key in state if key.endswith(".bias")]
    still = [norm for norm in norms if _is(state, norm, running_mean=0, running_var=1)]
    unmoved = [norm for norm in norms if _is(state, norm, weight=1, bias=0)]
    if norms and len(still) == len(unmoved) == len(norms):
        raise DataError(
            f"{where}: all {len(norms)} batch norms are as initialisation left them: this network "
            "was never trained; a random initialisation is MODEL.WEIGHTS random"
        )
    warnings = []
    if still and not folded:
        warnings.append(
            f"{len(still)} of {len(norms)} batch norms have the statistics of initialisation "
            f"(mean 0, variance 1), as if they had never seen an image: {names(still)}"
        )
    if unmoved:
        warnings.append(
            f"{len(unmoved)} of {len(norms)} batch norms have the scale and shift of "
            f"initialisation (1, 0), as if they had been frozen: {names(unmoved)}"
        )
    return warnings


def _is(state: Mapping[str, Tensor], norm: str, **values: float) -> bool:
    """Whether tensors of a batch norm hold one number each; a missing one does not."""
    tensors = {name: state.get(f"{norm}.{name}") for name in values}
    return all(
        tensor is not None and bool((tensor == values[name]).all())
        for name, tensor in tensors.items()
    )
