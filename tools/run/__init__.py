"""What runs around a training run."""
