"""Trains a model in place through torch.compile; a partitioner applies plans written in ONNX Runtime's grammar."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_pt_utils import LabelSmoother

from optimum_memopt.compat import bitsandbytes
from optimum_memopt.compat.torch import current_autocast, mode_without_compiler, tensors_in, world_size
from optimum_memopt.engines.api.predictions import Frontier, StepTimeline
from optimum_memopt.engines.api.run import ALONE, HeldUntil, LargestBatch, Run, Selection
from optimum_memopt.engines.compile.capture.backend import check_compiler, default_compiler
from optimum_memopt.engines.compile.capture.capture import check_model, check_trainer_arguments
from optimum_memopt.engines.compile.capture.forward_call import ForwardArgs
from optimum_memopt.engines.compile.capture.layer_groups import layer_groups
from optimum_memopt.engines.compile.capture.traced_forward import TracedForward
from optimum_memopt.engines.compile.capture.traced_graph import TraceSpec
from optimum_memopt.engines.compile.loss.decide import loss_mode
from optimum_memopt.engines.compile.memory.eager_loss import EagerLoss
from optimum_memopt.engines.compile.options import AUTO, LAYER, MODEL
from optimum_memopt.engines.compile.partition import host_copies
from optimum_memopt.engines.compile.partition.producers import producer_for
from optimum_memopt.engines.compile.predict.loss_simulation import eager_loss
from optimum_memopt.engines.compile.predict.pending import Pending
from optimum_memopt.engines.compile.predict.planner import Planner, PlannerSpec
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.compile.sharding.leaf_layers import Zero3Layers
from optimum_memopt.engines.compile.sharding.model import shared_model
from optimum_memopt.engines.compile.train.host_watch import FASTER_AS_ONE_GRAPH, HostWatch
from optimum_memopt.engines.compile.train.length_buckets import LengthBuckets
from optimum_memopt.engines.compile.train.loss_watch import LossWatch, assumed_loss
from optimum_memopt.engines.compile.train.outputs_watch import OutputsWatch
from optimum_memopt.engines.compile.train.planned_forward import PlannedForward
from optimum_memopt.engines.shared import in_place, released_gradients
from optimum_memopt.engines.shared.forward_patch import weak_method
from optimum_memopt.engines.shared.label_smoothing import LabelSmoothing
from optimum_memopt.engines.shared.released_gradients import ReleasedGradients
from optimum_memopt.engines.torch_compat import host_masks, releases
from optimum_memopt.engines.torch_compat.attention import KeptMasks
from optimum_memopt.engines.torch_compat.compiler_errors import is_of_compiled_backward, own_error
from optimum_memopt.engines.torch_compat.kernels import start_libraries
from optimum_memopt.errors import DoesNotFitError, forget_frames, line_of
from optimum_memopt.logs import get_logger
from optimum_memopt.memory import process
from optimum_memopt.memory.capacity import host_available
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.sizes import MIB

if TYPE_CHECKING:
    from transformers import TrainingArguments


_MAY_HOLD = (
    "the training loop may hold the model's outputs, which count toward the peak; if it reads only the loss, use "
    'memory_opt_loss="chunked", which returns no other outputs'
)
_CHUNKED = 'or memory_opt_loss="chunked", which never holds all logits, if the training loop reads only the loss'


class CompileEngine(in_place.InPlaceEngine):
    """The `compile` engine.

    Forwards with gradients enabled run through torch.compile, in training and evaluation mode; all others run through
    the model's own forward. Without a plan, torch partitions the graph as usual.

    Args:
        compiler: `inductor`, or `aot_eager`: the same graphs, run operator by operator; None: see `default_compiler`.
        dynamic: batch sizes stay symbolic; False: tracing is several times as fast, but for the first batch's sizes
            only.
        loss: one of `options.LOSSES`.
        variants: the most plans that a run may have under a budget.
        with_frontier: the solver also computes the time-memory frontier.
        unit: one of `options.UNITS`.
        releases_gradients: see `ReleasedGradients`.
    """

    name = "compile"

    def __init__(
        self,
        selection: Selection | None = None,
        compiler: str | None = None,
        dynamic: bool = True,
        loss: str = AUTO,
        variants: int = 1,
        with_frontier: bool = False,
        unit: str = AUTO,
        releases_gradients: bool = False,
    ) -> None:
        self._compiler_asked = compiler
        self._dynamic = dynamic
        self._loss_asked = loss
        self._most_variants = variants
        self._with_frontier = with_frontier
        self._unit = unit
        self._releases_gradients = releases_gradients
        # None until the first training forward.
        self._released: ReleasedGradients | None = None
        self._logs_norm = False
        self._smoothing: LabelSmoothing | None = None
        # None if ZeRO 3 does not shard the model.
        self._leafs: Zero3Layers | None = None
        self._is_on_cpu = self._keeps_freed = False
        self._outputs: OutputsWatch | None = None
        # None once it is known whether the device waits for Python, and if the unit cannot be another one.
        self._host: HostWatch | None = None
        # A parameter that trained in the last forward.
        self._trained: Callable[[], torch.Tensor | None] = lambda: None
        # Gradients flow to a tensor that is neither a parameter nor an argument.
        self._has_other_gradients = self._has_said_frozen = False
        # Modules whose weights of 4 bits must not be packed by evaluations while the engine is attached.
        self._unpacked: list[torch.nn.Module] = []
        super().__init__(selection)

    def check_arguments(self, args: "TrainingArguments") -> None:
        check_trainer_arguments(args)
        if self._releases_gradients:
            released_gradients.check_arguments(args)
        self._leafs = Zero3Layers.of(args, self._unit, self._asked.budget is not None, self._loss.must_chunk)

    def _check(self, model: torch.nn.Module) -> None:
        check_model(model)
        if self._compiler_asked is not None:
            check_compiler(self._compiler_asked, next(model.parameters()).device.type)
        if self._releases_gradients and not (run := self._run_now()).has_trainer:
            released_gradients.check_run(run)

    def _enter(self) -> None:
        for line in releases.what_is_less():
            get_logger().warning(line)
        self._trained = lambda: None
        self._has_other_gradients = False
        self._is_on_cpu = next(self._model.parameters()).device.type == "cpu"
        if self._leafs is not None:
            self._leafs.start(self._model, self._layers())
        if self._is_on_cpu:
            self._unpacked = bitsandbytes.keep_unpacked(self._model)
            process.return_freed_memory()
        else:
            host_masks.watch_masks()
            device = next(self._model.parameters()).device
            self._host = HostWatch(device) if device.type == "cuda" and self._unit == AUTO else None

    def _leave(self) -> None:
        if self._outputs is not None:
            self._outputs.stop()
        if self._released is not None:
            self._released.stop()
            self._released = None
        if self._leafs is not None:
            self._leafs.stop()
        if self._is_on_cpu:
            self._keep_freed(False)
            bitsandbytes.allow_packing(self._unpacked)
            process.restore_malloc()
        else:
            host_masks.leave_masks()
            host_copies.release_pinned()

    def norm_with(self, norm: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `norm`, which computes the norm of existing gradients, so that released gradients count, too."""
        self._logs_norm = True

        def norm_of_all(*args: Any, **kwargs: Any) -> Any:
            norm_of_others = functools.partial(norm, *args, **kwargs)
            return norm_of_others() if self._released is None else self._released.norm(norm_of_others)

        return norm_of_all

    def smooth_labels(self, smoothing: Any) -> bool:
        """Compute the Trainer's smoothed loss in training forwards with labels. Returns False if the engine cannot,
        since the loss may not be chunked or the smoother is not a plain `LabelSmoother`."""
        works = self._loss.may_chunk and (smoothing is None or type(smoothing.smoother) is LabelSmoother)
        taken = smoothing if works else None
        if taken != self._smoothing:
            self._smoothing = taken
            self._forget()
        return works

    @property
    def _planned(self) -> PlannedForward | None:
        return forwards.largest if (forwards := self._forwards) is not None else None

    @property
    def _forwards(self) -> LengthBuckets | None:
        """Returns the compiled forwards, updated with the outputs that the training loop holds."""
        if self._buckets is not None and self._outputs is not None:
            self._buckets.hold_outputs(self._outputs.held)
        return self._buckets

    def plans(self) -> PlanTable | None:
        return self._planned.table if self._planned is not None else None

    def plan_file(self) -> PlanFile | None:
        return self._planned.plan_file if self._planned is not None else None

    @property
    def predictor(self) -> StepMemoryPredictor | None:
        """Returns the predictor of training steps with any batch size and sequence length, under the plan for the
        largest batch; None before the first training forward."""
        return self._planned.predictor if self._planned is not None else None

    def predicted_peak_mib(self, optimizer: torch.optim.Optimizer | None) -> float | None:
        if (forwards := self._forwards) is None:
            return None
        peak = forwards.predicted_peak(optimizer)
        return None if peak is None else peak / MIB

    def timeline(self, optimizer: torch.optim.Optimizer | None) -> StepTimeline | None:
        forwards = self._forwards
        return forwards.timeline(optimizer) if forwards is not None else None

    def frontier(self) -> Frontier | None:
        return self._buckets.frontier() if self._buckets is not None else None

    def without_plan(self, error: Exception) -> contextlib.AbstractContextManager[None] | None:
        is_of_compiler = is_of_compiled_backward(error) and own_error(error) is None
        return self._plainly(error) if is_of_compiler and self._planned is not None else None

    @contextlib.contextmanager
    def _plainly(self, failed: Exception) -> Iterator[None]:
        assert self._planned is not None
        self._is_plain = True
        try:
            yield
            self._planned.give_up(f"its compiled backward failed in the first step ({line_of(failed)})", failed)
        except BaseException:
            self._is_plain = False
            raise

    @property
    def _compiler(self) -> str:
        return self._compiler_asked or default_compiler(next(self._model.parameters()).device.type)[0]

    def _forget(self) -> None:
        config, self._loss = loss_mode(self._selection, self._loss_asked)
        self._producer = producer_for(replace(self._selection, config=config))
        self._buckets: LengthBuckets | None = None
        if self._outputs is not None:
            self._outputs.stop()
            self._outputs = None
        self._pending = Pending()
        # The largest batch seen before the forward was replanned in another way.
        self._largest: LargestBatch | None = None
        self._is_plain = False
        self._eager_loss: EagerLoss | None = None
        # Plan one graph: with separate layers, whose inputs and outputs are saved, no plan fit the budget.
        self._is_whole = False
        # Assume that the loop drops outputs: with held ones, no plan fit the budget.
        self._drops_outputs = False
        self._keep_freed(False)

    def _keep_freed(self, keeps: bool) -> None:
        """Have malloc keep the memory that steps free, or return it to the system."""
        if keeps != self._keeps_freed:
            self._keeps_freed = keeps
            (process.keep_freed_memory if keeps else process.keep_no_more)()

    def _mode_around(self) -> str:
        return mode_without_compiler()

    def _train_forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_gradients(args, kwargs):
            return self._frozen_forward(args, kwargs)
        is_first = self._buckets is None
        if self._releases_gradients and self._released is None:
            self._released = self._release_gradients()
        if self._buckets is None:
            self._buckets = self._new_buckets()
        call = self._call(args, kwargs)
        if self._outputs is None:
            self._outputs = self._new_outputs_watch(call)
        self._outputs.begin(self.outputs_read_by is None and self._attached.training_forward.is_wrapped)
        self._buckets.hold_outputs(self._outputs.held)
        if self._is_plain:
            return self._buckets.largest.run_plainly(call)
        failed: DoesNotFitError | None = None
        try:
            outputs = self._buckets(call)
        except DoesNotFitError as error:
            failed = error
        if failed is not None:
            # The frames of its traceback hold activations that the graphs saved for the backward.
            forget_frames(failed)
            return self._plan_otherwise(failed, args, kwargs)
        if self._leafs is not None:
            self._leafs.gather_ahead(self._model, self._buckets.largest.gather_ahead)
        if is_first and self._is_on_cpu and not self._selection.name:
            # After the first forward, since its prediction reads the memory that the process holds.
            self._keep_freed(self._has_room(self._buckets))
        self._outputs.watch(outputs)
        if is_first and self._released is not None:
            self._warn_of_one_graph()
        if self._host is not None:
            self._watch_host(self._host)
        return outputs

    def _new_buckets(self) -> LengthBuckets:
        """Returns the forwards of a new run, after its checks."""
        # The model may have been sharded since the engine was attached.
        check_model(self._model)
        releases.check_for_ranks(self._model, by_zero3=self._leafs is not None)
        start_libraries(next(self._model.parameters()).device)
        is_sharded = self._is_sharded
        if is_sharded and self._most_variants > 1:
            get_logger().warning(
                "--memory_opt_variants ignored: under FSDP2 and ZeRO 3 all ranks must use the same plan"
            )
        most = 1 if self._producer.bound is None or is_sharded else self._most_variants
        new_forward = weak_method(self._new_forward)
        return LengthBuckets(most, new_forward, self._pending, may_rerun=not is_sharded, largest=self._largest)

    def _new_outputs_watch(self, call: ForwardArgs) -> OutputsWatch:
        # A training loop that gets logits may hold them.
        may_hold = self.outputs_read_by is None and bool(call.reader) and not self._drops_outputs
        assumed = HeldUntil.NEXT_FORWARD if may_hold else HeldUntil.BACKWARD
        return OutputsWatch(self._model, assumed, self._loss_watch(call.inputs))

    def _has_room(self, buckets: LengthBuckets) -> bool:
        """True if the host has room for a step's peak beside the memory that earlier steps have freed: the next step
        may not be able to reuse the blocks that malloc keeps."""
        return host_available() >= (buckets.predicted_peak(self._run_now().optimizer) or 0)

    def _warn_of_one_graph(self) -> None:
        """Warn if gradients are released, but most are returned at once, by one graph for all layers."""
        if self._planned is not None and not (self._planned.is_plain or self._planned.traced.has_regions):
            get_logger().warning(
                f"{released_gradients.FLAG} saves little here: the layers of {type(self._model).__name__} are not "
                "compiled separately, and one graph returns all their gradients at once"
            )

    def _watch_host(self, watch: HostWatch) -> None:
        """Count a forward; after the last one to watch, say if one graph for the whole forward would be faster."""
        watch.end_forward()
        if not watch.is_over:
            return
        self._host = None
        may_be_whole = not self._is_sharded and self._planned is not None and self._planned.traced.has_regions
        if watch.waits and may_be_whole:
            get_logger().info(FASTER_AS_ONE_GRAPH)

    def _loss_watch(self, inputs: Mapping[str, object]) -> LossWatch | None:
        """Returns a watch of the memory that a training loop takes for its loss, for a forward with these inputs; None
        for a Trainer, and if ranks gather parameters meanwhile."""
        if self.outputs_read_by is not None or self._is_sharded:
            return None
        return LossWatch(0.0 if self._drops_outputs else assumed_loss(self._model, inputs))

    def _plan_otherwise(self, error: DoesNotFitError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Replan a forward for which no plan fits, and return its outputs: first as if the training loop dropped the
        outputs, then as one graph.

        Raises:
            DoesNotFitError: no plan fits then either.
        """
        assert self._buckets is not None and self._outputs is not None
        if error.is_final:
            raise error
        if self._outputs.is_assumed and self._outputs.held.until:
            if self._is_sharded:
                raise DoesNotFitError(f"{error}; {_MAY_HOLD}", error.lowest) from None
            also = " and computes no loss of its own" if self._outputs.held.loss else ""
            get_logger().warning(
                f"assuming that the training loop drops the model's outputs before the backward{also}: "
                "no plan fits while it holds them"
            )
            return self._start_again(args, kwargs, self._is_whole, True)
        is_layered = self._unit == AUTO and not self._is_whole and self._buckets.largest.traced.has_regions
        if not is_layered or self._is_sharded:
            raise self._with_advice(error)
        get_logger().info(f"planning one graph for the whole forward, which allows more recompute: {error}")
        try:
            return self._start_again(args, kwargs, True, self._drops_outputs)
        except DoesNotFitError as of_whole:
            # On a CPU, the process has grown since, often by more than one graph saves.
            raise self._with_advice(min(error, of_whole, key=lambda each: each.lowest)) from None

    def _with_advice(self, error: DoesNotFitError) -> DoesNotFitError:
        """Returns the error; with advice to chunk the loss, if the training loop gets logits that it may not read."""
        if self.outputs_read_by is not None or self._buckets is None or _CHUNKED in str(error):
            return error
        would_chunk = self._buckets.largest.traced.would_chunk
        return DoesNotFitError(f"{error}; {_CHUNKED}", error.lowest) if would_chunk else error

    def _start_again(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_whole: bool, drops_outputs: bool
    ) -> Any:
        watch, pending = self._outputs, self._pending
        largest = self._buckets.known_largest if self._buckets is not None else None
        self._forget()
        self._is_whole, self._drops_outputs = is_whole, drops_outputs
        self._pending, self._largest = pending, largest
        if watch is not None and not watch.is_assumed:
            self._outputs = watch
        return self._train_forward(*args, **kwargs)

    def _has_gradients(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """True if a parameter, an argument or a tensor seen in an earlier forward requires a gradient."""
        trained = self._trained()
        if trained is None or not trained.requires_grad:
            # The parameter that was found last no longer trains: look for another one.
            trained = next((each for each in self._model.parameters() if each.requires_grad), None)
            self._trained = weakref.ref(trained) if trained is not None else lambda: None
        if trained is not None or self._has_other_gradients:
            return True
        return any(each.requires_grad for each in tensors_in((args, kwargs)))

    def _frozen_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the outputs of plain PyTorch: a frozen model, such as a reference model, saves no activations."""
        outputs = self._attached.training_forward.plain_forward(*args, **kwargs)
        # A given key-value cache, or a tensor that a module holds, may require a gradient.
        self._has_other_gradients = any(each.requires_grad for each in tensors_in(outputs))
        if not self._has_other_gradients and not self._has_said_frozen:
            self._has_said_frozen = True
            get_logger().info(
                f"running forwards of {type(self._model).__name__} in plain PyTorch: nothing in them trains"
            )
        return outputs

    def _release_gradients(self) -> ReleasedGradients:
        """Have the run's optimizer step in the backward.

        Raises:
            MemOptError: the optimizer cannot, or the run needs all gradients at once.
        """
        device = next(self._model.parameters()).device.type
        is_float16, count = current_autocast(device) == torch.float16, world_size()
        optimizer = released_gradients.check_run(
            self._run_now(),
            float16="autocast to float16" if is_float16 else "",
            ranks="FSDP2 or ZeRO 3" if self._is_sharded else f"{count} processes" if count > 1 else "",
        )
        of_layers = (layer.parameters() for layer in self._layers())
        return ReleasedGradients(optimizer, self._model.parameters(), of_layers, self._logs_norm)

    @property
    def _is_sharded(self) -> bool:
        """True if ranks gather parameters together."""
        return self._leafs is not None or shared_model(self._model).is_shared

    def _layers(self) -> list[torch.nn.Module]:
        """Returns the layers of the model that are equal to another one."""
        return [layer for group in layer_groups(self._model) for layer in group.values()]

    def _new_forward(
        self, former: PlannedForward | None, largest: LargestBatch | None, purpose: str
    ) -> PlannedForward:
        # The plan for the largest batch has no purpose.
        with_curve, with_lengths = (
            not purpose and is_wanted for is_wanted in (self._with_frontier, self._most_variants > 1)
        )
        wanted = PlannerSpec(
            self._producer,
            weak_method(self._run_now),
            self._compiler == "inductor",
            with_curve=with_curve,
            with_lengths=with_lengths,
            is_sharded=self._is_sharded,
            # A draft might fail on one rank alone.
            drafts=self._compiler == "inductor" and not self._is_sharded,
            loss=weak_method(self._loss_of_step),
        )
        if former is not None:
            planner = former.planner.for_another(largest, wanted)
            return PlannedForward(self._model, former.traced, planner, self._pending, purpose, is_later=True)
        plan = self._selection.plan
        # A plan file with one graph was made for the whole forward.
        is_whole = self._is_whole or (plan is not None and len(plan.graphs) == 1)
        unit = MODEL if is_whole and self._unit == AUTO else self._unit
        spec = TraceSpec(
            self._compiler,
            self._dynamic,
            self._loss,
            self._selection.strict,
            self._smoothing,
            unit=unit if self._leafs is None else LAYER,
            only_layers=self._leafs is not None,
            accumulates=self._run_now().gradient_accumulation,
        )
        if not (with_curve or with_lengths or self._is_sharded):
            autocast = current_autocast(next(self._model.parameters()).device.type)
            options = f"{replace(spec, smoothing=None)} {self._smoothing is None} {autocast}"
            if self._selection.compress is not None:
                options = f"{options} {self._selection.compress}"
            wanted = replace(wanted, options=options)
        traced = TracedForward(self._model, self._attached.training_forward.plain_forward, spec)
        traced.variants.measures_gradients = self._selection.budget is None
        if plan is not None:
            traced.masks.keep(KeptMasks.of(plan))
        return PlannedForward(self._model, traced, Planner(self._model, wanted), self._pending, purpose)

    def _loss_of_step(self, inputs: Mapping[str, object]) -> EagerLoss | None:
        """Returns the loss that the run computes outside of the forward; None if there is none.

        Args:
            inputs: keyword arguments of the forward.
        """
        if self._eager_loss is None and (step := self._run_now().loss()) is not None:
            patch, forward = self._attached.training_forward, weak_method(self._plain_forward)
            self._eager_loss = eager_loss(self._model, patch, forward, step, inputs)
        return self._eager_loss

    def _plain_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the outputs of the model's own forward, with the changes that compiled outputs have."""
        assert self._buckets is not None
        return self._buckets.largest.traced.plainly(self._call(tuple(args), kwargs))

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardArgs:
        reader = self._loss.reader(self.outputs_read_by)
        loss_only = not reader and self.outputs_read_by is not None
        return ForwardArgs.of(self._model, args, kwargs, loss_only, reader)

    def _run_now(self) -> Run:
        run = self.run() if self.run is not None else Run(has_trainer=False)
        if self._outputs is not None:
            run = replace(run, held_outputs=self._outputs.held, earlier_forwards=self._outputs.bytes)
        if (others := self._pending.most) != ALONE:
            earlier = run.earlier_forwards + self._pending.saved_bytes
            run = replace(run, others=others, earlier_forwards=earlier)
        return replace(run, releases_gradients=self._releases_gradients)
