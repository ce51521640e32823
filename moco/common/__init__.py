"""What every package shares: errors, files, config nodes, distributed helpers, run records."""
