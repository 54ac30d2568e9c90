"""Trials, rounds and ratios, and the verdict that follows from them. Pure."""
