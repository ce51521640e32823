"""Utilities of all packages: errors, files, config nodes, distributed helpers, run records."""
