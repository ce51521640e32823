"""Executors, which compute runs on this machine's GPUs or cores, or on a Slurm cluster."""

from benchmarks.suites.executors import local, slurm  # noqa: F401 - registers them
