"""Every timing as a row, the model of all rows, and the verdict that follows from it. Pure."""
