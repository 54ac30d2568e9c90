"""Measures what a policy costs, and what it does to numbers."""
