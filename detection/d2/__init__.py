"""The Detectron2 plugin. Importing it registers its backbones and heads.

A custom train_net.py calls `setup` (docs/guides/own_train_net.md).
"""

from detection.d2 import backbones, heads  # noqa: F401  # imports register
from detection.d2.config import setup as setup
