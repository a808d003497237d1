"""Partitions and compiles the graphs of a forward, once for each choice."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from optimum_memopt.compat.torch import without_modes, world_size
from optimum_memopt.engines.compile.capture.backend import compile_graph
from optimum_memopt.engines.compile.capture.error_probe import ErrorProbe
from optimum_memopt.engines.compile.capture.gradient_probe import GradientProbe
from optimum_memopt.engines.compile.capture.moved_state import StateWatch
from optimum_memopt.engines.compile.capture.regions import Regions
from optimum_memopt.engines.compile.capture.traced_graph import ForwardRun, TracedGraph, TraceSpec, Variant
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, Modules, gradients_of, sources_of
from optimum_memopt.engines.compile.graph.joint import Inlined
from optimum_memopt.engines.compile.graph.saved_activations import add_outer_modules
from optimum_memopt.engines.compile.graph.symbols import input_sizes
from optimum_memopt.engines.compile.memory.inductor_programs import InductorPrograms
from optimum_memopt.engines.compile.memory.tape import sizes_of
from optimum_memopt.engines.compile.partition.accumulation import InPlaceAccumulation
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.output_gradients import OutputGradients
from optimum_memopt.engines.compile.partition.partitioned_graph import (
    PartitionedGraph,
    analyze,
    partitioned,
    timeline_of,
)
from optimum_memopt.engines.shared.forward_patch import weak_method
from optimum_memopt.engines.torch_compat import fx_graph, traced_sizes
from optimum_memopt.logs import best_effort
from optimum_memopt.memory.peak_monitor import held_bytes

# Share by which blocks of the allocator may exceed the tensors of a draft, whose blocks are not predicted.
_DRAFTS_OVERHEAD = 0.01


class Variants:
    """The compiled variants of a forward's graphs.

    Args:
        state: watch of state that changes between a forward and its backward.
        is_shared: ranks gather parameters together.
        say: logs a line once.

    Attributes:
        held: bytes that the process held when the last graph was partitioned.
        held_after: graph runs of the same forward before that.
        measures_gradients: the error of gradients is measured; off with a budget, which the measurement might exceed.
    """

    def __init__(
        self, model: torch.nn.Module, spec: TraceSpec, state: StateWatch, is_shared: bool, say: Callable[[str], None]
    ) -> None:
        self._model, self._spec, self._state, self._is_shared, self._say = model, spec, state, is_shared, say
        self.held = self.held_after = 0
        self.measures_gradients = True
        # The graph that was partitioned last.
        self._partitioned: tuple[AnalyzedGraph, PartitionedGraph] | None = None
        self._probe: ErrorProbe | None = None
        self._gradient_probe: GradientProbe | None = None
        # Of graphs whose backwards are compiled without gradients of outputs beside the loss.
        self._output_gradients: list[OutputGradients] = []

    @property
    def read_outputs(self) -> bool:
        """True if a training loop has computed the gradient of an output beside the loss."""
        return any(gradients.are_read for gradients in self._output_gradients)

    def chosen(self, graph: TracedGraph, args: Sequence[Any], run: ForwardRun, regions: Regions) -> Variant:
        """Returns the variant of a graph for its next run, and makes the choice for that run if needed.

        Args:
            args: arguments of the run.
        """
        (*_, latest), analyzed, layer = graph.variants.values(), graph.analyzed, regions.layer
        choices = run.choices
        if analyzed is None or latest.partitioned is None or graph.chosen_at == run.place(layer):
            return latest
        is_asked = graph.chosen_at is not None and graph.chosen_at[0] is choices
        if is_asked and latest.partitioned.choice.is_for_all_runs:
            return latest
        partitioned = latest.partitioned
        if graph not in choices.sizes:
            now = partitioned.timeline.values(sizes_of(args)) if partitioned.timeline is not None else {}
            choices.sizes[graph] = {**analyzed.size_hints, **now}
        analyzed = replace(analyzed, size_hints=choices.sizes[graph])
        # If the forward runs on fake tensors, their mode is not that of the graph.
        with without_modes():
            choice = run.choose(graph, analyzed, partitioned.gradients, layer)
            own = choices.partitions.get((graph, choice.key))
            if own is not None:
                return replace(own, inputs=choice.inputs)
            same = graph.variants.get(choice.key)
            if same is None or same.partitioned is None:
                return self.compile(graph, run, regions)
            chosen = replace(same.partitioned, choice=choice, candidates=analyzed.candidates)
            own = replace(same, partitioned=chosen.with_sizes(analyzed.size_hints), analyzed=analyzed)
            choices.partitions[graph, choice.key] = own
            return replace(own, inputs=choice.inputs)

    def compile(self, graph: TracedGraph, run: ForwardRun, regions: Regions, given: Sequence[Any] = ()) -> Variant:
        """Make a choice for a graph, and return the graph compiled for it.

        Args:
            given: inputs to compile it with; empty: those of its trace.

        Raises:
            Exception: errors of torch and of `GraphChoices.choose`.
        """
        self._partitioned, self._probe, self._gradient_probe = None, None, None
        programs = InductorPrograms()
        gradients = OutputGradients()
        accumulation = InPlaceAccumulation(graph.parameters, reuses=self._spec.compiler == "inductor")
        partition = functools.partial(weak_method(self._partition), graph, gradients, accumulation, run, regions)
        with graph.trace.again() if graph.trace is not None else contextlib.nullcontext():
            saw = programs.add if self._spec.is_run else None
            given = given or graph.inputs
            is_draft = weak_method(self._is_draft)
            compiled = compile_graph(
                self._spec.compiler,
                graph.graph,
                given,
                partition,
                lambda compiled: accumulation.wrap(gradients.wrap(compiled)),
                saw,
                self._say,
                is_draft,
            )
        if gradients.are_left_out:
            self._output_gradients.append(gradients)
        variant, key = Variant(compiled, programs, None, None), ""
        if self._partitioned is not None:
            analyzed, partitioned = self._partitioned
            key = partitioned.choice.key
            inputs = partitioned.choice.inputs
            known, probes = replace(partitioned, programs=programs), (self._probe, self._gradient_probe)
            variant = Variant(compiled, programs, known, analyzed, inputs, *probes)
        graph.chosen_at, graph.variants[key] = run.place(regions.layer), variant
        run.choices.partitions[graph, key] = variant
        return variant

    def _is_draft(self) -> bool:
        """True if the graph that was partitioned last runs as a draft, operator by operator."""
        return self._partitioned is not None and self._partitioned[1].choice.draft_limit is not None

    def _partition(
        self,
        traced: TracedGraph,
        of_outputs: OutputGradients,
        accumulation: InPlaceAccumulation,
        running: ForwardRun,
        regions: Regions,
        module: fx.GraphModule,
        inputs: Any,
        num_fwd_outputs: int,
        options: dict[str, Any],
    ) -> tuple[Choice, Modules]:
        spec = self._spec
        number = len(running.ran) + 1
        running.progress.stage = f"partitioning graph {number} of {len(module.graph.nodes)} operators"
        add_outer_modules(module.graph, self._model, traced.module() if traced.module is not None else None)
        gradients = gradients_of(module.graph, num_fwd_outputs, traced.parameters)
        sources = sources_of(module.graph, num_fwd_outputs)
        fuses = spec.compiler == "inductor"
        if fuses:
            traced_sizes.make_unit_sizes_constant(module.graph)
        analyzed = analyze(
            module,
            inputs,
            num_fwd_outputs,
            options,
            cuda=spec.target.cuda if spec.target is not None else None,
            batch=input_sizes(running.inputs),
            layer=traced.layer,
            state=traced.state_arguments(self._state.moved),
            fuses=fuses,
            gradients=of_outputs if self._may_run_late(traced, module) else None,
            accumulation=accumulation if self._may_add_in_place(traced) else None,
        )
        if traced.analyzed is None:
            traced.analyzed = analyzed
        # The symbols were named by the sizes of the batch that the graph was first traced with.
        sizes = running.choices.sizes.setdefault(traced, analyzed.size_hints)
        graph = replace(analyzed, layers_at_once=regions.layers_at_once, names=traced.analyzed.names, size_hints=sizes)
        choice = running.choose(traced, graph, gradients, regions.layer)
        made, modules = partitioned(graph, choice, runs_operators=not fuses, target=spec.target)
        self.held = held_bytes(next(self._model.parameters()).device)
        self.held_after = len(running.chosen)
        if choice.draft_limit is not None and not _may_be_draft(graph, modules, self.held, choice.draft_limit):
            made = replace(made, choice=replace(choice, draft_limit=None))
        made = replace(
            made,
            is_all_of_forward=traced.is_all,
            losses=traced.losses,
            gradients=gradients,
            sources=sources,
            takes_none=of_outputs.are_left_out,
        )
        self._partitioned = graph, made
        of_outputs.keep(modules[1])
        if spec.is_run:
            self._probe_first_run(traced, graph, choice, modules)
            running.progress.stage = f"{'running' if self._is_draft() else 'compiling'} graph {number}"
        return choice, modules

    def _may_run_late(self, traced: TracedGraph, module: fx.GraphModule) -> bool:
        """True if the backward of a graph may be compiled for the outputs that have gradients, and run operator by
        operator until then. In a layer's graph all outputs have gradients, and without inductor's kernels the backward
        would draw other random numbers."""
        is_random = self._spec.compiler == "inductor" and any(map(fx_graph.is_random, module.graph.nodes))
        return not traced.layer and not is_random and not self.read_outputs

    def _may_add_in_place(self, traced: TracedGraph) -> bool:
        """True if the backward of a graph may add to earlier gradients itself. Ranks exchange gradients after autograd
        has accumulated them."""
        is_alone = world_size() == 1 and not self._is_shared
        return self._spec.accumulates and is_alone and traced.is_whole and traced.is_all

    def _probe_first_run(self, traced: TracedGraph, graph: AnalyzedGraph, choice: Choice, modules: Modules) -> None:
        """Prepare to measure the error of activations saved in fp8, and of gradients, in a graph's first run."""
        self._probe = ErrorProbe.of(modules[0], graph, choice)
        if self.measures_gradients and not self._is_shared:
            is_eager = self._spec.compiler != "inductor"
            self._gradient_probe = GradientProbe.of(graph, choice, traced.parameters, is_eager)


def _may_be_draft(graph: AnalyzedGraph, modules: Modules, held: int, limit: int) -> bool:
    """Returns True if a graph's forward, run operator by operator in all layers that share it, fits within a limit.

    Args:
        held: bytes that the process holds before it.
    """
    is_within = False
    with best_effort("the peak of a forward, operator by operator"):
        forward = timeline_of(replace(graph, inlined=Inlined()), modules).predict(graph.size_hints).forward
        earlier = (graph.layers_at_once - 1) * forward.end if graph.layer else 0
        is_within = (held + earlier + forward.peak) * (1 + _DRAFTS_OVERHEAD) <= limit
    return is_within
