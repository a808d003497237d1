"""Predicts training steps: before training, while planning, and after an out-of-memory error.

step_predictor   predicts the steps of a model that trains or is planned
pending          forwards whose backward has not run yet
loss_simulation  a loss computed outside of the forward, on fake tensors
table            the plan table and the plan file
planner          chooses plans, and re-plans until a step fits
step_limit       the limit on the bytes of steps
plan_cache       plans of budgets, cached for the next start
planned_step     a step traced on fake tensors for any device
plain_step       a step of plain PyTorch on fake tensors
estimate         `memopt plan`: table, peak, curve, ways, largest batch
micro_batches    `memopt advise`: any micro-batch from one trace
reconstruction   re-runs a step that ran out of memory on fake tensors
explain          what such a step held, and what would have fit
"""
