"""Runs of both engines: processes, training loop, checkpoints, evaluation, logs, run folder."""
