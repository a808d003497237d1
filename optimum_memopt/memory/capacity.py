"""How much memory a process may take."""

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.memory.control_groups import control_groups

_ON_HOST = "LOCAL_WORLD_SIZE"
# Of the machine's files.
_ROOT = Path("/")
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
    """Of a CUDA device, or this process's share of the host.

    Raises:
        MemOptError: `LOCAL_WORLD_SIZE` is no number of processes.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Capacity(total, int((free + torch.cuda.memory_reserved(device)) * _ALLOCATED))
    memory, processes, groups = psutil.virtual_memory(), _processes(), control_groups(_ROOT)
    host = min([memory.total, *(group.limit for group in groups)])
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    total = host // processes if address_space == resource.RLIM_INFINITY else min(host // processes, address_space)
    own = psutil.Process().memory_info()
    free = memory.available // processes + own.rss
    # What is shared is files mostly, libraries among them, which are in no group's `held`.
    in_groups = ((group.limit - group.held) // processes + own.rss - own.shared for group in groups)
    return Capacity(total, max(0, min(total, free, *in_groups)))


def host_available() -> int:
    """Bytes of the host's memory that this process may still take."""
    return capacity(torch.device("cpu")).available - psutil.Process().memory_info().rss


def capacity_of(total: int) -> Capacity:
    """Of a device that is not here and runs nothing else.

    Args:
        total: its memory, bytes.
    """
    return Capacity(total, int(total * _ALLOCATED))


def _processes() -> int:
    """How many a launcher has started on this host; torchrun, accelerate and DeepSpeed tell each of them."""
    text = os.environ.get(_ON_HOST, "").strip()
    if text and re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) is None:
        raise MemOptError(
            f"{_ON_HOST}={excerpt(text)}: allowed are whole numbers from 1 on, the processes on this host; launchers "
            "set it, unset it for a single process"
        )
    return int(text or 1)
