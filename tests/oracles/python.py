"""Python processes that have to succeed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments: object, cwd: Path = ROOT, **variables: str) -> str:
    """Run Python, which finds this project's modules, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout
