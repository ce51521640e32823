"""From any recognized ResNet checkpoint to verified Detectron2 weights."""
