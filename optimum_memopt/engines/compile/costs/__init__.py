"""Costs of operators, on this machine or on a named device.

work      bytes moved, floating point operations, kind of kernel
devices   rates of devices
fusion    operators that inductor computes in one kernel
inlining  results that inductor never stores
costs     seconds per operator, measured or by a roofline model
times     measured seconds, their cache, and the optimizer's
"""
