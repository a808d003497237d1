"""What a whole training step holds at its peak: the graphs' activations, and all that is there beside them."""

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from optimum_memopt.engines.compile import compat
from optimum_memopt.engines.compile.memory.inductor_memory import simulate_programs
from optimum_memopt.engines.compile.memory.liveness import Prediction
from optimum_memopt.engines.compile.memory.pending import Forward, Pending, Sizes
from optimum_memopt.engines.compile.partitioned_graph import PartitionedGraph
from optimum_memopt.errors import MemOptError
from optimum_memopt.memory.peak_monitor import MIB, CudaMemory, PeakMonitor
from optimum_memopt.plans.table import canonical_symbols


@dataclass(frozen=True)
class Footprint:
    """The parts of a training step's memory, in bytes.

    Attributes:
        activations: the most that a forward and its backward hold over what was there before, with the gradients that
            the backward returns.
        parameters: of the model, trainable or not.
        buffers: of the model.
        batch: the tensors that the forward is given.
        optimizer: its states.
        accumulated: gradients that are there before the forward, 0 where each step begins without.
        other_forwards: saved by earlier forwards of the step, whose backward is still to come.
        gradients: of all trainable parameters, there in the optimizer's step.
        step: what the optimizer's step takes for its own time.
        constant: all else that was there before the first step: on CUDA other tensors and workspaces, on the CPU the
            interpreter, libraries and compiled code.
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
    constant: int = 0

    @property
    def peak(self) -> int:
        """The higher one of the forward with its backward, and the optimizer's step."""
        always = self.constant + self.parameters + self.buffers + self.batch + self.optimizer
        return always + max(self._in_backward, self.gradients + self.step)

    @property
    def _in_backward(self) -> int:
        return self.accumulated + self.other_forwards + self.activations

    def __str__(self) -> str:
        is_in_backward = self._in_backward >= self.gradients + self.step
        moment = (
            f"activations and gradients {_mib(self.activations)}"
            if is_in_backward
            else f"gradients and the optimizer's own step {_mib(self.gradients + self.step)}"
        )
        parts = {
            "parameters": self.parameters + self.buffers,
            "optimizer": self.optimizer,
            "gradients from before": self.accumulated,
            "saved by earlier forwards": self.other_forwards if is_in_backward else 0,
            "batch": self.batch,
            "other": self.constant,
        }
        return " + ".join([moment, *(f"{name} {_mib(size)}" for name, size in parts.items() if size)])


def _mib(size: int) -> str:
    return f"{size / MIB:.1f}"


def stashed_of(graphs: Sequence[Prediction]) -> int:
    """Bytes that graphs which run one after the other hold between forward and backward."""
    return sum(graph.stashed for graph in graphs) + sum(_kept_inputs(graphs))


def _kept_inputs(graphs: Sequence[Prediction]) -> list[int]:
    """Bytes of what the graph before has returned and only the backward of this one reads, for each graph."""
    before = (0, *(graph.returned for graph in graphs[:-1]))
    return [min(passed, graph.saved_inputs) for passed, graph in zip(before, graphs, strict=True)]


def activations_of(graphs: Sequence[Prediction], gradients: int = 0) -> int:
    """The peak of one forward and backward through graphs that run one after the other, in bytes.

    Exact for one graph, and for several where each reads what the one before returned and nothing runs between them.

    Args:
        gradients: there when the backward begins, and not yet in the forward.
    """
    peaks = []
    before = 0
    for index, (graph, kept) in enumerate(zip(graphs, _kept_inputs(graphs), strict=True)):
        passed = graphs[index - 1].returned if index else 0
        # What later backwards have returned: tangents of the one before each, which are counted there, and gradients.
        returned = sum(later.backward.end for later in graphs[index + 1 :])
        returned -= sum(earlier.tangents for earlier in graphs[index:-1])
        peaks.append(before + passed + graph.forward.peak.held)
        peaks.append(before + kept + graph.backward.peak.held + max(0, returned) + gradients)
        before += graph.stashed + kept
    return max(peaks)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors, each counted once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer | None, parameters: Sequence[torch.Tensor]) -> int:
    """Bytes of an optimizer's states: as they are, or AdamW's two for each trainable parameter before its first step.

    An optimizer that is wrapped (accelerate's) shows its own states.
    """
    states = [] if optimizer is None else [value for state in optimizer.state.values() for value in state.values()]
    # The step count of each parameter, a scalar on the CPU, is left out.
    tensors = [value for value in states if isinstance(value, torch.Tensor) and value.dim()]
    if optimizer is None or not optimizer.state:
        return 2 * tensor_bytes(parameters)
    return tensor_bytes(tensors)


def step_bytes(optimizer: torch.optim.Optimizer | None, parameters: Sequence[torch.Tensor]) -> int:
    """What torch's AdamW takes in its step: nothing where fused (Trainer's default); a copy of all parameters where it
    handles them together (torch's default on CUDA); else two copies of the largest (`torch/optim/adam.py`, 2.13)."""
    if optimizer is None or not parameters:
        return 0
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return 0
    if group.get("foreach") or (group.get("foreach") is None and parameters[0].is_cuda):
        return tensor_bytes(parameters)
    return 2 * max(tensor.nbytes for tensor in parameters)


def resident(device: torch.device) -> int:
    """What this process holds now, in bytes: on CUDA allocated by torch, else resident."""
    held = PeakMonitor(device).read()
    return round((held.allocated if isinstance(held, CudaMemory) else held.resident) * MIB)


def largest_shapes(seen: Iterable[Forward], new: Forward) -> tuple[Forward, ...]:
    """`seen` and `new` without those that another one covers."""
    seen = tuple(seen)
    if any(forward.covers(new) for forward in seen):
        return seen
    return (*(forward for forward in seen if not new.covers(forward)), new)


class StepMemoryPredictor:
    """Predicts a model's training step for any batch, from the graphs of its first one.

    Args:
        model: whose parameters and buffers count.
        graphs: of one training forward, in order.
        inputs: the forward's keyword arguments in the first batch.
        resident: what the process held when the graphs were made, in bytes.
        is_encoder_decoder: see `canonical_symbols`.

    Attributes:
        first: sizes of the first batch by the plan table's names, `inputs_input_ids_dim0`.
        largest_shapes: the largest forwards of the run so far.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        graphs: Sequence[PartitionedGraph],
        inputs: Mapping[str, object],
        resident: int,
        is_encoder_decoder: bool = False,
    ) -> None:
        self._unread = ""
        self._model = weakref.ref(model)
        self._graphs = graphs
        self._is_on_cuda = any(parameter.is_cuda for parameter in model.parameters())
        values = {
            name: graph.sizes[symbol]
            for graph in graphs
            for symbol, name in graph.names.items()
            if symbol in graph.sizes
        }
        self._canonical = canonical_symbols(values, is_encoder_decoder)
        self.first: Sizes = {self._canonical[name]: value for name, value in values.items()}
        self.largest_shapes: tuple[Forward, ...] = (Forward(self.first),)
        self._pending = Pending()
        self._saved = [sympy.Add(*dict(filter(None, graph.saved_for_backward.values())).values()) for graph in graphs]
        self._batch = tensor_bytes(value for value in inputs.values() if isinstance(value, torch.Tensor))
        there = tensor_bytes([*model.parameters(), *model.buffers()]) + self._batch
        there += tensor_bytes(one.grad for one in model.parameters() if one.grad is not None)
        # Graphs before the last have run by then.
        there += sum(graph.prediction.stashed for graph in graphs[:-1])
        # Tensors without data hold nothing.
        fake = any(compat.is_fake(one) for one in model.parameters())
        self._constant = resident if fake else max(0, resident - there)

    @property
    def caveat(self) -> str:
        """Why the activations are not exact, empty where they are."""
        kernels = []
        if any(graph.has_convolutions for graph in self._graphs):
            kernels.append("convolutions")
        if self._is_on_cuda:
            kernels.append("CUDA's libraries")
        reasons = (
            self._unread,
            f"not exact: {len(self._graphs)} graphs, and what runs between them is not counted"
            if len(self._graphs) > 1
            else "",
            f"without the workspaces of {' and '.join(kernels)}" if kernels else "",
        )
        return "; ".join(filter(None, reasons))

    def saw(self, inputs: Mapping[str, object], outputs: object = None) -> None:
        """Note a training forward.

        Args:
            inputs: its keyword arguments.
            outputs: what it has returned, by which is known when its backward has run.
        """
        sizes = {
            self._canonical[f"{name}_dim{index}"]: size
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor)
            for index, size in enumerate(value.shape)
            if f"{name}_dim{index}" in self._canonical
        }
        earlier = list(self._pending)
        new = Forward({**self.first, **sizes}, sum(self.saved(forward.sizes) for forward in earlier))
        self.largest_shapes = largest_shapes(self.largest_shapes, new)
        if earlier:
            self.largest_shapes = largest_shapes(self.largest_shapes, replace(earlier[-1], is_followed=True))
        self._pending.add(new, outputs)

    def saved(self, sizes: Sizes | None = None) -> int:
        """Bytes that a forward saves for its backward; sizes as in `footprint`."""
        wanted = {**self.first, **(sizes or {})}
        if len(self._graphs) > 1:
            return stashed_of(self.graphs(wanted))
        pairs = zip(self._graphs, self._saved, strict=True)
        return sum(int(saved.subs(self._values(graph, wanted))) for graph, saved in pairs)

    def activations(self, sizes: Sizes | None = None) -> int:
        """The most that a forward and its backward hold, in bytes; see `footprint`."""
        return activations_of(self.graphs(sizes))

    def graphs(self, sizes: Sizes | None = None) -> list[Prediction]:
        """Each graph alone; see `footprint`."""
        return [self._predict(graph, {**self.first, **(sizes or {})}) for graph in self._graphs]

    def footprint(
        self,
        sizes: Sizes | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        gradient_accumulation: bool = False,
        saved_before: int = 0,
        is_followed: bool = False,
    ) -> Footprint:
        """What a training step holds, nothing run or traced.

        Args:
            sizes: by the plan table's names; those left out, and None, are of the first batch.
            optimizer: None, or one that has not stepped yet, counts as AdamW with two states for each parameter.
            gradient_accumulation: gradients of earlier micro-batches are in memory.
            saved_before: bytes that earlier forwards hold for the same backward, see `saved`.
            is_followed: another forward runs before the backward, see `Forward`.

        Raises:
            MemOptError: a size that the model's graphs do not have, or that is not positive.
        """
        wanted = {**self.first, **(sizes or {})}
        for name, size in wanted.items():
            if name not in self.first or size < 1:
                raise MemOptError(f"size {name}={size}: allowed are numbers from 1 on for {', '.join(self.first)}")
        model = self._model()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        weights = tensor_bytes(trainable)
        growth = math.prod(wanted[name] / size for name, size in self.first.items())
        return Footprint(
            activations=activations_of(self.graphs(wanted), weights if is_followed else 0),
            parameters=tensor_bytes(model.parameters()),
            buffers=tensor_bytes(model.buffers()),
            batch=round(self._batch * growth),
            optimizer=optimizer_bytes(optimizer, trainable),
            accumulated=weights if gradient_accumulation else 0,
            other_forwards=saved_before,
            gradients=weights,
            step=step_bytes(optimizer, trainable),
            constant=self._constant,
        )

    def peak(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> int:
        """The highest of all steps so far, in bytes; see `footprint`."""
        return max(
            self.footprint(seen.sizes, optimizer, gradient_accumulation, seen.saved_before, seen.is_followed).peak
            for seen in self.largest_shapes
        )

    def _predict(self, graph: PartitionedGraph, sizes: Sizes) -> Prediction:
        values = self._values(graph, sizes)
        found = graph.prediction if values == graph.sizes else graph.predict(values)
        if graph.programs.forward is None or graph.programs.backward is None:
            return found
        try:
            run = simulate_programs(graph.programs, graph.saved_for_backward, found.stashed, values)
            return replace(found, forward=run.forward, backward=run.backward)
        except Exception as error:
            # How inductor writes its programs is no promise to anybody, and training goes on without knowing.
            self._unread = f"without inductor's fusions, whose program cannot be read ({type(error).__name__})"
            return found

    def _values(self, graph: PartitionedGraph, sizes: Sizes) -> dict[sympy.Symbol, int]:
        named = {symbol: self._canonical.get(name) for symbol, name in graph.names.items()}
        return {symbol: sizes.get(named.get(symbol), first) for symbol, first in graph.sizes.items()}
