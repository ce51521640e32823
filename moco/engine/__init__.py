"""Training loop, optimizers and schedules, checkpoints, stop requests, logs."""
