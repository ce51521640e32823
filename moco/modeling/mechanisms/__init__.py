"""Contrastive mechanisms (the paper's Figure 2), one file each, registered by name."""

from moco.modeling.mechanisms import end_to_end, memory_bank, momentum_queue
from moco.modeling.mechanisms.base import MECHANISMS

__all__ = ["MECHANISMS", "end_to_end", "memory_bank", "momentum_queue"]
