"""Data sets by name: Detectron2's own names and a folder of the user's own, never by substring."""

from detection.datasets.voc import (
    VOC_CLASSES,
    VOCImage,
    VOCObject,
    VOCSource,
    VOCSplit,
    annotations_sha256,
    folder_sources,
    ground_truth,
    read_split,
    records,
    resolve,
)

__all__ = [
    "VOC_CLASSES",
    "VOCImage",
    "VOCObject",
    "VOCSource",
    "VOCSplit",
    "annotations_sha256",
    "folder_sources",
    "ground_truth",
    "read_split",
    "records",
    "resolve",
]
