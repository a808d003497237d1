"""Why a prediction is not exact, in words. Pure."""

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import sympy
import torch

from optimum_memopt.compat import is_encoder_decoder
from optimum_memopt.engines.api.engine import Run
from optimum_memopt.engines.api.predictions import StepTimeline
from optimum_memopt.engines.compile.graph.analyzed_graph import without_gradient
from optimum_memopt.engines.compile.graph.symbols import SymbolNames, input_sizes, plain_sizes
from optimum_memopt.engines.compile.memory.allocator import AllocatorPeak, StepRequests, allocator_peak
from optimum_memopt.engines.compile.memory.footprint import (
    Footprint,
    constant_of,
    footprint_of,
    state_sizes,
    tensor_bytes,
    trainable_of,
)
from optimum_memopt.engines.compile.memory.graph_run import GraphRun, run_of_graphs, run_of_requests
from optimum_memopt.engines.compile.memory.inductor_memory import simulate_programs
from optimum_memopt.engines.compile.memory.step_timeline import PredictedRun, step_timeline
from optimum_memopt.engines.compile.memory.timeline import GraphTimeline, Prediction
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.predict.pending import BatchSizes, Forward, Pending, largest_shapes
from optimum_memopt.errors import MemOptError
from optimum_memopt.memory.optimizers import Optimizer


def caveat_of(graphs: Sequence[PartitionedGraph], runs: int, bound: Mapping[str, int], programs: str = "") -> str:
    """Empty where it is exact.

    Args:
        graphs: of one forward.
        runs: of all graphs together.
        bound: sizes by name, which the graphs may not be for where they are others.
        programs: what is wrong with inductor's.
    """
    kernels = []
    if any(graph.has_convolutions for graph in graphs):
        kernels.append("convolutions")
    if any("cuDNN" in graph.attention for graph in graphs):
        kernels.append("cuDNN's attention")
    shown = ", ".join(f"{name}={size}" for name, size in bound.items())
    reasons = (
        programs,
        _outside_of(graphs, runs),
        f"only for {shown}, since others may be traced again" if shown else "",
        f"without the workspaces of {' and '.join(kernels)}" if kernels else "",
        "without what oneDNN keeps for each shape in half precision"
        if any(graph.has_half_products for graph in graphs)
        else "",
        "as if every token had a label" if any(graph.chunks_loss for graph in graphs) else "",
    )
    return "; ".join(filter(None, reasons))


def _outside_of(graphs: Sequence[PartitionedGraph], runs: int) -> str:
    if runs == 1 and graphs[0].is_all_of_forward:
        return ""
    count = len(graphs)
    in_runs = f" in {runs} runs" if runs > count else ""
    several, them = ("s", "them") if count > 1 else ("", "it")
    return f"not exact: {count} graph{several}{in_runs}, and what runs outside of {them} is not counted"


def stashed_of(graphs: Sequence[Prediction]) -> int:
    """Bytes that graphs which run one after the other hold between forward and backward."""
    return sum(graph.stashed for graph in graphs) + sum(_kept_inputs(graphs))


def left_by(graphs: Sequence[Prediction]) -> int:
    """Bytes that the forwards of graphs have left when the next graph's begins: also what that one is given."""
    return stashed_of(graphs) + sum(graph.returned for graph in graphs[-1:])


def _kept_inputs(graphs: Sequence[Prediction]) -> list[int]:
    """Bytes of what the graph before has returned and only the backward of this one reads, for each graph."""
    before = (0, *(graph.returned for graph in graphs))
    return [min(passed, graph.saved_inputs) for passed, graph in zip(before, graphs, strict=False)]


def activations_of(graphs: Sequence[Prediction], gradients: int = 0) -> int:
    """The peak of one forward and backward through graphs that run one after the other, in bytes.

    Exact for one graph, and for several where each reads what the one before returned and nothing runs between them.

    Args:
        graphs: in the order of the forward.
        gradients: there when the backward begins, and not yet in the forward.
    """
    peaks = []
    before = 0
    # What later backwards have returned: tangents of the one before each, which are counted there, and gradients.
    returned = sum(graph.backward.end for graph in graphs) - sum(graph.tangents for graph in graphs[:-1])
    for index, (graph, kept) in enumerate(zip(graphs, _kept_inputs(graphs), strict=True)):
        passed = graphs[index - 1].returned if index else 0
        returned -= graph.backward.end
        peaks.append(before + passed + graph.forward.peak.held)
        peaks.append(before + kept + graph.backward.peak.held + max(0, returned) + gradients)
        returned += graph.tangents
        before += graph.stashed + kept
    return max(peaks)


@dataclass(frozen=True)
class _Part:
    """A graph of a forward.

    Attributes:
        prediction: of the first batch.
        runs: how often it ran in the first forward.
    """

    graph: PartitionedGraph
    timeline: GraphTimeline
    prediction: Prediction
    runs: int


class _ProgramRun(NamedTuple):
    """What running a graph's programs without data gave, which takes up to a second."""

    graph: PartitionedGraph
    values: dict[sympy.Symbol, int]
    prediction: Prediction


class _Noted(NamedTuple):
    """A forward whose backward is still to come."""

    predictor: "StepMemoryPredictor"
    forward: Forward


class _Shared(NamedTuple):
    """What is the same for all graphs of a model.

    Attributes:
        pending: its forwards.
        constant: what the process holds beside the model and its batch, in bytes.
    """

    pending: Pending[_Noted]
    constant: int


class StepMemoryPredictor:
    """Predicts a model's training step for any batch, from the graphs of its first one.

    Args:
        model: whose parameters and buffers count.
        graphs: of one training forward, in order, right after it, each with a prediction. One that has run several
            times counts as often, as if all its runs came one after the other.
        inputs: the forward's keyword arguments in the first batch.
        resident: what the process held when the last graph was partitioned, in bytes.
        names: of the graphs' symbols, as in the plan table.
        run: the one that steps are predicted for where nothing else is said.
        runs: how often each graph ran; None: as often as it has so far.
        shared: with a predictor from other graphs of the model.

    Attributes:
        first: sizes of the first batch by the plan table's names, `inputs_input_ids_dim0`.
        largest_shapes: the largest forwards of the run so far.
        run: see above.
        untrained: see `without_gradient`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        graphs: Sequence[PartitionedGraph],
        inputs: Mapping[str, object],
        resident: int,
        names: SymbolNames,
        run: Run | None = None,
        *,
        runs: Sequence[int] | None = None,
        shared: "_Shared | None" = None,
    ) -> None:
        self.run = run or Run()
        self._programs_caveat = ""
        # A step's tensors and its blocks are asked for one after the other.
        self._last_run: _ProgramRun | None = None
        self._model = weakref.ref(model)
        self._parts = [
            _Part(graph, graph.timeline, graph.prediction, count)
            for graph, count in zip(graphs, runs or [graph.runs for graph in graphs], strict=True)
            if graph.timeline is not None and graph.prediction is not None
        ]
        self._runs = sum(part.runs for part in self._parts)
        self.untrained = without_gradient(graph.gradients for graph in graphs)
        self._is_on_cuda = any(part.graph.is_for_cuda for part in self._parts)
        self._names = names
        self.first: BatchSizes = names.first
        self.largest_shapes: tuple[Forward, ...] = (Forward(self.first),)
        self._pending: Pending[_Noted] = Pending() if shared is None else shared.pending
        self._batch = tensor_bytes(value for value in inputs.values() if isinstance(value, torch.Tensor))
        # Graphs before the last have run by then.
        left = left_by([part.prediction for part in self._parts[:-1] for _ in range(part.runs)])
        self._constant = constant_of(model, self._batch, resident, left) if shared is None else shared.constant

    @property
    def caveat(self) -> str:
        """Why the activations are not exact, empty where they are."""
        graphs = [part.graph for part in self._parts]
        named = {self._names.of_symbols(graph).get(symbol, "") for graph in graphs for symbol in graph.bound}
        bound = {name: size for name, size in self.first.items() if name in named}
        return caveat_of(graphs, self._runs, bound, self._programs_caveat)

    @property
    def runs(self) -> tuple[int, ...]:
        """How often each graph ran in the first forward."""
        return tuple(part.runs for part in self._parts)

    @property
    def stashed(self) -> int:
        """Bytes that the first batch's forward saves for its backward, by the graphs' own timelines."""
        return stashed_of([part.prediction for part in self._parts for _ in range(part.runs)])

    def sizes_of(self, inputs: Mapping[str, object]) -> BatchSizes:
        """Sizes of a batch by the plan table's names.

        Args:
            inputs: keyword arguments of a forward; sizes that are not there are of the first batch.
        """
        sizes = {
            self._names.canonical[f"{name}_dim{index}"]: size
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor)
            for index, size in enumerate(value.shape)
            if f"{name}_dim{index}" in self._names.canonical
        }
        return {**self.first, **sizes}

    def note_forward(self, inputs: Mapping[str, object], outputs: object = None) -> None:
        """Count a training forward among those of the run.

        Args:
            inputs: its keyword arguments.
            outputs: what it returned; its backward has run once their autograd graph has.
        """
        earlier = list(self._pending)
        saved = sum(noted.predictor.saved(noted.forward.sizes) for noted in earlier)
        new = Forward(self.sizes_of(inputs), saved)
        self.largest_shapes = largest_shapes(self.largest_shapes, new)
        if earlier:
            last, forward = earlier[-1]
            last.largest_shapes = largest_shapes(last.largest_shapes, replace(forward, is_followed=True))
        self._pending.add(_Noted(self, new), outputs)

    def of_others(
        self, graphs: Mapping[PartitionedGraph, int], inputs: Mapping[str, object]
    ) -> "StepMemoryPredictor | None":
        """Predicts from other graphs of the same model; None where they cannot be predicted.

        Args:
            graphs: of one forward, with how often each ran.
            inputs: its keyword arguments.
        """
        model = self._model()
        if model is None or not all(graph.prediction for graph in graphs):
            return None
        names = SymbolNames.of(graphs, is_encoder_decoder(model))
        shared = _Shared(self._pending, self._constant)
        return StepMemoryPredictor(
            model, [*graphs], inputs, 0, names, self.run, runs=[*graphs.values()], shared=shared
        )

    def saved(self, sizes: BatchSizes | None = None) -> int:
        """Bytes that a forward saves for its backward; sizes as in `footprint`."""
        wanted = {**self.first, **(sizes or {})}
        if self._runs > 1:
            return stashed_of(self.graphs(wanted))
        return sum(part.timeline.saved_bytes(self._values(part.graph, wanted)) for part in self._parts)

    def activations(self, sizes: BatchSizes | None = None) -> int:
        """The peak of a forward and its backward, in bytes; see `footprint`."""
        return activations_of(self.graphs(sizes))

    def graphs(self, sizes: BatchSizes | None = None) -> list[Prediction]:
        """Each run of a graph alone; see `footprint`."""
        wanted = {**self.first, **(sizes or {})}
        predictions = [self._predict(part, wanted) for part in self._parts]
        pairs = zip(predictions, self._parts, strict=True)
        return [prediction for prediction, part in pairs for _ in range(part.runs)]

    def footprint(
        self,
        sizes: BatchSizes | None = None,
        optimizer: Optimizer | None = None,
        gradient_accumulation: bool | None = None,
        saved_before: int = 0,
        is_followed: bool = False,
        *,
        batch_size: int | None = None,
        seq_len: int | None = None,
    ) -> Footprint:
        """The memory of a training step, without running or tracing anything.

        Args:
            sizes: by the plan table's names; those left out, and None, are of the first batch.
            optimizer: None: that of `run`. None there, and one that has not stepped yet, count as AdamW with two
                states for each parameter.
            gradient_accumulation: gradients of earlier micro-batches are in memory; None: as in `run`.
            saved_before: bytes that earlier forwards hold for the same backward, see `saved`.
            is_followed: another forward runs before the backward, see `Forward`.
            batch_size: rows; None: as `sizes` has them.
            seq_len: tokens of a row; None: as `sizes` has them.

        Raises:
            MemOptError: a size that the model's graphs do not have, or that is not positive.
        """
        wanted = {**self.first, **(sizes or {}), **plain_sizes(self.first, batch_size, seq_len)}
        for name, size in wanted.items():
            if name not in self.first or size < 1:
                raise MemOptError(f"size {name}={size}: allowed are numbers from 1 on for {', '.join(self.first)}")
        model = self._model()
        if model is None:
            raise ReferenceError("the model whose steps are predicted was deleted")
        weights = tensor_bytes(trainable_of(model, self.untrained))
        growth = math.prod(wanted[name] / size for name, size in self.first.items())
        return footprint_of(
            model,
            optimizer or self.run.optimizer,
            self.run.gradient_accumulation if gradient_accumulation is None else gradient_accumulation,
            activations=activations_of(self.graphs(wanted), weights if is_followed else 0),
            batch=round(self._batch * growth),
            constant=self._constant,
            other_forwards=saved_before,
            untrained=self.untrained,
        )

    def peak(self, optimizer: Optimizer | None, gradient_accumulation: bool) -> int:
        """The highest of all steps so far, in bytes; see `footprint`."""
        return self._highest(optimizer, gradient_accumulation)[1].peak

    def timeline(self, optimizer: Optimizer | None = None, gradient_accumulation: bool | None = None) -> StepTimeline:
        """What the step with the highest peak so far holds, operator by operator; arguments as in `footprint`."""
        forward, around = self._highest(optimizer, gradient_accumulation)
        sizes = {**self.first, **forward.sizes}
        pairs = [
            (self._run(part, sizes), self._predict(part, sizes)) for part in self._parts for _ in range(part.runs)
        ]
        kept = _kept_inputs([prediction for _, prediction in pairs])
        runs = [PredictedRun(*pair, bytes_kept) for pair, bytes_kept in zip(pairs, kept, strict=True)]
        return step_timeline(runs, around, sizes, around.gradients if forward.is_followed else 0)

    def _highest(self, optimizer: Optimizer | None, gradient_accumulation: bool | None) -> tuple[Forward, Footprint]:
        """The forward of the run so far whose step has the highest peak."""
        found = [
            (
                forward,
                self.footprint(
                    forward.sizes, optimizer, gradient_accumulation, forward.saved_before, forward.is_followed
                ),
            )
            for forward in self.largest_shapes
        ]
        return max(found, key=lambda pair: pair[1].peak)

    def _run(self, part: _Part, sizes: BatchSizes) -> GraphRun:
        names = {candidate.activation.root.name: candidate.cluster_id for candidate in part.graph.candidates}
        if requests := self._predict(part, sizes).requests:
            return run_of_requests(requests, part.timeline, names)
        return run_of_graphs(part.timeline, self._values(part.graph, sizes), names)

    def allocator_peak(
        self,
        sizes: BatchSizes | None = None,
        optimizer: Optimizer | None = None,
        gradient_accumulation: bool | None = None,
        *,
        batch_size: int | None = None,
        seq_len: int | None = None,
    ) -> AllocatorPeak | None:
        """What torch's allocator takes on CUDA for the step of `footprint`, whose tensors lie in larger blocks.

        None elsewhere, and where a forward is several graphs. Arguments as in `footprint`.
        """
        if not self._is_on_cuda or self._runs > 1:
            return None
        model, (part,) = self._model(), self._parts
        if model is None:
            raise ReferenceError("the model whose steps are predicted was deleted")
        wanted = {**self.first, **(sizes or {}), **plain_sizes(self.first, batch_size, seq_len)}
        around = self.footprint(wanted, optimizer, gradient_accumulation)
        tensors = [*model.parameters(), *model.buffers()]
        step = StepRequests(
            always=[*filter(None, (around.constant, around.batch)), *(tensor.nbytes for tensor in tensors)],
            graphs=self._predict(part, wanted).requests or part.timeline.requests(self._values(part.graph, wanted)),
            states=state_sizes(optimizer or self.run.optimizer, trainable_of(model, self.untrained)),
            temporary=around.step,
            accumulates=around.accumulated > 0,
        )
        return allocator_peak(step)

    def _predict(self, part: _Part, sizes: BatchSizes) -> Prediction:
        values = self._values(part.graph, sizes)
        prediction = part.prediction if values == part.graph.sizes else part.timeline.predict(values)
        programs = part.graph.programs.both
        if programs is None:
            return prediction
        if self._last_run is not None and self._last_run.graph is part.graph and self._last_run.values == values:
            return self._last_run.prediction
        try:
            saved = part.timeline.saved_for_backward(values)
            simulated = simulate_programs(*programs, saved, prediction.stashed, values)
            found = replace(
                prediction,
                forward=simulated.forward,
                backward=simulated.backward,
                requests=simulated.requests,
            )
            self._last_run = _ProgramRun(part.graph, values, found)
            return found
        except Exception as error:
            # The form of inductor's programs is private and may change; training goes on without the prediction.
            self._programs_caveat = (
                f"without inductor's fusions, whose program cannot be read ({type(error).__name__})"
            )
            return prediction

    def _values(self, graph: PartitionedGraph, sizes: BatchSizes) -> dict[sympy.Symbol, int]:
        named = self._names.of_symbols(graph)
        return {symbol: sizes.get(named.get(symbol, ""), first) for symbol, first in graph.sizes.items()}


class Predictors:
    """Those of one forward: torch traces it again where a guard fails, as for a length that is a constant of a graph,
    and what was traced first says nothing of such a batch.

    Args:
        first: of the first training forward.

    Attributes:
        first: see above.
    """

    def __init__(self, first: StepMemoryPredictor) -> None:
        self.first = first
        self._by_graphs: dict[frozenset[PartitionedGraph], StepMemoryPredictor] = {}
        # Of batches that others than the first are for.
        self._by_sizes: dict[frozenset[tuple[str, int]], StepMemoryPredictor] = {}

    def __iter__(self) -> Iterator[StepMemoryPredictor]:
        return iter(dict.fromkeys((self.first, *self._by_graphs.values())))

    def of(self, inputs: Mapping[str, object]) -> StepMemoryPredictor:
        """The one for a batch, as far as one of its sizes has run; else the first.

        Args:
            inputs: keyword arguments of a forward.
        """
        return self._by_sizes.get(_sizes(inputs), self.first)

    def note_forward(
        self, ran: Sequence[PartitionedGraph], inputs: Mapping[str, object], outputs: object = None
    ) -> None:
        """Count a training forward among those of the run.

        Args:
            ran: its graphs, in the order that they ran, one that has run several times as often.
            inputs: its keyword arguments.
            outputs: what it returned.
        """
        predictor = self._predictor(Counter(ran), inputs)
        if predictor is not self.first:
            self._by_sizes[_sizes(inputs)] = predictor
        predictor.note_forward(inputs, outputs)

    def _predictor(self, ran: Mapping[PartitionedGraph, int], inputs: Mapping[str, object]) -> StepMemoryPredictor:
        # How often a graph runs may differ at every step, as where layers are dropped.
        key = frozenset(ran)
        if key not in self._by_graphs:
            found = self.first.of_others(ran, inputs) if self._by_graphs and ran else None
            self._by_graphs[key] = found or self.first
        return self._by_graphs[key]


def _sizes(inputs: Mapping[str, object]) -> frozenset[tuple[str, int]]:
    return frozenset(input_sizes(inputs).items())
