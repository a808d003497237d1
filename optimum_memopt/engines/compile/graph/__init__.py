"""Analysis of the joint graph of forward and backward, without running it. Pure.

symbols            symbolic sizes as integer arithmetic
joint              storages: their allocating operators, readers and sizes
saved_activations  storages of the forward that the backward reads
naming             cluster ids
candidates         saved activations that a strategy can take out of memory
layouts            memory layouts of the gradients that pass between graphs
state_copies       copies of state that a backward recomputes from
analyzed_graph     a graph with the results of its analysis
problem            a graph as numbers, for solver and simulation
"""
