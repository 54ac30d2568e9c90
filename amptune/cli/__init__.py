"""The commands: arguments in, text and exit code out."""
