"""What concerns GPUs, with one and without."""
