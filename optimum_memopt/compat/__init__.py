"""Private names of other libraries, one file per library; engines have compat files of their own.

torch         modules and their hooks, tensors, the backward, the process group
transformers  a Trainer's batches and outputs, models, activation checkpointing
accelerate    configured sharding and parallelism
bitsandbytes  weights of 4 and 8 bits
deepspeed     parameters sharded by ZeRO 3
installed     versions of packages
python        CPython's data stack
"""
