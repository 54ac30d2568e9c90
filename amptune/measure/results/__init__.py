"""The values that measuring returns. No machine, no clock, no files."""
