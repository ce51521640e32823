"""Executors that compute runs on the GPUs or cores of this machine, or on a Slurm cluster."""

from benchmarks.suites.executors import local, slurm  # noqa: F401 - registers them
