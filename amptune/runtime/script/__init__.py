"""Training scripts that run unchanged: what they do is seen by hooks, and policies are applied in place."""
