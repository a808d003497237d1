"""Traces, partitions and compiles a training forward.

backend         AOTAutograd with the engine's partitioner
forward_call    arguments of a call, and its kind
traced_graph    graphs traced by dynamo, the choices for each, the state of a running forward
variants        graphs partitioned and compiled, once for each choice
traced_forward  a forward, traced once for each kind of call
layer_groups    equal layers, and other modules that are compiled separately
regions         equal layers, compiled once
error_probe     the error of activations saved in fp8
gradient_probe  the error that these cause in gradients
layer_inputs    offload and recompute of tensors that pass between layers
moved_state     state that changes between a forward and its backward
ranks           stand-ins for absent ranks
capture         a forward traced on fake tensors without running it
"""
