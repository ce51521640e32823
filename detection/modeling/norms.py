"""Synchronized batch norm: which kind a number of processes and a device can have."""

from fvcore.common.config import CfgNode

from moco.common.cfgnode import flatten

_SYNCED = ("SyncBN", "nnSyncBN", "naiveSyncBN", "naiveSyncBN_N")


def process_norms(cfg: CfgNode, num_processes: int) -> dict[str, str]:
    """Keys of norms that this number of processes cannot have → what they have instead.

    One process: synchronized BN is plain BN, and torch's own refuses the CPU. Several on the CPU:
    torch's SyncBatchNorm refuses the CPU, Detectron2's naive one computes there.
    """
    norms = {}
    for key in norm_keys(cfg):
        name = flatten(cfg)[key]
        if name in _SYNCED and num_processes == 1:
            norms[key] = "BN"
        elif name in ("SyncBN", "nnSyncBN") and cfg.MODEL.DEVICE == "cpu":
            norms[key] = "naiveSyncBN"
    return norms


def with_process_norms(cfg: CfgNode, num_processes: int) -> CfgNode:
    """`cfg` with the norms of `process_norms` (a frozen copy)."""
    cfg = cfg.clone()
    cfg.defrost()
    for key, norm in process_norms(cfg, num_processes).items():
        cfg.merge_from_list([key, norm])
    cfg.freeze()
    return cfg


def norm_keys(cfg: CfgNode) -> list[str]:
    """Every `*.NORM` key of a task."""
    return [key for key in flatten(cfg) if key.endswith(".NORM")]
