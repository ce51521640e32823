"""Conversion of pre-trained checkpoints to verified Detectron2 weights."""
