"""The memory of a training step over time.

events             event streams of storages, and folds over them
schedule           events of a partitioned graph, for any sizes
simulation         memory and events of a problem for any saved set
inductor_programs  events of inductor's programs
live               events of plain PyTorch on fake tensors
workspaces         workspaces of operators
around_runs        events of a sharded model around its graphs
tape               the runs of a forward's graphs
known_tapes        cache of the tapes of earlier calls
composition        events of a step, composed over a tape
tape_problem       a tape as one problem
eager_loss         memory of a loss outside of the forward
allocator          simulation of torch's CUDA caching allocator
footprint          memory of a step beside activations, and its limit
"""
