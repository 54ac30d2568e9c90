"""What amptune did, recorded once, and the program that holds the tree against it: `python -m frozen --help`."""
