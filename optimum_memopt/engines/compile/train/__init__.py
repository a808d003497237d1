"""The engine while it trains.

engine           CompileEngine
batch_kind       which batches run the same graphs
length_buckets   compiled forwards by length
planned_forward  a forward under one plan
outputs_watch    how long a loop holds the model's outputs
loss_watch       what a loop computes from them
"""
