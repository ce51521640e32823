"""The keys of a task, their checks, and the recipes of the paper."""
