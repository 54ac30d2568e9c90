"""From comparisons to the decision, its evidence and its findings."""
