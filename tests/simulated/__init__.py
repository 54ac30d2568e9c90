"""Machines that are nowhere: a recorded H200, and a landscape of policies whose truth is known, in simulated time."""
