"""Support for training frameworks. Each module imports its framework; no other part of amptune imports them."""
