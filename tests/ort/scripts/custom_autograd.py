"""Trains through a torch.autograd.Function, and refuses it with `--ort_custom_autograd false`."""

import torch

from optimum_memopt import UnsupportedModelError
from tests.gradients import assert_same_step
from tests.ort.compat_models import Custom
from tests.ort.helpers import MLM, optimize

refused, trained, off = Custom(), Custom(), MLM.build()
engines = optimize(refused, ort_custom_autograd=False), optimize(trained), optimize(off, ort_custom_autograd=False)
for _ in range(2):
    try:
        refused(torch.ones(2, 3))
    except UnsupportedModelError as error:
        assert str(error).endswith(
            "torch extensions; leave out --ort_custom_autograd false, or give --memory_opt_engine compile"
        ), error
    else:
        raise AssertionError("trained with an inlined function")
trained(torch.ones(2, 3)).sum().backward()
assert torch.equal(trained.linear.bias.grad, torch.full((4,), 6.0))
assert_same_step(off, MLM.build(), MLM.batch())
