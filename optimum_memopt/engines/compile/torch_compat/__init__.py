"""Private names of torch and of what is traced with it, each with the versions it was seen in.

dynamo              dynamo and AOTAutograd
traced_sizes        sizes while torch traces
compiler_errors     errors of tracing, compiling and compiled graphs
fx_graph            joint graphs
inductor            inductor's compiler and programs
kernels             which kernels run, and what they hold
autograd            operators outside of graphs
autocast            autocast of a device that is not there
fake_tensors        Python on tensors without data
allocation_history  what CUDA's allocator records
recompiles          why torch compiles again
fully_shard         FSDP2
zero3               DeepSpeed's ZeRO 3
attention           transformers' masks and attention
host_masks          masks read before they are on the device
fused_lm_head       TRL's language-model head
expert_adapters     PEFT's adapters of fused experts
liger               Liger Kernel
patches             patches, and what is lost without one
releases            which patches installed releases do not take
trace_fixes         code that torch cannot trace
"""
