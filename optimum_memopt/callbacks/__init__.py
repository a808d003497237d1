"""Trainer callbacks that observe a run, one per file, and their outputs.

plan_stats     the plan table, and finally its claimed saving and the measured peak
input_density  the share of each batch that is not padding
memory_phases  memory at the boundaries of forward, backward and the optimizer's step
reporting      output to the log, the log file and the trackers
"""
