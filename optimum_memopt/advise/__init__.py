"""Which micro-batch and which plan train fastest within a budget."""
