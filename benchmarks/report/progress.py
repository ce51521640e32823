"""Progress of a running suite, as its page displays it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PAGE_NAME = "table.html"


@dataclass(frozen=True)
class Progress:
    """Progress of a suite in plain, unescaped texts.

    Attributes:
        name: Name of the suite.
        share: Fraction of the work that is done, 0..1.
        left: Time left.
        counts: State → number of runs.
        listed: Title, state, fraction of iterations, time left if known, and location or reason
            of failure of each run that is not done; of waiting ones, the next.
        at: Time of the snapshot, in UTC.
    """

    name: str
    share: float
    left: str
    counts: Mapping[str, int]
    listed: Sequence[tuple[str, str, float, str, str]]
    at: str
