"""Private names of other libraries that the package needs beside those of its engines, a file a library.

torch         modules and their hooks, tensors, the backward, the process group
transformers  a Trainer's batches and outputs, models, activation checkpointing
accelerate    sharding that is asked for, outputs
bitsandbytes  weights of 4 bits
deepspeed     parameters that ZeRO 3 has sharded
installed     versions
"""
