"""The study: which policy to measure next, and where trials are stored."""
