"""Makes predictors of steps: of a config, on fake tensors alone, and of a model that is about to train."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from optimum_memopt.engines.api.predictions import Workload
from optimum_memopt.engines.api.run import Run, Selection, StepSpec
from optimum_memopt.engines.compile.capture.backend import default_compiler
from optimum_memopt.engines.compile.capture.capture import capture, chosen_by
from optimum_memopt.engines.compile.capture.device_standin import traced_for
from optimum_memopt.engines.compile.capture.traced_forward import TraceSpec
from optimum_memopt.engines.compile.costs import times
from optimum_memopt.engines.compile.costs.costs import EFFICIENCY
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.loss.decide import LossMode, may_have_vocabulary
from optimum_memopt.engines.compile.memory.footprint import tensor_bytes, trainable_of
from optimum_memopt.engines.compile.memory.simulation import simulate_everything_saved
from optimum_memopt.engines.compile.memory.step_context import StepContext, step_around
from optimum_memopt.engines.compile.options import AUTO, PLAIN
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.partition.producers.level import FromLevel
from optimum_memopt.engines.compile.partition.producers.torch_default import TorchDefault
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep, build
from optimum_memopt.engines.compile.predict.steps import GraphSteps, StepsOfModel
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.errors import MemOptError, line_of
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
        compiler: whose graphs, one of `COMPILERS`.
        target: the device that steps are predicted for; None: where the model lies.
        autocast: dtype; None: without.
        budget: of the whole step.
        optim: the optimizer, by Trainer's name.
        tokens: of a row; 0: as many as the batch has that is traced.
        may_chunk: the loss may be chunked.
        compares: there are other plans beside that of the budget.
    """

    compiler: str
    target: Device | None
    autocast: torch.dtype | None
    budget: Budget
    optim: str
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

    def make(rows: int) -> tuple[dynamo.FakeTensorMode, torch.nn.Module, Mapping[str, Any]]:
        with dynamo.fake_tensors() as fake:
            return fake, *build(workload.with_rows(rows), planned.here)

    _, model, batch = make(_FEW)
    case = _Case(planned.compiled_by, planned.target, planned.autocast_dtype, budget, spec.optim, workload.tokens)
    return _predictor(case, model, batch, make)


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

    def make(rows: int) -> tuple[dynamo.FakeTensorMode, torch.nn.Module, Mapping[str, Any]]:
        fake, copied = dynamo.fake_copy(model)
        return fake, copied.train(), dynamo.fake_batch(dict(make_batch(rows)), fake)

    case = _Case(compiled_by, None, autocast, budget, optim, tokens, may_chunk, compares=False)
    return _predictor(case, model, make_batch(_FEW), make)


def _predictor(case: _Case, model: torch.nn.Module, batch: Mapping[str, Any], make: _MakeFake) -> StepsOfModel:
    losses = (PLAIN, AUTO) if case.may_chunk and may_have_vocabulary(model) else (PLAIN,)
    captured = [_captured(case, make, loss) for loss in losses]
    untrained, target, device = captured[0].untrained, case.target, next(model.parameters()).device
    step = _step_of_one_row(case, model, batch, untrained)
    graphs = {
        graph.chunks_loss: GraphSteps(graph, step, case.tokens, _times(case, graph, device, step))
        for graph in captured
    }
    trained = trainable_of(model, untrained)
    if target is None:
        bandwidth = times.update_bandwidth(device, sum(parameter.numel() for parameter in trained))
    else:
        bandwidth = target.bandwidth * EFFICIENCY
    return StepsOfModel(
        type(model).__name__,
        device.type if target is None else target.name,
        (step.limit, case.budget.text),
        case.tokens,
        graphs,
        times.update_times(tensor_bytes(trained), step.fixed.optimizer, bandwidth),
        case.compares,
    )


def _step_of_one_row(
    case: _Case, model: torch.nn.Module, batch: Mapping[str, Any], untrained: frozenset[str]
) -> StepContext:
    """The step, with a batch of one row. On a CPU a process holds more once it has traced a model, as in training."""
    is_on_cuda = next(model.parameters()).is_cuda if case.target is None else case.target.cuda is not None
    run = Run(PlannedOptimizer(case.optim, is_on_cuda, embeddings_of(model)))
    step = step_around(model, batch, case.budget, run, case.target, untrained=untrained)
    return replace(step, fixed=replace(step.fixed, batch=step.fixed.batch // _FEW))


def _captured(case: _Case, make: _MakeFake, loss: str) -> CapturedGraph:
    """The graph of a training forward, with sizes that stay symbols.

    Raises:
        MemOptError: the model cannot be traced without data, or its forward is not one graph for all batches.
    """
    rows, other_rows = _ROWS[loss]
    fake, model, batch = make(rows)
    if any(rows in tensor.shape[1:] for tensor in batch.values() if isinstance(tensor, torch.Tensor)):
        fake, model, batch = make(other_rows)
    name, spec = type(model).__name__, TraceSpec(case.compiler, loss=LossMode(loss), target=case.target)
    try:
        with fake, traced_for(case.target, case.autocast, next(model.parameters()).device.type):
            graphs = capture(model, (), batch, spec, chosen_by(TorchDefault()), compared=(FromLevel(1),))
    except MemOptError:
        raise
    except Exception as error:
        raise MemOptError(
            f"{name} cannot be traced on fake tensors ({line_of(error)}), so that nothing can be predicted for other "
            "batches"
        ) from error
    if len(graphs) != 1:
        raise MemOptError(
            f"the training forward of {name} is not one graph ({len(graphs)} graphs); advice is for forwards that are"
        )
    if not graphs[0].row_symbols:
        raise MemOptError(f"the graph of {name} is for one batch size only, so that no other one can be predicted")
    return graphs[0]


def _times(
    case: _Case, graph: CapturedGraph, device: torch.device, step: StepContext
) -> Callable[[int], times.OperatorTimes]:
    assert graph.analyzed is not None
    sizes = functools.partial(graph.sizes_of, tokens=case.tokens)
    if case.target is not None:
        return times.estimated(graph.analyzed, sizes, case.target)

    def peak(rows: int) -> int:
        """A step without a plan; the graph is run on parameters of its own, before there is an optimizer."""
        fixed = step.fixed
        return replace(
            fixed,
            batch=fixed.batch * rows,
            activations=simulate_everything_saved(graph.problem_at(sizes(rows))).peak,
            optimizer=max(fixed.optimizer, fixed.parameters),
        ).peak

    # A budget may be more than there is.
    most = min(step.limit, capacity(device).available)
    return times.measured(graph.analyzed, sizes, device, case.compiler == "inductor", most, peak)
