"""Suites of runs: files, the plan, folders, checks, the runner and its executors."""
