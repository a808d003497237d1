"""A run of a Trainer phase by phase, on tensors without data: its own training step and evaluation."""

import contextlib
import copy
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import Trainer

from optimum_memopt import compat
from optimum_memopt.engines.api.predictions import SimulatedStep, Simulator
from optimum_memopt.engines.shared.registry import predicting_factory
from optimum_memopt.errors import MemOptError, line_of, path_excerpt
from optimum_memopt.predict.phases import DryRun, Evaluation, RunPhase, evaluation_phase, suggestions, train_suggestion
from optimum_memopt.sizes import Budget, gib_text
from optimum_memopt.training.batches import complexities, is_readable

_MOST_ROWS = 100_000
# Tokens that transformers (5.23) generates where nobody says how many.
_GENERATED = 20


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
    before, kind = (sys.argv, list(sys.path), Trainer.train), cast("Any", Trainer)
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))

    def train(trainer: Trainer, *_: Any, **__: Any) -> None:
        show(trainer, device, budget, before[2])

    try:
        kind.train = train
        with compat.models_without_weights():
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:], kind.train = before
    raise MemOptError(f"dry-run {path_excerpt(script)}: the script ended without a Trainer's train()")


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
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise MemOptError("dry run: the Trainer shards its model (DeepSpeed, FSDP), which is not simulated")
    found: list[DryRun] = []
    with _left_as_it_is(trainer):
        compat.run_instead_of_loop(trainer, train, lambda: found.append(_dry_run(trainer, device, budget)))
    return found[0]


@contextlib.contextmanager
def _left_as_it_is(trainer: Trainer) -> Iterator[None]:
    models = [value for value in vars(trainer).values() if isinstance(value, torch.nn.Module)]
    owners = [trainer, trainer.args, trainer.accelerator, trainer.callback_handler, *models]
    before = [(vars(owner), dict(vars(owner)), _lists(vars(owner))) for owner in owners]
    forked = torch.random.fork_rng(devices=[])
    try:
        with forked:
            yield
    finally:
        for current, attributes, lists in before:
            current.clear()
            current.update(attributes)
            for held, items in lists:
                held[:] = items


def _lists(attributes: Mapping[str, Any]) -> list[tuple[list[Any], list[Any]]]:
    return [(value, list(value)) for value in attributes.values() if type(value) is list]


def _dry_run(trainer: Any, device: str | None, budget: Budget | None) -> DryRun:
    args = trainer.args
    rows = compat.train_batch_size(trainer)
    batch = _largest(trainer, trainer.train_dataset, rows, compat.training_collator, trainer.get_train_dataloader)
    steps = 2 if args.gradient_accumulation_steps > 1 else 1
    items = compat.items_in_batch(trainer, [batch] * steps)
    data = _eval_data(trainer)
    evaluated = None
    if data is not None:
        evaluated = _largest(
            trainer, data, args.eval_batch_size, compat.evaluation_collator, lambda: trainer.get_eval_dataloader(data)
        )
    with predicting_factory().simulator(device) as simulator:
        memory = simulator.memory
        limit = memory.available if budget is None else budget.on_device(memory.total, memory.available)
        holders = _holders(trainer)
        weights = _bytes(holders)
        simulator.replace(holders)
        tensors = {name: value for name, value in vars(trainer).items() if isinstance(value, torch.Tensor)}
        vars(trainer).update(simulator.copy(tensors))
        # Else an engine is attached to the model.
        trainer.is_in_train = False
        model = compat.prepared_for_training(trainer)
        trainer.current_gradient_accumulation_steps = steps
        inputs, items, evaluated = simulator.copy((batch, items, evaluated))
        run = _FakeRun(trainer, model, simulator, holders)
        step = run.train(inputs, items, steps)
        phases = [RunPhase("load", weights, weights, "parameters and buffers; the host has the file, too"), *_of(step)]
        evaluation, flags = None, {}
        if evaluated is not None:
            evaluation = run.evaluate(evaluated, args.eval_batch_size, len(data))
            what = "results of preprocess_logits_for_metrics" if trainer.preprocess_logits_for_metrics else "logits"
            phases.append(evaluation_phase(evaluation, "generated tokens" if run.generates else what))
            flags["evaluation"] = evaluation.suggestion(limit)
        phases += run.other_phases(weights, step)
    lines = suggestions(phases, limit, flags)
    if step.peak > limit:
        lines = (train_suggestion(step.peak, step.given, limit, rows), *lines)
    precision = f", {trainer.accelerator.mixed_precision}" if trainer.accelerator.mixed_precision != "no" else ""
    accumulated = f", {steps} micro-batches" if steps > 1 else ""
    reserved = "" if step.reserved is None else f" ({gib_text(step.reserved)} reserved)"
    header = (
        f"{type(trainer).__name__}, {type(trainer.model).__name__}, batch {_shape(batch)}{accumulated}{precision}, "
        f"{getattr(args.optim, 'value', args.optim)}, on "
        f"{device or 'this machine'} as plain PyTorch{reserved}:"
    )
    return DryRun(header, limit, tuple(phases), step.timeline, lines, evaluation)


def _of(step: SimulatedStep) -> list[RunPhase]:
    # Blocks of the allocator are larger than what is in them.
    waste = step.peak - max(step.phases.values())
    return [RunPhase(name, size + waste) for name, size in step.phases.items()]


def _holders(trainer: Any) -> list[Any]:
    """Modules and optimizers that a Trainer holds: its model, reference and reward models."""
    values = [value for value in vars(trainer).values() if value is not trainer.callback_handler]
    held = [inner for value in values for inner in (value if isinstance(value, list | tuple) else [value])]
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return list({id(value): value for value in held if isinstance(value, kinds)}.values())


def _bytes(holders: Sequence[Any]) -> int:
    models = [holder for holder in holders if isinstance(holder, torch.nn.Module)]
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _trained_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


@dataclass(frozen=True)
class _FakeRun:
    """A Trainer whose modules have no data."""

    trainer: Any
    model: Any
    simulator: Simulator
    holders: Sequence[Any] = field(repr=False)

    def train(self, inputs: Any, items: Any, steps: int) -> SimulatedStep:
        """Micro-batches, clipping and the optimizer's step as in Trainer's loop."""
        trainer, model = self.trainer, self.model

        def step() -> None:
            with compat.longest_generation(trainer):
                for _ in range(steps):
                    trainer.training_step(model, copy.copy(inputs), items)
            compat.clip_gradients(trainer, model)
            trainer.optimizer.step()
            model.zero_grad()

        # What Trainers log, they read.
        return self.simulator.run(step, [*self.holders, trainer.optimizer, inputs], reads_floats=True)

    def evaluate(self, inputs: Any, rows: int, total: int) -> Evaluation:
        """A batch as in Trainer's loop over the data."""
        trainer = self.trainer
        loss_only = trainer.args.prediction_loss_only or trainer.compute_metrics is None
        # What is generated branches on values.
        generates = self.generates and not loss_only
        logits = labels = 0

        def step() -> Any:
            nonlocal logits, labels
            _, predicted, given = trainer.prediction_step(self.model, copy.copy(inputs), loss_only or generates)
            if predicted is not None and trainer.preprocess_logits_for_metrics is not None:
                predicted = trainer.preprocess_logits_for_metrics(predicted, given)
            logits, labels = _tree_bytes(predicted), _tree_bytes(given)
            return predicted, given

        self.model.eval()
        held = [*self.holders, trainer.optimizer, inputs]
        found = self.simulator.run(step, held, finds_variables=False, reads_floats=True)
        forward = found.peak - found.given
        if generates:
            _, length = self._beams_and_length()
            logits = labels = rows * length * torch.int64.itemsize
            forward = max(forward, self._generation(inputs))
        world, args = trainer.args.world_size, trainer.args
        is_collected = not args.batch_eval_metrics
        return Evaluation(
            found.given,
            forward,
            rows,
            -(-total // world),
            logits * world * is_collected,
            labels * world * is_collected,
            args.eval_accumulation_steps,
            args.eval_do_concat_batches,
        )

    @property
    def generates(self) -> bool:
        """True for a Trainer that generates texts where it evaluates (`--predict_with_generate`)."""
        return bool(getattr(self.trainer.args, "predict_with_generate", False))

    def _beams_and_length(self) -> tuple[int, int]:
        args, config = self.trainer.args, self.trainer.model.generation_config
        new = config.max_new_tokens
        length = args.generation_max_length or (new + 1 if new else config.max_length) or _GENERATED
        return args.generation_num_beams or config.num_beams or 1, length

    def _generation(self, inputs: Mapping[str, Any]) -> int:
        """Bytes that the longest generation takes, from the shapes of a forward's key-value cache: the cache of all
        beams, a copy of its largest tensor to which a token is added, and the logits of a token, twice."""
        model, (beams, length) = self.trainer.model, self._beams_and_length()
        given = {name: value for name, value in inputs.items() if name != "labels" and "decoder" not in name}
        first = next(value for value in given.values() if isinstance(value, torch.Tensor))
        if compat.is_encoder_decoder(model):
            given["decoder_input_ids"] = first.new_zeros((len(first), length), dtype=torch.int64)
        else:
            # The cache has the prompt, too.
            given = {"input_ids": first.new_zeros((len(first), max(length, first.shape[1])), dtype=torch.int64)}
        sizes: list[int] = []
        logits = encoded = 0

        def step() -> None:
            nonlocal logits, encoded
            with torch.no_grad():
                outputs = model(**given, use_cache=True)
            sizes[:] = [tensor.nbytes for tensor in _cached(outputs.past_key_values)]
            logits = len(first) * outputs.logits.shape[-1] * torch.float32.itemsize
            encoded = _tree_bytes(getattr(outputs, "encoder_last_hidden_state", None))

        self.simulator.run(step, [*self.holders, inputs], finds_variables=False)
        return beams * (sum(sizes) + max(sizes, default=0) + 2 * logits + encoded)

    def other_phases(self, weights: int, step: SimulatedStep) -> Iterator[RunPhase]:
        """Save, resume, merge of adapters."""
        trainer = self.trainer
        states = sum(
            value.nbytes
            for state in trainer.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        resident = weights + states
        # PEFT writes adapters alone.
        written = weights if not hasattr(trainer.model, "peft_config") else _trained_bytes(trainer.model)
        yield RunPhase("save", step.given, written, "the host has copies of the weights that are written")
        yield RunPhase("resume", resident, written + states, "the host has weights and states from their files")
        merge = getattr(getattr(trainer.model, "base_model", None), "merge_adapter", None)
        if hasattr(trainer.model, "peft_config") and merge is not None:
            unmerge = trainer.model.base_model.unmerge_adapter

            def merged() -> None:
                with torch.no_grad():
                    merge()
                    unmerge()

            found = self.simulator.run(merged, [*self.holders, trainer.optimizer], finds_variables=False)
            yield RunPhase("merge", found.peak, note="of the adapters into the weights")


def _cached(cache: Any) -> Iterator[torch.Tensor]:
    """The keys and values of all layers, of an encoder-decoder's two caches."""
    for part in (cache, getattr(cache, "self_attention_cache", None), getattr(cache, "cross_attention_cache", None)):
        for layer in getattr(part, "layers", ()):
            yield from (tensor for tensor in (layer.keys, layer.values) if isinstance(tensor, torch.Tensor))


def _tree_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return sum(map(_tree_bytes, value)) if isinstance(value, list | tuple) else 0


def _eval_data(trainer: Any) -> Any:
    data = trainer.eval_dataset
    if isinstance(data, Mapping) and not hasattr(data, "select_columns"):
        data = max((each for each in data.values() if hasattr(each, "__len__")), key=len, default=None)
    wants = trainer.args.do_eval or str(getattr(trainer.args.eval_strategy, "value", "no")) != "no"
    return (
        data if data is not None and hasattr(data, "__len__") and len(data) and (wants or data is not None) else None
    )


def _largest(trainer: Any, data: Any, rows: int, collator: Callable[[Any], Any], dataloader: Callable[[], Any]) -> Any:
    """The longest rows of the data in one batch; the first batch where the data cannot tell.

    Raises:
        MemOptError: there is no data, or no batch can be made of them.
    """
    try:
        if is_readable(data) and len(data) <= _MOST_ROWS:
            with contextlib.suppress(MemOptError, TypeError, ValueError, KeyError):
                lengths = complexities(data, trainer.args.length_column_name)
                longest = np.argsort(-lengths, kind="stable")
                return collator(trainer)([data[int(longest[place % len(data)])] for place in range(rows)])
        return next(iter(dataloader()))
    except MemOptError:
        raise
    except Exception as error:
        raise MemOptError(f"dry run: no batch can be made of the data ({line_of(error)})") from error


def _shape(batch: Any) -> str:
    tensors = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    first = next((value for value in tensors if isinstance(value, torch.Tensor) and value.dim()), None)
    return "of the data" if first is None else " x ".join(map(str, first.shape))
