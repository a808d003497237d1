"""Costs of operators, on this machine or on a named device.

graph_work  the work of a graph's nodes
fusion      operators that inductor computes in one kernel
inlining    results that inductor never stores
costs       seconds per operator, measured or by a roofline model
times       measured seconds, their cache, and the optimizer's
"""
