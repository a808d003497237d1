"""The simulator: steps of plain PyTorch on tensors without data, for a device that need not be present.

events         event streams of storages, and folds over them
recorder       records the events of a step
live_run       the recorded step
trainer_step   a model's forwards and backwards, as Trainer runs them
user_step      any step
standins       stand-ins for an absent device
devices        rates and memory of devices
work           bytes moved and floating point operations of operators
workspaces     workspaces of operators
own_operators  the sizes of operators that this package defines
allocator      simulation of torch's CUDA caching allocator
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimum_memopt.engines.simulator.user_step import Simulator


def simulated(device: str | None) -> "AbstractContextManager[Simulator]":
    """Returns a context with a simulator of any step, in which tensors have no data.

    Args:
        device: device whose operators and allocator are simulated, such as `h100` or a JSON file; None: this
            machine's.

    Raises:
        MemOptError: an unknown device.
    """
    # Imports torch's compilers.
    from optimum_memopt.engines.simulator.user_step import simulator_of

    return simulator_of(device)
