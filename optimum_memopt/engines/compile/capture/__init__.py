"""A training forward as torch traces it.

backend         AOTAutograd with the engine's partitioner
forward_call    arguments of a call, and its kind
traced_graph    dynamo's graphs, the choices for each, the forward while it runs
variants        graphs partitioned and compiled, once for each choice
traced_forward  a forward that is traced once for each kind of call
regions         equal layers, compiled once
error_probe     the error of activations that are saved in fp8
gradient_probe  the error of gradients under these
layer_inputs    what passes between layers, offloaded or recomputed
moved_state     state that changes between a forward and its backward
standins        a device or ranks that are not there
capture         a forward that is traced on fake tensors, and not run
"""
