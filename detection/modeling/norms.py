"""Synchronized batch norm: which kind a number of processes and a device can have."""

from fvcore.common.config import CfgNode

from moco.common.cfgnode import flatten

_ON_GPU, _NAIVE = ("SyncBN", "nnSyncBN"), ("naiveSyncBN", "naiveSyncBN_N")


def process_norms(cfg: CfgNode, num_processes: int) -> dict[str, str]:
    """Keys of norms that this number of processes cannot have → what they have instead.

    One process: synchronized BN is plain BN, and torch's own refuses the CPU. Several on the CPU:
    torch's SyncBatchNorm refuses the CPU, Detectron2's naive one computes there.
    """
    values = flatten(cfg)
    if num_processes == 1:
        return {key: "BN" for key in norm_keys(cfg) if values[key] in (*_ON_GPU, *_NAIVE)}
    on_cpu = cfg.MODEL.DEVICE == "cpu"
    return {key: "naiveSyncBN" for key in norm_keys(cfg) if on_cpu and values[key] in _ON_GPU}


def with_process_norms(cfg: CfgNode, num_processes: int) -> CfgNode:
    """`cfg` with the norms of `process_norms` (a frozen copy)."""
    cfg = cfg.clone()
    cfg.defrost()
    norms = process_norms(cfg, num_processes)
    cfg.merge_from_list([item for pair in norms.items() for item in pair])
    cfg.freeze()
    return cfg


def norm_keys(cfg: CfgNode) -> list[str]:
    """Every `*.NORM` key of a task."""
    return [key for key in flatten(cfg) if key.endswith(".NORM")]
