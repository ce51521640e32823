"""Report of the runs of a suite that failed or were cancelled."""

import sys
from collections.abc import Mapping, Sequence

from benchmarks.suites.runs import FAILED, Run, State
from moco.common.errors import UserError, printable


class SuiteFailed(UserError):
    """Failure of some runs of a suite whose other runs have finished."""

    exit_code = 1


def raise_failures(runs: Sequence[Run], states: Mapping[str, State], retried: bool) -> None:
    """Print the runs that failed or were cancelled; raise SuiteFailed if there are any."""
    failed = [each for each in runs if states[each.name].kind == FAILED]
    cancelled = [each for each in runs if not states[each.name].settled]
    for what, which in (("failed", failed), ("cancelled", cancelled)):
        for each in which:
            print(f"{what}: {each.title}: {printable(states[each.name].text)}", file=sys.stderr)
    if failed:
        raise SuiteFailed(
            f"{len(failed)} of {len(runs)} runs failed and are in no number; fix the causes named "
            f"above, then repeat the command{'' if retried else ' with --retry-failed'}"
        )
    if cancelled:
        raise SuiteFailed(
            f"the jobs of {len(cancelled)} of {len(runs)} runs were cancelled; the same command "
            "submits them again, and they resume from their checkpoints"
        )
