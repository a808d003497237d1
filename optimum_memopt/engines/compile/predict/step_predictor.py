"""Predicts the memory of a model's training steps, and says in words why a prediction is not exact."""

import copy
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from optimum_memopt.compat.deepspeed import is_sharded_by_deepspeed
from optimum_memopt.compat.torch import tensors_in
from optimum_memopt.compat.transformers import is_encoder_decoder
from optimum_memopt.engines.api.engine import Run
from optimum_memopt.engines.api.predictions import StepTimeline
from optimum_memopt.engines.api.run import HeldOutputs
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, input_sizes, plain_sizes
from optimum_memopt.engines.compile.memory.composition import bytes_left_by, compose
from optimum_memopt.engines.compile.memory.footprint import (
    Footprint,
    blocks_around,
    constant_of,
    footprint_of,
    local_bytes,
    step_timeline,
    tensors_around,
    trainable_of,
)
from optimum_memopt.engines.compile.memory.graph_events import GraphEvents
from optimum_memopt.engines.compile.memory.inductor_programs import program_events
from optimum_memopt.engines.compile.memory.tape import Call, Tape, resized
from optimum_memopt.engines.compile.partition.captured_forward import trained_by
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph, SymbolNames
from optimum_memopt.engines.compile.predict.pending import (
    BatchSizes,
    Forward,
    Pending,
    PendingForward,
    elements_of,
    largest_shapes,
)
from optimum_memopt.engines.simulator.allocator import AllocatorPeak
from optimum_memopt.engines.simulator.events import StepEvents
from optimum_memopt.errors import MemOptError
from optimum_memopt.memory.optimizers import Optimizer

# Maximum number of batch sizes whose tapes are kept.
_MOST_TAPES = 256


class StepMemoryPredictor:
    """Predicts a model's training step for any batch, from the graphs of its first one.

    Args:
        graphs: the graphs of one training forward, in order, right after it, each with a prediction.
        inputs: keyword arguments of the forward in the first batch.
        resident: bytes that the process held when the last graph was partitioned.
        runs_before: number of the tape's runs that had run by then; -1: the forward had ended.
        names: names of the graphs' symbols, as in the plan table.
        tape: the runs of the graphs; None: each graph runs once, and none reads an output of another.
        pending: pending forwards of all predictors of the model.
        constant: constant bytes of another predictor of the model; None: derived from `resident`.

    Attributes:
        graphs: the graphs that the tape's calls index.
        first: sizes of the first batch by the plan table's names, `inputs_input_ids_dim0`.
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
        tape: Tape | None = None,
        runs_before: int = 0,
        pending: Pending | None = None,
        constant: int | None = None,
    ) -> None:
        self.run, self._names = run or Run(), names
        self._programs_caveat = ""
        # Callers ask for a step's tensors, then for its blocks; evaluating inductor's programs takes up to a second.
        self._last: dict[object, StepEvents] = {}
        self._model = weakref.ref(model)
        self.graphs = tuple(graph for graph in graphs if graph.timeline is not None and graph.prediction)
        self._schedules = [graph.timeline for graph in self.graphs if graph.timeline is not None]
        self.tape = tape or Tape(tuple(map(Call, range(len(self.graphs)))))
        # Tapes of batches that have run: with several graphs, not all sizes follow from those of the first batch.
        self._tapes: dict[frozenset[tuple[str, int]], Tape] = {}
        self._saved: dict[frozenset[tuple[str, int]], int] = {}
        self.trained, self.untrained = trained_by(self.tape, self.graphs)
        self._is_on_cuda = any(graph.is_for_cuda for graph in self.graphs)
        self.first: BatchSizes = names.first
        self.largest_shapes: tuple[Forward, ...] = (Forward(self.first),)
        self._batch = self.run.batches_held * local_bytes(tensors_in(inputs))
        self._pending = pending or Pending()
        if constant is None:
            constant = constant_of(model, self._batch, resident, self._left(runs_before))
        self._constant = constant

    def _left(self, runs: int) -> int:
        """Returns the bytes that the first `runs` runs of the forward leave allocated; -1: the forward has ended."""
        sharding, loss = self.tape.sharding, self.tape.loss
        if runs <= 0 and loss is None and not (sharding.is_sharded and (runs == 0 or sharding.stays_gathered)):
            return 0
        tape, events = self._runs(self.first, compiled=False)
        return bytes_left_by(replace(tape, sharding=tape.sharding.first), events, max(0, runs))

    @property
    def caveat(self) -> str:
        """Returns why the predicted activations are not exact; empty if they are."""
        graphs, count, runs = self.graphs, len(self.graphs), len(self.tape.calls)
        reasons = [self._programs_caveat, self.tape.loss.caveat if self.tape.loss is not None else ""]
        is_told = self.tape.sharding.tells_outside
        if not is_told and not all(graph.is_all_of_forward for graph in graphs):
            in_runs = f" in {runs} runs" if runs > count else ""
            shown, them = (f"{count} graphs", "them") if count > 1 else (f"{count} graph", "it")
            reasons.append(f"not exact: {shown}{in_runs}, and code outside of {them} is not counted")
        if not is_told and is_sharded_by_deepspeed(self._living_model()):
            why = f", since {self.tape.sharding.unknown}" if self.tape.sharding.unknown else ""
            reasons.append(f"without the parameters that DeepSpeed gathers{why}")
        # Sizes that the graphs are specialized to.
        named = {self._names.of_symbols(graph).get(symbol, "") for graph in graphs for symbol in graph.bound}
        if bound := [f"{name}={size}" for name, size in self.first.items() if name in named]:
            reasons.append(f"only for {', '.join(bound)}, since other sizes may be retraced")
        kernels = ["convolutions"] if any(graph.has_convolutions for graph in graphs) else []
        kernels += ["cuDNN's attention"] if any("cuDNN" in graph.attention for graph in graphs) else []
        if kernels:
            reasons.append(f"without the workspaces of {' and '.join(kernels)}")
        if any(graph.has_half_products for graph in graphs):
            reasons.append("without the memory that oneDNN keeps for each shape in half precision")
        if any(graph.chunks_loss or graph.has_fused_head for graph in graphs):
            reasons.append("as if every token had a label")
        return "; ".join(filter(None, reasons))

    def sizes_of(self, inputs: Mapping[str, object]) -> BatchSizes:
        """Returns the sizes of a batch by the plan table's names; sizes that `inputs` lacks are the first batch's."""
        canonical = self._names.canonical
        return {**self.first, **{canonical[n]: size for n, size in input_sizes(inputs).items() if n in canonical}}

    def note_forward(
        self, graphs: Sequence[PartitionedGraph], tape: Tape, inputs: Mapping[str, object], outputs: object = None
    ) -> bool:
        """Record a training forward of the run.

        Args:
            outputs: what the forward returned; it is pending until their autograd graph has run.

        Returns:
            True if earlier forwards of the same backward hold more than in any step before.
        """
        sizes = self.sizes_of(inputs)
        key = frozenset(sizes.items())
        if len(tape.calls) > 1 and len(self._tapes) < _MOST_TAPES and key not in self._tapes:
            places = {graph: place for place, graph in enumerate(self.graphs)}
            if places.keys() == set(graphs):
                calls = tuple(replace(call, graph=places[graphs[call.graph]]) for call in tape.calls)
                self._tapes[key] = replace(tape, calls=calls)
                self._saved.pop(key, None)
                self._last.clear()
        earlier = list(self._pending)
        saved = self._pending.saved_in_steps(self)
        new = Forward(sizes, saved)
        before, self.largest_shapes = self.largest_shapes, largest_shapes(self.largest_shapes, new)
        if earlier:
            last = earlier[-1]
            followed = replace(last.forward, is_followed=True)
            last.predictor.largest_shapes = largest_shapes(last.predictor.largest_shapes, followed)
        self._pending.add(PendingForward(self, new, elements_of(inputs)), outputs)
        return saved > max((each.saved_before for each in before), default=0)

    def with_graphs(
        self, graphs: Sequence[PartitionedGraph], tape: Tape, inputs: Mapping[str, object]
    ) -> "StepMemoryPredictor | None":
        """Returns a predictor for other graphs of the same model; None if they cannot be predicted."""
        model = self._model()
        if model is None or not all(graph.prediction for graph in graphs):
            return None
        names = SymbolNames.of(graphs, is_encoder_decoder(model))
        pending, constant = self._pending, self._constant
        return StepMemoryPredictor(
            model, graphs, inputs, 0, names, self.run, tape=tape, pending=pending, constant=constant
        )

    def with_tapes(self, **changes: Any) -> "StepMemoryPredictor":
        """Returns a predictor for the same graphs on tapes with other attributes: `sharding`, or `held_outputs`."""
        other = copy.copy(self)
        tapes = {sizes: replace(tape, **changes) for sizes, tape in self._tapes.items()}
        vars(other).update(tape=replace(self.tape, **changes), _tapes=tapes, _last={}, _saved={})
        return other

    @property
    def known_tapes(self) -> int:
        """Returns the number of batch sizes whose tapes are known."""
        return len(self._tapes)

    def saved(self, sizes: BatchSizes | None = None) -> int:
        """Returns the bytes that a forward saves for its backward, by the graphs' own events; `sizes` as in
        `footprint`."""
        wanted = self._all_sizes(sizes)
        key = frozenset(wanted.items())
        if key not in self._saved:
            tape, runs = self._runs(wanted, compiled=False)
            if len(self._saved) >= _MOST_TAPES:
                self._saved.clear()
            # With several forwards before one backward, every step reads this.
            self._saved[key] = compose(tape.without_caller(), runs).saved_bytes
        return self._saved[key]

    def activations(self, sizes: BatchSizes | None = None, gradients: int = 0, frees_gradients: bool = False) -> int:
        """Returns the peak of a forward and its backward, in bytes; see `compose`."""
        return self._step(self._all_sizes(sizes), frees_gradients).peak(gradients)

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
        """Returns the memory of a training step, without running or tracing anything.

        Args:
            sizes: batch sizes by the plan table's names; missing sizes, and None, mean the first batch's.
            optimizer: None: the optimizer of `run`. If that is None or has not stepped yet, it counts as AdamW with
                two states for each parameter.
            gradient_accumulation: gradients of earlier micro-batches are in memory; None: as in `run`.
            saved_before: bytes that earlier forwards hold for the same backward, see `saved`.
            is_followed: another forward runs before the backward, see `Forward`.

        Raises:
            MemOptError: a size that the model's graphs do not have, or that is not positive.
        """
        wanted, model = self._all_sizes(sizes, batch_size, seq_len), self._living_model()
        for name, size in wanted.items():
            if name not in self.first or size < 1:
                raise MemOptError(f"size {name}={size}: allowed: whole numbers from 1 up for {', '.join(self.first)}")
        weights = local_bytes(trainable_of(model, self.untrained))
        growth = math.prod(wanted[name] / size for name, size in self.first.items())
        accumulates = self.run.gradient_accumulation if gradient_accumulation is None else gradient_accumulation
        releases = self.run.releases_gradients
        return footprint_of(
            model,
            optimizer or self.run.optimizer,
            accumulates,
            # Autograd accumulates this forward's gradients into those of later forwards.
            activations=self.activations(wanted, weights * is_followed, accumulates or releases or is_followed),
            batch=round(self._batch * growth),
            constant=self._constant + self.tape.held_outputs.more,
            other_forwards=saved_before,
            untrained=self.untrained,
            trained=self.trained,
            releases_gradients=releases,
            outputs=self._step(wanted, accumulates or releases).outputs,
        )

    def peak(self, optimizer: Optimizer | None) -> int:
        """Returns the highest peak of all steps so far, in bytes; see `footprint`."""
        return self._highest(optimizer)[1].peak

    def timeline(self, optimizer: Optimizer | None = None) -> StepTimeline:
        """Returns the step with the highest peak so far, operator by operator; arguments as in `footprint`."""
        forward, around = self._highest(optimizer)
        sizes = {**self.first, **forward.sizes}
        step = self._step(sizes, around.frees_gradients or forward.is_followed)
        gradients = around.gradients if forward.is_followed else 0
        is_compiled = any(graph.programs.both for graph in self.graphs) and not self._programs_caveat
        counts = "allocations" if is_compiled else "operators"
        tensors = tensors_around(self._living_model(), optimizer or self.run.optimizer, self.untrained)
        return step_timeline(step, around, sizes, gradients, counts, tensors)

    def _highest(self, optimizer: Optimizer | None) -> tuple[Forward, Footprint]:
        def footprint(forward: Forward) -> Footprint:
            return self.footprint(
                forward.sizes, optimizer, saved_before=forward.saved_before, is_followed=forward.is_followed
            )

        return max(((shape, footprint(shape)) for shape in self.largest_shapes), key=lambda pair: pair[1].peak)

    def allocator_peak(
        self,
        sizes: BatchSizes | None = None,
        optimizer: Optimizer | None = None,
        gradient_accumulation: bool | None = None,
        saved_before: int = 0,
        *,
        batch_size: int | None = None,
        seq_len: int | None = None,
    ) -> AllocatorPeak | None:
        """Returns the peak of torch's allocator on CUDA for the step of `footprint`, whose tensors lie in larger
        blocks; None on other devices.

        Arguments as in `footprint`.
        """
        wanted = self._all_sizes(sizes, batch_size, seq_len)
        around = self.footprint(wanted, optimizer, gradient_accumulation, saved_before)
        later = self._step(wanted, True) if around.accumulated and self._is_on_cuda else None
        return self.blocks_of(self._step(wanted, around.releases), around, optimizer, later)

    def blocks_of(
        self, step: StepEvents, around: Footprint, optimizer: Optimizer | None = None, later: StepEvents | None = None
    ) -> AllocatorPeak | None:
        """Returns the peak of torch's allocator on CUDA for the events of a step; None on other devices.

        Args:
            later: events of a micro-batch that accumulates gradients; None: as `step`, if gradients accumulate.
        """
        if not self._is_on_cuda:
            return None
        model, optimizer = self._living_model(), optimizer or self.run.optimizer
        return blocks_around(model, optimizer, self.untrained, around, step, later)

    def _all_sizes(
        self, sizes: BatchSizes | None, batch_size: int | None = None, seq_len: int | None = None
    ) -> dict[str, int]:
        return {**self.first, **(sizes or {}), **plain_sizes(self.first, batch_size, seq_len)}

    def _living_model(self) -> torch.nn.Module:
        if (model := self._model()) is None:
            raise ReferenceError("the model whose steps are predicted was deleted")
        return model

    def _step(self, sizes: BatchSizes, frees_gradients: bool = False) -> StepEvents:
        key = frozenset(sizes.items()), frees_gradients, tuple(graph.programs.both is None for graph in self.graphs)
        if key not in self._last:
            # Keep two steps: that of a first micro-batch, and that of later ones.
            self._last = dict([*self._last.items()][-1:]) | {key: compose(*self._runs(sizes), frees_gradients)}
        return self._last[key]

    def _runs(self, sizes: BatchSizes, compiled: bool = True) -> tuple[Tape, list[GraphEvents]]:
        """Returns the tape for a batch, and the events of each call: from inductor's programs, if there are any."""
        tape = self._tapes.get(frozenset(sizes.items()), self.tape)
        canonical = self._names.canonical.items()
        tape = tape.at({name: sizes[shown] for name, shown in canonical if shown in sizes})
        first, named = [graph.sizes for graph in self.graphs], [self._named(graph, sizes) for graph in self.graphs]
        tape, values = resized(tape, self._schedules, first, named)
        events_by_call: dict[object, GraphEvents] = {}
        runs: list[GraphEvents] = []
        for call, of_call in zip(tape.calls, values, strict=True):
            key = (call.graph, *of_call.values())
            if key not in events_by_call:
                events = self._schedules[call.graph].at(of_call)
                graph = self.graphs[call.graph]
                events_by_call[key] = self._compiled(graph, events, of_call) if compiled else events
            runs.append(events_by_call[key])
        return tape, runs

    def _compiled(self, graph: PartitionedGraph, events: GraphEvents, values: SymbolValues) -> GraphEvents:
        if (programs := graph.programs.both) is None:
            return events
        try:
            return program_events(*programs, events, values)
        except Exception as error:
            # The form of inductor's programs is private and may change; training continues without the prediction.
            name = type(error).__name__
            self._programs_caveat = f"without inductor's fusions, since its program cannot be read ({name})"
            return events

    def _named(self, graph: PartitionedGraph, sizes: BatchSizes) -> dict[sympy.Symbol, int]:
        names = self._names.of_symbols(graph)
        return {symbol: sizes[name] for symbol, name in names.items() if symbol in graph.sizes and name in sizes}


class Predictors:
    """The predictors of one forward, one for each set of graphs.

    torch retraces the forward if a guard fails, as for a length that is a constant of a graph; the first graphs do not
    predict such a batch.
    """

    def __init__(self, first: StepMemoryPredictor) -> None:
        self.first = first
        self._by_graphs: dict[frozenset[PartitionedGraph], StepMemoryPredictor] = {}
        # Predictors of batches that the first one does not cover.
        self._by_sizes: dict[frozenset[tuple[str, int]], StepMemoryPredictor] = {}

    def __iter__(self) -> Iterator[StepMemoryPredictor]:
        return iter(dict.fromkeys((self.first, *self._by_graphs.values())))

    def hold_outputs(self, held: HeldOutputs) -> None:
        """Predict for a training loop that holds these outputs."""
        others = {each: each.with_tapes(held_outputs=held) for each in self}
        self.first = others[self.first]
        self._by_graphs = {graphs: others[each] for graphs, each in self._by_graphs.items()}
        self._by_sizes = {sizes: others[each] for sizes, each in self._by_sizes.items()}

    def of(self, inputs: Mapping[str, object]) -> StepMemoryPredictor:
        """Returns the predictor of a batch of these sizes if one has run, else the first."""
        return self._by_sizes.get(frozenset(input_sizes(inputs).items()), self.first)

    def note_forward(
        self, graphs: Sequence[PartitionedGraph], tape: Tape, inputs: Mapping[str, object], outputs: object = None
    ) -> bool:
        """Record a training forward of the run; arguments and result as of `StepMemoryPredictor.note_forward`."""
        # How often a graph runs may differ at every step, as with layer drop.
        key = frozenset(graphs)
        if key not in self._by_graphs:
            predictor = self.first.with_graphs(graphs, tape, inputs) if self._by_graphs and graphs else None
            self._by_graphs[key] = predictor or self.first
        predictor = self._by_graphs[key]
        if predictor is not self.first:
            self._by_sizes[frozenset(input_sizes(inputs).items())] = predictor
        return predictor.note_forward(graphs, tape, inputs, outputs)
