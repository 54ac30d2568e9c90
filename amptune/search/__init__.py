"""Finds the policy to measure next, and the one that wins."""

from amptune.errors import require_tune

require_tune()
