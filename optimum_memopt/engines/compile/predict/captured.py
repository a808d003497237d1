"""The joint graphs of a training forward, traced on fake tensors: nothing is run, nothing allocated."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from optimum_memopt.engines.api.explanations import ForwardCall, TensorLike
from optimum_memopt.engines.api.run import LargestBatch, Selection
from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import Candidate, offloads
from optimum_memopt.engines.compile.graph.joint import is_chunked_loss_operator
from optimum_memopt.engines.compile.graph.problem import Problem, problems_of
from optimum_memopt.engines.compile.graph.saved_activations import module_path
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, larger_sizes
from optimum_memopt.engines.compile.memory.simulation import Simulation, simulate
from optimum_memopt.engines.compile.memory.tape import Call, Tape
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.producer import InternalProducer, Producer
from optimum_memopt.engines.compile.solver.offload import offloadable
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.shared.model_settings import Checkpointing
from optimum_memopt.logs import only_warnings
from optimum_memopt.plans.matching import Matched


@dataclass(frozen=True)
class CapturedGraph:
    """One joint graph of a forward.

    Attributes:
        problem_at: the graph as numbers, for any sizes.
        sizes: of the batch that it was captured with.
        names: of the symbols that are sizes of inputs, `input_ids_dim0`.
        saved: names of the nodes that its plan saves.
        offloaded: names of those that it keeps on the host.
        rows: of the plan table, by the name of the node that makes an activation.
        modules: paths of the modules that call the operators, by node.
        costs: of its operators.
        offloadable: numbers of the nodes that may wait on the host.
        runs: how often it runs in a forward.
        tape: the runs of all graphs of the forward.
        untrained: parameters of the model that get no gradient, see `without_gradient`.
    """

    problem_at: Callable[[SymbolValues], Problem]
    sizes: Mapping[sympy.Symbol, int]
    names: Mapping[sympy.Symbol, str]
    saved: frozenset[str]
    offloaded: frozenset[str]
    rows: Mapping[str, str]
    modules: Mapping[str, str]
    costs: Costs
    offloadable: frozenset[int]
    runs: int = 1
    tape: Tape = field(default_factory=lambda: Tape(()))
    untrained: frozenset[str] = frozenset()

    @property
    def chunks_loss(self) -> bool:
        """Whether a loss is computed without its logits."""
        return any(map(is_chunked_loss_operator, self.problem_at(self.sizes).kinds))

    def sizes_for(self, largest: LargestBatch | None) -> dict[sympy.Symbol, int]:
        """The sizes of the batch, raised to those of the run's largest."""
        return larger_sizes(self.sizes, self.names, largest)

    def simulated(self, problem: Problem) -> Simulation:
        """Its plan's run; `problem` is of this graph."""
        numbers = {name: number for number, name in enumerate(problem.names)}
        return simulate(problem, problem.saving(numbers[name] for name in self.saved if name in numbers))


@dataclass(frozen=True)
class Recorder(InternalProducer):
    """See `Producer`; records each graph before another producer chooses.

    Attributes:
        inner: that chooses.
        costs_of: operators' costs.
        graphs: filled.
    """

    inner: Producer
    costs_of: Callable[[AnalyzedGraph], Costs]
    graphs: list[CapturedGraph] = field(default_factory=list)

    def match(self, candidates: Sequence[Candidate]) -> Matched:
        """What the other one is asked for, as far as it is there."""
        return self.inner.match(candidates)

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice]) -> Choice:
        """The other producer's choice."""
        costs = self.costs_of(graph)
        # All that is read of the joint graph is read now: torch's own partition changes it.
        problem_at = problems_of(graph, costs.seconds, costs.workspaces)
        modules = {node.name: module_path(node) for node in graph.joint.nodes if node.op == "call_function"}
        rows: dict[str, str] = {}
        for candidate in graph.candidates:
            rows.setdefault(candidate.activation.root.name, candidate.row)
        # Else what passes between graphs is not known, and nor is what was held.
        assert len(graph.joint.gradients) == len(graph.joint.inputs)
        on_host = offloadable(graph)
        choice = self.inner.choose(graph, earlier)
        offloaded = _names(c.activation.root for c in offloads(choice.candidates))
        saved = _names(choice.nodes_to_save)
        sizes, names = graph.size_hints, graph.names
        self.graphs.append(CapturedGraph(problem_at, sizes, names, saved, offloaded, rows, modules, costs, on_host))
        return choice


def _names(nodes: Any) -> frozenset[str]:
    return frozenset(node.name for node in nodes)


def capture(
    model: torch.nn.Module,
    call: ForwardCall,
    producer: Producer,
    loss: str,
    compiler: str,
    autocast: torch.dtype | None,
    costs_of: Callable[[AnalyzedGraph], Costs],
) -> list[CapturedGraph]:
    """Trace a model's training forward and its backward.

    Args:
        model: left as it is.
        call: of its forward.
        producer: whose plan is recorded.
        loss: one of `options.LOSSES`.
        compiler: one of `options.COMPILERS`.
        autocast: its type; None: without.
        costs_of: operators' costs.

    Raises:
        Exception: whatever tracing meets, as a forward that reads values of its tensors.
    """
    recorder = Recorder(producer, costs_of)
    # What a plan lacks in this graph is no mistake of the user's here.
    engine = CompileEngine(Selection(strict=False), compiler, loss=loss, producer=recorder, is_dry=True)
    engine.outputs_read_by = lambda: call.reader
    mode, fake = dynamo.fake_copy(model)
    # Whose part the producer takes.
    Checkpointing(fake).switch_off()
    device_type = next(model.parameters()).device.type
    with (
        only_warnings(),
        torch.autocast(device_type, autocast, enabled=autocast is not None),
        torch.enable_grad(),
        mode,
    ):
        engine.attach(fake)
        try:
            fake(*_made(call.args), **_made(call.kwargs))
            tape, untrained = Tape(tuple(map(Call, range(len(recorder.graphs))))), frozenset[str]()
            if (predictor := engine.predictor) is not None:
                tape, untrained = predictor.tape, predictor.untrained
        finally:
            engine.detach()
    return [
        replace(graph, runs=count, untrained=untrained, tape=tape)
        for graph, count in zip(recorder.graphs, tape.runs, strict=True)
    ]


def _made(given: Any) -> Any:
    """With tensors of the current mode for `TensorLike`, in containers too."""
    if isinstance(given, TensorLike):
        made = torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=given.device)
        return made.requires_grad_(given.requires_grad)
    if isinstance(given, Mapping):
        return {key: _made(value) for key, value in given.items()}
    if isinstance(given, tuple | list) and type(given) in (tuple, list):
        return type(given)(map(_made, given))
    # A cache or another object that a forward writes to is not the failed step's.
    return given if isinstance(given, Collection | int | float | bool | None) else copy.copy(given)
