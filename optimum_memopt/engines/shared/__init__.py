"""Code shared by all engines.

registry            engines by name, and `auto`
in_place            the life cycle of an engine on a model
forward_patch       patches of a model's forward, checkpointing and key-value cache
function_state      saves and restores the state that a script's hooks and forwards hold
label_smoothing     the Trainer's label smoothing, in the forward
released_gradients  the optimizer's step in the backward
optimizers          AdamW of other libraries
"""
