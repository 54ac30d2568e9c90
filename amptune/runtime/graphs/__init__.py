"""Recorded training passes (CUDA graphs), and when they may be replayed in the model's place."""
