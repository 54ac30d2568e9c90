"""Changes that knobs make, each with the way back: flags of the process, layouts of tensors, compiled blocks."""
