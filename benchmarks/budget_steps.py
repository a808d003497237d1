"""Measured step times on the CPU of other ways to a lower peak, and of the solver's plan at the same peak, for
budget.py."""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from allocations import allocated
from budget_graphs import Within, attach
from shared import make_config, to_markdown
from torch._functorch import config as functorch_config

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.costs.times import costs_of
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.memory import process
from optimum_memopt.sizes import MIB

MODELS = ("roberta", "deberta-v2")
NO_PLAN = "no plan"
_DECIMALS = {"CPU-s": 2, "of no plan": 2, "of the baseline": 2}


@dataclass(frozen=True)
class Size:
    """The size of a model and of its batch."""

    hidden: int
    layers: int
    batch_size: int
    seq_len: int


FULL, QUICK = Size(512, 6, 4, 256), Size(64, 2, 2, 16)


def _within(budget: int) -> Within:
    """Returns a producer of plans for the graph alone, with operator costs measured on this machine."""
    return Within(budget, lambda graph: costs_of(graph, torch.device("cpu"), fused=False))


# Prepares a model for one way to train, and returns a context with torch's settings for its compilation.
_Prepare = Callable[[torch.nn.Module], "contextlib.AbstractContextManager[Any]"]


def _engine(selection: Selection | None = None, producer: Within | None = None) -> _Prepare:
    def prepare(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        if producer is not None:
            engine = attach(model, producer)
        else:
            # Fixed sizes are traced several times as fast.
            engine = CompileEngine(selection, "aot_eager", dynamic=False)
            engine.attach(model)
        engine.outputs_read_by = lambda: ""
        return contextlib.nullcontext()

    return prepare


def _checkpointing(every: int) -> _Prepare:
    def prepare(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        model.activation_checkpointing_enable(every_n_layers=every)
        return contextlib.nullcontext()

    return prepare


def _torchs_budget(budget: float) -> _Prepare:
    def prepare(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        model.compile(backend="aot_eager", dynamic=False)
        return functorch_config.patch(activation_memory_budget=budget)

    return prepare


BASELINES: dict[str, _Prepare] = {
    "checkpointing, 1 of 2 layers": _checkpointing(2),
    "torch's budget 0.5": _torchs_budget(0.5),
    "level 1": _engine(Selection(level=1)),
}


@dataclass(frozen=True)
class Trained:
    """A model that is trained in one way.

    Attributes:
        step: runs a forward and backward.
        peak: the step's peak over what is allocated before it, in bytes of torch's allocator.
    """

    step: Callable[[], None]
    peak: int


def trained(name: str, size: Size, prepare: _Prepare) -> Trained:
    """Compile a model, and measure its peak.

    Raises:
        DoesNotFitError: the budget is too small.
    """
    import transformers

    torch.manual_seed(0)
    config = make_config(name, size.hidden, size.layers)
    model = transformers.AutoModelForSequenceClassification.from_config(config).train()
    ids = torch.randint(5, config.vocab_size, (size.batch_size, size.seq_len))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros_like(ids[:, 0])}

    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    with prepare(model):
        step()
        # The second step may recompile for an input that the first did not have.
        step()
    peak, _, _ = allocated(step)
    return Trained(step, peak)


def measure(name: str, size: Size, rounds: int) -> dict[str, Any]:
    """Measure peaks and CPU seconds of interleaved steps; keep the error for a budget that no plan fits."""
    process.return_freed_memory()
    torch._dynamo.reset()
    ways = {NO_PLAN: trained(name, size, _engine())}
    errors = {}
    for baseline, prepare in BASELINES.items():
        ways[baseline] = trained(name, size, prepare)
        try:
            ways[f"solver for {baseline}"] = trained(name, size, _engine(producer=_within(ways[baseline].peak)))
        except DoesNotFitError as error:
            errors[baseline] = str(error)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, one in ways.items():
            begin = time.process_time()
            one.step()
            seconds[way].append(time.process_time() - begin)
    about = f"{size.layers} layers of {size.hidden}, batch {size.batch_size} x {size.seq_len}, fp32, dropout 0.1"
    peaks = {way: one.peak for way, one in ways.items()}
    return {"about": about, "peaks": peaks, "seconds": seconds, "errors": errors}


def run(saved: dict[str, Any], keep: Callable[[], None], arguments: argparse.Namespace) -> None:
    """Add the models that are missing; see budget.py."""
    for name in MODELS[:1] if arguments.quick else MODELS:
        if name not in saved:
            saved[name] = measure(name, QUICK if arguments.quick else FULL, 1 if arguments.quick else arguments.rounds)
            keep()


def rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of one model's table; each ratio is the median over rounds."""
    seconds = found["seconds"]

    def ratio(way: str, base: str) -> float:
        return statistics.median(own / other for own, other in zip(seconds[way], seconds[base], strict=True))

    for way, peak in found["peaks"].items():
        base = way.removeprefix("solver for ")
        yield {
            "way": "solver, same budget" if base != way else way,
            "peak MiB": peak / MIB,
            "CPU-s": statistics.median(seconds[way]),
            "of no plan": ratio(way, NO_PLAN),
            "of the baseline": ratio(way, base) if base != way else "",
        }


def sections(saved: Mapping[str, Any]) -> dict[str, str]:
    """Returns a table for each model."""

    def text(found: Mapping[str, Any]) -> str:
        notes = [f"The solver at the peak of {name}: {error}" for name, error in found["errors"].items()]
        rounds = len(found["seconds"][NO_PLAN])
        return "\n\n".join([f"{found['about']}, {rounds} rounds:", to_markdown(list(rows(found)), _DECIMALS), *notes])

    return {f"steps of {name}": text(found) for name, found in saved.items()}
