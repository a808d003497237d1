"""The cheapest nodes to save within a budget. Pure but for HiGHS.

cut              recompute or save, as an integer program
blocks           what can be planned alone
dynamic_program  a point of each block's frontier
offload          which activations are worth a copy
compression      which activations are worth a conversion
segments         layers that are recomputed together
solver           the solver, and the curve of budgets
forward_solver   all graphs of a forward together
"""
