"""The training programs that a suite runs: what they check, and the commands that start them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.suites import checks
from benchmarks.suites.checks import Findings, command_keys, in_own_process
from benchmarks.suites.executors.base import HOST, PORT, RANK
from benchmarks.suites.suite import DETECTION, RunSpec
from moco.common.command import RANDOM
from moco.common.pretrained import LocalWeights

_T = TypeVar("_T")
PLOTTED_IMAGES = 4  # with predictions, for the report
_SIGNALS = "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"  # torchrun would otherwise die of the last two


class Programs:
    """This project's; tests put small ones in their place. Only their own processes import torch.

    See benchmarks/suites/checks.py for what is checked.
    """

    def not_downloaded(self, weights: Mapping[str, str]) -> dict[str, str]:
        """Init → what would have to be downloaded for it; those that need nothing are left out."""
        return _imports_timm(checks.not_downloaded, weights)

    def locate(self, weights: Mapping[str, str]) -> dict[str, LocalWeights | None]:
        """Init → its file, downloaded if need be; None is random."""
        return _imports_timm(checks.locate_all, weights)

    def choose_engines(self, wanted: str) -> tuple[str, ...]:
        return checks.choose_engines(wanted)

    def check(self, specs: Sequence[RunSpec], on_gpus: bool) -> Findings:
        return in_own_process(checks.check, list(specs), on_gpus)

    def command(self, spec: RunSpec, folder: Path, machines: int = 1) -> list[str]:
        """The command that starts a run in a folder, or continues it.

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
        program = ["-m", f"moco.{spec.program}", "--config-file", str(spec.config)]
        program += ["--resume=auto", "--checkpoint", spec.weights]
        if spec.weights != RANDOM:
            program += ["--init", spec.init]
        return [sys.executable, *launcher, *program, *keys]


def _imports_timm(function: Callable[[dict[str, str]], _T], weights: Mapping[str, str]) -> _T:
    """Call `function`, in a process of its own where it imports timm, and with it torch."""
    apart = any(text.startswith("timm://") for text in weights.values())
    return in_own_process(function, dict(weights)) if apart else function(dict(weights))
