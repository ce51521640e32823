"""Metrics of VOC, COCO, LVIS, Cityscapes and semantic segmentation; predictions and drawings."""
