"""The parts of a training step's memory, activations and everything held beside them, and the step's limit."""

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from optimum_memopt.compat.bitsandbytes import buffers_of, named_buffers
from optimum_memopt.compat.torch import dtype_name, tensor_bytes, tensors_in
from optimum_memopt.engines.api import predictions
from optimum_memopt.engines.api.layer_paths import layer_in
from optimum_memopt.engines.api.predictions import (
    CATEGORIES,
    GRADIENTS,
    OPTIMIZER,
    OUTPUTS,
    PARAMETERS,
    SAVED,
    TEMPORARY,
    Group,
    Phase,
    StepTimeline,
)
from optimum_memopt.engines.api.run import ALONE, LargestBatch, OtherForwards, Run
from optimum_memopt.engines.simulator.allocator import AllocatorPeak, allocator_peak
from optimum_memopt.engines.simulator.devices import Device, device_at
from optimum_memopt.engines.simulator.events import StepEvents, Storage, bytes_by_category, groups, held_during
from optimum_memopt.engines.torch_compat import dynamo, fully_shard, zero3
from optimum_memopt.memory.capacity import capacity, capacity_of, host_available
from optimum_memopt.memory.optimizers import DEFAULT, Optimizer, PlannedOptimizer, planned_like, state_tensors
from optimum_memopt.memory.peak_monitor import held_bytes
from optimum_memopt.sizes import MIB, Budget

# On a CPU the process itself grows during training, by compiled code and memory that malloc keeps: by 10 to 16 MiB
# without a plan, by 23 to 26 MiB under a budget (RoBERTa, Llama, LoRA of 480 to 750 MiB). In bytes, and as a share of
# the memory that the process held before.
_GROWTH = 32 * 2**20
_GROWTH_SHARE = 0.02


@dataclass(frozen=True)
class Footprint:
    """The parts of a training step's memory, in bytes.

    Attributes:
        activations: peak of a forward and its backward above the memory held before, including the gradients that the
            backward returns.
        parameters: parameters of the model, trainable or not.
        batch: tensor arguments of the forward, for all micro-batches that are held at once.
        optimizer: optimizer states.
        accumulated: gradients of earlier micro-batches; 0 if each backward starts without gradients.
        other_forwards: activations saved by earlier forwards of the step, or by earlier graphs of a forward, whose
            backward is still to come.
        gradients: gradients of all parameters that get one, held in the optimizer's step.
        step: temporary tensors of the optimizer's step.
        outputs: the forward's outputs that the training loop still holds in the optimizer's step.
        constant: everything else held before the first step: on CUDA other tensors and workspaces, on the CPU the
            interpreter, libraries and compiled code.
        releases: whether the optimizer steps in the backward, so that `step` is held there and `gradients` is 0.
    """

    activations: int
    parameters: int
    buffers: int = 0
    batch: int = 0
    optimizer: int = 0
    accumulated: int = 0
    other_forwards: int = 0
    gradients: int = 0
    step: int = 0
    outputs: int = 0
    constant: int = 0
    releases: bool = False

    @property
    def frees_gradients(self) -> bool:
        """True if a parameter's gradient is freed once a graph's backward has returned it: it is either accumulated
        into that of earlier micro-batches, or released."""
        return self.releases or self.accumulated > 0

    def with_released_gradients(self) -> "Footprint":
        """Returns the footprint of a step that releases gradients; `step` stays as an upper bound."""
        return replace(self, gradients=0, accumulated=0, releases=True)

    def of_later_micro_batch(self) -> "Footprint":
        """Returns the footprint of a micro-batch that starts with the gradients of earlier ones."""
        return replace(self, accumulated=self.gradients)

    @property
    def peak(self) -> int:
        """Returns the higher peak of forward and backward, and of the optimizer's step."""
        always = self.constant + self.parameters + self.buffers + self.batch + self.optimizer
        return always + max(self._in_backward, self._in_optimizer)

    def activations_within(self, budget: int) -> int:
        """Returns the maximum of `activations` with which the backward is within a budget; negative if everything else
        that it holds exceeds the budget already."""
        return budget - replace(self, activations=0, gradients=0, step=self.step * self.releases, outputs=0).peak

    @property
    def _in_backward(self) -> int:
        return self.accumulated + self.other_forwards + self.activations + self.step * self.releases

    @property
    def _in_optimizer(self) -> int:
        return self.gradients + self.step + self.outputs

    def text(self, weights: str, batches: int = 1) -> str:
        """Returns the parts in MiB, as text.

        Args:
            weights: description of the parameters' dtypes.
            batches: number of micro-batches held at once.
        """
        is_in_backward = self._in_backward >= self._in_optimizer
        moment, size = "gradients and the optimizer's step", self.gradients + self.step
        if is_in_backward:
            moment, size = "activations and gradients", self.activations
        parts = {
            moment: size,
            "parameters": self.parameters + self.buffers,
            "optimizer": self.optimizer,
            "accumulated gradients": self.accumulated,
            "saved by earlier forwards": self.other_forwards if is_in_backward else 0,
            "outputs": 0 if is_in_backward else self.outputs,
            "batch" if batches == 1 else f"{batches} micro-batches": self.batch,
            "other": self.constant,
        }
        remarks = {"parameters": f" ({weights})"}
        return " + ".join(
            f"{name} {size / MIB:.1f}{remarks.get(name, '')}" for name, size in parts.items() if size or name == moment
        )


def footprint_of(
    model: torch.nn.Module,
    optimizer: Optimizer | None = None,
    gradient_accumulation: bool = False,
    activations: int = 0,
    batch: int = 0,
    constant: int = 0,
    other_forwards: int = 0,
    untrained: Collection[str] = (),
    trained: Collection[str] = (),
    releases_gradients: bool = False,
    outputs: int = 0,
) -> Footprint:
    """Returns the footprint of a model's training step.

    Args:
        optimizer: None before it exists: AdamW is assumed.
        trained: names of parameters that certainly get a gradient.
        releases_gradients: see `Run`; temporary tensors are then at most those for the largest parameter.
        outputs: see `StepEvents`.
    """
    trainable = trainable_of(model, untrained)
    # ZeRO 3 updates its flat tensors one after the other.
    flat = zero3.updated(model)
    updated = [max(flat, key=lambda tensor: tensor.nbytes)] if flat else trainable
    step = Footprint(
        activations=activations,
        parameters=local_bytes(parameters_of(model).values()),
        buffers=local_bytes(buffers_of(model)),
        batch=batch,
        optimizer=sum(state_sizes(optimizer, trainable)) + _states_to_come(model, optimizer, trained),
        accumulated=_accumulated(model, trainable) if gradient_accumulation else 0,
        other_forwards=other_forwards,
        gradients=local_bytes(updated),
        step=step_bytes(optimizer, updated),
        outputs=outputs,
        constant=constant,
    )
    if not releases_gradients:
        return step
    largest = max(([each] for each in trainable), key=local_bytes, default=[])
    return replace(step.with_released_gradients(), step=step_bytes(optimizer, largest))


def _accumulated(model: torch.nn.Module, trainable: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of earlier micro-batches' gradients: FSDP2 reduces them with those of the last micro-batch;
    0 under ZeRO 3, which preallocates memory for them.
    """
    if zero3.updated(model):
        return 0
    sharded = {id(fully_shard.local(share)) for share in fully_shard.shards(model).values()}
    return fully_shard.unreduced_bytes(model) + local_bytes(each for each in trainable if id(each) not in sharded)


def trainable_of(model: torch.nn.Module, untrained: Collection[str] = ()) -> list[torch.Tensor]:
    """Returns the parameters that get a gradient, and so optimizer states; of sharded parameters this rank's shard,
    which ZeRO 3 keeps in flat tensors of several parameters.

    Args:
        untrained: names of parameters that require a gradient but get none; see `without_gradient`.
    """
    if flat := zero3.updated(model):
        return flat
    parameters = parameters_of(model).items()
    trainable = (each for name, each in parameters if each.requires_grad and name not in untrained)
    return list(map(fully_shard.local, trainable))


def weights_by_dtype(model: torch.nn.Module) -> dict[str, int]:
    """Returns the bytes of a model's parameters by dtype name, `bfloat16`, largest first."""
    sizes: Counter[str] = Counter()
    for parameter in {id(parameter): parameter for parameter in parameters_of(model).values()}.values():
        sizes[dtype_name(parameter.dtype)] += fully_shard.local(parameter).nbytes
    return dict(sizes.most_common())


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's parameters by name; of sharded parameters this rank's shard, gathered or not."""
    return {**dict(model.named_parameters()), **fully_shard.shards(model), **zero3.shards(model)}


def constant_of(model: torch.nn.Module, batch: int, resident: int, saved_bytes: int = 0) -> int:
    """Returns the bytes that a process holds beside a model and its batch.

    Args:
        model: a model whose parameters, buffers and gradients may be fake tensors, which take no memory.
        resident: bytes that the process holds.
        saved_bytes: bytes of saved activations among `resident`.
    """
    if any(dynamo.is_fake(parameter) for parameter in model.parameters()):
        return resident
    parameters = parameters_of(model).values()
    there = local_bytes([*parameters, *buffers_of(model)]) + batch + saved_bytes
    there += local_bytes(parameter.grad for parameter in parameters if parameter.grad is not None)
    return max(0, resident - there)


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of this rank's shards of tensors, each counted once."""
    return tensor_bytes(map(fully_shard.local, tensors))


def state_sizes(optimizer: Optimizer | None, parameters: Sequence[torch.Tensor]) -> list[int]:
    """Returns the bytes of each optimizer state: the existing ones, or before the first step those that the class will
    create (AdamW's for unknown classes). Wrapped optimizers (accelerate's) expose their own states."""
    if optimizer is None or isinstance(optimizer, PlannedOptimizer) or not optimizer.state:
        return planned_like(optimizer).state_sizes(parameters)
    # Each parameter's step count is a scalar, and left out.
    tensors = {id(value): value for value in state_tensors(optimizer) if value.dim()}
    return [fully_shard.local(tensor).nbytes for tensor in tensors.values()]


def states_held(optimizer: Optimizer | None) -> int:
    """Returns the bytes of existing optimizer states; 0 before the first step."""
    if optimizer is None or isinstance(optimizer, PlannedOptimizer) or not optimizer.state:
        return 0
    return sum(state_sizes(optimizer, ()))


def _states_to_come(model: torch.nn.Module, optimizer: Optimizer | None, trained: Collection[str]) -> int:
    """Returns the bytes of states that an optimizer adds in its next step, for parameters that train for the first
    time; they are assumed to take as much per byte of parameter as the existing states."""
    if optimizer is None or isinstance(optimizer, PlannedOptimizer) or not optimizer.state:
        return 0
    groups = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    new = [each for name, each in model.named_parameters() if name in trained and id(each) in groups]
    if not (size := local_bytes(each for each in new if each not in optimizer.state)):
        return 0
    known = local_bytes(each for each in groups.values() if each in optimizer.state)
    return size * sum(state_sizes(optimizer, ())) // known if known else 0


def step_bytes(optimizer: Optimizer | None, parameters: Sequence[torch.Tensor]) -> int:
    """Returns the temporary bytes of an optimizer's step, by its class; AdamW's for unknown classes.

    AdamW has none if fused (Trainer's default), a copy of all parameters with `foreach` (torch's default on CUDA),
    else two copies of the largest parameter (`torch/optim/adam.py`, 2.13).
    """
    if isinstance(optimizer, PlannedOptimizer):
        return optimizer.step_bytes(parameters)
    if optimizer is None or not parameters:
        return 0
    if (planned := planned_like(optimizer, parameters[0].is_cuda)).name != DEFAULT:
        return planned.step_bytes(parameters)
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return 0
    if group.get("foreach") or (group.get("foreach") is None and parameters[0].is_cuda):
        return local_bytes(parameters)
    return 2 * max(tensor.nbytes for tensor in parameters)


def blocks_around(
    model: torch.nn.Module,
    optimizer: Optimizer | None,
    untrained: Collection[str],
    around: Footprint,
    step: StepEvents,
    later: StepEvents | None = None,
) -> AllocatorPeak:
    """Returns the peak of torch's allocator on CUDA.

    Args:
        untrained: names of parameters that get no gradient.
        around: the footprint of the step.
        step: the events of the first micro-batch.
        later: the events of later micro-batches, read if gradients are accumulated; None: those of `step`.
    """
    tensors = [*map(fully_shard.local, parameters_of(model).values()), *buffers_of(model)]
    return allocator_peak(
        [
            *filter(None, (around.constant, around.batch, around.other_forwards)),
            *(tensor.nbytes for tensor in tensors),
        ],
        step.events,
        state_sizes(optimizer, trainable_of(model, untrained)),
        temporary=around.step + around.outputs,
        later=(later or step).events if around.accumulated else (),
    )


def tensors_around(
    model: torch.nn.Module, optimizer: Optimizer | None = None, untrained: Collection[str] = ()
) -> tuple[Storage, ...]:
    """Returns a model's parameters and buffers, their gradients and the optimizer states, each once."""
    trainable = trainable_of(model, untrained)
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*parameters_of(model).items(), *named_buffers(model)):
        local = fully_shard.local(tensor)
        named.setdefault(id(local), (name, local))
    weights = (
        Storage(name, tensor.nbytes, PARAMETERS, dtype_name(tensor.dtype), layer_in(name))
        for name, tensor in named.values()
    )
    once = {id(each): each.nbytes for each in trainable}.values()
    gradients = (Storage(f"gradient {number}", size, GRADIENTS) for number, size in enumerate(once))
    states = (
        Storage(f"state {number}", size, OPTIMIZER) for number, size in enumerate(state_sizes(optimizer, trainable))
    )
    return (*weights, *gradients, *states)


def step_timeline(
    step: StepEvents,
    around: Footprint,
    sizes: Mapping[str, int],
    gradients: int = 0,
    counts: str = "operators",
    tensors: Sequence[Storage] = (),
) -> StepTimeline:
    """Returns a step's timeline by category, operator by operator; its peak equals `around.peak`.

    Args:
        around: the footprint of the step, with the activations of these events.
        gradients: bytes of gradients that exist from the start of the backward, but not in the forward.
        tensors: the result of `tensors_around`; names the parts of `around` that these tensors add up to.
    """
    always = {
        predictions.OTHER: around.constant,
        predictions.PARAMETERS: around.parameters + around.buffers,
        predictions.OPTIMIZER: around.optimizer,
        predictions.BATCH: around.batch,
    }
    in_graphs = {**always, GRADIENTS: around.accumulated, SAVED: around.other_forwards}
    in_optimizer = {**always, GRADIENTS: around.gradients, OUTPUTS: around.outputs, TEMPORARY: around.step}
    in_backward = {
        **in_graphs,
        GRADIENTS: around.accumulated + gradients,
        TEMPORARY: around.step if around.releases else 0,
    }
    # Bytes held during each event, including events between operators.
    first = step.forward_end
    during = [
        {name: size + (in_graphs if index <= first else in_backward).get(name, 0) for name, size in held.items()}
        for index, held in enumerate(bytes_by_category(step.events))
    ]
    totals = [sum(now.values()) for now in during]
    most = totals.index(max(totals)) if totals else -1
    # The peak may be between two operators.
    operators = [index for index, event in enumerate(step.events) if event.operator or index == most]
    shown = [*(during[index] for index in operators), {name: in_optimizer.get(name, 0) for name in CATEGORIES}]
    peaks = [sum(now.values()) for now in shown]
    at = peaks.index(max(peaks))
    base = in_optimizer if at == len(operators) else in_graphs if operators[at] <= first else in_backward
    held_at_peak = held_during(step.events, operators[at]) if at < len(operators) else ()
    alive = [*_parts(base, tensors), *groups(held_at_peak)]
    alone, count = sum(in_graphs.values()), sum(index < first for index in operators)
    before = alone + step.earlier_outputs
    # Gradients are accumulated into those of earlier micro-batches, without memory of their own.
    after = alone - in_graphs[GRADIENTS] - in_graphs[SAVED] + in_optimizer[GRADIENTS] + around.outputs
    forward, given = totals[first] if first else before, totals[first + 1] - gradients
    in_forward, later = peaks[:count], peaks[count:-1]
    return StepTimeline(
        operators=(*(step.events[index].operator for index in operators), "optimizer step"),
        layers=(*(step.events[index].layer for index in operators), ""),
        held={name: tuple(now[name] for now in shown) for name in CATEGORIES},
        backward_at=count,
        alive=tuple(sorted(alive, key=lambda group: -group.bytes)),
        phases=(
            Phase(predictions.PRE_FORWARD, before, before),
            Phase(predictions.POST_FORWARD, forward, max(in_forward, default=before)),
            Phase(predictions.PRE_BACKWARD, given, max(forward, given)),
            Phase(predictions.POST_BACKWARD, after, max(later, default=before)),
            Phase(predictions.POST_OPTIMIZER_STEP, after, sum(in_optimizer.values())),
        ),
        sizes=dict(sizes),
        counts=counts,
    )


def _parts(sizes: Mapping[str, int], tensors: Iterable[Storage]) -> Iterator[Group]:
    """Yields the groups held beside the events: a category's tensors if they add up to its size, else one total."""
    for category, size in sizes.items():
        known = [storage for storage in tensors if storage.category == category]
        if size and sum(storage.bytes for storage in known) == size:
            yield from groups(known)
        elif size:
            yield Group(category, "", 0, size)


@dataclass(frozen=True)
class StepContext:
    """The training step around its graphs.

    Attributes:
        limit: bytes that the step's peak must not exceed.
        fixed: footprint of everything but the graphs' activations, for the first batch.
        margin: bytes kept free, since earlier plans took more than predicted.
        others: see `Run`.
        aside: bytes kept free for the activations that `others` save.
        largest: the run's largest batch; None if it is not known.
        rows: see `Run`.
        micro_batches: see `Run`.
        resident: bytes that the process holds without the optimizer's states; on a CPU including room to grow.
        room: the part of `resident` that the process may still grow by.
        link: bandwidth between device and host, in bytes a second in one direction; 0: offload saves nothing.
        host: bytes of host memory that offload may take.
        gather_rate: bytes a second that a rank receives from others; 0: not known.
    """

    limit: int
    fixed: Footprint
    margin: int = 0
    others: OtherForwards = ALONE
    aside: int = 0
    largest: LargestBatch | None = None
    rows: int = 0
    micro_batches: int = 0
    resident: int = 0
    room: int = 0
    link: float = 0.0
    host: int = 0
    gather_rate: float = 0.0

    @property
    def allowed(self) -> int:
        """Returns the bytes that the graphs may hold; negative if everything else exceeds the limit already."""
        return self.fixed.activations_within(self.limit - self.margin - self.aside)


def step_around(
    model: torch.nn.Module,
    inputs: Mapping[str, object],
    budget: Budget,
    run: Run,
    target: Device | None = None,
    untrained: Collection[str] = (),
    trained: Collection[str] = (),
    resident: int | None = None,
) -> StepContext:
    """Returns the step around a graph that is being partitioned; AdamW is assumed until the optimizer exists.

    Args:
        target: the device that the step is planned for, which holds nothing else; None: the model's device.
        resident: bytes that the process held before the forward; None: as many as now.
    """
    device = next(model.parameters()).device
    memory = capacity(device) if target is None else capacity_of(target.memory)
    batch = run.batches_held * local_bytes(tensors_in(inputs))
    held, room = (0 if target is None else target.libraries), 0
    if target is None:
        resident = held_bytes(device) if resident is None else resident
        held = resident - states_held(run.optimizer) - run.earlier_forwards
        room = room_to_grow(device, held)
    held += room
    constant = constant_of(model, batch, held) + run.held_outputs.more
    fixed = footprint_of(
        model,
        run.optimizer,
        run.gradient_accumulation,
        batch=batch,
        constant=constant,
        untrained=untrained,
        trained=trained,
        releases_gradients=run.releases_gradients,
    )
    link, host = link_of(device, target)
    known = device_at(device) if target is None and device.type == "cuda" else target
    return StepContext(
        budget.on_device(memory.total, memory.available),
        fixed,
        rows=run.rows,
        micro_batches=run.micro_batches,
        others=run.others,
        resident=held,
        room=room,
        link=link,
        host=host,
        gather_rate=0.0 if known is None else known.gather_rate,
    )


def link_of(device: torch.device, target: Device | None = None) -> tuple[float, int]:
    """Returns the bytes a second to the host, 0 if offload saves nothing, and the bytes of free host memory, which
    are unlimited for another machine.

    Args:
        target: the device that is planned for; None: `device`.
    """
    if target is not None:
        return (0.0, 0) if target.cuda is None else (target.copy_rate, sys.maxsize)
    if device.type != "cuda":
        return 0.0, 0
    return device_at(device).copy_rate, host_available()


def room_to_grow(device: torch.device, held: int) -> int:
    """Returns the bytes by which the process itself may grow while it trains under a budget; 0 except on a CPU."""
    return max(_GROWTH, int(_GROWTH_SHARE * held)) if device.type == "cpu" else 0
