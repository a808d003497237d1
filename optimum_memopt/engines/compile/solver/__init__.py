"""Finds the cheapest nodes to save within a budget. Pure except for HiGHS.

cut              recompute or save, as an integer program
blocks           groups of operators that can be planned alone
dynamic_program  picks a point of each block's frontier
offload          which activations are worth a copy
compression      which activations are worth a conversion
segments         layers that are recomputed together
solver           the solver, and the curve of budgets
forward_solver   solves all graphs of a forward together
"""
