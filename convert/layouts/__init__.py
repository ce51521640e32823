"""Checkpoint layouts: who writes which keys, and how its networks see pixels."""
