"""The Detectron2 plugin. Importing it registers ``Res5ROIHeadsExtraNorm``.

In one's own train_net.py::

    from detection.d2 import add_transfer_config
    cfg = get_cfg()
    add_transfer_config(cfg)
"""

from detection.d2.config import (
    add_transfer_config,
    check_transfer_config,
    transfer_defaults,
    with_process_norms,
)
from detection.d2.roi_heads import Res5ROIHeadsExtraNorm

__all__ = [
    "Res5ROIHeadsExtraNorm",
    "add_transfer_config",
    "check_transfer_config",
    "transfer_defaults",
    "with_process_norms",
]
