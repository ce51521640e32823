"""The bytes of one step's keys on W gloo processes, the official way and ours.

And on paper, fed by such bytes, how a step scales with the number of GPUs.

N images of all processes, n of each, C dimension, P crop size in pixels.
"""

import copy
import json
import os
import socket
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.speed import reference
from benchmarks.speed.results import Result
from moco.common import distributed
from moco.modeling.shuffle_bn import exchange_plan, shuffle_plan, unshuffle

TIMEOUT_SECONDS = 300.0
FLOAT = 4  # bytes


class Received(NamedTuple):
    """Mean bytes per process; whether the keys equal those of the official way."""

    bytes: dict[str, float]
    equal: dict[str, bool]


def received_bytes(W: int, n: int, P: int, dim: int, K: int, scratch: Path) -> Received:
    """Encode one step's keys with the same permutation, each way, and count what arrives."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_process, (W, port, n, P, dim, K, scratch), nprocs=W)
    found = [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(W)]
    ways = found[0]["bytes"]
    return Received(
        {way: sum(one["bytes"][way] for one in found) / W for way in ways},
        {way: all(one["equal"][way] for one in found) for way in ways},
    )


def _process(rank: int, W: int, port: int, n: int, P: int, dim: int, K: int, folder: Path) -> None:
    process = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": W, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{key: str(x) for key, x in process.items()}}
    torch.set_num_threads(1)
    with distributed.session(torch.device("cpu"), TIMEOUT_SECONDS), torch.no_grad():
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
    Path(folder, f"{rank}.json").write_text(json.dumps({"bytes": received, "equal": equal}))


class Model(NamedTuple):
    """Bytes that a step moves; ResNet-50 with MLP head at 224 pixels, queue of 65536 keys."""

    gradient_bytes: int = 28_000_000 * FLOAT
    key_bytes: int = 128 * FLOAT
    image_bytes: int = 3 * 224 * 224 * FLOAT
    buffer_bytes: int = 65536 * 128 * FLOAT

    def exchanged_bytes(self, official: bool, W: int, n: int) -> int:
        """What one process receives for the keys of a step, besides the gradients."""
        keys = (W - 1) * n * self.key_bytes
        return (W - 1) * n * self.image_bytes + 2 * keys + self.buffer_bytes if official else keys


class Machine(NamedTuple):
    """A GPU's images/s, forward and backward of both encoders, and the bytes/s it receives.

    Attributes:
        latency_seconds: of one collective.
        backward_share: part of the computation with which the gradients' exchange overlaps.
    """

    images_per_second: float = 3300.0
    link_bytes_per_second: float = 40e9
    latency_seconds: float = 50e-6
    backward_share: float = 0.5

    def efficiency(self, official: bool, W: int, n: int, model: Model) -> float:
        """Share of a step in which the encoders compute, 0..1.

        Step = max(computation, its part before the gradients + their ring all-reduce) + exposed
        exchange of images, keys and buffers.
        """
        compute = n / self.images_per_second
        all_reduce = 2 * (W - 1) / W * model.gradient_bytes / self.link_bytes_per_second
        forward = (1 - self.backward_share) * compute
        overlapped = max(compute, forward + all_reduce + self.latency_seconds)
        collectives = 5 if official else 1  # images, permutation, buffers, keys twice; keys
        exchange = model.exchanged_bytes(official, W, n) / self.link_bytes_per_second
        return compute / (overlapped + exchange + collectives * self.latency_seconds)


def scaling() -> list[Result]:
    """64 GPUs with 64 images each, and the paper's largest batch of 1024 on 64."""
    machine = Machine()
    assumed = (
        f"if a GPU computes {machine.images_per_second:.0f} images/s, receives "
        f"{machine.link_bytes_per_second / 1e9:.0f} GB/s, a collective costs "
        f"{machine.latency_seconds * 1e6:.0f} us and the gradients' exchange overlaps with "
        f"{machine.backward_share:.0%} of the computation"
    )
    rows = []
    for n in (64, 16):
        ours, official = (100 * machine.efficiency(way, 64, n, Model()) for way in (False, True))
        rows.append(Result(f"estimate {n}", ours, official, assumed))
    return rows
