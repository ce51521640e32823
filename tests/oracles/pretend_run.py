"""A command with a pretended GPU: `python -m tests.oracles.pretend_run COMMAND ARGUMENTS…`.

The commands that `moco-transfer speed gpu` starts have that GPU, too.
"""

import sys

from tests.oracles import pretend_driver

if __name__ == "__main__":
    pretend_driver.install()
    from benchmarks import __main__ as benchmarks
    from moco.common.errors import run_cli

    if sys.argv[1] == "speed":
        from benchmarks.speed import branches

        branches.PROGRAM = (sys.executable, "-m", "tests.oracles.pretend_run")
    run_cli(benchmarks.main)
