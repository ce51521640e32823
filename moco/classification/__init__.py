"""Linear classification and fine-tuning: configuration, run, data."""
