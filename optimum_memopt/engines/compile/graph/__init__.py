"""The joint graph of forward and backward, read and not run. Pure.

symbols            symbolic sizes as integer arithmetic
joint              storages: what allocates each, who reads it
saved_activations  what the backward reads of the forward
naming             cluster ids
candidates         what a strategy can take out of memory
layouts            the order in memory of gradients between graphs
state_copies       copies of state that a backward recomputes from
analyzed_graph     a graph with all of that
problem            the same as numbers, for solver and simulation
"""
