"""The knobs of a policy: a file for each, or for a few that belong together, says all that is known of it."""
