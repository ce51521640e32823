"""Suites of runs: files, folders, checks, the scheduler and its executors."""
