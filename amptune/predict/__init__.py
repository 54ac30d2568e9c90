"""What a training step should cost on a GPU that is not here: predicted from shapes, never measured."""
