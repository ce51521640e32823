"""How a step scales with the number of GPUs: on paper, fed by counted bytes.

W GPUs, n images on each, N = W n, C dimension of a key.
"""

from dataclasses import dataclass

from benchmarks.speed.results import Result

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Machine:
    """What is assumed.

    Attributes:
        images_per_second: of one GPU, forward and backward of both encoders.
        link_bytes_per_second: that a GPU receives.
        latency_seconds: of one collective.
        backward_share: part of the computation with which the gradients' exchange overlaps.
    """

    images_per_second: float = 3300.0
    link_bytes_per_second: float = 40e9
    latency_seconds: float = 50e-6
    backward_share: float = 0.5


@dataclass(frozen=True)
class Model:
    """Bytes that a step moves; ResNet-50 with MLP head at 224 pixels, queue of 65536 keys."""

    gradient_bytes: int = 28_000_000 * FLOAT
    key_bytes: int = 128 * FLOAT
    image_bytes: int = 3 * 224 * 224 * FLOAT
    buffer_bytes: int = 65536 * 128 * FLOAT


def exchanged_bytes(official: bool, W: int, n: int, model: Model) -> int:
    """What one process receives for the keys of a step, besides the gradients."""
    keys = (W - 1) * n * model.key_bytes
    if not official:
        return keys
    return (W - 1) * n * model.image_bytes + 2 * keys + model.buffer_bytes


def efficiency(official: bool, W: int, n: int, machine: Machine, model: Model) -> float:
    """Share of a step in which the encoders compute, 0..1.

    Step = max(computation, its part before the gradients + their ring all-reduce) + exposed
    exchange of images, keys and buffers.
    """
    compute = n / machine.images_per_second
    all_reduce = 2 * (W - 1) / W * model.gradient_bytes / machine.link_bytes_per_second
    forward = (1 - machine.backward_share) * compute
    overlapped = max(compute, forward + all_reduce + machine.latency_seconds)
    collectives = 5 if official else 1  # images, permutation, buffers, keys twice; keys
    exposed = (
        exchanged_bytes(official, W, n, model) / machine.link_bytes_per_second
        + collectives * machine.latency_seconds
    )
    return compute / (overlapped + exposed)


def results() -> list[Result]:
    """64 GPUs with 64 images each, and the paper's largest batch of 1024 on 64."""
    machine, model = Machine(), Model()
    assumed = (
        f"if a GPU computes {machine.images_per_second:.0f} images/s, receives "
        f"{machine.link_bytes_per_second / 1e9:.0f} GB/s, a collective costs "
        f"{machine.latency_seconds * 1e6:.0f} us and the gradients' exchange overlaps with "
        f"{machine.backward_share:.0%} of the computation"
    )
    rows = []
    for n in (64, 16):
        ours, official = (100 * efficiency(side, 64, n, machine, model) for side in (False, True))
        rows.append(Result(f"paper {n}", ours, official, assumed))
    return rows
