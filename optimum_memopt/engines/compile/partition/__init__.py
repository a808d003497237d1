"""Choices of what to save, recompute, offload and compress, and their implementation.

producers          classes that make a choice
strategies         graph rewrites for recompute, offload and compression
choice             Choice, and the nodes that it saves
output_gradients   gradients of outputs other than the loss, which most loops never compute
accumulation       in-place gradient accumulation inside a backward
partitioned_graph  a joint graph split according to a choice
dropout            dropout with masks that can be recomputed
host_copies        pinned memory for offload
conversions        the operators that compression adds to a graph, as numbers
captured_graph     a graph that can be queried for other plans and batch sizes
captured_forward   the graphs of a forward, for any batch size
step_model         predicts a step's peak under a plan, and finds plans that fit
"""
