"""Shows what one training step spends its time on, by PyTorch's profiler."""
