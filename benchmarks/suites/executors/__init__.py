"""Where runs are computed, one file each: this machine's GPUs or cores, or a Slurm cluster."""

from benchmarks.suites.executors import cpu, local, slurm  # noqa: F401 - registers them
