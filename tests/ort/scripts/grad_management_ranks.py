"""Trains two ranks under DDP and compares them with each other and with plain PyTorch."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from optimum_memopt import MemOptError
from tests.ort.helpers import MLM, optimize
from tests.trainer_runs import make

torch.set_num_threads(1)

dist.init_process_group("gloo")
rank, case = dist.get_rank(), MLM
model, plain = case.build(), case.build()
optimize(model, ort_mem_efficient_grad_mgmt=True)
vectors = []
for trained in (model, plain):
    parallel, optimizer = DistributedDataParallel(trained), torch.optim.SGD(trained.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        with parallel.no_sync():
            parallel(**case.batch(seed=20 * step + 5 + rank)).loss.backward()
        parallel(**case.batch(seed=20 * step + rank)).loss.backward()
        optimizer.step()
    vectors.append(torch.nn.utils.parameters_to_vector(trained.parameters()).detach())
gathered = [torch.empty_like(vectors[0]) for _ in range(2)]
dist.all_gather(gathered, vectors[0])
assert torch.equal(*gathered)
torch.testing.assert_close(vectors[0], vectors[1], rtol=1e-5, atol=1e-6)

# Under a Trainer, DDP searches the autograd graph for unused parameters, and managed ones are not in it.
try:
    make(sys.argv[1], "roberta-mlm", ort_mem_efficient_grad_mgmt=True)
except MemOptError as error:
    assert "add --ddp_find_unused_parameters false" in str(error), error
else:
    raise AssertionError("not refused")
make(sys.argv[1], "roberta-mlm", ort_mem_efficient_grad_mgmt=True, ddp_find_unused_parameters=False).train()
print("rank", rank, "is done", flush=True)
os._exit(0)  # gloo's threads sometimes abort the interpreter's shutdown.
