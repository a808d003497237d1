"""The namespace of this engine's custom operators: `torch.ops.optimum_memopt`."""

LIBRARY = "optimum_memopt"
