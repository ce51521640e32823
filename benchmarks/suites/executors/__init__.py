"""Where runs are computed, one file each: this machine's GPUs or cores, or Slurm."""
