"""What a Trainer does around its steps.

batches         batches, their largest sizes, the micro-batch
loss_step       a loss outside of the model
fake_run        a run on tensors without data
compat_dry_run  private names that a dry run changes
"""
