"""What operators cost, on this machine or on a named device.

work      bytes moved, floating point operations, kind of kernel
devices   rates of devices
fusion    what inductor computes in one kernel
inlining  results that inductor holds nowhere
costs     seconds by a roofline model
times     measured seconds, their cache, and the optimizer's
"""
