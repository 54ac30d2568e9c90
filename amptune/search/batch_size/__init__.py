"""The largest batch that fits, and the batch sizes to search."""
