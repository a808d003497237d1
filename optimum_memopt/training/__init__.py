"""Trainer-side code: batches, custom losses, dry runs.

batches         sample order, largest batch, micro-batch size
loss_step       losses computed outside of the model
fake_run        a run simulated on tensors without data
compat_dry_run  private names that a dry run patches
"""
