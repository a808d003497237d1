"""Steps predicted: before training, while it plans, after it ran out of memory.

step_predictor   the steps of a model that trains or is planned
pending          forwards whose backward is still to come
loss_simulation  a loss outside of the forward, on fake tensors
table            the plan table and the plan file
planner          chooses, and chooses again until a step fits
step_limit       the bytes that steps may take
plan_cache       plans of budgets, kept for the next start
planned_step     a step that is traced for a device that may not be here
live_step        a step of plain PyTorch
estimate         `memopt plan`: table, peak, curve, ways, largest batch
micro_batches    `memopt advise`: any micro-batch from one trace
reconstruction   a step that ran out of memory, run again on fake tensors
explain          what it held, and what would have fit
"""
