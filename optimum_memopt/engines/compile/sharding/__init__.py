"""Sharded models: the parameters that each rank gathers, the gradients that it reduces, and when.

model         the sharding method of a model
fsdp2         memory of FSDP2 around a forward's graphs
zero3         memory of ZeRO 3 around a forward's graphs, and of operators outside of the layers
gathering     ZeRO 3's gathers and reductions
leaf_layers   layers as ZeRO 3 leaf modules
"""
