"""Pre-training: configuration, run, training state."""
