"""From the verdict to the decision, its evidence and its findings."""
