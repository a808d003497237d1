"""Simulates a Trainer's run on tensors without data, phase by phase: loading, training step, generation, evaluation,
checkpoints, merging of adapters. A dry run prints the phases; a run within a budget checks them before its first
step."""

import contextlib
import copy
import itertools
import runpy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from optimum_memopt.callbacks.reporting import Reporter
from optimum_memopt.compat.bitsandbytes import buffers_of, is_quantized
from optimum_memopt.compat.torch import tensor_bytes, tensors_in
from optimum_memopt.compat.transformers import collator, train_batch_size
from optimum_memopt.engines.api.predictions import SimulatedStep
from optimum_memopt.engines.shared.forward_patch import Checkpointing, ForwardState
from optimum_memopt.engines.simulator import simulated
from optimum_memopt.errors import MemOptError, line_of, path_excerpt
from optimum_memopt.logs import best_effort
from optimum_memopt.memory.capacity import host_available
from optimum_memopt.memory.optimizers import planned_like, state_tensors
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

if TYPE_CHECKING:
    from optimum_memopt.engines.simulator.user_step import Simulator

_DATA = ("train_dataset", "eval_dataset")
# Maximum number of items in a container that a step may change; larger containers are data.
MOST_ITEMS = 10_000


def held_by(trainer: Any) -> Iterator[Any]:
    """Yields the values of a Trainer's attributes, containers unpacked: sentence-transformers has one loss, or several
    by name."""
    for value in vars(trainer).values():
        if isinstance(value, dict | list | tuple):
            yield from value.values() if isinstance(value, dict) else value
        else:
            yield value


def holders_of(trainer: Any) -> list[Any]:
    """Returns the modules and optimizers that a Trainer holds, such as its model, reference and reward models."""
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return list({id(value): value for value in held_by(trainer) if isinstance(value, kinds)}.values())


def is_sharded(trainer: Any) -> bool:
    return bool(trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)


_Container = dict[Any, Any] | list[Any] | deque[Any]


@contextlib.contextmanager
def left_as_it_is(trainer: Any, others: Sequence[Any] = ()) -> Iterator[None]:
    """Returns a context that restores on exit the attributes of a Trainer and its models, the contents of their lists,
    deques and dicts, and the random generators.

    Args:
        others: further objects and containers to restore.
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
    """Yields a container and the containers nested in it, each with a shallow copy, the outermost first.

    Args:
        data: ids of containers to skip.
        depth: number of nesting levels to follow.
    """
    yield held, dict(held) if isinstance(held, dict) else list(held)
    for value in (held.values() if isinstance(held, dict) else held) if depth else ():
        is_container = isinstance(value, dict | deque) or type(value) is list
        if is_container and id(value) not in data and len(value) <= MOST_ITEMS:
            yield from _contents(value, data, depth - 1)


def replace_tensors(trainer: Any, simulator: "Simulator", holders: Sequence[Any]) -> None:
    """Replace the tensors of `holders`, until the simulator exits, and the Trainer's own tensors (TRL has weights of
    rewards), until `left_as_it_is` restores them, by tensors without data."""
    simulator.replace(holders)
    tensors = {name: value for name, value in vars(trainer).items() if isinstance(value, torch.Tensor)}
    vars(trainer).update(simulator.copy(tensors))


@dataclass(frozen=True)
class EvaluationData:
    """The largest batch of an evaluation.

    Attributes:
        batch: batch of the longest rows.
        rows: rows of the batch.
        total: rows of the evaluation data.
    """

    batch: Any
    rows: int
    total: int


def evaluation_data(trainer: Any, reads_any: bool) -> EvaluationData | None:
    """Returns the data of a Trainer's evaluation, of several datasets the largest; None if there are none.

    Args:
        reads_any: also read datasets whose rows are computed by code, which may draw random numbers.

    Raises:
        MemOptError: no batch can be made of the data.
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
    """Returns a batch of the longest rows of the data; the first batch if the lengths of rows are unknown.

    Args:
        kind: `training` or `evaluation`.
        dataloader: returns the data loader of the first batch.

    Raises:
        MemOptError: there is no data, or no batch can be made of it.
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
        raise MemOptError(f"cannot make a batch from the data ({line_of(error)})") from error


def _longest_texts(batch: Any, data: Any) -> Any:
    """Returns a batch of copies of the row with the longest text, if the batch holds rows that the Trainer tokenizes
    itself; other batches unchanged."""
    are_rows = isinstance(batch, list) and has_few_rows(data)
    if not are_rows or not all(isinstance(row, Mapping) for row in batch):
        return batch
    lengths = list(_text_lengths(data))
    return [data[lengths.index(max(lengths))]] * len(batch)


def _text_lengths(data: Any) -> Iterator[int]:
    """Yields the characters of each row; a `datasets.Dataset` is read column by column, which is faster."""
    if not hasattr(data, "select_columns"):
        yield from (len(str(row)) for row in data)
        return
    for rows in data.iter(1000):
        yield from (len(str(row)) for row in zip(*rows.values(), strict=True))


@dataclass(frozen=True)
class FakeRun:
    """A run of a Trainer whose modules have tensors without data.

    Attributes:
        model: the model as wrapped for training.
        holders: modules and optimizers whose tensors exist before a step.
        coming: bytes of optimizer states that are not allocated yet.
        others: tensors of the other micro-batches, held on the device while one runs.
    """

    trainer: Any
    model: Any
    simulator: "Simulator"
    holders: Sequence[Any] = field(repr=False)
    coming: int = 0
    others: Sequence[torch.Tensor] = field(default=(), repr=False)

    def train(self, inputs: Any, items: Any, steps: int) -> tuple[SimulatedStep, list[RunPhase]]:
        """Run micro-batches, clipping and the optimizer step as Trainer's loop does; returns the step and its phases.

        Args:
            inputs: one micro-batch.
            items: `num_items_in_batch` of the training step.
            steps: number of micro-batches.
        """
        trainer, model = self.trainer, self.model

        def step() -> None:
            for place in range(steps):
                compat_dry_run.generate_next(trainer, place)
                trainer.training_step(model, copy.copy(inputs), items)
            compat_dry_run.clip_gradients(trainer, model)
            trainer.optimizer.step()
            model.zero_grad()

        found, generation = self._run(step, [inputs, *self.others])
        # Blocks of the allocator are larger than their tensors.
        waste = found.peak - max(found.phases.values())
        # Texts are generated before the model is trained on them.
        names = sorted(found.phases, key=lambda name: (name != GENERATION, name != NO_GRAD))
        return found, [_phase(name, found.phases[name] + waste, generation) for name in names]

    def _run(
        self, step: Callable[[], Any], given: Any, finds_variables: bool = True
    ) -> tuple[SimulatedStep, compat_dry_run.Generation]:
        phase = partial(self.simulator.phase, GENERATION)
        kernels = contextlib.nullcontext() if self.simulator.shares_host else compat_dry_run.kernels_of_a_gpu()
        with compat_dry_run.longest_generation(phase) as generation, kernels:
            # Trainers read values that they log.
            found = self.simulator.run(step, [*self.holders, given], finds_variables, reads_floats=True)
        return found, generation

    @property
    def weights(self) -> int:
        """Returns the bytes of the parameters and buffers of all models, including scales of quantized weights."""
        models = [holder for holder in self.holders if isinstance(holder, torch.nn.Module)]
        return tensor_bytes(tensor for model in models for tensor in (*model.parameters(), *buffers_of(model)))

    @property
    def states(self) -> int:
        """Returns the bytes of the optimizers' states."""
        optimizers = [holder for holder in self.holders if isinstance(holder, torch.optim.Optimizer)]
        return self.coming + tensor_bytes(itertools.chain.from_iterable(map(state_tensors, optimizers)))

    def evaluate(self, data: EvaluationData) -> tuple[Evaluation, list[RunPhase]]:
        """Run a batch as Trainer's evaluation loop does; returns the evaluation and its phases."""
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
        return RunPhase("load", size, self.weights, "parameters and buffers; the host also holds the file")

    def save_and_resume(self) -> Iterator[RunPhase]:
        """Yields the phases that write and read a checkpoint. safetensors (0.8) and torch copy tensors on a device to
        the host, and write host tensors without a copy. Weights are read before optimizer states exist."""
        weights, states = self.weights, self.states
        resident = self.simulator.constant + weights + states
        # PEFT writes only the adapters.
        is_adapter = hasattr(self.trainer.model, "peft_config")
        written = _trained_bytes(self.trainer.model) if is_adapter else weights
        if self.simulator.shares_host:
            yield RunPhase("save", resident, note="weights and states are written without copies")
            read = self.simulator.constant + weights + written
            yield RunPhase("resume", max(resident, read), note="weights of the file, then optimizer states")
            return
        yield RunPhase("save", resident, written, "the host holds copies of the written weights")
        yield RunPhase("resume", resident, written + states, "the host holds weights and states read from the files")

    def merge(self) -> Iterator[RunPhase]:
        """Yields the phase that merges adapters into the weights; nothing without adapters, or for quantized weights,
        which bitsandbytes quantizes again from their values."""
        trainer = self.trainer
        base: Any = getattr(trainer.model, "base_model", None)
        if not hasattr(trainer.model, "peft_config") or not hasattr(base, "merge_adapter"):
            return
        if any(map(is_quantized, trainer.model.parameters())):
            return

        def merged() -> None:
            with torch.no_grad():
                base.merge_adapter()
                base.unmerge_adapter()

        found = self.simulator.run(merged, list(self.holders), finds_variables=False)
        yield RunPhase("merge", found.peak, note="adapters are merged into the weights")


def _phase(name: str, peak: int, generation: compat_dry_run.Generation) -> RunPhase:
    if name == GENERATION:
        return generation_phase(peak, generation.rows, generation.length)
    return RunPhase(name, peak, note="modules called without gradients" if name == NO_GRAD else "")


def _bytes_in(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


class PhaseCheckCallback(TrainerCallback):
    """Logs phases of a run, other than its training steps, that would exceed the budget, and flags that make them fit.

    Raises:
        MemOptError: at the start of a run, if a phase needs more memory than the device has, whatever the data.
    """

    def __init__(self, budget: Budget) -> None:
        self.reporter = Reporter("phases")
        self._budget = budget

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        trainer = self.reporter.begin(state)
        certain: tuple[str, ...] = ()
        with best_effort("the memory check of other phases"):
            try:
                certain = self._check(trainer)
            except MemOptError as error:
                self.reporter.lines(f"phases other than training are not predicted: {error}")
        if certain:
            raise MemOptError("; ".join(certain))

    def _check(self, trainer: Any) -> tuple[str, ...]:
        """Log phases that may not fit; returns a line for each phase that certainly does not."""
        if is_sharded(trainer):
            return ()
        args = trainer.args
        evaluates = args.do_eval or args.do_predict or args.eval_on_start
        with left_as_it_is(trainer):
            data = evaluation_data(trainer, reads_any=False) if evaluates else None
            with simulated(None) as simulator:
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
                f"--memory_opt_budget {text}: {gib_text(limit)} of {gib_text(memory.total)}, of which "
                f"{gib_text(memory.elsewhere)} are used elsewhere"
            )
        if save.peak > limit:
            # No training step fits either; the engine reports that.
            return ()
        if trainer.args.save_strategy != SaveStrategy.NO:
            phases += save, resume
        if certain := suggestions([phase for phase in phases if phase.least > memory.total], memory.total, flags):
            return certain
        for line in (*suggestions(phases, limit, flags), *host_suggestions(phases, host_available())):
            self.reporter.lines(f"--memory_opt_budget {text}: {line}", "warning")
        return ()


def _coming_states(trainer: Any) -> int:
    """Returns the bytes of the states that the optimizer allocates in its first step; 0 if it has states already."""
    if trainer.optimizer.state:
        return 0
    parameters = [each for group in trainer.optimizer.param_groups for each in group["params"] if each.requires_grad]
    return sum(planned_like(trainer.optimizer).state_sizes(parameters))


def run_script(script: str, args: Sequence[str], device: str, budget: Budget | None = None) -> None:
    """Run a script as `python script args…` up to a Trainer's `train()`, and print the phases of that run instead.

    Raises:
        MemOptError: there is no such file or device, the script ends without `train()`, or `dry_run` fails.
        SystemExit: with 0, after the phases were printed.
    """
    if not Path(script).is_file():
        why = "a folder, not a script" if Path(script).is_dir() else "no such file"
        raise MemOptError(f"dry-run {path_excerpt(script)}: {why}")
    # Refuse an unknown device before the script starts.
    simulated(device)
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
    """Print the phases of a Trainer's run, on rank 0 of the world, and end the script.

    Args:
        train: the Trainer's original `train`.

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
    """Returns the phases of a Trainer's run on a device; restores the Trainer.

    Args:
        device: a name such as `h100`, or a JSON file; None: this machine's device.
        budget: limit of the phases; None: the device's memory.
        train: the Trainer's original `train`, which prepares the model.

    Raises:
        MemOptError: one line: an unknown device, a sharded model, data that cannot be read, or a step that reads
            values of its tensors.
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
    # The gradients of the first micro-batch exist while the second and all later ones run.
    steps = min(2, micro_batches)
    items = compat_dry_run.items_in_batch(trainer, [batch] * steps)
    evaluated = evaluation_data(trainer, reads_any=True)
    with simulated(device) as simulator:
        memory = simulator.memory
        limit = memory.available if budget is None else budget.on_device(memory.total, memory.available)
        holders = holders_of(trainer)
        replace_tensors(trainer, simulator, holders)
        # Otherwise an engine would be attached to the model.
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
            # Texts generated in training are generated in evaluation too: the generation phase is listed once.
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
        gradients, is_on = _trained_bytes(trainer.model), Checkpointing(trainer.model).is_on
        line = train_suggestion(trained, step.given, limit, rows, micro_batches, held, gradients, is_on)
        lines = (line, *lines)
    precision = f", {trainer.accelerator.mixed_precision}" if trainer.accelerator.mixed_precision != "no" else ""
    accumulated = f", {micro_batches} micro-batches" if micro_batches > 1 else ""
    reserved = "" if step.reserved is None else f" ({gib_text(step.reserved)} reserved)"
    header = (
        f"{type(trainer).__name__}, {type(trainer.model).__name__}, batch {_shape(batch)}{accumulated}{precision}, "
        f"{getattr(args.optim, 'value', args.optim)}, on "
        f"{device or 'this machine'} as plain PyTorch{reserved}:"
    )
    return DryRun(header, limit, tuple(phases), step.timeline, lines, evaluation)


def _trained_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of the parameters that train, which are also those of their gradients."""
    return tensor_bytes(each for each in model.parameters() if each.requires_grad)


def _shape(batch: Any) -> str:
    tensors = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    first = next((value for value in tensors if isinstance(value, torch.Tensor) and value.dim()), None)
    return "from the data" if first is None else " x ".join(map(str, first.shape))
