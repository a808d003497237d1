"""A Trainer whose modules have no data: its training step, its evaluation, and what else of its run takes memory,
phase by phase: shown as a dry run, and checked by a run within a budget before its first step."""

import contextlib
import copy
import runpy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from optimum_memopt.callbacks.reporting import Reporter
from optimum_memopt.compat.bitsandbytes import buffers_of, is_4bit
from optimum_memopt.compat.torch import tensor_bytes, tensors_in
from optimum_memopt.compat.transformers import collator, train_batch_size
from optimum_memopt.engines.api.predictions import SimulatedStep, Simulator
from optimum_memopt.engines.shared.forward_patch import ForwardState
from optimum_memopt.engines.shared.registry import predicting_factory
from optimum_memopt.errors import MemOptError, line_of, path_excerpt
from optimum_memopt.logs import best_effort
from optimum_memopt.memory.capacity import host_available
from optimum_memopt.memory.optimizers import DEFAULT, PlannedOptimizer, embeddings_of, is_known
from optimum_memopt.predict.phases import (
    EVALUATION,
    GENERATION,
    NO_GRAD,
    OF_ROWS,
    DryRun,
    Evaluation,
    RunPhase,
    evaluation_phase,
    generation_flags,
    generation_phase,
    host_suggestions,
    suggestions,
    train_suggestion,
)
from optimum_memopt.sizes import AUTO, Budget, gib_text
from optimum_memopt.training import compat_dry_run
from optimum_memopt.training.batches import has_few_rows, is_readable, micro_batches_of, row_lengths

_DATA = ("train_dataset", "eval_dataset")
# Of a container that a step may change: others are data.
MOST_ITEMS = 10_000


def held_by(trainer: Any) -> Iterator[Any]:
    """Values of a Trainer's attributes, in containers too: sentence-transformers has one loss, or several by name."""
    for value in vars(trainer).values():
        if isinstance(value, dict | list | tuple):
            yield from value.values() if isinstance(value, dict) else value
        else:
            yield value


def holders_of(trainer: Any) -> list[Any]:
    """Modules and optimizers that a Trainer holds: its model, reference and reward models."""
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return list({id(value): value for value in held_by(trainer) if isinstance(value, kinds)}.values())


def is_sharded(trainer: Any) -> bool:
    return bool(trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)


_Container = dict[Any, Any] | list[Any] | deque[Any]


@contextlib.contextmanager
def left_as_it_is(trainer: Any, others: Sequence[Any] = ()) -> Iterator[None]:
    """Within it a Trainer and its models may be changed, as may their lists, queues and dictionaries, and random
    numbers may be drawn.

    Args:
        others: objects and containers that may be changed, too.
    """
    models = [value for value in vars(trainer).values() if isinstance(value, torch.nn.Module)]
    parts = (trainer.args, trainer.state, trainer.callback_handler, trainer.accelerator)
    owners = [trainer, *parts, *models, *others]
    data = [id(getattr(trainer, name)) for name in _DATA]
    helds = (owner if isinstance(owner, list | dict | deque) else vars(owner) for owner in owners)
    before = [found for held in helds for found in _contents(held, data)]
    modes = [(module, module.training) for model in models for module in model.modules()]
    state = ForwardState.of(trainer.model, with_buffers=False)
    try:
        yield
    finally:
        for held, items in before:
            held.clear()
            held.update(items) if isinstance(held, dict) else held.extend(items)
        for module, is_training in modes:
            module.training = is_training
        state.restore()


def _contents(held: _Container, data: Sequence[int], depth: int = 3) -> Iterator[tuple[_Container, Any]]:
    """Containers that are held, with copies of them, the outermost first."""
    yield held, dict(held) if isinstance(held, dict) else list(held)
    for value in (held.values() if isinstance(held, dict) else held) if depth else ():
        is_container = isinstance(value, dict | deque) or type(value) is list
        if is_container and id(value) not in data and len(value) <= MOST_ITEMS:
            yield from _contents(value, data, depth - 1)


def replace_tensors(trainer: Any, simulator: Simulator, holders: Sequence[Any]) -> None:
    """Put tensors without data in the place of those of `holders`, and of the Trainer's own (TRL has weights of
    rewards), until the simulator is left, and the Trainer left as it is."""
    simulator.replace(holders)
    tensors = {name: value for name, value in vars(trainer).items() if isinstance(value, torch.Tensor)}
    vars(trainer).update(simulator.copy(tensors))


@dataclass(frozen=True)
class EvaluationData:
    """A batch of the longest rows, how many it has, and the number of all rows."""

    batch: Any
    rows: int
    total: int


def evaluation_data(trainer: Any, reads_any: bool) -> EvaluationData | None:
    """The data of a Trainer's evaluation, the largest of several; None where there are none.

    Args:
        reads_any: also those whose reading runs code, which may draw random numbers.

    Raises:
        MemOptError: no batch can be made of them.
    """
    data = trainer.eval_dataset
    if isinstance(data, Mapping) and not hasattr(data, "select_columns"):
        data = max((each for each in data.values() if hasattr(each, "__len__")), key=len, default=None)
    if data is None or not hasattr(data, "__len__") or not len(data) or not (reads_any or is_readable(data)):
        return None
    rows = min(trainer.args.eval_batch_size, len(data))
    batch = largest_batch_of(trainer, data, rows, "evaluation", lambda: trainer.get_eval_dataloader(data))
    return EvaluationData(batch, rows, len(data))


def largest_batch_of(trainer: Any, data: Any, rows: int, kind: str, dataloader: Callable[[], Any]) -> Any:
    """The longest rows of the data in one batch; the first batch where the data cannot tell.

    Raises:
        MemOptError: there is no data, or no batch can be made of them.
    """
    try:
        if has_few_rows(data):
            with contextlib.suppress(MemOptError, TypeError, ValueError, KeyError):
                lengths = row_lengths(trainer, data)
                longest = np.argsort(-lengths, kind="stable")
                return collator(trainer, kind)([data[int(longest[place % len(data)])] for place in range(rows)])
        return _longest_texts(next(iter(dataloader())), data)
    except MemOptError:
        raise
    except Exception as error:
        raise MemOptError(f"no batch can be made of the data ({line_of(error)})") from error


def _longest_texts(batch: Any, data: Any) -> Any:
    """A batch of rows that a Trainer will make tokens of, each as the one with the longest text; others unchanged."""
    are_rows = isinstance(batch, list) and has_few_rows(data)
    if not are_rows or not all(isinstance(row, Mapping) for row in batch):
        return batch
    lengths = list(_text_lengths(data))
    return [data[lengths.index(max(lengths))]] * len(batch)


def _text_lengths(data: Any) -> Iterator[int]:
    """Characters of each row, of a `datasets.Dataset` column by column, which is faster."""
    if not hasattr(data, "select_columns"):
        yield from (len(str(row)) for row in data)
        return
    for rows in data.iter(1000):
        yield from (len(str(row)) for row in zip(*rows.values(), strict=True))


@dataclass(frozen=True)
class FakeRun:
    """A Trainer whose modules have no data.

    Attributes:
        model: as the Trainer trains it.
        holders: modules and optimizers that hold tensors.
        coming: bytes of the optimizer's states that nobody holds yet.
        others: tensors of the micro-batches that wait on the device while one runs.
    """

    trainer: Any
    model: Any
    simulator: Simulator
    holders: Sequence[Any] = field(repr=False)
    coming: int = 0
    others: Sequence[torch.Tensor] = field(default=(), repr=False)

    def train(self, inputs: Any, items: Any, steps: int) -> tuple[SimulatedStep, list[RunPhase]]:
        """Micro-batches, clipping and the optimizer's step as in Trainer's loop, and the phases of it."""
        trainer, model = self.trainer, self.model

        def step() -> None:
            for place in range(steps):
                compat_dry_run.generate_next(trainer, place)
                trainer.training_step(model, copy.copy(inputs), items)
            compat_dry_run.clip_gradients(trainer, model)
            trainer.optimizer.step()
            model.zero_grad()

        found, generation = self._run(step, [inputs, *self.others])
        # Blocks of the allocator are larger than what is in them.
        waste = found.peak - max(found.phases.values())
        # Texts are made before they are trained on.
        names = sorted(found.phases, key=lambda name: (name != GENERATION, name != NO_GRAD))
        return found, [_phase(name, found.phases[name] + waste, generation) for name in names]

    def _run(
        self, step: Callable[[], Any], given: Any, finds_variables: bool = True
    ) -> tuple[SimulatedStep, compat_dry_run.Generation]:
        phase = partial(self.simulator.phase, GENERATION)
        kernels = contextlib.nullcontext() if self.simulator.shares_host else compat_dry_run.kernels_of_a_gpu()
        with compat_dry_run.longest_generation(phase) as generation, kernels:
            # What Trainers log, they read.
            found = self.simulator.run(step, [*self.holders, given], finds_variables, reads_floats=True)
        return found, generation

    @property
    def weights(self) -> int:
        """Bytes of the parameters and buffers of all models, and of the scales of quantized weights."""
        models = [holder for holder in self.holders if isinstance(holder, torch.nn.Module)]
        return tensor_bytes(tensor for model in models for tensor in (*model.parameters(), *buffers_of(model)))

    @property
    def states(self) -> int:
        """Bytes of the optimizers' states."""
        optimizers = [holder for holder in self.holders if isinstance(holder, torch.optim.Optimizer)]
        found = (value for each in optimizers for state in each.state.values() for value in state.values())
        return self.coming + tensor_bytes(value for value in found if isinstance(value, torch.Tensor))

    def evaluate(self, data: EvaluationData) -> tuple[Evaluation, list[RunPhase]]:
        """A batch as in Trainer's loop over the data, and the phases of it."""
        trainer, inputs, args = self.trainer, data.batch, self.trainer.args
        loss_only = args.prediction_loss_only or trainer.compute_metrics is None
        logits = labels = 0

        def step() -> Any:
            nonlocal logits, labels
            _, predicted, given = trainer.prediction_step(self.model, copy.copy(inputs), loss_only)
            if predicted is not None and trainer.preprocess_logits_for_metrics is not None:
                predicted = trainer.preprocess_logits_for_metrics(predicted, given)
            logits, labels = _bytes_in(predicted), _bytes_in(given)
            return predicted, given

        self.model.eval()
        compat_dry_run.set_generation_arguments(trainer)
        world = args.world_size
        with compat_dry_run.alone():
            found, generation = self._run(step, inputs, finds_variables=False)
        if "inputs" in args.include_for_metrics:
            labels += _bytes_in(inputs[getattr(trainer.model, "main_input_name", "input_ids")])
        collected = world * (not args.batch_eval_metrics)
        evaluation = Evaluation(
            found.given + self.coming,
            found.peak - found.given,
            data.rows,
            -(-data.total // world),
            logits * collected,
            labels * collected,
            args.eval_accumulation_steps,
            args.eval_do_concat_batches,
            self.simulator.shares_host,
        )
        what = "results of preprocess_logits_for_metrics" if trainer.preprocess_logits_for_metrics else "logits"
        phase = evaluation_phase(evaluation, "generated tokens" if GENERATION in found.phases else what)
        if GENERATION not in found.phases:
            return evaluation, [phase]
        generated = found.phases[GENERATION] + found.peak - max(found.phases.values()) + self.coming
        return evaluation, [_phase(GENERATION, generated, generation), phase]

    def load(self) -> RunPhase:
        size = self.simulator.constant + self.weights
        if self.simulator.shares_host:
            return RunPhase("load", size, note="parameters and buffers")
        return RunPhase("load", size, self.weights, "parameters and buffers; the host has the file, too")

    def save_and_resume(self) -> Iterator[RunPhase]:
        """A checkpoint is written and read: by safetensors (0.8) and torch, which copy what is on a device to the
        host, and write what is there from where it is. Weights are read before there are states."""
        weights, states = self.weights, self.states
        resident = self.simulator.constant + weights + states
        # PEFT writes adapters alone.
        is_adapter = hasattr(self.trainer.model, "peft_config")
        trained = sum(each.nbytes for each in self.trainer.model.parameters() if each.requires_grad)
        written = trained if is_adapter else weights
        if self.simulator.shares_host:
            yield RunPhase("save", resident, note="weights and states are written from where they are")
            read = self.simulator.constant + weights + written
            yield RunPhase("resume", max(resident, read), note="the file's weights, and then states")
            return
        yield RunPhase("save", resident, written, "the host has copies of the weights that are written")
        yield RunPhase("resume", resident, written + states, "the host has weights and states from their files")

    def merge(self) -> Iterator[RunPhase]:
        """The phase that merges adapters into the weights; none without adapters, and none for weights of 4 bits,
        which bitsandbytes quantizes again by their values."""
        trainer = self.trainer
        base: Any = getattr(trainer.model, "base_model", None)
        if not hasattr(trainer.model, "peft_config") or not hasattr(base, "merge_adapter"):
            return
        if any(map(is_4bit, trainer.model.parameters())):
            return

        def merged() -> None:
            with torch.no_grad():
                base.merge_adapter()
                base.unmerge_adapter()

        found = self.simulator.run(merged, list(self.holders), finds_variables=False)
        yield RunPhase("merge", found.peak, note="of the adapters into the weights")


def _phase(name: str, peak: int, generation: compat_dry_run.Generation) -> RunPhase:
    if name == GENERATION:
        return generation_phase(peak, generation.rows, generation.length)
    return RunPhase(name, peak, note="modules that are called without gradients" if name == NO_GRAD else "")


def _bytes_in(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


class PhaseCheckCallback(TrainerCallback):
    """Says which phases of a run beside its training steps would pass the budget, and with which flags they fit.

    Raises:
        MemOptError: at the start of a run, for a phase that takes more than the device has, whatever the data are.
    """

    def __init__(self, budget: Budget) -> None:
        self.reporter = Reporter("phases")
        self._budget = budget

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        trainer = self.reporter.begin(state)
        certain: tuple[str, ...] = ()
        with best_effort("what phases beside training take"):
            try:
                certain = self._check(trainer)
            except MemOptError as error:
                self.reporter.lines(f"phases beside training are not predicted: {error}")
        if certain:
            raise MemOptError("; ".join(certain))

    def _check(self, trainer: Any) -> tuple[str, ...]:
        """Log what may not fit; returns a line for each phase that certainly does not."""
        if is_sharded(trainer):
            return ()
        args = trainer.args
        evaluates = args.do_eval or args.do_predict or args.eval_on_start
        with left_as_it_is(trainer):
            data = evaluation_data(trainer, reads_any=False) if evaluates else None
            with predicting_factory().simulator(None) as simulator:
                memory = simulator.memory
                limit = min(memory.total, self._budget.on_device(memory.total, memory.available))
                models = [holder for holder in holders_of(trainer) if isinstance(holder, torch.nn.Module)]
                coming = _coming_states(trainer)
                replace_tensors(trainer, simulator, models)
                run = FakeRun(trainer, trainer.model, simulator, models, coming)
                phases: list[RunPhase] = []
                flags = {}
                if data is not None:
                    evaluation, phases = run.evaluate(simulator.copy(data))
                    flags = dict.fromkeys((GENERATION, EVALUATION), evaluation.suggestion(limit))
                save, resume = run.save_and_resume()
        text = self._budget.text
        if text == AUTO:
            self.reporter.lines(
                f"--memory_opt_budget {text}: {gib_text(limit)} of {gib_text(memory.total)}, of which others hold "
                f"{gib_text(memory.elsewhere)}"
            )
        if save.peak > limit:
            # No training step fits either, which the engine says.
            return ()
        if trainer.args.save_strategy != SaveStrategy.NO:
            phases += save, resume
        if certain := suggestions([phase for phase in phases if phase.least > memory.total], memory.total, flags):
            return certain
        for line in (*suggestions(phases, limit, flags), *host_suggestions(phases, host_available())):
            self.reporter.lines(f"--memory_opt_budget {text}: {line}", "warning")
        return ()


def _coming_states(trainer: Any) -> int:
    """Bytes of the states that the optimizer has after its first step; 0 where it has them."""
    if trainer.optimizer.state:
        return 0
    parameters = [each for group in trainer.optimizer.param_groups for each in group["params"] if each.requires_grad]
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    is_on_cuda = bool(parameters) and parameters[0].is_cuda
    planned = PlannedOptimizer(name if is_known(name) else DEFAULT, is_on_cuda, embeddings_of(trainer.model))
    return sum(planned.state_sizes(parameters))


def run_script(script: str, args: Sequence[str], device: str, budget: Budget | None = None) -> None:
    """Run a script as `python script args…` until a Trainer's `train()`, and show the phases of that run instead.

    Raises:
        MemOptError: there is no such file or device, it ends without `train()`, or the run cannot be shown.
        SystemExit: with 0, when the phases were shown.
    """
    if not Path(script).is_file():
        raise MemOptError(f"dry-run {path_excerpt(script)}: no such file")
    # A device that is not known is refused before the script starts.
    predicting_factory().simulator(device)
    trains = Trainer.train
    with (
        mock.patch.object(sys, "argv", [script, *args]),
        mock.patch.object(sys, "path", [str(Path(script).resolve().parent), *sys.path]),
        mock.patch.object(Trainer, "train", lambda trainer, *_, **__: show(trainer, device, budget, trains)),
        compat_dry_run.models_without_weights(),
        compat_dry_run.checked_arguments(_refuse_sharded),
    ):
        runpy.run_path(script, run_name="__main__")
    raise MemOptError(f"dry-run {path_excerpt(script)}: the script ended without a Trainer's train()")


def _refuse_sharded(args: Any) -> None:
    if args.deepspeed or args.fsdp:
        raise MemOptError(_sharded_line("DeepSpeed" if args.deepspeed else "FSDP"))


def _sharded_line(kind: str) -> str:
    return (
        f"dry run: {kind} shards the model, which is not simulated; optimum-cli memopt plan --fsdp 8 --device h100 "
        "predicts the step of one of 8 ranks"
    )


def show(
    trainer: Trainer, device: str, budget: Budget | None = None, train: Callable[..., Any] = Trainer.train
) -> None:
    """Print the phases of a Trainer's run on the world's rank 0, and end the script.

    Args:
        train: the Trainer's own.

    Raises:
        MemOptError: see `dry_run`.
        SystemExit: with 0.
    """
    found = dry_run(trainer, device, budget, train)
    if trainer.is_world_process_zero():
        print(found)
    raise SystemExit(0)


def dry_run(
    trainer: Trainer, device: str | None, budget: Budget | None = None, train: Callable[..., Any] = Trainer.train
) -> DryRun:
    """The phases of a Trainer's run on a device; the Trainer is left as it is.

    Args:
        device: as `h100`, or a JSON file; None: this machine's.
        budget: that bounds the phases; None: the device's memory does.
        train: the Trainer's own, which makes the model ready.

    Raises:
        MemOptError: one line: an unknown device, a Trainer that is sharded, data that cannot be read, or a step that
            reads values of its tensors.
    """
    if is_sharded(trainer):
        raise MemOptError(_sharded_line("DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP"))
    found: list[DryRun] = []
    with left_as_it_is(trainer):
        compat_dry_run.run_instead_of_loop(trainer, train, lambda: found.append(_dry_run(trainer, device, budget)))
    return found[0]


def _dry_run(trainer: Any, device: str | None, budget: Budget | None) -> DryRun:
    args = trainer.args
    rows = train_batch_size(trainer)
    batch = largest_batch_of(trainer, trainer.train_dataset, rows, "training", trainer.get_train_dataloader)
    micro_batches = micro_batches_of(trainer)
    # Gradients of the first are there while a second one runs, and all later ones.
    steps = min(2, micro_batches)
    items = compat_dry_run.items_in_batch(trainer, [batch] * steps)
    evaluated = evaluation_data(trainer, reads_any=True)
    with predicting_factory().simulator(device) as simulator:
        memory = simulator.memory
        limit = memory.available if budget is None else budget.on_device(memory.total, memory.available)
        holders = holders_of(trainer)
        replace_tensors(trainer, simulator, holders)
        # Else an engine is attached to the model.
        trainer.is_in_train = False
        model = compat_dry_run.prepared_for_training(trainer)
        trainer.current_gradient_accumulation_steps = steps
        inputs, items, evaluated = simulator.copy((batch, items, evaluated))
        others = [
            torch.empty(each.shape, dtype=each.dtype, device=each.device)
            for _ in range(micro_batches - 1)
            for each in tensors_in(inputs)
        ]
        run = FakeRun(trainer, model, simulator, (*holders, trainer.optimizer), others=others)
        step, phases = run.train(inputs, items, steps)
        trained = max(phase.peak for phase in phases if phase.name in OF_ROWS)
        generated = [phase.peak for phase in phases if phase.name == GENERATION]
        evaluation, flags = None, {}
        if evaluated is not None:
            evaluation, of_evaluation = run.evaluate(evaluated)
            # What training generates is generated in evaluation, too.
            phases += of_evaluation[-1:] if generated else of_evaluation
            flags = dict.fromkeys((GENERATION, EVALUATION), evaluation.suggestion(limit))
        together, tokens = (getattr(args, name, 0) for name in ("steps_per_generation", "max_completion_length"))
        if generated and generated[0] > limit:
            flags[GENERATION] = generation_flags(generated[0], step.given, limit, together or 0, tokens or 0)
        phases.insert(0, run.load())
        phases += [*run.save_and_resume(), *run.merge()]
    lines = suggestions(phases, limit, flags)
    if trained > limit:
        held = tensor_bytes(tensors_in(batch))
        lines = (train_suggestion(trained, step.given, limit, rows, micro_batches, held), *lines)
    precision = f", {trainer.accelerator.mixed_precision}" if trainer.accelerator.mixed_precision != "no" else ""
    accumulated = f", {micro_batches} micro-batches" if micro_batches > 1 else ""
    reserved = "" if step.reserved is None else f" ({gib_text(step.reserved)} reserved)"
    header = (
        f"{type(trainer).__name__}, {type(trainer.model).__name__}, batch {_shape(batch)}{accumulated}{precision}, "
        f"{getattr(args.optim, 'value', args.optim)}, on "
        f"{device or 'this machine'} as plain PyTorch{reserved}:"
    )
    return DryRun(header, limit, tuple(phases), step.timeline, lines, evaluation)


def _shape(batch: Any) -> str:
    tensors = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    first = next((value for value in tensors if isinstance(value, torch.Tensor) and value.dim()), None)
    return "of the data" if first is None else " x ".join(map(str, first.shape))
