"""Recorder of a model's inputs and losses in every training iteration of every process.

It hooks the calls of `torch.nn.Module`, and so works with any training loop.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tests.oracles import processes


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Record trainings of this process, and of those that it starts, in `folder/rank<n>.jsonl`.

    Each line is an iteration: its exact losses and a digest of its images.
    """
    folder.mkdir(parents=True)

    def start(function: Callable[..., None], args: tuple[Any, ...] = (), *a: Any, **kw: Any) -> Any:
        return processes.start_processes(_rank, (function, str(folder), *args), *a, **kw)

    before = torch.multiprocessing.start_processes
    torch.multiprocessing.start_processes = start
    handle = _record(folder / "rank0.jsonl")
    try:
        yield
    finally:
        handle.remove()
        torch.multiprocessing.start_processes = before


def lines(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the recorded iterations by process."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.iterdir())
    }


def _rank(rank: int, function: Callable[..., None], folder: str, *args: Any) -> None:
    _record(Path(folder, f"rank{rank}.jsonl"))
    function(rank, *args)


def _record(path: Path) -> Any:
    def look(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not (module.training and isinstance(output, dict) and output and _is_batch(inputs)):
            return
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return  # the wrapped model is recorded
        losses = {name: float(value).hex() for name, value in output.items()}
        digest = hashlib.sha256()
        for sample in inputs[0]:
            digest.update(Path(sample["file_name"]).name.encode())
            digest.update(sample["image"].numpy().tobytes())
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"losses": losses, "images": digest.hexdigest()}) + "\n")

    return register_module_forward_hook(look)


def _is_batch(inputs: tuple[Any, ...]) -> bool:
    return (
        len(inputs) == 1
        and isinstance(inputs[0], list)
        and isinstance(inputs[0][0], dict)
        and "image" in inputs[0][0]
    )
