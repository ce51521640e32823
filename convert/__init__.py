"""From any recognized checkpoint to verified Detectron2 weights."""
