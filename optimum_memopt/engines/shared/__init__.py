"""What all engines share.

registry            engines by name, and `auto`
in_place            the life cycle of an engine on a model
forward_patch       a model's forward, checkpointing, key-value cache
function_state      what hooks and forwards of a script hold
label_smoothing     the Trainer's label smoothing, in the forward
released_gradients  the optimizer in the backward
optimizers          AdamW of other libraries
"""
