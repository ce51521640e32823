"""The backbones that both engines train, with Detectron2's names, and their references."""
