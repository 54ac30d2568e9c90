"""Warns of mistakes in a training loop that harm training and raise nothing."""
