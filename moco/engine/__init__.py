"""The training loop and what it needs: schedule, checkpoints, signals, logs."""
