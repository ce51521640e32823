"""Detection engine made of torchvision's parts, bitwise identical to Detectron2 on a CPU."""
