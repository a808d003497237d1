"""Parameters that ranks share: what each rank gathers and reduces, and when.

model         which of these shards a model
fsdp2         what FSDP2 holds around a forward's graphs
zero3         what ZeRO 3 holds around a forward's graphs, with what runs outside of the layers
gathering     what ZeRO 3 gathers and reduces
leaf_layers   layers under ZeRO 3's hooks
"""
