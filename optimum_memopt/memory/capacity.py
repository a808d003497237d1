"""How much memory a process may take."""

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

# Limits of a container's memory: version 2 of control groups, and version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# Of what is free, the share that tensors get: torch's caching allocator holds 4 to 23% more than is allocated
# (RoBERTa, Llama with recompute; torch 2.13).
_ALLOCATED = 0.85


@dataclass(frozen=True)
class Capacity:
    """Memory of a device, in bytes.

    Attributes:
        total: all that this process may take.
        available: what a training run may take, with what this process holds already, less what allocators waste.
    """

    total: int
    available: int


def capacity(device: torch.device) -> Capacity:
    """Of a CUDA device, or of the host."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Capacity(total, int((free + torch.cuda.memory_reserved(device)) * _ALLOCATED))
    memory = psutil.virtual_memory()
    total = min(memory.total, *_host_limits(memory.total))
    own = psutil.Process().memory_info().rss
    return Capacity(total, min(total, memory.available + own))


def capacity_of(total: int) -> Capacity:
    """Of a device that is not here and runs nothing else.

    Args:
        total: its memory, bytes.
    """
    return Capacity(total, int(total * _ALLOCATED))


def _host_limits(otherwise: int) -> list[int]:
    limits = [otherwise]
    for path in _LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    return limits if address_space == resource.RLIM_INFINITY else [*limits, address_space]
