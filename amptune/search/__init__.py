"""What to try next, and which policy wins."""
