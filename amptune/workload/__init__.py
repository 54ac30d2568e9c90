"""The user's training step to tune, and the bundled workloads."""
