"""What is tuned: the user's training step, and the bundled workloads."""
