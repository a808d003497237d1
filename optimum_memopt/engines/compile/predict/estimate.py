"""The plan table and predicted peak of a model that is traced on fake tensors: no weights, no data, no GPU memory."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from optimum_memopt.compat import attention_implementation, is_encoder_decoder
from optimum_memopt.engines.api.predictions import BatchPoint, CurvePoint, Frontier, StepTimeline, Workload
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.graph.symbols import plain_sizes
from optimum_memopt.engines.compile.partition.producers import producer_for
from optimum_memopt.engines.compile.partition.producers.budget import FromBudget
from optimum_memopt.engines.compile.partition.producers.recorded import RecordedForward
from optimum_memopt.engines.compile.partition.producers.torch_default import TorchDefault
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep
from optimum_memopt.engines.compile.solver.plan import Infeasible, point_of, points_of, solved
from optimum_memopt.errors import DoesNotFitError, MemOptError
from optimum_memopt.memory.capacity import Capacity
from optimum_memopt.memory.optimizers import DEFAULT
from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable, canonical_symbols
from optimum_memopt.sizes import gib_text

if TYPE_CHECKING:
    from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor


# How exact a prediction is, by compiler; the figures of inductor are in docs/compile.md.
_EXACT = {
    "aot_eager": "Exact with --memory_opt_compiler aot_eager, except for the header's remarks in brackets; inductor's "
    "peak was between a third lower and a fifth higher",
    "inductor": "inductor orders operators by itself: its peak was between a third lower and a fifth higher; a "
    "training run predicts it from inductor's own programs",
}


@dataclass(frozen=True)
class Estimate:
    """The predicted memory of a step.

    Attributes:
        table: the plan table, with the prediction in its header.
        parts: bytes by name, see `Footprint`.
        peak_mib: of a step.
        device: type of the device whose kernels are assumed.
        compiler: whose graphs.
        attention: transformers' name of the assumed attention implementation.
        plan: what is on, to be applied by `--memory_opt_plan`.
        curve: what budgets cost, where that was asked for.
        costs: where the curve's times are from.
        batches: steps of several batch sizes, where that was asked for.
        chosen: the plan's place on the curve, where that is known.
        timeline: the step, operator by operator.
        allocated: bytes of the blocks of torch's allocator on CUDA; None where it is not known.
        reserved: bytes that it takes of the device; None where it is not known.
        capacity: memory of the device.
    """

    table: PlanTable
    parts: dict[str, int]
    peak_mib: float
    device: str
    compiler: str
    attention: str
    plan: PlanFile | None = field(default=None, repr=False)
    curve: tuple[CurvePoint, ...] = ()
    costs: str = ""
    batches: tuple[BatchPoint, ...] = ()
    chosen: CurvePoint | None = None
    timeline: StepTimeline | None = field(default=None, repr=False)
    allocated: int | None = None
    reserved: int | None = None
    capacity: Capacity | None = field(default=None, repr=False)

    @property
    def frontier(self) -> Frontier | None:
        """The curve with the plan; None where nobody asked."""
        return Frontier(self.curve, self.costs, self.chosen) if self.curve else None

    def to_text(self) -> str:
        """The table, of plans or of batch sizes, the curve, and what the prediction assumes."""
        curve = f"\n\n{_curve_text(self.curve, self.costs)}\n" if self.curve else ""
        table = f"{self.table.header[0]}\n{_batches_text(self.batches)}" if self.batches else self.table.to_text()
        return f"{table}{curve}\n{self._assumes}"

    def _repr_html_(self) -> str:
        """In a notebook."""
        curve = tabulate(_curve_rows(self.curve), headers="keys", tablefmt="html", disable_numparse=True)
        costs = f"<p>What budgets cost ({html.escape(self.costs)} costs)</p>{curve}" if self.curve else ""
        return f"<div>{self.table._repr_html_()}{costs}<p>{html.escape(self._assumes)}</p></div>"

    @property
    def _assumes(self) -> str:
        return (
            f"Predicted, not run: attention is {self.attention}, with the kernel that torch takes on {self.device}; "
            f"other devices may take another one. {_EXACT[self.compiler]}"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without the plan, which is a file of its own, and the timeline, which is a picture."""
        found = asdict(replace(self, plan=None, timeline=None, capacity=None))
        for name in ("plan", "timeline", "chosen", "capacity"):
            del found[name]
        return found


def estimate(
    workload: Workload,
    selection: Selection,
    symbolic: bool = False,
    device: str | None = None,
    with_curve: bool = False,
    compiler: str | None = None,
    autocast: str = "",
    optim: str = DEFAULT,
    gradient_accumulation_steps: int = 1,
    batch_sizes: Sequence[int] = (),
) -> Estimate:
    """Trace one training forward and its backward on fake tensors, and partition them with the compile engine.

    Args:
        workload: the model and the size of its batch.
        selection: which plans.
        symbolic: sizes stay symbols, so that savings are formulas; several times slower.
        device: whose memory and rates count, see `budget.devices`; None: this machine.
        with_curve: find out what budgets cost, too; with a plan selected, the model is traced a second time.
        compiler: whose graphs, one of `COMPILERS`; None: the one that would train. Of inductor's, too, the order of
            operators is the graph's.
        autocast: `bfloat16` or `float16`; empty: float32.
        optim: the optimizer, by Trainer's name.
        gradient_accumulation_steps: micro-batches of a step.
        batch_sizes: predict a step of each, too, from one trace with the workload's, the largest of them; sizes stay
            symbols.

    Raises:
        MemOptError: an unknown device or optimizer, bad sizes or plans, or a model whose forward depends on the
            values in its tensors.
    """
    step = PlannedStep(workload, selection, device, compiler, autocast, optim, gradient_accumulation_steps)
    is_planned = selection != Selection(strict=selection.strict)
    forward = _recorded(selection if is_planned else None) if with_curve else None
    symbolic = symbolic or len(batch_sizes) > 1
    try:
        engine, model, batch = step.trace(symbolic, None if is_planned else forward)
    except DoesNotFitError:
        if symbolic:
            raise
        # Symbols tell which smaller batch does.
        engine, model, batch = step.trace(True)
    if forward is not None and is_planned:
        step.trace(symbolic, forward).engine.detach()
    table, predictor = engine.plans(), engine.predictor
    if table is None or predictor is None:
        raise MemOptError("; ".join(table.header if table is not None else ()))
    footprint, blocks = predictor.footprint(), predictor.allocator_peak()
    if not symbolic:
        table = _without_formulas(table, batch, is_encoder_decoder(model))
    plan = engine.plan_file()
    assert plan is not None
    batches = tuple(_batch_point(predictor, size) for size in batch_sizes) if len(batch_sizes) > 1 else ()
    timeline = predictor.timeline()
    engine.detach()
    frontier = _frontier(forward, predictor.runs) if forward is not None else Frontier((), "")
    named = {"sizes": dict(table.symbols), "device": step.device_name}
    return Estimate(
        table=table,
        parts=asdict(footprint),
        peak_mib=footprint.peak / MIB,
        device=step.device_name,
        compiler=step.compiled_by,
        attention=attention_implementation(getattr(model, "config", None)) or "eager",
        plan=replace(plan, solved_for={**plan.solved_for, **named}),
        curve=frontier.points,
        costs=frontier.costs,
        batches=batches,
        chosen=frontier.chosen,
        timeline=timeline,
        allocated=blocks.allocated if blocks is not None else None,
        reserved=blocks.reserved if blocks is not None else None,
        capacity=step.capacity,
    )


def _recorded(selection: Selection | None) -> RecordedForward:
    """What a curve is made of, with the place of what is selected."""
    producer = None if selection is None else producer_for(selection)
    if isinstance(producer, FromBudget):
        return RecordedForward(budget=producer.budget)
    return RecordedForward(plan=None if isinstance(producer, TorchDefault) else producer)


def _frontier(forward: RecordedForward, runs: Sequence[int]) -> Frontier:
    """What budgets cost.

    Args:
        forward: what was traced.
        runs: how often each of its graphs has run.
    """
    graphs, step = forward.solver(runs), forward.steps[0]
    points = points_of(solved(graphs.lowest, graphs.everything, graphs.cheapest), step.outside)
    chosen = forward.plan_of(graphs)
    place = None if chosen is None else point_of(chosen, step.outside)
    if step.bytes:
        try:
            found = graphs.cheapest(step.outside.activations_within(step.bytes))
            place = point_of(found, step.outside, step.bytes)
        except Infeasible:
            place = None
    return Frontier(points, forward.graphs[0].costs, place)


def _batch_point(predictor: "StepMemoryPredictor", batch_size: int) -> BatchPoint:
    footprint = predictor.footprint(batch_size=batch_size)
    blocks = predictor.allocator_peak(batch_size=batch_size)
    saved = predictor.saved(plain_sizes(predictor.first, batch_size, None))
    allocated, reserved = (blocks.allocated, blocks.reserved) if blocks is not None else (None, None)
    return BatchPoint(batch_size, footprint.peak, footprint.activations, saved, allocated, reserved)


def _batches_text(points: Sequence[BatchPoint]) -> str:
    sizes = {"predicted peak": "peak", "allocated": "allocated", "reserved": "reserved", "activations": "activations"}
    rows = [
        {
            "batch size": str(point.batch_size),
            **{title: gib_text(size) for title, name in sizes.items() if (size := getattr(point, name)) is not None},
            "saved for backward": gib_text(point.saved),
        }
        for point in points
    ]
    return tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True, stralign="right")


def _curve_rows(points: Sequence[CurvePoint]) -> list[dict[str, str]]:
    return [
        {
            "budget": gib_text(point.budget),
            "predicted peak": gib_text(point.peak),
            "time": f"{point.extra_time:+.1%}",
        }
        for point in reversed(points)
    ]


def _curve_text(points: Sequence[CurvePoint], costs: str) -> str:
    grid = tabulate(_curve_rows(points), headers="keys", tablefmt="simple", disable_numparse=True, stralign="right")
    return f"What budgets cost ({costs} costs; a step's forward and backward)\n{grid}"


def _without_formulas(table: PlanTable, batch: Mapping[str, Any], is_encoder_decoder: bool) -> PlanTable:
    """A table without formulas, since sizes are fixed; symbols are named after the batch."""
    shapes = {name: getattr(value, "shape", ()) for name, value in batch.items()}
    sizes = {f"{name}_dim{dim}": size for name, shape in shapes.items() for dim, size in enumerate(shape)}
    canonical = canonical_symbols(sizes, is_encoder_decoder)
    return replace(
        table,
        plans=tuple(replace(plan, saving_symbolic="") for plan in table.plans),
        symbols={canonical[name]: size for name, size in sizes.items()},
    )
