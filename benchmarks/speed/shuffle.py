"""The bytes of one step's keys on W gloo processes, the official way and ours.

N images of all processes, n of each, C dimension, P crop size in pixels.
"""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.speed import reference
from benchmarks.speed.collectives import spawn
from moco.common import distributed
from moco.modeling.shuffle_bn import exchange_plan, shuffle_plan, unshuffle


class Received(NamedTuple):
    """Mean bytes per process; whether the keys equal those of the official way."""

    bytes: dict[str, float]
    equal: dict[str, bool]


def received_bytes(W: int, n: int, P: int, dim: int, K: int, scratch: Path) -> Received:
    """Encode one step's keys with the same permutation, each way, and count what arrives."""
    spawn(_encode, W, n, P, dim, K, scratch)
    found = [
        json.loads((scratch / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(W)
    ]
    ways = found[0]["bytes"]
    return Received(
        {way: sum(one["bytes"][way] for one in found) / W for way in ways},
        {way: all(one["equal"][way] for one in found) for way in ways},
    )


def _encode(n: int, P: int, dim: int, K: int, folder: Path) -> None:
    rank, W = distributed.rank(), distributed.world_size()
    with torch.no_grad():
        torch.manual_seed(0)
        encoder = nn.Sequential(  # BN, so that keys depend on their neighbors
            nn.Conv2d(3, 8, 7, stride=4),
            nn.BatchNorm2d(8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, dim),
        )
        crops = torch.randint(0, 256, (W * n, 3, P, P), dtype=torch.uint8)
        queue, plan = torch.randn(dim, K), shuffle_plan(W * n, W, seed=0, step=0)
        mine = slice(rank * n, (rank + 1) * n)
        official: Counter[str] = Counter()
        buffers = [queue, torch.zeros(1, dtype=torch.long), *encoder.buffers()]
        expected = reference.shuffled_keys(
            copy.deepcopy(encoder), crops[mine] / 255, plan.clone(), buffers, official
        )
        received, equal = {"official": official.total()}, {"official": True}
        for way in ("index", "all_to_all"):
            distributed.bytes_received.clear()
            if way == "index":
                x = crops[plan[mine]]  # the loader's part: these are the views it makes
            else:
                x = distributed.exchange_rows(crops[mine], *exchange_plan(plan, rank, W))
            keys = distributed.gather_rows(copy.deepcopy(encoder)(x / 255))
            equal[way] = torch.equal(unshuffle(keys, plan), expected)
            received[way] = distributed.bytes_received.total()
    Path(folder, f"{rank}.json").write_text(
        json.dumps({"bytes": received, "equal": equal}), encoding="utf-8"
    )
