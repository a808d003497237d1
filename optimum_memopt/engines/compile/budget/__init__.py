"""Solves for the cheapest recompute under which a step's exact peak is within a budget of bytes."""
