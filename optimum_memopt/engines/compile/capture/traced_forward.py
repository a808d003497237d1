"""A model's training forward as torch.compile traces it, each of its graphs partitioned as is chosen for it."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from optimum_memopt.compat import forward_hook_ids
from optimum_memopt.engines.compile.capture.backend import Backend, configured
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, Modules, gradients_of, without_gradient
from optimum_memopt.engines.compile.graph.saved_activations import add_outer_modules
from optimum_memopt.engines.compile.graph.symbols import input_sizes
from optimum_memopt.engines.compile.loss.decide import (
    LossDecision,
    LossMode,
    decide_losses,
    with_detached_outputs,
    without_logits,
)
from optimum_memopt.engines.compile.memory.inductor_programs import InductorPrograms
from optimum_memopt.engines.compile.memory.tape import Tape, TapeRecorder
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph, analyze, partitioned
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.torch_compat.dynamo import own_error
from optimum_memopt.engines.compile.torch_compat.trace_fixes import TraceFixes
from optimum_memopt.engines.shared.forward_patch import ForwardState, weak_method
from optimum_memopt.engines.shared.label_smoothing import LabelSmoothing, cross_entropy
from optimum_memopt.logs import Progress, announced, get_logger
from optimum_memopt.memory.peak_monitor import held_bytes


@dataclass(frozen=True)
class TraceSpec:
    """How a forward is traced.

    Attributes:
        strict: what is asked for and is not in the graphs is an error.
        purpose: for which batches, for log lines; empty: for all.
        target: the device that it is planned for; None: where the model lies.
        is_run: programs are compiled and run; False: the graphs are only looked at.
    """

    compiler: str
    dynamic: bool = True
    loss: LossMode = field(default_factory=LossMode)
    strict: bool = True
    smoothing: LabelSmoothing | None = None
    purpose: str = ""
    target: Device | None = None
    is_run: bool = True


@dataclass(frozen=True)
class ForwardArgs:
    """The arguments of a training forward.

    Attributes:
        loss_only: nobody calls backward from any output but the loss.
        reader: who may read more of the outputs than the loss, empty when nobody does.
    """

    args: tuple[Any, ...]
    inputs: dict[str, Any]
    loss_only: bool
    reader: str


@dataclass(frozen=True)
class GraphInForward:
    """The forward as far as it has come while one of its graphs is partitioned.

    Attributes:
        earlier: graphs of the same forward that were partitioned, and have run.
        is_all: nothing of the model's forward runs outside of the graph.
    """

    inputs: Mapping[str, Any]
    earlier: tuple[PartitionedGraph, ...]
    tape: Tape
    untrained: frozenset[str]
    progress: Progress
    is_all: bool


# Chooses for one graph; it may raise what the user is to read.
Choose = Callable[[AnalyzedGraph, GraphInForward], Choice]


@dataclass(frozen=True)
class TracedCall:
    """One call of a forward.

    Attributes:
        ran: `graphs`, and the others that ran.
        tape: the runs of `ran`.
        graph_breaks: reasons, one line each, where graphs were compiled.
        recompiles: reasons, one line each, where an earlier call had compiled graphs for it.
    """

    outputs: Any
    graphs: tuple[PartitionedGraph, ...]
    ran: tuple[PartitionedGraph, ...]
    tape: Tape
    graph_breaks: tuple[str, ...]
    recompiles: tuple[str, ...]


class TracedForward:
    """Compiles at its first call, and again for arguments of another kind.

    Attributes:
        held: bytes that the process held when the last graph was partitioned.
        is_first: the last call was the first with its kind of arguments.
    """

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any], spec: TraceSpec, choose: Choose) -> None:
        self._model, self._forward, self._spec, self._choose = model, forward, spec, choose
        self._name = type(model).__name__
        self._trace_fixes = TraceFixes(model)
        # By whether only the loss keeps its gradient, whether the logits are dropped, and the hooks of all modules.
        self._compiled: dict[tuple[bool, bool, tuple[int, ...]], Callable[..., Any]] = {}
        # What torch traces for them.
        self._traced: list[Callable[..., Any]] = []
        # Of the current call: its graphs so far, its keyword arguments, and of the graph that is compiled next the
        # losses, and of its inputs that are parameters the names.
        self._graphs: list[PartitionedGraph] = []
        self._inputs: Mapping[str, Any] = {}
        self._losses: tuple[LossDecision, ...] = ()
        self._parameters: tuple[str, ...] = ()
        # All that were compiled, and the runs of the current call.
        self._of_programs: dict[object, PartitionedGraph] = {}
        self._tape = TapeRecorder()
        self._progress = Progress()
        self._said: set[str] = set()
        self._has_run = False
        self.held = 0
        self.is_first = True

    def __call__(self, call: ForwardArgs) -> TracedCall:
        """Run the forward. Where it raises in a first call, random generators and buffers are as they were before.

        Raises:
            Exception: torch's, or what is no fault of a compiler's as it was raised.
        """
        traced = self._call(call)
        if traced is None:
            # transformers installs those that collect hidden states and router logits in a model's first forward,
            # which breaks its graph there; all later ones run with them.
            self.say(f"the first forward of {self._name} has put hooks on its modules: compiling it again with them")
            self._compiled.clear()
            self._has_run = True
            traced = self._call(call)
            assert traced is not None
        self._has_run = True
        return traced

    def _call(self, call: ForwardArgs) -> TracedCall | None:
        """Run a call; None where a model's first forward has put hooks on its modules."""
        key = call.loss_only, self._spec.loss.drops_logits(call.reader), dynamo.global_hooks()
        self.is_first = is_first = key not in self._compiled or not self._has_run
        if key not in self._compiled:
            self._compiled[key] = self._compile(call)
        watch = dynamo.Watch()
        before = ForwardState.of(self._model, with_buffers=True) if is_first else None
        hooks = None if self._has_run else forward_hook_ids(self._model)
        outputs, self._inputs = None, call.inputs
        self._graphs = []
        self._tape.begin(dynamo.tree_leaves((call.args, call.inputs)))
        try:
            with (
                configured(compiles=is_first),
                self._trace_fixes.around_call(call.inputs),
                self._announced(is_first) as self._progress,
            ):
                outputs = self._compiled[key](*call.args, **call.inputs)
        except BaseException as error:
            if before is not None:
                before.restore(self._model)
            if not isinstance(error, Exception) or hooks is None or forward_hook_ids(self._model) == hooks:
                own = own_error(error)
                if own is None or own is error:
                    raise
                raise own from None
        finally:
            self._inputs = {}
        if hooks is not None and forward_hook_ids(self._model) != hooks:
            assert before is not None
            before.restore(self._model)
            return None
        graphs, self._graphs = tuple(self._graphs), []
        self._of_programs.update((graph.programs, graph) for graph in graphs)
        self._tape.end(dynamo.tree_leaves(outputs))
        earlier = (self._of_programs[programs] for programs in self._tape.graphs if programs in self._of_programs)
        ran = tuple(dict.fromkeys((*graphs, *earlier)))
        tape = self._tape.tape([graph.programs for graph in ran])
        breaks = tuple(watch.graph_breaks()) if is_first or graphs else ()
        return TracedCall(outputs, graphs, ran, tape, breaks, () if is_first else tuple(watch.recompiles()))

    def plainly(self, call: ForwardArgs) -> Any:
        """The outputs of the model's own forward, changed as those of the compiled one."""
        return self._wrapped(call)(*call.args, **call.inputs)

    def say(self, line: str) -> None:
        """Log a line, once."""
        if line not in self._said:
            self._said.add(line)
            get_logger().info(line)

    def _compile(self, call: ForwardArgs) -> Callable[..., Any]:
        if self._compiled:
            outputs = (
                "only the loss keeps its gradient"
                if call.loss_only
                else "outputs beside the loss may be read and keep theirs"
            )
            self.say(f"compiling another training graph for other hooks or another caller: {outputs}")
        # torch keeps each backend until the process ends (`torch/_dynamo/eval_frame.py`, `cached_backends`, 2.13);
        # it must not keep the model with it.
        partition, prepare, say = weak_method(self._partition), weak_method(self._prepare), weak_method(self.say)
        reader = call.reader
        backend = Backend(
            self._spec.compiler,
            partition,
            lambda module, inputs: prepare(module, inputs, reader),
            say,
            self._tape,
            self._spec.is_run,
        )
        forward = dynamo.with_own_code(self._wrapped(call))
        self._traced.append(forward)
        return dynamo.compile_alone(forward, backend, self._spec.dynamic)

    def _wrapped(self, call: ForwardArgs) -> Callable[..., Any]:
        forward, smoothing = self._forward, self._spec.smoothing
        if smoothing is not None:
            forward = smoothing.wrap(forward, functools.partial(cross_entropy, smoothing))
        if call.loss_only:
            forward = with_detached_outputs(forward)
        return without_logits(forward) if self._spec.loss.drops_logits(call.reader) else forward

    def _prepare(self, module: fx.GraphModule, inputs: Sequence[Any], reader: str) -> None:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._parameters = tuple(names.get(id(given), "") for given in inputs)
        self._losses, reasons = decide_losses(module.graph, self._spec.loss, reader)
        if any(loss.is_chunked for loss in self._losses):
            module.recompile()
        for reason in reasons:
            self.say(f"the loss of {self._name} is not chunked: {reason}")

    def _partition(
        self,
        programs: InductorPrograms,
        module: fx.GraphModule,
        inputs: Any,
        num_fwd_outputs: int,
        options: dict[str, Any],
    ) -> tuple[Choice, Modules]:
        spec, number = self._spec, len(self._graphs) + 1
        self._progress.stage = f"partitioning graph {number} of {len(module.graph.nodes)} operators"
        add_outer_modules(module.graph, self._model, dynamo.traced_module())
        is_all = any(dynamo.is_all_of(forward) for forward in self._traced)
        gradients = gradients_of(module.graph, num_fwd_outputs, self._parameters)
        untrained = without_gradient([*(graph.gradients for graph in self._graphs), gradients])
        cuda = spec.target.cuda if spec.target is not None else None
        graph = analyze(module, inputs, num_fwd_outputs, options, cuda, input_sizes(self._inputs))
        tape = self._tape.tape([graph.programs for graph in self._graphs])
        state = GraphInForward(self._inputs, tuple(self._graphs), tape, untrained, self._progress, is_all)
        choice = self._choose(graph, state)
        partitioned_graph, modules = partitioned(
            graph, choice, runs_operators=spec.compiler != "inductor", target=spec.target
        )
        partitioned_graph = replace(
            partitioned_graph, programs=programs, is_all_of_forward=is_all, losses=self._losses, gradients=gradients
        )
        self._losses = ()
        self._graphs.append(partitioned_graph)
        self.held = held_bytes(next(self._model.parameters()).device)
        self._progress.stage = f"compiling graph {number}"
        return choice, modules

    def _announced(self, is_first: bool) -> contextlib.AbstractContextManager[Progress]:
        if not is_first:
            return contextlib.nullcontext(Progress())
        subject = f"the training graph of {self._name}{self._spec.purpose}"
        return announced(
            f"compiling {subject} with {self._spec.compiler}",
            f"compiled {subject} and ran its forward",
            "tracing forward and backward, partitioning, compiling; once, takes a minute for large models",
            stage="tracing",
        )


def no_training_graph(traced: TracedCall) -> str:
    """Why a call has compiled no graph."""
    reasons = "; ".join(traced.graph_breaks) or "nothing in it can be trained"
    return f"torch compiled no training graph of this model ({reasons})"
