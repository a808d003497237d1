"""How a training forward is traced, its graphs as dynamo has traced them, the choices for each, and the forward while
it runs."""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from optimum_memopt.engines.compile.capture.error_probe import ErrorProbe, RelativeError
from optimum_memopt.engines.compile.capture.gradient_probe import GradientErrors, GradientProbe
from optimum_memopt.engines.compile.capture.layer_inputs import LayerInputs
from optimum_memopt.engines.compile.costs.devices import Device
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
from optimum_memopt.engines.compile.torch_compat import dynamo, fx_graph
from optimum_memopt.engines.shared.forward_patch import ForwardState
from optimum_memopt.engines.shared.label_smoothing import LabelSmoothing
from optimum_memopt.logs import Progress


@dataclass(frozen=True)
class TraceSpec:
    """How a forward is traced.

    Attributes:
        strict: what is asked for and is not in the graphs is an error.
        target: the device that it is planned for; None: where the model lies.
        is_run: programs are compiled and run; False: the graphs are only looked at.
        unit: what is compiled as one, of `options.UNITS`.
        only_layers: what is outside of layers runs as in plain PyTorch, since hooks there gather what it reads.
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


@dataclass(frozen=True, eq=False)
class Variant:
    """A graph as it was compiled for one choice.

    Attributes:
        partitioned: None where nothing of it is trained, as `analyzed`.
        analyzed: the joint graph that the choice is for, which is traced again for each.
        inputs: of the choice.
        probe: None where nothing is compressed.
        gradient_probe: None where the error of its gradients is not measured.
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
    """A graph that dynamo has traced, or a part of one.

    Attributes:
        inputs: fake ones, that it was traced with.
        parameters: the name of each input that is a parameter, empty for the others.
        state: where the model holds each input that is state, empty for the others.
        losses: that were decided for it.
        layer: path of the layer that it was traced for; empty: of none.
        is_all: nothing of the forward that was traced runs outside of it and others that were traced with it.
        is_whole: it is all that was traced, and no layer.
        module: whose forward, or a part of it, it is.
        trace: None where it is compiled while dynamo traces it.
        analyzed: its joint graph; None where nothing of it is trained.
        variants: by the keys of their choices.
        chosen_at: choices, run of the forward and layer of the latest variant.
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

    def state_key(self, at: int) -> str:
        """The source of an argument that is state, and whose attribute it is."""
        module = self.module() if self.module is not None else None
        return f"{type(module).__name__} {self.state[at]}"

    def written_arguments(self) -> Collection[int]:
        """The places of arguments that it writes to."""
        if self.analyzed is not None:
            return places_of(self.analyzed.joint.mutated_inputs)
        inputs = self.graph.graph.find_nodes(op="placeholder")
        return [inputs.index(node) for node in fx_graph.written_in_place(self.graph.graph)]

    def state_arguments(self, moved: Collection[str]) -> StateArguments:
        """Those of its arguments that are state; `moved` are keys of some."""
        places = [at for at, source in enumerate(self.state) if source]
        return StateArguments(
            frozenset(at for at in places if self.parameters[at]),
            frozenset(at for at in places if not self.parameters[at]),
            frozenset(at for at in places if self.state_key(at) in moved),
        )


@dataclass(frozen=True)
class ForwardProgress:
    """The forward as far as it has come when a choice is made for one of its graphs.

    Attributes:
        choices: that of each run of a graph so far.
        untrained: see `without_gradient`.
        trained: see `with_gradient`.
        is_all: nothing of the model's forward runs outside of the graph.
    """

    inputs: Mapping[str, Any]
    choices: tuple[Choice, ...]
    untrained: frozenset[str]
    trained: frozenset[str]
    progress: Progress
    is_all: bool


# Chooses for one graph; it may raise what the user is to read.
Choose = Callable[[AnalyzedGraph, ForwardProgress], Choice]


@dataclass(eq=False)
class GraphChoices:
    """The choices for the graphs of a forward, one for each; other batches may have choices of their own.

    Attributes:
        purpose: for which batches, for log lines; empty: for all.
        has_run: a forward has run with them.
        sizes: of each graph in its first run with them.
        variants: by graph, layer and call index.
        partitions: the same by graph and the key of the choice.
        seen: graphs that have run with them.
        tapes: by the kinds of calls and what their arguments are like.
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
        """The same choices, to which others may be added."""
        own = {name: copy.copy(getattr(self, name)) for name in ("sizes", "variants", "partitions", "seen")}
        return replace(self, tapes=KnownTapes(), **own)


@dataclass(eq=False)
class ForwardRun:
    """A forward while it runs.

    Attributes:
        args: its positional arguments.
        inputs: its keyword arguments.
        reader: see `ForwardArgs`.
        tape: notes the runs of graphs.
        watch: knows why torch has traced them.
        layer_inputs: arguments of those runs that are offloaded or recomputed.
        chosen: the choice of each run of a graph so far.
        ran: the graphs among those, with their joint graphs.
        buffers: the state of the model's buffers before it; None where they were not read.
        errors: of activations that are saved in fp8, in a first forward.
        gradient_errors: of the backward of a first forward; None: they are not measured.
        overwritten: parameters, and tensors of the batch, that its graphs write to in a first forward, with their
            values before.
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
        """True where it may have written to buffers."""
        return any(graph.joint.mutated_inputs for graph in self.ran.values()) or not all(
            graph.is_all_of_forward for graph in self.ran
        )

    def call_index(self, analyzed: AnalyzedGraph | None, layer: str) -> int:
        """See `Call`; 0 for a graph of which nothing is trained."""
        return 0 if analyzed is None else self._calls[analyzed.digest, layer]

    def place(self, layer: str) -> tuple[GraphChoices, int, str]:
        """See `TracedGraph.chosen_at`."""
        return self.choices, self.tape.count, layer

    def choose(self, graph: TracedGraph, analyzed: AnalyzedGraph, gradients: Mapping[str, bool], layer: str) -> Choice:
        """The choice for a graph that runs next, of these gradients of parameters. Raises what choosing does."""
        so_far = [*(earlier.gradients for earlier in self.ran), gradients]
        is_all = graph.is_whole and graph.is_all
        state = ForwardProgress(
            self.inputs, tuple(self.chosen), without_gradient(so_far), with_gradient(so_far), self.progress, is_all
        )
        choice = self.choices.choose(
            replace(analyzed, layer=layer, call_index=self.call_index(analyzed, layer)), state
        )
        # A plan file may say so all the same, of another layer or of an earlier version.
        if choice.inputs.is_repeated and analyzed.joint.mutated_inputs:
            return replace(choice, inputs=replace(choice.inputs, is_repeated=False))
        return choice

    def note(self, variant: Variant, layer: str) -> None:
        """A variant has run for a layer."""
        if variant.partitioned is not None and variant.analyzed is not None:
            self.ran.setdefault(variant.partitioned, variant.analyzed)
            self.chosen.append(variant.partitioned.choice)
            self._calls[variant.analyzed.digest, layer] += 1
