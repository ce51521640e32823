"""Momentum Contrast pre-training (He et al., arXiv 1911.05722), and what every room shares."""
