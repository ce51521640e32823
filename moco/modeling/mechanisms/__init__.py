"""Contrastive mechanisms (the paper's Figure 2), one file each, registered by name in build.py."""

from moco.modeling.mechanisms.build import MECHANISMS

__all__ = ["MECHANISMS"]
