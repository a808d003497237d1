"""What a step holds, and when.

events             the stream of events, and folds over it
simulation         events of a problem under any saved set
inductor_programs  events of inductor's programs
live               events of plain PyTorch on fake tensors
workspaces         what an operator holds while it runs
around_runs        what a sharded model holds around its graphs
tape               the runs of a forward's graphs
known_tapes        tapes of earlier calls
composition        events composed over a tape
tape_problem       a tape as one problem
eager_loss         a loss outside of the forward
allocator          CUDA's caching allocator
footprint          what a step holds beside activations, and its limit
"""
