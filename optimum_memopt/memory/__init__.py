"""The memory of this process and its device.

capacity      the memory that the process may use
peak_monitor  the memory that it holds, and its peak
process       settings of malloc and the garbage collector
optimizers    memory of optimizers by name
"""
