"""From any recognised ResNet checkpoint to verified Detectron2 weights."""
