"""The detection engine made of torchvision's parts, equal to Detectron2 bit for bit on the CPU."""
