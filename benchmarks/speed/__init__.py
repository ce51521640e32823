"""Speed benchmarks: this project against the official MoCo code and plain Detectron2."""
