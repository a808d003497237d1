"""The memory of a training step over time.

graph_events       events of a graph's forward and backward
schedule           events of a partitioned graph, for any sizes
simulation         memory and events of a problem for any saved set
inductor_programs  events of inductor's programs
around_runs        events of a sharded model around its graphs
tape               the runs of a forward's graphs
known_tapes        cache of the tapes of earlier calls
composition        events of a step, composed over a tape
tape_problem       a tape as one problem
eager_loss         memory of a loss outside of the forward
footprint          memory of a step beside activations, and its limit
"""
