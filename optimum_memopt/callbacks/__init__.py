"""Observers of a training run, one a file, and where they report to.

plan_stats     the plan table, and at the end what it claimed beside what was measured
input_density  the share of each batch that is padding
memory_phases  memory at the borders of forward, backward and the optimizer's step
reporting      the log, the log file, the trackers
"""
