"""Choice of the synchronized batch norm by number of processes and device."""

from fvcore.common.config import CfgNode

from moco.common.cfgnode import flatten

_ON_GPU, _NAIVE = ("SyncBN", "nnSyncBN"), ("naiveSyncBN", "naiveSyncBN_N")


def process_norms(cfg: CfgNode, num_processes: int) -> dict[str, str]:
    """Return replacements, by key, of the norms that this number of processes cannot have.

    In one process, synchronized BN equals plain BN, which also runs on a CPU. In several processes
    on a CPU, where torch's SyncBatchNorm does not run, it is replaced by Detectron2's naive one.
    """
    values = flatten(cfg)
    if num_processes == 1:
        return {key: "BN" for key in norm_keys(cfg) if values[key] in (*_ON_GPU, *_NAIVE)}
    on_cpu = cfg.MODEL.DEVICE == "cpu"
    return {key: "naiveSyncBN" for key in norm_keys(cfg) if on_cpu and values[key] in _ON_GPU}


def with_process_norms(cfg: CfgNode, num_processes: int) -> CfgNode:
    """Return a frozen copy of `cfg` with the replacements of `process_norms`."""
    cfg = cfg.clone()
    cfg.defrost()
    norms = process_norms(cfg, num_processes)
    cfg.merge_from_list([item for pair in norms.items() for item in pair])
    cfg.freeze()
    return cfg


def norm_keys(cfg: CfgNode) -> list[str]:
    """Return all `*.NORM` keys of a task."""
    return [key for key in flatten(cfg) if key.endswith(".NORM")]
