"""The collectives of real training steps on W gloo processes: counted, and how long each took.

Every collective of torch, those of DistributedDataParallel among them, goes through torch's
dispatcher as an operator of the namespace c10d, where it is seen here; nothing of the trainings is
replaced.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moco.common import distributed

TIMEOUT_SECONDS = 300.0
SUM, GATHER, BROADCAST = "all-reduce", "all-gather", "broadcast"
OPERATORS = {
    **{"allreduce_": SUM, "_allgather_base_": GATHER, "allgather_": GATHER},
    "broadcast_": BROADCAST,
}
SKIPPED = 2  # first steps: DistributedDataParallel arranges its buckets in the first backward pass
FIT_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)


class Collective(NamedTuple):
    """One call.

    Attributes:
        kind: SUM, GATHER or BROADCAST.
        nbytes: of its result, the same on all processes.
    """

    kind: str
    nbytes: int


class Counted(NamedTuple):
    """Of one step: its collectives in order, and seconds of each in the last process to arrive."""

    collectives: list[Collective]
    seconds: list[float]


class Counting(TorchDispatchMode):
    """While active, notes every collective of this process and waits for its end."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, float]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, torch.ScriptObject):
                part.wait()  # type: ignore[attr-defined]  # of a Work
        seconds = time.perf_counter() - start
        name, outputs = func.__name__.partition(".")[0], tree_leaves(args[0])
        self.calls.append((OPERATORS[name], sum(x.nbytes for x in outputs), seconds))
        return result


def spawn(work: Callable[..., None], W: int, *arguments: Any) -> None:
    """Call `work(*arguments)` in W connected processes with one thread each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_process, (W, port, work, arguments), nprocs=W)


def _process(
    rank: int, W: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    process = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": W, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{key: str(x) for key, x in process.items()}}
    torch.set_num_threads(1)
    with distributed.session(torch.device("cpu"), TIMEOUT_SECONDS):
        work(*arguments)


def count(training: str, W: int, folder: Path, keys: Sequence[str], steps: int) -> Counted:
    """Train on W processes and count the last steps.

    Args:
        training: "pretrain" or "finetune". keys: KEY VALUE pairs of its configuration, after the
            config's name.
    """
    spawn(WORKS[training], W, folder, list(keys), steps)
    return _of_all(folder, W)


def fit_times(W: int, folder: Path, repeats: int) -> dict[int, float]:
    """Seconds of an all-reduce by the bytes of its result."""
    spawn(_all_reduces, W, folder, repeats)
    found = _of_all(folder, W)
    return {one.nbytes: s for one, s in zip(found.collectives, found.seconds, strict=True)}


def _of_all(folder: Path, W: int) -> Counted:
    """The processes' notes as one.

    A process that waits for others spends that time in the collective, too; the one that comes
    last has the collective's own time, which is the least. Of that the median over the steps.
    """
    ranks = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(W)]
    steps = list(zip(*ranks, strict=True))  # by step, by process: [kind, bytes, seconds]
    lists = [[call[:2] for call in one] for step in steps for one in step]
    assert all(each == lists[0] for each in lists), "the collectives of the steps differ"
    least = [
        [min(call[2] for call in calls) for calls in zip(*step, strict=True)] for step in steps
    ]
    seconds = [median(of_steps) for of_steps in zip(*least, strict=True)]
    return Counted([Collective(*call) for call in lists[0]], seconds)


def _write(folder: Path, steps: Sequence[Sequence[tuple[str, int, float]]]) -> None:
    Path(folder, f"{distributed.rank()}.json").write_text(json.dumps(steps), encoding="utf-8")


def _all_reduces(folder: Path, repeats: int) -> None:
    steps = []
    for _ in range(repeats):
        with Counting() as counting:
            for nbytes in FIT_BYTES:
                distributed.sum_over_ranks(torch.zeros(nbytes // 4))
        steps.append(counting.calls)
    _write(folder, steps[SKIPPED:])


def _pretrain(folder: Path, keys: list[str], steps: int) -> None:
    """`moco.pretrain` itself; a step's collectives end with its update."""
    from moco.common.run import RunFolder
    from moco.engine.loop import train
    from moco.pretraining.config import load_pretrain_cfg
    from moco.pretraining.run import Pretraining, PretrainStep

    ends = []

    class Marked(Pretraining):
        def update(self, step: PretrainStep) -> None:
            super().update(step)
            ends.append(len(counting.calls))

    out = folder / "out"
    more = ["SOLVER.MAX_ITERS", str(steps), "SOLVER.WARMUP_ITERS", "0", "OUTPUT_DIR", str(out)]
    cfg = load_pretrain_cfg(keys[0], [*keys[1:], *more])
    with Counting() as counting, RunFolder(out, owner=distributed.is_main()) as run:
        train(Marked(cfg, run), run)
    pairs = zip(ends[SKIPPED - 1 :], ends[SKIPPED:], strict=False)
    _write(folder, [counting.calls[a:b] for a, b in pairs])


def _finetune(folder: Path, keys: list[str], steps: int) -> None:
    """The embedded engine's own trainer, its loader among it."""
    from detection.config.task import load_task
    from detection.embedded.build import build_model
    from detection.embedded.pipeline import build_training
    from detection.embedded.trainer import Trainer
    from detection.modeling.norms import with_process_norms
    from moco.engine.stop import StopRequest

    cfg = load_task(keys[0], [*keys[1:], "OUTPUT_DIR", str(folder)], "embedded").cfg
    cfg = with_process_norms(cfg, distributed.world_size())
    torch.manual_seed(cfg.SEED)
    trainer = Trainer(cfg, build_model(cfg).train(), StopRequest())
    batches, calls = build_training(cfg, num_workers=0), []
    for iteration in range(steps):
        with Counting() as counting:
            trainer.step(iteration, batches)
        calls.append(counting.calls)
    _write(folder, calls[SKIPPED:])


WORKS = {"pretrain": _pretrain, "finetune": _finetune}
