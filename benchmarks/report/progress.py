"""How far a suite is, as its page shows it while it is computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PAGE_NAME = "table.html"


@dataclass(frozen=True)
class Progress:
    """All texts are plain.

    Attributes:
        name: of the suite.
        share: of the work that is done, 0..1.
        left: the time left.
        counts: state → number of runs.
        begun: of each run that has begun and is not done its title, state, share of its
            iterations, and where it is computed or why it failed.
        at: when that was, in UTC.
    """

    name: str
    share: float
    left: str
    counts: Mapping[str, int]
    begun: Sequence[tuple[str, str, float, str]]
    at: str
