"""Times the user's own training loop under a policy."""
