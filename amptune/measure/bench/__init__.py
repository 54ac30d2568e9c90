"""Times one policy's training step: warm-up, blocks of steps, readings of the GPU."""
