"""Backbones that both engines train, with Detectron2's names, and reference implementations."""
