"""Private names of torch and of packages traced with it, each with the versions it was checked in.

dynamo              dynamo and AOTAutograd
traced_sizes        symbolic and constant sizes in a trace
compiler_errors     errors of tracing, compiling and compiled graphs
fx_graph            joint graphs
inductor            inductor's compiler and programs
kernels             which kernels run, and their memory
autograd            operators outside of graphs
autocast            CUDA's autocast on machines without a GPU
fake_tensors        Python on tensors without data
function_caches     `functools.lru_cache` filled on tensors without data
allocation_history  the history of CUDA's allocator
recompiles          reasons for recompiles
fully_shard         FSDP2
zero3               DeepSpeed's ZeRO 3
attention           transformers' masks and attention
host_masks          masks read on the host, before the transfer
fused_lm_head       TRL's language-model head
expert_adapters     PEFT's adapters of fused experts
int8_products       bitsandbytes' products with 8-bit weights
liger               Liger Kernel
patches             patches, and what is lost without one
releases            patches that do not apply to installed releases
run_ahead           a module that finds images in a text, run before the forward
trace_fixes         replacements for code that torch cannot trace
"""
