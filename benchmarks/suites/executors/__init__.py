"""Where runs are computed: this machine's GPUs or cores, or a Slurm cluster."""

from benchmarks.suites.executors import local, slurm  # noqa: F401 - registers them
