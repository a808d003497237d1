"""A model's training forward, traced by torch.compile; each of its graphs is partitioned by the choice made for it."""

import contextlib
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from optimum_memopt.compat.python import with_room
from optimum_memopt.compat.torch import (
    has_hook_since,
    hooks_around_call,
    modes_restored_on_error,
    next_hook_id,
    own_parameters,
    tensors_in,
    without_modes,
    write_back,
)
from optimum_memopt.engines.compile.capture.error_probe import errors_line
from optimum_memopt.engines.compile.capture.forward_call import CallKind, ForwardArgs
from optimum_memopt.engines.compile.capture.gradient_probe import GradientErrors
from optimum_memopt.engines.compile.capture.layer_groups import LayerGroup, layer_groups, opened_modules, regions_of
from optimum_memopt.engines.compile.capture.layer_inputs import listed
from optimum_memopt.engines.compile.capture.moved_state import StateArgs, StateWatch
from optimum_memopt.engines.compile.capture.regions import Regions, ResultsChangedError, around_regions
from optimum_memopt.engines.compile.capture.traced_graph import (
    ForwardRun,
    GraphChoices,
    TracedGraph,
    TraceSpec,
    Variant,
)
from optimum_memopt.engines.compile.capture.variants import Variants
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.loss.decide import (
    LossDecision,
    decide_losses,
    with_detached_outputs,
    without_logits,
)
from optimum_memopt.engines.compile.memory.around_runs import Sharding
from optimum_memopt.engines.compile.memory.known_tapes import OtherRunsError, TapePlayer
from optimum_memopt.engines.compile.memory.tape import RunId, Tape, TapeRecorder
from optimum_memopt.engines.compile.options import LAYER
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.sharding.model import shared_model
from optimum_memopt.engines.shared.forward_patch import ForwardState, weak_method
from optimum_memopt.engines.shared.label_smoothing import cross_entropy
from optimum_memopt.engines.torch_compat import autograd, dynamo, fused_lm_head, fx_graph, traced_sizes
from optimum_memopt.engines.torch_compat.attention import AttentionMasks, KeptMasks
from optimum_memopt.engines.torch_compat.compiler_errors import is_of_trace, line_with_place, own_error
from optimum_memopt.engines.torch_compat.trace_fixes import TraceFixes, one_at_a_time
from optimum_memopt.errors import UnsupportedModelError, forget_frames, is_out_of_memory
from optimum_memopt.generators import GeneratorStates
from optimum_memopt.logs import Progress, announced, get_logger, watched
from optimum_memopt.memory import process

# Retrace limit for forwards that keep adding hooks or changing layer outputs.
_MOST_TRACES = 3


@dataclass(frozen=True)
class TracedCall:
    """The outputs of one call of a forward, with the graphs that ran in it.

    Attributes:
        graphs: graphs of `ran` that had not run in an earlier call with the same choices.
        ran: all graphs, in the order of their first runs.
        analyzed: the joint graphs of `ran`.
        tape: the recorded runs of `ran`.
        graph_breaks: reasons, one line each, if the call compiled graphs.
        recompiles: recompiles that the call caused; empty in a first call.
        before: the state to restore before a rerun of the call; None if the call changed more than that.
    """

    outputs: Any
    graphs: tuple[PartitionedGraph, ...]
    ran: tuple[PartitionedGraph, ...]
    analyzed: tuple[AnalyzedGraph, ...]
    tape: Tape
    graph_breaks: tuple[str, ...]
    recompiles: tuple[dynamo.Recompile, ...]
    before: ForwardState | None = None


class TracedForward:
    """Traces a forward once per kind of call, and partitions the traced graphs for any number of choices.

    Attributes:
        spec: trace settings.
        masks: the attention masks that a traced forward makes.
        variants: compiled variants of the graphs.
        is_first: the last call was the first of its kind, or the first with its choices.
        is_undone: the last call failed, and left no change of state.
        would_chunk: a loss would be computed in chunks if the logits could not be read.
    """

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any], spec: TraceSpec) -> None:
        self._model, self._forward, self.spec = model, forward, spec
        self._name = type(model).__name__
        compiles = None if spec.only_layers else weak_method(self._compile_alone)
        # They look for functions that another thread's forward may have replaced.
        with one_at_a_time:
            self._trace_fixes = TraceFixes(model, compiles, spec.loss.may_chunk)
            self.masks = AttentionMasks(model, forward)
        self._compiled: dict[CallKind, Callable[..., Any]] = {}
        self._traced_again = 0
        # Code objects of the compiled forwards and layers. The functions themselves would keep the model alive.
        self._codes: list[types.CodeType] = []
        weakref.finalize(self, dynamo.forget, self._codes).atexit = False
        # Functions that the backend has returned to torch; see `_owned`.
        self._returned: list[Callable[..., Any]] = []
        groups, opened = regions_of(model, spec.unit), opened_modules(model)
        self._regions = self._new_regions(groups, opened)
        around = () if spec.only_layers else groups
        in_layers = [module for group in around for layer in group.values() for module in layer.modules()]
        self._in_layers, self._parameters = (list(map(own_parameters, each)) for each in (in_layers, model.modules()))
        self._hooks = [hooks_around_call(module) for module in model.modules()]
        self._forward_hooks = [hooks for _, hooks, *_ in self._hooks]
        leafs = [path for group in groups for path in group] if spec.only_layers else None
        self.shared = shared_model(model, frozenset(opened), leafs)
        self._running: ForwardRun | None = None
        # Tensors that the graphs of the last call wrote to, with their former values.
        self._overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        # The watch of a failed call, for its rerun.
        self._watch: dynamo.Watch | None = None
        self._said: set[str] = set()
        self._state = StateWatch(weak_method(self._name_of))
        # Functions left to plain Python, and the places in the code that made argument sizes constants of a graph.
        self._in_python: frozenset[dynamo.CodePlace] = frozenset()
        self._constant_sizes: dict[tuple[str, int], tuple[dynamo.CodePlace, ...]] = {}
        self._image_sizes = traced_sizes.ImageSizes()
        # By the attention masks of a batch.
        self._shardings: dict[KeptMasks, Sharding] = {}
        self._has_run = self.would_chunk = self._has_breaks = False
        self.is_first = True
        self.is_undone = False
        self.variants = Variants(model, spec, self._state, self.shared.is_shared, weak_method(self.say))

    def __call__(self, call: ForwardArgs, choices: GraphChoices, records: bool = False) -> TracedCall:
        """Run the forward with these choices, and make the missing ones. If a first call raises, random generators and
        buffers are restored.

        Args:
            records: record the runs of graphs, even if they are known from an equal call.

        Raises:
            OtherRunsError: the runs differ from those of an equal call; rerun with `records`.
            Exception: torch's error, or the original one if no compiler is at fault.
        """
        has_failed = False
        try:
            with one_at_a_time:
                traced = self._call(call, choices, records)
        except OtherRunsError:
            choices.tapes.forget()
            raise
        except Exception as error:
            is_changed = isinstance(error, ResultsChangedError)
            why = self._regions.refusal or (line_with_place(error) if self.is_first else "")
            why = str(error) if is_changed else why
            if not self._regions.all or not why or own_error(error) is not None:
                raise
            # The frames of its traceback hold activations that the graphs saved for the backward.
            forget_frames(error)
            if self.spec.is_run and not is_changed and not self._regions.refusal:
                # If plain PyTorch fails too, compiling layers is not the cause.
                self.check_plain(call)
            if is_changed and not self.is_first and self._traced_again < _MOST_TRACES:
                self._traced_again += 1
                self.say(f"recompiling the forward of {self._name}: {why}")
            else:
                self._say_whole(why)
                self._regions = self._new_regions(())
            has_failed = True
        if has_failed:
            # Outside the except block: the errors that it was raised from hold tensors, too.
            self._forget_compiled()
            return self(call, choices)
        if traced is None:
            # transformers installs the hooks that collect hidden states and router logits in the first forward asked
            # for these outputs, which breaks its graph there; all later forwards run with the hooks.
            which = "a later" if self._has_run else "the first"
            self.say(f"{which} forward of {self._name} registered module hooks: recompiling")
            self._forget_compiled()
            self._traced_again += 1
            return self(call, choices)
        self._has_run = choices.has_run = True
        return traced

    def move_scales(self) -> None:
        """Move the scales of 8-bit weights; do so before the state that a rerun starts from is taken, since a restored
        layer would have neither the old nor the new ones."""
        self._trace_fixes.move_scales()

    def _new_regions(
        self, groups: tuple[LayerGroup, ...], opened: Mapping[str, torch.nn.Module] = MappingProxyType({})
    ) -> Regions:
        modules = tuple(opened.values()) if groups else ()
        return Regions(groups, weak_method(self._compile_alone), modules, self.spec.only_layers)

    def _forget_compiled(self) -> None:
        """Drop all compiled forwards and the layer results that traces assumed; every call is traced again."""
        self._compiled.clear()
        self._trace_fixes.forget()
        self._regions.forget_results()

    def run_in_python(self, functions: frozenset[dynamo.CodePlace]) -> bool:
        """Leave these functions to plain Python; functions that they call are compiled, as after a graph break.
        Returns False if Python already runs all of them."""
        is_new = not functions <= self._in_python
        if is_new:
            self._in_python |= functions
            self._forget_compiled()
        return is_new

    @property
    def own_function(self) -> frozenset[dynamo.CodePlace]:
        """Returns the place of the model's forward in the code; empty if it has no code object."""
        code = getattr(inspect.unwrap(self._forward), "__code__", None)
        own = None if code is None else dynamo.CodePlace(code.co_filename, code.co_firstlineno, code.co_name)
        return frozenset() if own is None else frozenset({own})

    def is_in_layers(self, functions: Iterable[dynamo.CodePlace]) -> bool:
        """True if one of the functions is the forward of a layer or of a module inside one. Also True if there
        are none, since the code is then that of a layer's call."""
        modules = {
            module for group in layer_groups(self._model) for each in group.values() for module in each.modules()
        }
        codes = {forward.__code__ for module in modules if (forward := dynamo.forward_of(module)) is not None}
        known = list(functions)
        return not known or any(place.is_in(code) for place in known for code in codes)

    def _say_whole(self, why: str) -> None:
        """Log the fallback to one graph. Raises UnsupportedModelError if the settings demand separate layers."""
        if self.spec.only_layers:
            raise UnsupportedModelError(
                f"ZeRO 3 gathers parameters by layer, but the layers of {self._name} cannot be compiled separately "
                f"({why})",
                "use ZeRO stage 0, 1 or 2",
            )
        if self.spec.unit == LAYER:
            raise UnsupportedModelError(
                f"--memory_opt_unit layer: the layers of {self._name} cannot be compiled separately ({why})",
                "leave the flag out",
            )
        self.say(f"falling back to one graph for {self._name}: its layers cannot be compiled separately: {why}")

    def _call(self, call: ForwardArgs, choices: GraphChoices, records: bool) -> TracedCall | None:
        """Run a call. Returns None if it registered hooks on the model's modules and must be rerun."""
        self._renew_regions()
        kind = self._kind_of(call)
        self.is_first = is_first = kind not in self._compiled or not choices.has_run
        like = kind, call.description
        player = None if is_first or records else choices.tapes.player(like)
        if kind not in self._compiled:
            self._compiled[kind] = self._compile(call, kind)
        before = self._forward_state(call) if is_first or kind.has_regions else None
        next_hook = next_hook_id()
        outputs = None
        noting = self._recorder(call.args, call.inputs) if player is None else player
        watch = self._watch or dynamo.Watch()
        run = self._running = ForwardRun(choices, call.args, call.inputs, call.reader, noting, watch)
        self._overwritten = run.overwritten
        self._watch = None
        try:
            with modes_restored_on_error(self._device.type):
                outputs = self._run_compiled(kind, call, run, stops_at_hooks=self._may_run_again(before))
        except BaseException as error:
            self._undo(error, run, before)
            if isinstance(error, OtherRunsError):
                self._watch = run.watch
                raise
            if not isinstance(error, Exception) or not self._has_put_hooks(before, next_hook):
                own = own_error(error)
                if own is None or own is error:
                    raise
                raise own from None
        finally:
            self._running = None
        if before is not None and self._has_put_hooks(before, next_hook):
            self.restore_overwritten()
            before.restore()
            return None
        self._say_of(run)
        tape = run.tape.tape([graph.programs for graph in run.ran])
        if isinstance(run.tape, TapeRecorder):
            self._has_breaks = self._has_breaks or bool(run.watch.graph_breaks())
            if self._may_play(run):
                choices.tapes.add(like, run.tape, tape)
        graphs = tuple(graph for graph in run.ran if graph not in choices.seen)
        choices.seen.update(graphs)
        return self._traced_call(run, outputs, graphs, tape.under(self._sharding_of(call, tape)), before)

    def _undo(self, error: BaseException, run: ForwardRun, before: ForwardState | None) -> None:
        """Restore the state before a failed run, if it is rerun. Out of memory or interrupted it is not: its random
        numbers are drawn, as in plain PyTorch."""
        is_unwritten = is_of_trace(error) and not run.has_written
        is_other = isinstance(error, ResultsChangedError | OtherRunsError) or bool(self._regions.refusal)
        is_final = not isinstance(error, Exception) or is_out_of_memory(own_error(error) or error)
        self.is_undone = not run.ran
        if before is not None and not is_final and (self.is_first or is_unwritten or is_other):
            self.restore_overwritten()
            before.restore()
            self.is_undone = True

    def _say_of(self, run: ForwardRun) -> None:
        """Log remarks on a run, each once."""
        if self._regions.has_checkpointed:
            self.say(
                "running layers under torch.utils.checkpoint in plain PyTorch, outside the plan and the prediction: "
                "the checkpoint reruns them; to have a plan recompute them instead, remove the checkpoint"
            )
        if run.errors:
            self.say(errors_line(run.errors))

    def _renew_regions(self) -> None:
        """Recompile if layers have changed since the last call, and fall back to one graph if hooks now rule out
        separate layers."""
        if is_replaced := self._regions.are_replaced:
            self.say(f"layers of {self._name} have new forwards: recompiling")
        if self._state.begin() or is_replaced:
            self._forget_compiled()
            if self._regions.all:
                self._regions = self._new_regions(regions_of(self._model, self.spec.unit), opened_modules(self._model))
        if self._regions.all and not self._regions.are_closed:
            self._say_whole("modules inside them have hooks, or global module hooks are registered")

    def _kind_of(self, call: ForwardArgs) -> CallKind:
        """Returns the properties of a call that it is compiled for and torch does not guard on."""
        has_regions = self._regions.are_closed
        # The graph around the layers does not contain them, so it has no guards on whether they train.
        trains = _trains(self._in_layers) if has_regions else ()
        reads_outputs = not call.loss_only and self.variants.read_outputs
        drops_logits, hooks = self.spec.loss.drops_logits(call.reader), dynamo.global_hooks()
        return CallKind(call.loss_only, drops_logits, self.masks.kept, hooks, has_regions, reads_outputs, trains)

    def _forward_state(self, call: ForwardArgs) -> ForwardState:
        """Returns the state to restore before a rerun of the call; with buffers if it is the first of its kind."""
        # A forward may write to a dict argument (sentence-transformers).
        given = call.args, call.inputs
        kinds = filter(None, itertools.chain.from_iterable(self._hooks))
        called = (hook for of_kind in kinds for hook in of_kind.values())
        return ForwardState.of(self._model, with_buffers=self.is_first, arguments=given, functions=called)

    def _run_compiled(self, kind: CallKind, call: ForwardArgs, run: ForwardRun, stops_at_hooks: bool) -> Any:
        """Returns the outputs of the forward that was compiled for this kind."""
        masks = self.masks.replacements(call.args, call.inputs, call.drops_cache)
        with (
            dynamo.configured(kind.has_regions, self._in_python, self._codes),
            process.fewer_collections() if self.is_first else contextlib.nullcontext(),
            self._image_sizes.constant(call.named),
            self._trace_fixes.around_call(call.inputs, masks, stops_at_hooks=stops_at_hooks),
            self._announced(self.is_first, run.choices.purpose) as run.progress,
            self._regions.in_place(kind) if kind.has_regions else contextlib.nullcontext(),
        ):
            self._trace_fixes.run_ahead(functools.partial(self.plainly, call))
            outputs = with_room(self._compiled[kind], call.args, call.inputs)
            if kind.has_regions:
                outputs = self._regions.finish(outputs)
            self._note_on_tape(run, lambda tape: tape.end(dynamo.tree_leaves(outputs)))
            if any(graph.choice.draft_limit is not None for graph in run.ran):
                run.progress.done = f"ran the forward of {self._name} once, to see all its graphs,"
            return outputs

    def _traced_call(
        self,
        run: ForwardRun,
        outputs: Any,
        graphs: tuple[PartitionedGraph, ...],
        tape: Tape,
        before: ForwardState | None,
    ) -> TracedCall:
        breaks = tuple(run.watch.graph_breaks()) if self.is_first or graphs else ()
        recompiles = run.watch.recompiles() if not self.is_first else ()
        if before is not None and run.buffers is not None:
            # Side effects of traced code follow its graphs; hooks are called between the graphs.
            functions = (*run.buffers.functions, *before.functions)
            before = replace(
                run.buffers, generators=before.generators, arguments=before.arguments, functions=functions
            )
        elif run.has_written:
            before = None
        with_sizes = tuple(each.with_sizes(self._constant_sizes) for each in recompiles)
        return TracedCall(outputs, graphs, tuple(run.ran), tuple(run.ran.values()), tape, breaks, with_sizes, before)

    def _recorder(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> TapeRecorder:
        return TapeRecorder(dynamo.tree_leaves((args, inputs, self.shared.gathered())))

    def _note_on_tape(self, run: ForwardRun, note: Callable[[TapeRecorder | TapePlayer], None]) -> None:
        """Call `note` with a forward's tape. If its first run is not the known one, as after torch has given up the
        forward's code, the tape is recorded from here.

        Raises:
            OtherRunsError: a later run is not the known one; earlier ones would be missing on a recorded tape.
        """
        try:
            note(run.tape)
        except OtherRunsError:
            if run.tape.count:
                raise
            run.choices.tapes.forget()
            run.tape = self._recorder(run.args, run.inputs)
            note(run.tape)

    def _may_play(self, run: ForwardRun) -> bool:
        """True if the tape of this run may be played for equal calls. A call that then runs other graphs is rerun, so
        the forward must write nothing and involve no other rank, no hook and no Python code between its graphs."""
        is_one = run.tape.count == 1 and all(graph.is_all_of_forward for graph in run.ran)
        has_written = run.has_written and not is_one
        runs_python = self._has_breaks or self._regions.has_run_others
        return self.spec.is_run and not (has_written or self.shared.is_shared or runs_python)

    def _has_put_hooks(self, before: ForwardState | None, next_hook: int) -> bool:
        """True if the call registered module hooks, with this id or a later one, and may be rerun. A forward that
        does so in every call is no longer rerun after `_MOST_TRACES`."""
        may_have = self._may_run_again(before) and next_hook != next_hook_id()
        return may_have and has_hook_since(self._forward_hooks, next_hook)

    def _may_run_again(self, before: ForwardState | None) -> bool:
        return before is not None and self._traced_again < _MOST_TRACES

    @property
    def _runs_outside(self) -> bool:
        """True if operators run outside of all graphs without a graph break."""
        return self.spec.only_layers or self._trace_fixes.opens_modules

    @property
    def has_regions(self) -> bool:
        """True if layers are compiled separately."""
        return self._regions.are_closed

    @property
    def sharding(self) -> Sharding | None:
        """Returns the model's sharding for batches like the last one; None until such a batch has run."""
        return self._shardings.get(self.masks.kept)

    @sharding.setter
    def sharding(self, sharding: Sharding) -> None:
        self._shardings[self.masks.kept] = sharding

    @property
    def trains(self) -> tuple[bool, ...]:
        """Returns, for each parameter of the model, whether it trains."""
        return _trains(self._parameters)

    def go_on_with(self, choices: GraphChoices) -> None:
        """Use these choices for all graphs that have not yet run in the current call."""
        run = self._run
        run.choices = choices
        if run.buffers is None and not run.has_written:
            with without_modes():
                run.buffers = ForwardState.of(self._model, with_buffers=True)

    @property
    def overwritten(self) -> Sequence[torch.Tensor]:
        """Returns parameters and batch tensors that the graphs of the last call wrote to, if it was a first call."""
        return [tensor for tensor, _ in self._overwritten]

    def restore_overwritten(self) -> None:
        # Newest first: of several copies of a tensor, the oldest is restored last.
        while self._overwritten:
            tensor, values = self._overwritten.pop()
            write_back(tensor, values)

    def forget_overwritten(self) -> None:
        self._overwritten = []

    def plainly(self, call: ForwardArgs) -> Any:
        """Returns the outputs of the model's own forward, with the changes that compiled outputs have (`_wrapped`)."""
        return self._wrapped(call)(*call.args, **call.inputs)

    def check_plain(self, call: ForwardArgs, is_last: bool = False) -> None:
        """Run a failed batch in plain PyTorch, then restore the state before it.

        Args:
            is_last: the batch is not run again. If the failed run left no change of state, that of plain PyTorch's
                failure stays: a loop that goes on has drawn the random numbers.

        Raises:
            Exception: plain PyTorch's own, of one line, if it cannot run the batch either, as one without rows.
        """
        # The other ranks would not gather the parameters for this forward.
        if self.shared.is_shared:
            return
        before = ForwardState.of(self._model, with_buffers=True, arguments=(call.args, call.inputs))
        # Without gradients a forward takes the least memory, but registering a hook on a tensor needs them.
        for has_gradients in (False, True):
            restores = True
            try:
                with torch.set_grad_enabled(has_gradients):
                    self.plainly(call)
                return
            except Exception as error:
                if is_out_of_memory(error):
                    return
                if has_gradients:
                    restores = not (is_last and self.is_undone)
                    raise error from None
            finally:
                if restores:
                    before.restore()

    def say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            get_logger().info(line)

    def _sharding_of(self, call: ForwardArgs, tape: Tape) -> Sharding:
        """Returns the model's sharding for batches like that of this call, which has run."""
        if (sharding := self.sharding) is None:
            forward = functools.partial(weak_method(self._plain_forward), call.loss_only, call.reader)
            compiled = {each.layer for each in tape.calls}
            sharding = self.sharding = self.shared.sharding(forward, call.args, call.inputs, compiled)
        return sharding

    def _plain_forward(self, loss_only: bool, reader: str, args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        return self.plainly(ForwardArgs(args, inputs, loss_only, reader))

    def _compile(self, call: ForwardArgs, kind: "CallKind") -> Callable[..., Any]:
        if self._compiled:
            why = kind.compared(next(reversed(self._compiled)))
            self.say(f"compiling another training graph: {', '.join(why)}")
        forward = self._wrapped(call)
        return forward if self.spec.only_layers else self._compile_alone(dynamo.with_own_code(forward))

    def _compile_alone(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        if (code := getattr(forward, "__code__", None)) is not None:
            self._codes.append(code)
        # torch keeps each backend until the process ends (`torch/_dynamo/eval_frame.py`, `cached_backends`, 2.13);
        # it must not keep the model with it.
        return dynamo.compile_alone(forward, weak_method(self._backend), self.spec.dynamic)

    def _wrapped(self, call: ForwardArgs) -> Callable[..., Any]:
        forward, smoothing = self._forward, self.spec.smoothing
        if smoothing is not None:
            forward = smoothing.wrap(forward, functools.partial(cross_entropy, smoothing))
        if call.loss_only:
            forward = with_detached_outputs(forward)
        return without_logits(forward) if self.spec.loss.drops_logits(call.reader) else forward

    def _backend(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns the function that runs in place of a graph traced by dynamo: the backend of `torch.compile`."""
        self._constant_sizes.update(traced_sizes.constant_sizes())
        dynamo.clear_static_marks(module)
        fx_graph.drop_unread_results(module)
        fused_lm_head.with_labels(module)
        losses, reasons = decide_losses(module.graph, self.spec.loss, self._run.reader)
        if any(loss.is_chunked for loss in losses):
            module.recompile()
        self.would_chunk |= bool(reasons) and not self.spec.loss.must_chunk
        for reason in reasons:
            self.say(f"the loss of {self._name} is not chunked: {reason}")
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        placeholders = module.graph.find_nodes(op="placeholder")
        given = {node.name: value for node, value in zip(placeholders, inputs, strict=True)}
        if not any(map(dynamo.is_operator_of_python, module.graph.nodes)):
            return self._owned(self._traced(module, given, names, losses, None))
        self._regions.check_graph(module.graph)
        if (trace := dynamo.Trace.current()) is not None:
            self._regions.check_around(trace)
        whole = around_regions(module)
        pieces = {name: piece for name, piece in whole.named_children() if isinstance(piece, fx.GraphModule)}
        # Only the last piece, after the layers, has losses over a vocabulary.
        last = next(reversed(pieces))
        for name, piece in pieces.items():
            if any(map(dynamo.is_operator_of_python, piece.graph.nodes)):
                run = dynamo.generated_forward(piece)
            else:
                run = self._traced(piece, given, names, losses if name == last else (), trace)
            # A function instead of a module: global module hooks must not run for pieces of a graph.
            delattr(whole, name)
            setattr(whole, name, run)
        return self._owned(dynamo.generated_forward(whole))

    def _owned(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls `run` without keeping it alive: torch may keep what a backend returns until
        the process ends, among the globals of the Python module whose code it has traced (2.13)."""
        self._returned.append(run)
        return weak_method(run)

    def _traced(
        self,
        module: fx.GraphModule,
        given: Mapping[str, Any],
        names: Mapping[int, str],
        losses: tuple[LossDecision, ...],
        trace: dynamo.Trace | None,
    ) -> Callable[..., Any]:
        """Compile a traced graph, or a part of one, for the first time.

        Args:
            given: inputs that dynamo passed to the backend, by the names of their placeholders.
            names: names of parameters by their ids.
        """
        placeholders, traced = module.graph.find_nodes(op="placeholder"), dynamo.traced_module()
        graph = TracedGraph(
            graph=module,
            inputs=list(map(dynamo.traced_value, placeholders)),
            parameters=tuple(names.get(id(given.get(node.name)), "") for node in placeholders),
            state=tuple(map(dynamo.state_source, placeholders)),
            losses=losses,
            layer=self._regions.layer,
            is_all=not self._runs_outside and any(map(dynamo.is_all_of, self._codes)),
            is_whole=trace is None and not self._regions.layer,
            module=None if traced is None else weakref.ref(traced),
            trace=trace,
        )
        # The backend's inputs come before the traced values: a forward may have changed a tensor's metadata.
        values = [given.get(node.name, dynamo.traced_value(node)) for node in placeholders]
        self.variants.compile(graph, self._run, self._regions, values)
        if self.is_first and graph.analyzed is not None and (line := self._regions.note_graph(self._run.watch)):
            raise RuntimeError(line)
        graph.trace = dynamo.Trace.current()
        run_graph = weak_method(self._run_graph)

        # Not a bound method, since dynamo keeps the function alive.
        def called(*args: Any) -> Any:
            return run_graph(graph, args)

        return called

    def _run_graph(self, graph: TracedGraph, args: Sequence[Any]) -> Any:
        run, layer = self._run, self._regions.layer
        call_index, variants = run.call_index(graph.analyzed, layer), run.choices.variants
        key = graph, layer, call_index
        variant = variants.get(key)
        if variant is None:
            variant = variants[key] = self.variants.chosen(graph, args, run, self._regions)
        if variant.probe is not None and not run.choices.has_run:
            run.errors.extend(variant.probe.errors(args, layer))
        probe = None if run.choices.has_run else variant.gradient_probe
        generators = None if probe is None else GeneratorStates.of(self._device)
        if not run.choices.has_run:
            self._note_writes(graph, args)
        state = self._state_before(graph, variant, args, key)
        plan = run.layer_inputs.possible(variant.inputs, args)
        run_id = RunId(variant.programs, layer, call_index, plan.offloaded, plan.recomputed)
        self._note_on_tape(run, lambda tape: tape.before(run_id, args, graph.parameters))
        if plan.is_empty and state.saved is None:
            results = variant.run(*state.args)
        else:
            around = functools.partial(self.shared.gathered_again, self._model.get_submodule(layer))
            results = run.layer_inputs.run(variant.run, plan, around, state)
        self._state.after(listed(results))
        run.tape.after(listed(results))
        if probe is not None and generators is not None:
            run.gradient_errors = run.gradient_errors or GradientErrors(self.say, graph.is_whole and graph.is_all)
            probe.watch(state.args, listed(results), generators, layer, run.gradient_errors)
        if variant.partitioned is not None and variant.partitioned.sources:
            kept = variant.partitioned
            autograd.drop_unread_gradients(listed(results), graph.is_tensor, kept.sources, kept.takes_none)
        run.note(variant, layer)
        return results

    def _note_writes(self, graph: TracedGraph, args: Sequence[Any]) -> None:
        """Copy the parameters and batch tensors that a graph will write to; buffers are copied before a first
        forward."""
        if places := graph.written_arguments():
            batch = set(map(dynamo.storage_id, tensors_in((self._run.args, self._run.inputs))))
            for given, parameter in ((args[at], graph.parameters[at]) for at in places):
                # The place may be that of a size: of a new tensor that the graph writes to.
                if isinstance(given, torch.Tensor) and (parameter or dynamo.storage_id(given) in batch):
                    self._run.overwritten.append((given, given.detach().to("cpu", copy=True)))

    def _state_before(self, graph: TracedGraph, variant: Variant, args: Sequence[Any], run: Hashable) -> StateArgs:
        partitioned = variant.partitioned
        # ZeRO 3 frees the data of parameters and later assigns new tensors.
        is_watched = partitioned is not None and self.spec.is_run and not self.spec.only_layers
        if partitioned is None or not is_watched:
            return StateArgs(args, copied=() if partitioned is None else partitioned.copied)
        sources = {at: graph.state_key(at) for at in partitioned.recomputed_from}
        return self._state.before(args, sources, partitioned.recomputed_from, partitioned.copied, run)

    def _name_of(self, tensor: torch.Tensor) -> str:
        model = self._model
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        return next((name for name, each in named if each is tensor), "")

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def _run(self) -> ForwardRun:
        assert self._running is not None
        return self._running

    def _announced(self, is_first: bool, purpose: str) -> contextlib.AbstractContextManager[Progress]:
        if not is_first:
            return contextlib.nullcontext(Progress())
        subject = f"the training graph of {self._name}{purpose}"
        if not self.spec.is_run:
            return watched(f"tracing {subject}")
        return announced(
            f"compiling {subject} with {self.spec.compiler}",
            f"compiled {subject} and ran its forward",
            "traces, partitions and compiles forward and backward once; takes a minute for large models",
            stage="tracing",
        )


def _trains(parameters: Sequence[Mapping[str, torch.nn.Parameter | None]]) -> tuple[bool, ...]:
    # A list takes half the time of a generator, in each step.
    return tuple([each.requires_grad for of_module in parameters for each in of_module.values() if each is not None])


def no_training_graph(traced: TracedCall) -> str:
    """Returns why a call has compiled no training graph."""
    reasons = "; ".join(traced.graph_breaks) or "nothing in it is trainable"
    return f"torch compiled no training graph of this model ({reasons})"
