"""Trace settings, graphs traced by dynamo, the choices and variants for each, and the state of a running forward."""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from optimum_memopt.engines.compile.capture.error_probe import ErrorProbe, RelativeError
from optimum_memopt.engines.compile.capture.gradient_probe import GradientErrors, GradientProbe
from optimum_memopt.engines.compile.capture.layer_inputs import LayerInputs
from optimum_memopt.engines.compile.graph.analyzed_graph import (
    AnalyzedGraph,
    places_of,
    with_gradient,
    without_gradient,
)
from optimum_memopt.engines.compile.graph.state_copies import StateArguments
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.loss.decide import LossDecision, LossMode
from optimum_memopt.engines.compile.memory.inductor_programs import InductorPrograms
from optimum_memopt.engines.compile.memory.known_tapes import KnownTapes, TapePlayer
from optimum_memopt.engines.compile.memory.tape import TapeRecorder
from optimum_memopt.engines.compile.options import MODEL
from optimum_memopt.engines.compile.partition.choice import Choice, InputsPlan
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.shared.forward_patch import ForwardState
from optimum_memopt.engines.shared.label_smoothing import LabelSmoothing
from optimum_memopt.engines.simulator.devices import Device
from optimum_memopt.engines.torch_compat import dynamo, fx_graph
from optimum_memopt.logs import Progress


@dataclass(frozen=True)
class TraceSpec:
    """Settings for tracing a forward.

    Attributes:
        strict: requested ids that are not in the graphs are an error.
        target: the device that is planned for; None: the model's device.
        is_run: graphs are compiled and run; False: they are only traced.
        unit: the compilation unit, one of `options.UNITS`.
        only_layers: code outside of layers runs in plain PyTorch, since hooks there gather the parameters that it
            reads.
        accumulates: the run accumulates gradients of several micro-batches.
    """

    compiler: str
    dynamic: bool = True
    loss: LossMode = field(default_factory=LossMode)
    strict: bool = True
    smoothing: LabelSmoothing | None = None
    target: Device | None = None
    is_run: bool = True
    unit: str = MODEL
    only_layers: bool = False
    accumulates: bool = False


@dataclass(frozen=True, eq=False)
class Variant:
    """A graph compiled for one choice.

    Attributes:
        run: the compiled graph.
        partitioned: None if nothing in the graph is trained.
        analyzed: the joint graph of the choice, traced anew for each variant; None as for `partitioned`.
        inputs: the choice's plan for arguments.
        probe: None if nothing is compressed.
        gradient_probe: None if the error of its gradients is not measured.
    """

    run: Callable[..., Any]
    programs: InductorPrograms
    partitioned: PartitionedGraph | None
    analyzed: AnalyzedGraph | None
    inputs: InputsPlan = field(default_factory=InputsPlan)
    probe: ErrorProbe | None = None
    gradient_probe: GradientProbe | None = None


@dataclass(eq=False)
class TracedGraph:
    """A graph traced by dynamo, or a part of one.

    Attributes:
        inputs: the fake inputs that it was traced with.
        parameters: the name of each input that is a parameter, empty for the others.
        state: the source of each input that is state of the model, empty for the others.
        losses: the decisions on its losses over a vocabulary.
        layer: path of the layer that it was traced for; empty outside of layers.
        is_all: no part of the traced forward runs outside of this graph and those traced together with it.
        is_whole: dynamo's whole graph, and not that of a layer.
        module: the module whose forward, or a part of it, was traced.
        trace: dynamo's trace, to compile further variants in; None while dynamo is tracing the graph.
        analyzed: its joint graph; None if nothing in it is trained.
        variants: variants by the keys of their choices.
        chosen_at: choices, number of earlier graph runs, and layer of the latest variant.
    """

    graph: fx.GraphModule
    inputs: Sequence[Any]
    parameters: tuple[str, ...]
    state: tuple[str, ...]
    losses: tuple[LossDecision, ...]
    layer: str
    is_all: bool
    is_whole: bool
    module: "weakref.ref[torch.nn.Module] | None"
    trace: dynamo.Trace | None
    analyzed: AnalyzedGraph | None = None
    variants: dict[str, Variant] = field(default_factory=dict)
    chosen_at: tuple[object, int, str] | None = None

    @cached_property
    def is_tensor(self) -> tuple[bool, ...]:
        """Returns, for each input, whether it is a tensor."""
        return tuple(isinstance(value, torch.Tensor) for value in self.inputs)

    def state_key(self, at: int) -> str:
        """Returns the key of an argument that is state: the class of the traced module, and the argument's source."""
        module = self.module() if self.module is not None else None
        return f"{type(module).__name__} {self.state[at]}"

    def written_arguments(self) -> Collection[int]:
        """Returns the positions of the arguments that the graph writes to."""
        if self.analyzed is not None:
            return places_of(self.analyzed.joint.mutated_inputs)
        inputs = self.graph.graph.find_nodes(op="placeholder")
        return [inputs.index(node) for node in fx_graph.written_in_place(self.graph.graph)]

    def state_arguments(self, moved: Collection[str]) -> StateArguments:
        """Returns the arguments that are state.

        Args:
            moved: keys of the state that has changed between a forward and its backward.
        """
        places = [at for at, source in enumerate(self.state) if source]
        return StateArguments(
            frozenset(at for at in places if self.parameters[at]),
            frozenset(at for at in places if not self.parameters[at]),
            frozenset(at for at in places if self.state_key(at) in moved),
        )


@dataclass(frozen=True)
class ForwardProgress:
    """The progress of a forward when a choice is made for one of its graphs.

    Attributes:
        inputs: keyword arguments of the forward.
        choices: the choices of all graph runs so far.
        untrained: parameters without a gradient so far, see `without_gradient`.
        trained: parameters with a gradient so far, see `with_gradient`.
        is_all: nothing of the model's forward runs outside of the graph.
    """

    inputs: Mapping[str, Any]
    choices: tuple[Choice, ...]
    untrained: frozenset[str]
    trained: frozenset[str]
    progress: Progress
    is_all: bool


# Makes the choice for one graph; its errors are shown to the user.
Choose = Callable[[AnalyzedGraph, ForwardProgress], Choice]


@dataclass(eq=False)
class GraphChoices:
    """The choices for the graphs of a forward under one plan.

    Attributes:
        purpose: the batches that the choices are for, in log lines; empty: all batches.
        has_run: a forward has run with these choices.
        sizes: symbol values of each graph in its first run with these choices.
        variants: variants by graph, layer and call index.
        partitions: variants by graph and the key of the choice.
        seen: graphs that have run with these choices.
        tapes: tapes by kind of call and description of its arguments.
    """

    choose: Choose
    purpose: str = ""
    has_run: bool = False
    sizes: dict[TracedGraph, SymbolValues] = field(default_factory=dict)
    variants: dict[tuple[TracedGraph, str, int], Variant] = field(default_factory=dict)
    partitions: dict[tuple[TracedGraph, str], Variant] = field(default_factory=dict)
    seen: set[PartitionedGraph] = field(default_factory=set)
    tapes: KnownTapes = field(default_factory=KnownTapes)

    def copied(self) -> "GraphChoices":
        """Returns a copy to which further choices can be added, without the tapes."""
        own = {name: copy.copy(getattr(self, name)) for name in ("sizes", "variants", "partitions", "seen")}
        return replace(self, tapes=KnownTapes(), **own)


@dataclass(eq=False)
class ForwardRun:
    """The state of a running forward.

    Attributes:
        args: positional arguments of the forward.
        inputs: keyword arguments of the forward.
        reader: see `ForwardArgs`.
        tape: recorder or player of the graph runs.
        watch: reasons for graph breaks and recompiles.
        layer_inputs: arguments of graph runs that are offloaded or recomputed.
        chosen: the choices of all graph runs so far.
        ran: the graphs that have run, with their joint graphs.
        buffers: the model's state before the forward, with buffers; None if they were not copied.
        errors: errors of activations saved in fp8, in a first forward.
        gradient_errors: errors of the gradients of a first forward; None: they are not measured.
        overwritten: parameters and batch tensors that graphs of a first forward write to, with their former values.
    """

    choices: GraphChoices
    args: Sequence[Any]
    inputs: Mapping[str, Any]
    reader: str
    tape: TapeRecorder | TapePlayer
    watch: dynamo.Watch = field(default_factory=dynamo.Watch)
    layer_inputs: LayerInputs = field(default_factory=LayerInputs)
    progress: Progress = field(default_factory=Progress)
    chosen: list[Choice] = field(default_factory=list)
    ran: dict[PartitionedGraph, AnalyzedGraph] = field(default_factory=dict)
    buffers: ForwardState | None = None
    errors: list[RelativeError] = field(default_factory=list)
    gradient_errors: GradientErrors | None = None
    overwritten: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def has_written(self) -> bool:
        """True if the forward may have written to buffers."""
        return any(graph.joint.mutated_inputs for graph in self.ran.values()) or not all(
            graph.is_all_of_forward for graph in self.ran
        )

    def call_index(self, analyzed: AnalyzedGraph | None, layer: str) -> int:
        """Returns the call index of the graph's next run, see `tape.Call`; 0 if nothing in the graph is trained."""
        return 0 if analyzed is None else self._calls[analyzed.digest, layer]

    def place(self, layer: str) -> tuple[GraphChoices, int, str]:
        """Returns the value of `TracedGraph.chosen_at` for the next run of a graph."""
        return self.choices, self.tape.count, layer

    def choose(self, graph: TracedGraph, analyzed: AnalyzedGraph, gradients: Mapping[str, bool], layer: str) -> Choice:
        """Returns the choice for the graph that runs next. Raises the errors of `GraphChoices.choose`.

        Args:
            gradients: for each parameter that the graph reads, whether it returns a gradient.
        """
        so_far = [*(earlier.gradients for earlier in self.ran), gradients]
        is_all = graph.is_whole and graph.is_all
        state = ForwardProgress(
            self.inputs, tuple(self.chosen), without_gradient(so_far), with_gradient(so_far), self.progress, is_all
        )
        choice = self.choices.choose(
            replace(analyzed, layer=layer, call_index=self.call_index(analyzed, layer)), state
        )
        # A plan file of another layer or an earlier version may still ask to rerun a graph that writes to its inputs.
        if choice.inputs.is_repeated and analyzed.joint.mutated_inputs:
            return replace(choice, inputs=replace(choice.inputs, is_repeated=False))
        return choice

    def note(self, variant: Variant, layer: str) -> None:
        """Note that a variant has run for a layer."""
        if variant.partitioned is not None and variant.analyzed is not None:
            self.ran.setdefault(variant.partitioned, variant.analyzed)
            self.chosen.append(variant.partitioned.choice)
            self._calls[variant.analyzed.digest, layer] += 1
