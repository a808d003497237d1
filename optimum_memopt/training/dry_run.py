"""A run of a Trainer phase by phase, on tensors without data: its own training step and evaluation."""

import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Trainer

from optimum_memopt import compat
from optimum_memopt.engines.shared.registry import predicting_factory
from optimum_memopt.errors import MemOptError, path_excerpt
from optimum_memopt.predict.phases import (
    EVALUATION,
    GENERATION,
    OF_ROWS,
    DryRun,
    generation_flags,
    suggestions,
    train_suggestion,
)
from optimum_memopt.sizes import Budget, gib_text
from optimum_memopt.training.fake_run import (
    FakeRun,
    evaluation_data,
    holders_of,
    is_sharded,
    largest_batch_of,
    left_as_it_is,
    replace_tensors,
)


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
        with compat.models_without_weights(), compat.checked_arguments(_refuse_sharded):
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:], kind.train = before
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
        compat.run_instead_of_loop(trainer, train, lambda: found.append(_dry_run(trainer, device, budget)))
    return found[0]


def _dry_run(trainer: Any, device: str | None, budget: Budget | None) -> DryRun:
    args = trainer.args
    rows = compat.train_batch_size(trainer)
    batch = largest_batch_of(
        trainer, trainer.train_dataset, rows, compat.training_collator, trainer.get_train_dataloader
    )
    steps = 2 if args.gradient_accumulation_steps > 1 else 1
    items = compat.items_in_batch(trainer, [batch] * steps)
    evaluated = evaluation_data(trainer, reads_any=True)
    with predicting_factory().simulator(device) as simulator:
        memory = simulator.memory
        limit = memory.available if budget is None else budget.on_device(memory.total, memory.available)
        holders = holders_of(trainer)
        replace_tensors(trainer, simulator, holders)
        # Else an engine is attached to the model.
        trainer.is_in_train = False
        model = compat.prepared_for_training(trainer)
        trainer.current_gradient_accumulation_steps = steps
        inputs, items, evaluated = simulator.copy((batch, items, evaluated))
        run = FakeRun(trainer, model, simulator, (*holders, trainer.optimizer))
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
        lines = (train_suggestion(trained, step.given, limit, rows), *lines)
    precision = f", {trainer.accelerator.mixed_precision}" if trainer.accelerator.mixed_precision != "no" else ""
    accumulated = f", {steps} micro-batches" if steps > 1 else ""
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
