"""Prints the peak of two steps whose gradients accumulate, with and without gradient management."""

import sys

import torch

from optimum_memopt.memory.peak_monitor import PeakMonitor
from tests.ort.helpers import optimize

torch.set_num_threads(1)

model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(32)))
optimize(model, ort_mem_efficient_grad_mgmt=sys.argv[1] == "managed")
batch, monitor = torch.rand(2, 1024), PeakMonitor("cpu")
for step in range(3):
    if step == 1:
        monitor.start_run()
    model(batch).mean().backward()
print(monitor.run_peak)
