"""Configuration of a task: keys, their checks, and the recipes of the paper."""
