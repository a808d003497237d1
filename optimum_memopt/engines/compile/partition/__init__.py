"""Choices, and how they are carried out.

producers          who makes a choice
strategies         what recompute, offload and compression do to a graph
choice             Choice, and the nodes that it saves
output_gradients   gradients of outputs beside the loss, which most loops never compute
partitioned_graph  a joint graph split as a choice says
dropout            masks that are recomputed
host_copies        pinned memory for offload
conversions        what compression adds to a graph, as numbers
captured_graph     a graph that can be asked about other plans and batches
captured_forward   the graphs of a forward, for any batch
step_model         a step that can be asked what a plan takes, and which plan fits
"""
