"""What amptune does, recorded once, and the program that holds the tree against it: `python -m frozen --help`."""
