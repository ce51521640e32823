"""The training programs that a suite runs: what they check, and the commands that start them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suites import checks
from benchmarks.suites.checks import Findings, command_keys
from benchmarks.suites.executors.base import HOST, PORT, RANK
from benchmarks.suites.suite import DETECTION, RANDOM, RunSpec

PLOTTED_IMAGES = 4  # with predictions, for the report
_SIGNALS = "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"  # torchrun would otherwise die of the last two


@dataclass(frozen=True)
class Programs:
    """What knows the training programs; tests put a small one in its place.

    Attributes:
        resolve_names: init → weights, with names that are not files made files.
        choose_engines: the value of `--engine` → engines for detection.
        check: every task, dataset, weights file; whether on GPUs.
        command: see `command`.
    """

    resolve_names: Callable[[Mapping[str, str]], dict[str, str]]
    choose_engines: Callable[[str], tuple[str, ...]]
    check: Callable[[Sequence[RunSpec], bool], Findings]
    command: Callable[[RunSpec, Path, int], Sequence[str]]


def training_programs() -> Programs:
    """The programs of this project. Torch is imported by processes of their own only."""

    def resolve_names(weights: Mapping[str, str]) -> dict[str, str]:
        if not any("://" in name for name in weights.values()):
            return dict(weights)
        return checks.in_own_process(checks.resolve_names, dict(weights))

    def choose_engines(wanted: str) -> tuple[str, ...]:
        return checks.in_own_process(checks.choose_engines, wanted)

    def check(specs: Sequence[RunSpec], on_gpus: bool) -> Findings:
        return checks.in_own_process(checks.check, list(specs), on_gpus)

    return Programs(resolve_names, choose_engines, check, command)


def command(spec: RunSpec, folder: Path, machines: int = 1) -> list[str]:
    """The command that starts a run of this project's programs in a folder, or continues it.

    On several machines each has to fill in what only it knows, see
    benchmarks/suites/executors/base.py.
    """
    keys = [*command_keys(spec), "OUTPUT_DIR", str(folder), "SEED", str(spec.seed)]
    if spec.program == DETECTION:
        gpus = max(spec.gpus // machines, 1)
        flags = ["--engine", spec.engine, "--resume", "--num-gpus", str(gpus)]
        if machines > 1:
            flags += ["--num-machines", str(machines), "--machine-rank", RANK]
            flags += ["--dist-url", f"tcp://{HOST}:{PORT}"]
        if spec.seed == 0:  # the report shows one trial's
            flags += ["--visualize", str(PLOTTED_IMAGES)]
        program = ["-m", "detection.train_net", *flags, "--config-file", str(spec.config)]
        return [sys.executable, *program, *keys, "MODEL.WEIGHTS", spec.weights]
    launcher = []
    if spec.gpus > 1:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={spec.gpus // machines}"]
        if machines > 1:
            launcher += [f"--nnodes={machines}", f"--node-rank={RANK}"]
            launcher += [f"--master-addr={HOST}", f"--master-port={PORT}"]
        else:
            launcher += ["--standalone"]
        launcher += [f"--signals-to-handle={_SIGNALS}"]
    program = ["-m", f"moco.{spec.program}", "--config-file", str(spec.config), "--resume=auto"]
    program += ["--checkpoint", spec.weights]
    if spec.weights != RANDOM:
        program += ["--init", spec.init]
    return [sys.executable, *launcher, *program, *keys]
