"""What knobs change, each with the way back: flags of the process, the layout of tensors, blocks that are compiled."""
