"""Makes predictors of steps: of a config, on fake tensors alone, and of a model that is about to train."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from optimum_memopt.engines.api.engine import Run
from optimum_memopt.engines.api.predictions import Workload
from optimum_memopt.engines.api.run import Selection, StepSpec
from optimum_memopt.engines.compile.capture.backend import default_compiler
from optimum_memopt.engines.compile.costs import times
from optimum_memopt.engines.compile.costs.costs import EFFICIENCY
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.loss.mode import may_have_vocabulary
from optimum_memopt.engines.compile.memory.footprint import tensor_bytes, trainable_of
from optimum_memopt.engines.compile.memory.simulation import simulate_everything_saved
from optimum_memopt.engines.compile.options import AUTO, PLAIN
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep, build
from optimum_memopt.engines.compile.predict.steps import Around, GraphSteps, StepsOfModel
from optimum_memopt.engines.compile.predict.traced import Traced, TracedAs, trace
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.train.step_context import step_around
from optimum_memopt.memory.capacity import capacity
from optimum_memopt.memory.optimizers import DEFAULT, PlannedOptimizer, embeddings_of, is_known
from optimum_memopt.sizes import Budget

# Rows of the batch that is traced, for each loss: with many a chunked loss pays. The second where the first is the
# size of something else, which torch would give the same symbol.
_ROWS = {PLAIN: (7, 11), AUTO: (61, 67)}
_FEW = _ROWS[PLAIN][0]

# A fake mode, and a model and a batch of so many rows, of its tensors.
_MakeFake = Callable[[int], tuple[dynamo.FakeTensorMode, torch.nn.Module, Mapping[str, Any]]]


@dataclass(frozen=True)
class _Case:
    """What is predicted.

    Attributes:
        how: the model is traced.
        budget: of the whole step.
        tokens: of a row; 0: as many as the batch has that is traced.
        may_chunk: the loss may be chunked.
        compares: there are other plans beside that of the budget.
    """

    how: TracedAs
    budget: Budget
    tokens: int
    may_chunk: bool = True
    compares: bool = True


def of_workload(workload: Workload, budget: Budget, spec: StepSpec) -> StepsOfModel:
    """Of a model that is given by its config.

    Args:
        workload: its batch size counts for nothing.
        budget: of the peak of a step.
        spec: operators of this machine are measured.

    Raises:
        MemOptError: an unknown device or optimizer, bad sizes, or a model that cannot be traced without data or not
            for any batch.
    """
    planned = PlannedStep(workload, Selection(), spec)
    how = TracedAs(planned.compiled_by, planned.target, planned.autocast_dtype)

    def make(rows: int) -> tuple[dynamo.FakeTensorMode, torch.nn.Module, Mapping[str, Any]]:
        with dynamo.fake_tensors() as fake:
            return fake, *build(workload.with_rows(rows), planned.here)

    _, model, batch = make(_FEW)
    around = functools.partial(_around, model, batch, budget, spec.optim, target=planned.target)
    return _predictor(_Case(how, budget, workload.tokens), model, around, make)


def of_model(
    model: torch.nn.Module,
    make_batch: Callable[[int], Mapping[str, Any]],
    budget: Budget,
    spec: StepSpec,
    tokens: int,
    may_chunk: bool,
) -> StepsOfModel:
    """Of a model that is about to train, where it is; it is left as it is.

    Args:
        model: on the device that trains it.
        make_batch: the arguments of its forward in a batch of so many rows.
        budget: of the peak of a step.
        spec: an optimizer whose memory is not known counts as AdamW.
        tokens: of the longest row; 0: as many as the batches have.
        may_chunk: nobody asked for the model's own loss or reads its logits.

    Raises:
        MemOptError: it cannot be traced without data, or not for any batch.
    """
    compiled_by = spec.compiler or default_compiler(next(model.parameters()).device.type)[0]
    optim = spec.optim if is_known(spec.optim) else DEFAULT
    autocast = getattr(torch, spec.autocast) if spec.autocast else None
    around = functools.partial(_around, model, make_batch(_FEW), budget, optim)

    def make(rows: int) -> tuple[dynamo.FakeTensorMode, torch.nn.Module, Mapping[str, Any]]:
        fake, copied = dynamo.fake_copy(model)
        return fake, copied.train(), dynamo.fake_batch(dict(make_batch(rows)), fake)

    case = _Case(TracedAs(compiled_by, None, autocast), budget, tokens, may_chunk, compares=False)
    return _predictor(case, model, around, make)


def _around(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    budget: Budget,
    optim: str,
    untrained: Collection[str],
    target: Device | None = None,
) -> Around:
    """The step. On a CPU a process holds more once it has traced a model, as it will in training."""
    moved = tensor_bytes(one for one in batch.values() if isinstance(one, torch.Tensor))
    device = next(model.parameters()).device.type if target is None else "cuda" if target.cuda is not None else "cpu"
    optimizer = PlannedOptimizer(optim, device == "cuda", embeddings_of(model))
    single, several = (
        step_around(model, batch, budget, Run(optimizer, accumulates), target, untrained=untrained)
        for accumulates in (False, True)
    )
    return Around(single.bytes, single.outside, several.outside, moved // _FEW, single.link, single.host)


def _predictor(
    case: _Case, model: torch.nn.Module, ask_around: Callable[[Collection[str]], Around], make: _MakeFake
) -> StepsOfModel:
    losses = (PLAIN, AUTO) if case.may_chunk and may_have_vocabulary(model) else (PLAIN,)
    traced = [_traced(case.how, make, loss) for loss in losses]
    around = ask_around(traced[0].untrained)
    target, device = case.how.target, next(model.parameters()).device
    graphs = {
        one.chunks_loss: GraphSteps(one, around, case.tokens, _times(case, one, device, around)) for one in traced
    }
    states, trained = around.single.optimizer, trainable_of(model, traced[0].untrained)
    if target is None:
        bandwidth = times.update_bandwidth(device, sum(one.numel() for one in trained))
    else:
        bandwidth = target.bandwidth * EFFICIENCY
    return StepsOfModel(
        type(model).__name__,
        device.type if target is None else target.name,
        (around.budget, case.budget.text),
        case.tokens,
        graphs,
        times.update_times(tensor_bytes(trained), states, bandwidth),
        case.compares,
    )


def _traced(how: TracedAs, make: _MakeFake, loss: str) -> Traced:
    rows, others = _ROWS[loss]
    fake, model, batch = make(rows)
    if any(rows in one.shape[1:] for one in batch.values() if isinstance(one, torch.Tensor)):
        fake, model, batch = make(others)
    with fake:
        return trace(model, batch, how, loss)


def _times(case: _Case, traced: Traced, device: torch.device, around: Around) -> Callable[[int], times.OperatorTimes]:
    sizes = functools.partial(traced.sizes, tokens=case.tokens)
    if case.how.target is not None:
        return times.estimated(traced.graph, sizes, case.how.target)

    def peak(rows: int) -> int:
        """Of a step without a plan; the graph is run on parameters of its own, before there is an optimizer."""
        activations = simulate_everything_saved(traced.problem_at(sizes(rows))).peak
        step = around.footprint(rows, False, activations)
        return replace(step, optimizer=max(step.optimizer, step.parameters)).peak

    # A budget may be more than there is.
    most = min(around.budget, capacity(device).available)
    return times.measured(traced.graph, sizes, device, case.how.compiler == "inductor", most, peak)
