"""The training step around its graphs: what is held beside them, and what all of it may take."""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from optimum_memopt.engines.api.run import LargestBatch, Run
from optimum_memopt.engines.compile.costs.devices import Device, device_at
from optimum_memopt.engines.compile.memory.footprint import (
    Footprint,
    constant_of,
    footprint_of,
    state_sizes,
    tensor_bytes,
    trainable_of,
)
from optimum_memopt.memory.capacity import capacity, capacity_of, host_available
from optimum_memopt.memory.optimizers import PlannedOptimizer
from optimum_memopt.memory.peak_monitor import held_bytes
from optimum_memopt.sizes import Budget

# On a CPU the process itself grows while it trains, by compiled code and what malloc keeps: by 10 to 16 MiB without a
# plan, by 23 to 26 under a budget (RoBERTa, Llama, LoRA of 480 to 750 MiB). Bytes, and a share of what it held.
_GROWTH = 32 * 2**20
_GROWTH_SHARE = 0.02


@dataclass(frozen=True)
class StepContext:
    """The training step around its graphs.

    Attributes:
        limit: bytes that its peak must not pass.
        fixed: all that it holds beside the graphs' activations, with the first batch.
        margin: bytes that stay free, for what earlier plans took beyond their prediction.
        largest: the run's largest batch, None where it is not known.
        resident: what the process holds without the optimizer's states, in bytes; on a CPU with room to grow.
        room: bytes of it that the process may still grow by.
        link: between the device and the host, bytes a second in one direction; 0: offload saves nothing.
        host: bytes that offload may take of the host's memory.
        gather_rate: bytes a second that a rank gets from others; 0: not known.
    """

    limit: int
    fixed: Footprint
    margin: int = 0
    largest: LargestBatch | None = None
    resident: int = 0
    room: int = 0
    link: float = 0.0
    host: int = 0
    gather_rate: float = 0.0

    @property
    def allowed(self) -> int:
        """Bytes that the graphs may hold; negative where the rest passes the limit alone."""
        return self.fixed.activations_within(self.limit - self.margin)

    def footprint(self, activations: int) -> Footprint:
        """The step with graphs that hold so much."""
        return replace(self.fixed, activations=activations)


def step_around(
    model: torch.nn.Module,
    inputs: Mapping[str, object],
    budget: Budget,
    run: Run,
    target: Device | None = None,
    untrained: Collection[str] = (),
) -> StepContext:
    """The step around a graph that is being partitioned, with AdamW until there is another optimizer.

    Args:
        target: the device that the step is planned for, which holds nothing else; None: where the model lies.
    """
    device = next(model.parameters()).device
    memory = capacity(device) if target is None else capacity_of(target.memory)
    batch = tensor_bytes(value for value in inputs.values() if isinstance(value, torch.Tensor))
    trainable = trainable_of(model, untrained)
    held, room = (0 if target is None else target.libraries), 0
    if target is None:
        # Before its first step an optimizer has no states.
        is_stepped = not isinstance(run.optimizer, PlannedOptimizer | None) and run.optimizer.state
        held = held_bytes(device) - (sum(state_sizes(run.optimizer, trainable)) if is_stepped else 0)
        room = room_to_grow(device, held)
    held += room
    constant = constant_of(model, batch, held)
    fixed = footprint_of(
        model, run.optimizer, run.gradient_accumulation, batch=batch, constant=constant, untrained=untrained
    )
    link, host = link_of(device, target)
    known = device_at(device) if target is None and device.type == "cuda" else target
    return StepContext(
        budget.on_device(memory.total, memory.available),
        fixed,
        resident=held,
        room=room,
        link=link,
        host=host,
        gather_rate=0.0 if known is None else known.gather_rate,
    )


def link_of(device: torch.device, target: Device | None = None) -> tuple[float, int]:
    """Bytes a second to the host, 0 where offload saves nothing, and the host's bytes: what is free now, or any on a
    machine not known.

    Args:
        target: that is planned for; None: `device`.
    """
    if target is not None:
        return (0.0, 0) if target.cuda is None else (target.copy_rate, sys.maxsize)
    if device.type != "cuda":
        return 0.0, 0
    return device_at(device).copy_rate, host_available()


def room_to_grow(device: torch.device, held: int) -> int:
    """Bytes by which the process itself grows while it trains under a budget."""
    return max(_GROWTH, int(_GROWTH_SHARE * held)) if device.type == "cpu" else 0
