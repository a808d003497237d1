"""The engine during training.

engine           CompileEngine
batch_kind       which batches run the same graphs
length_buckets   compiled forwards by length
planned_forward  a forward under one plan
outputs_watch    how long a training loop holds the model's outputs
host_watch       whether the device waits for Python
loss_watch       memory that a training loop takes for its loss
"""
