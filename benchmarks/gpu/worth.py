"""The part `worth` of gpu/acceptance.py: samples a second at the largest batch under a cap of memory."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu.checks import Check, Figure, Setting
from gpu.steps import MIB, TINY, Batch, Held, Shape, adamw, batch_of, build, planned, train
from gpu.trainer import distributed, observers

_CAPS_GIB = (24, 40)
_QUICK_CAPS_GIB = (0.25,)
# Of what remains under the cap, for what grows with the batch and not in proportion.
_ROOM = 0.97
_SHRINK = 0.94
_ATTEMPTS = 6
_STEPS = 4


@dataclass(frozen=True)
class Job:
    """A model and the rows of its smallest batches, of which the largest is extrapolated."""

    model: str
    shape: Shape
    probes: tuple[int, int]


def _job(name: str, setting: Setting) -> Job:
    if setting.quick:
        return Job(_JOBS[name].model, TINY, (2, 3))
    return replace(_JOBS[name], shape=replace(_JOBS[name].shape, layers=setting.layers))


_JOBS = {
    "DeBERTa-v2-xlarge": Job("deberta-v2", Shape(24, 1536, 24, 6144, 128100, 4, 512), (2, 4)),
    "RoBERTa-large": Job("roberta", Shape(24, 1024, 16, 4096, 50265, 8, 512), (4, 8)),
    "Llama-1B": Job("llama", Shape(16, 2048, 32, 8192, 128256, 2, 1024), (2, 4)),
}


def _eager(model: torch.nn.Module, compiler: str) -> None:
    """As it is."""


def _checkpointing(model: Any, compiler: str) -> None:
    model.gradient_checkpointing_enable()


def _compiled(model: torch.nn.Module, compiler: str) -> None:
    model.compile(backend=compiler, dynamic=True)


def _torchs_budget(model: torch.nn.Module, compiler: str, share: float) -> None:
    torch._functorch.config.activation_memory_budget = share
    model.compile(backend=compiler, dynamic=True)


def _ours(model: torch.nn.Module, compiler: str, **options: Any) -> None:
    planned(model, dynamic=True, compiler=compiler, **options)


# Each changes a model that is on the GPU, for the compiler.
METHODS: dict[str, Callable[[Any, str], None]] = {
    "eager": _eager,
    "activation checkpointing": _checkpointing,
    "level 1": functools.partial(_ours, level=1),
    "torch.compile": _compiled,
    "no plan": functools.partial(_ours, level=0),
    "level 1, plain loss": functools.partial(_ours, level=1, loss="plain"),
    "torch's budget 0.5": functools.partial(_torchs_budget, share=0.5),
    "torch's budget 0.2": functools.partial(_torchs_budget, share=0.2),
    "level 2": functools.partial(_ours, level=2),
}


def largest(setting: Setting, job: str, method: str) -> Iterator[Figure]:
    """The most samples a second of a method under each cap."""
    wanted = _job(job, setting)
    model = build(wanted.model, wanted.shape, dropout=0.1)
    METHODS[method](model, setting.compiler(wanted.model))
    try:
        optimizer = adamw(model)

        def steps(rows: int, count: int = 1) -> Held:
            batch = _labelled(batch_of(replace(wanted.shape, batch=rows)))
            return train(model, batch, "bf16", optimizer, count, warm=1)

        (few, many), (low, high) = wanted.probes, (steps(rows) for rows in wanted.probes)
        slope = max(1.0, (high.reserved - low.reserved) / (many - few))
        for cap in _QUICK_CAPS_GIB if setting.quick else _CAPS_GIB:
            guess = few + math.floor(_ROOM * (cap * 2**30 - low.reserved) / slope)
            found = _largest_under(int(cap * 2**30), min(guess, 8 if setting.quick else guess), steps)
            if found is None:
                yield Figure(f"{cap} GiB", True, "no batch fits", "", {"cap": cap, "job": job, "method": method})
                continue
            rows, held = found
            speed = rows / held.seconds
            text = f"batch {rows}, {speed:.1f} samples/s, {held.allocated / MIB:.0f} MiB"
            data = {"cap": cap, "job": job, "method": method, "rows": rows, "speed": speed, **vars(held)}
            yield Figure(f"{cap} GiB", True, text, "", data)
    finally:
        torch._functorch.config.activation_memory_budget = 1.0


def _largest_under(cap: int, guess: int, steps: Callable[[int, int], Held]) -> tuple[int, Held] | None:
    """The largest batch that trains where torch may reserve n bytes."""
    rows = guess
    for _ in range(_ATTEMPTS):
        if rows < 1 or (held := _try(cap, rows, steps)) is not None:
            break
        rows = math.floor(rows * _SHRINK) if rows > 16 else rows - 1
    else:
        return None
    if rows < 1:
        return None
    larger = math.floor(rows * _ROOM * cap / held.reserved)
    if rows == guess and larger > rows and (more := _try(cap, larger, steps)) is not None:
        return larger, more
    return rows, held


def _try(cap: int, rows: int, steps: Callable[[int, int], Held]) -> Held | None:
    """Some steps; None where they do not fit."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    try:
        return steps(rows, _STEPS)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _labelled(batch: Batch) -> Batch:
    """Labels for 15% of the tokens, as in masked language modelling."""
    generator = torch.Generator().manual_seed(0)
    chosen = (torch.rand(batch["labels"].shape, generator=generator) < 0.15).cuda()
    return {**batch, "labels": batch["labels"].masked_fill(~chosen, -100)}


def under_budget(setting: Setting, job: str, cap: float) -> Iterator[Figure]:
    """A budget of the cap, at a batch that does not fit without a plan."""
    wanted = _job(job, setting)
    cap = _QUICK_CAPS_GIB[0] if setting.quick else cap
    plain = build(wanted.model, wanted.shape, dropout=0.1)
    optimizer = adamw(plain)
    rows = wanted.probes[1]
    held = train(plain, _labelled(batch_of(replace(wanted.shape, batch=rows))), "bf16", optimizer, 1, warm=1)
    states = sum(parameter.nbytes for parameter in plain.parameters()) * 4
    batch = rows if setting.quick else math.floor(1.5 * rows * (cap * 2**30 - states) / (held.allocated - states))
    del plain, optimizer
    torch.cuda.empty_cache()
    model = build(wanted.model, wanted.shape, dropout=0.1)
    planned(model, budget=f"{int(cap * 1024)}MiB", compiler=setting.compiler(wanted.model))
    data = _labelled(batch_of(replace(wanted.shape, batch=batch)))
    held = train(model, data, "bf16", adamw(model), 1 if setting.quick else _STEPS)
    peak = held.allocated / MIB
    text = f"batch {batch}, {batch / held.seconds:.1f} samples/s, {peak:.0f} MiB"
    found = {"cap": cap, "job": job, "method": "budget", "rows": batch, "speed": batch / held.seconds, **vars(held)}
    yield Figure(f"{cap} GiB", peak <= cap * 1024, text, f"{cap * 1024:.0f} MiB", found)


def _checks() -> Iterator[Check]:
    order = ["eager", "activation checkpointing", "level 1"]
    for method in order:
        for job in _JOBS:
            yield _check(job, method)
    yield Check("Trainer, observers", observers, seconds=240)
    yield Check("DDP of one process", distributed, seconds=240)
    for job in _JOBS:
        run = functools.partial(under_budget, job=job, cap=_CAPS_GIB[0])
        yield Check(f"{job}, budget", run, seconds=200, needs=("scipy",))
    yield _check("Llama-1B", "level 1, plain loss")
    for method in METHODS:
        if method not in (*order, "level 1, plain loss"):
            for job in _JOBS:
                yield _check(job, method)


def _check(job: str, method: str) -> Check:
    return Check(f"{job}, {method}", functools.partial(largest, job=job, method=method), seconds=150)


CHECKS = tuple(_checks())
