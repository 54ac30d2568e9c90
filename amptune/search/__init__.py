"""Finds the policy to measure next, and the one that wins."""
