"""Training at one point of a grid: `detection.train_net`, where divergence is a result."""

from collections.abc import Sequence

from detection import train_net
from moco.common.errors import NumericError, UserError, echo, run_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return 0 even after divergence, which the record tells the choice of a point."""
    try:
        return train_net.main(argv)
    except UserError as error:
        if error.exit_code != NumericError.exit_code:
            raise
        echo(f"diverged: {error}")
        return 0


if __name__ == "__main__":
    run_cli(main)
