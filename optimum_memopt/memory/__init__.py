"""The memory of this process and its device.

capacity      what the process may take
peak_monitor  what it holds, and its peak
process       malloc and the garbage collector
optimizers    bytes of optimizers by their names
"""
