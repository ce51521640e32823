"""Program of a suite that runs Python code: `python -m …run_code CODE`."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    exec(compile(sys.argv[1], "<string>", "exec"), {"__name__": "__main__"})
    return 0


def command(code: str) -> list[str]:
    """Return the command that runs `code`."""
    return [sys.executable, "-m", __name__, code]


if __name__ == "__main__":
    main()
