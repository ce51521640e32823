"""Momentum Contrast pre-training (He et al., arXiv 1911.05722), and what every room shares."""

__version__ = "0.1.0"
