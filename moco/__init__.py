"""Momentum Contrast pre-training (He et al., arXiv 1911.05722), and shared modules."""

__version__ = "0.1.0"
