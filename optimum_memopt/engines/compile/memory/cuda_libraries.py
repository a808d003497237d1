"""What CUDA's libraries hold for as long as a process trains."""

import torch


def start_libraries(device: torch.device) -> None:
    """Have cuBLAS allocate its workspaces on a CUDA device now, so that they count among what the process holds.

    torch gives it one a thread and stream (`aten/src/ATen/cuda/CublasHandlePool.cpp`; 32 MiB each on an H100): here
    for the thread that runs forwards, and for autograd's thread of the device.

    Args:
        device: nothing is done for one that is no CUDA device of this machine.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        weight = torch.ones(8, 8, device=device, requires_grad=True)
        bias = torch.ones(8, device=device)
        torch.nn.functional.linear(weight, weight, bias).sum().backward()
