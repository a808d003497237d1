"""Builds the plan table with its header lines, and the plan file."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from optimum_memopt.compat.installed import software
from optimum_memopt.compat.transformers import attention_implementation, is_encoder_decoder
from optimum_memopt.engines.api.layer_paths import layer_in
from optimum_memopt.engines.api.run import Run
from optimum_memopt.engines.compile.capture.layer_groups import layer_groups
from optimum_memopt.engines.compile.capture.traced_graph import TraceSpec
from optimum_memopt.engines.compile.graph.analyzed_graph import with_gradient
from optimum_memopt.engines.compile.graph.candidates import Candidate, by_row
from optimum_memopt.engines.compile.graph.symbols import compile_sizes, formula
from optimum_memopt.engines.compile.loss.decide import ROW, check_row
from optimum_memopt.engines.compile.memory.footprint import Footprint, weights_by_dtype
from optimum_memopt.engines.compile.memory.tape import Call, Tape
from optimum_memopt.engines.compile.options import CHUNKED, PLAIN
from optimum_memopt.engines.compile.partition.choice import InputsPlan
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph, SymbolNames
from optimum_memopt.engines.compile.partition.producers import matched_in
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.compile.partition.strategies import strategy_of
from optimum_memopt.engines.compile.predict.pending import Pending
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.simulator.allocator import pinned_bytes
from optimum_memopt.engines.simulator.devices import Device
from optimum_memopt.engines.torch_compat import releases
from optimum_memopt.engines.torch_compat.attention import KeptMasks
from optimum_memopt.logs import best_effort
from optimum_memopt.memory.optimizers import planned_like
from optimum_memopt.plans.grammar import ALL
from optimum_memopt.plans.matching import Matched
from optimum_memopt.plans.plan_file import GraphEntry, LayerEntry, PlanFile
from optimum_memopt.plans.table import PlanRow, PlanTable, sorted_plans
from optimum_memopt.sizes import MIB, gib_text


def plan_line(
    model: torch.nn.Module, compiler: str, graphs: Sequence[PartitionedGraph], tape: Tape, target: Device | None = None
) -> str:
    """Returns the header line about the model, its device, compiler and plan."""
    device = next(model.parameters()).device.type if target is None else target.name
    attention = f", attention: {_attention(model, graphs)}" if any(graph.is_for_cuda for graph in graphs) else ""
    # Only layers of a list, not modules that are sharded on their own.
    layers = len({call.layer for call in tape.calls if call.layer.rpartition(".")[2].isdigit()})
    runs = f" for {layers} layers, equal layers share one" if layers else ""
    counted = f"{len(graphs)} graphs" if len(graphs) > 1 else "1 graph"
    pieces = f", in {counted}{runs}" if layers or len(graphs) > 1 else ""
    name, ranks = tape.sharding.name, tape.sharding.ranks
    sharded = f", {name} on {ranks} rank{'s' if ranks > 1 else ''}" if tape.sharding.is_sharded else ""
    loss = ", loss in chunks" if any(graph.chunks_loss for graph in graphs) else ""
    weights = " and ".join(weights_by_dtype(model))
    where = f"{type(model).__name__} in {weights} on {device} by {compiler}"
    return f"{where}, {_why(graphs)}{pieces}{sharded}{loss}{attention}"


def _why(graphs: Sequence[PartitionedGraph]) -> str:
    """Returns the reason for the graphs' choices, by graph if the reasons differ."""
    reasons = [graph.choice.why for graph in graphs]
    numbered = (f"graph {number}: {why}" for number, why in enumerate(reasons, 1))
    return reasons[0] if len(set(reasons)) == 1 else "; ".join(numbered)


def host_lines(graphs: Sequence[PartitionedGraph], tape: Tape) -> list[str]:
    """Returns a line about offloaded bytes on the host; none if the host is the device itself."""
    runs = [graphs[call.graph] for call in tape.calls]
    sizes = [size for graph in runs if graph.is_for_cuda for size in graph.offloaded_bytes]
    sizes += [size for call, graph in zip(tape.calls, runs, strict=True) for size in _offloaded_inputs(call, graph)]
    offloaded, pinned = (f"{sum(counted) / MIB:.1f} MiB" for counted in (sizes, map(pinned_bytes, sizes)))
    return [f"Predicted for the host: {offloaded} offloaded, in {pinned} of pinned memory"] if sizes else []


def _offloaded_inputs(call: Call, graph: PartitionedGraph) -> list[int]:
    """Returns the sizes of a run's offloaded arguments in the first batch, in bytes."""
    if graph.timeline is None or not call.offloaded:
        return []
    inputs = graph.timeline.at({**graph.sizes, **graph.timeline.values(call.sizes)}).inputs
    return [inputs[place].bytes for place in sorted(call.offloaded)]


def collective_lines(tape: Tape) -> list[str]:
    """Returns a line about the bytes that each rank moves; none for a single rank, or if they are not counted."""
    moved = tape.moved
    if not any(moved):
        return []
    gathered, reduced = map(gib_text, moved)
    in_segments = any(tape.repeated)
    recomputed = "in segments" if in_segments else "regardless of recompute"
    counted = "counts only for parameters gathered a third time, on a GPU" if in_segments else "is not counted"
    return [
        f"Predicted for each of {tape.sharding.ranks} ranks: {gathered} all-gathered per micro-batch, {reduced} "
        f"reduce-scattered per optimizer step, {recomputed}; their time {counted}"
    ]


def _attention(model: torch.nn.Module, graphs: Sequence[PartitionedGraph]) -> str:
    """Returns the attention kernels that torch has chosen: they decide what a layer saves for its backward."""
    fused = dict.fromkeys(kernel for graph in graphs for kernel in graph.attention)
    implementation = attention_implementation(getattr(model, "config", None)) or "eager"
    # torch composes its math kernel from products and a softmax, with no operator that identifies it.
    return " and ".join(fused) or ("math" if implementation == "sdpa" else implementation)


def prediction_lines(predictor: StepMemoryPredictor, model: torch.nn.Module) -> list[str]:
    run = predictor.run
    before = round(run.others.earlier * predictor.saved())
    footprint = predictor.footprint(saved_before=before)
    caveat = predictor.caveat and f" ({predictor.caveat})"
    outputs = f"{footprint.outputs / MIB:.1f} MiB"
    held = "" if outputs == "0.0 MiB" else f", with {outputs} of outputs that the loop may hold"
    if loss := predictor.tape.held_outputs.loss:
        held += f", and as if its loss took {loss:.3g} times the outputs"
    optimizer = planned_like(run.optimizer)
    accumulation = " and gradient accumulation" if run.gradient_accumulation else ""
    accumulation += " and released gradients" if run.releases_gradients else ""
    by_dtype = weights_by_dtype(model)
    sizes = (f"{dtype} {size / MIB:.1f}" for dtype, size in by_dtype.items())
    parts = footprint.text(", ".join(by_dtype if len(by_dtype) == 1 else sizes), run.batches_held)
    lines = [
        f"Predicted for the first batch: {predictor.saved() / MIB:.1f} MiB saved for backward, peak of "
        f"activations and gradients {footprint.activations / MIB:.1f} MiB{held}{caveat}",
        f"Predicted peak of a step with {optimizer}{accumulation}: {footprint.peak / MIB:.1f} MiB = {parts}",
    ]
    if blocks := predictor.allocator_peak(saved_before=before):
        allocated, reserved = (
            f"{size / MIB:.1f} MiB {name} ({size / footprint.peak - 1:+.1%})"
            for name, size in (("allocated", blocks.allocated), ("reserved", blocks.reserved))
        )
        lines.append(f"Predicted for torch's allocator: {allocated}, {reserved}")
    return lines


_AUTO = "AUTO: torch recomputes {count} by itself"


@dataclass(frozen=True)
class _Part:
    """One graph's share of a row, counted once for each run of the graph."""

    graph: PartitionedGraph
    runs: int
    candidates: Sequence[Candidate]
    symbols: dict[sympy.Symbol, sympy.Symbol]

    @property
    def saving(self) -> sympy.Expr:
        return self.runs * sympy.Add(*(candidate.saving for candidate in self.candidates)).subs(self.symbols)

    def count(self, candidates: Sequence[Candidate]) -> int:
        return self.runs * len(candidates)

    @property
    def chosen(self) -> list[Candidate]:
        on = set(self.graph.choice.candidates)
        return [candidate for candidate in self.candidates if candidate in on]

    @property
    def auto_recomputed(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate in self.graph.choice.auto_recomputed]

    def bytes(self, candidates: Sequence[Candidate]) -> int:
        return self.runs * sum(compile_sizes(candidate.saving for candidate in candidates)(self.graph.sizes))


def to_table(
    graphs: Sequence[PartitionedGraph], tape: Tape, matched: Matched, names: SymbolNames, header: Sequence[str]
) -> PlanTable:
    """Returns the plan table of all runs of the graphs, with one row for each id and strategy.

    Offload is listed if it is on, or if an activation cannot be recomputed and has no other option; compression only
    if it is on.
    """
    rows: dict[str, list[_Part]] = {}
    for graph, runs in zip(graphs, tape.runs, strict=True):
        symbols = _named_symbols(graph, names)
        for row, candidates in by_row(graph.candidates).items():
            rows.setdefault(row, []).append(_Part(graph, runs, candidates, symbols))
    recomputable = {
        candidate.cluster_id for graph in graphs for candidate in graph.candidates if candidate.chain is not None
    }
    listed = {row: parts for row, parts in rows.items() if row in matched.requests or _is_listed(parts, recomputable)}
    plans = [*(_plan(row, parts, matched) for row, parts in listed.items()), *_loss_plans(graphs, names)]
    return PlanTable(engine="compile", plans=sorted_plans(plans), symbols=dict(names.first), header=tuple(header))


def _named_symbols(graph: PartitionedGraph, names: SymbolNames) -> dict[sympy.Symbol, sympy.Symbol]:
    named = names.of_symbols(graph).items()
    return {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in named}


def _loss_plans(graphs: Sequence[PartitionedGraph], names: SymbolNames) -> list[PlanRow]:
    """Returns the row of the losses; none if no loss was requested and all logits are smaller than what a chunked loss
    saves."""
    found = [(graph, loss) for graph in graphs for loss in graph.losses if loss.is_requested or loss.pays]
    if not found:
        return []
    losses = [loss for _, loss in found]
    chunked = [loss for loss in losses if loss.is_chunked]
    # Graphs of different traces may have the same symbols for different sizes.
    saving = sympy.Add(*(loss.saving.subs(_named_symbols(graph, names)) for graph, loss in found))
    return [
        PlanRow(
            config=ROW,
            frequency=len(losses),
            saving_bytes=sum(loss.first.saving for loss in losses),
            saving_symbolic=formula(saving),
            requested_count=ALL if any(loss.is_requested for loss in losses) else 0,
            applied_count=len(chunked),
            note="; ".join(dict.fromkeys(loss.note for loss in losses)),
            applied_saving_bytes=sum(loss.first.saving for loss in chunked),
        )
    ]


def _is_listed(parts: Sequence[_Part], recomputable: Collection[str]) -> bool:
    first = parts[0].candidates[0]
    if any(part.chosen for part in parts):
        return True
    return strategy_of(first.strategy).is_listed(_device_type(parts[0]), first.cluster_id in recomputable)


def _device_type(part: _Part) -> str:
    """Returns the type of the candidates' device: the accelerator's if any candidate is on it."""
    types = {candidate.device_type for candidate in part.candidates}
    return min(types, key=lambda device_type: device_type == "cpu")


def _plan(row: str, parts: Sequence[_Part], matched: Matched) -> PlanRow:
    strategy = strategy_of(parts[0].candidates[0].strategy)
    device_type = _device_type(parts[0])
    saves = strategy.saves_on(device_type)
    frequency = sum(part.count(part.candidates) for part in parts)
    auto_recomputed = sum(part.count(part.auto_recomputed) for part in parts)
    auto = _AUTO.format(count="all" if auto_recomputed == frequency else auto_recomputed) if auto_recomputed else ""
    request = matched.requests.get(row)
    notes = {
        strategy.note_applied(part.chosen, part.graph.prediction, part.graph.sizes)
        for part in parts
        if saves and part.chosen and part.graph.prediction is not None
    }
    # With several graphs, keep only a note that applies to all of them.
    applied = notes if len(notes) == 1 else ()
    return PlanRow(
        config=row,
        frequency=frequency,
        saving_bytes=sum(part.bytes(part.candidates) for part in parts) if saves else 0,
        saving_symbolic=formula(sympy.Add(*(part.saving for part in parts if saves))),
        requested_count=request.count if request else 0,
        applied_count=sum(part.count(part.chosen) for part in parts),
        note="; ".join(filter(None, (matched.note(row), strategy.note(device_type), *applied, auto))),
        applied_saving_bytes=sum(part.bytes(part.chosen) for part in parts) if saves else 0,
    )


def plan_file_of(
    model: torch.nn.Module,
    compiler: str,
    graphs: Sequence[PartitionedGraph],
    tape: Tape,
    sizes: Mapping[str, int],
    masks: KeptMasks,
    predicted: Footprint | None,
) -> PlanFile:
    """Returns the plan file of a forward's graphs, with one entry for equal layers."""
    solved_for = {
        "model": type(model).__name__,
        "device": next(model.parameters()).device.type,
        "compiler": compiler,
        "sizes": dict(sizes),
        "padding": masks.padding,
        "local_masks": masks.local,
        "predicted_bytes": {"peak": predicted.peak, "activations": predicted.activations} if predicted else {},
        "versions": software(),
    }
    loss = CHUNKED if any(graph.chunks_loss for graph in graphs) else PLAIN
    return PlanFile(graphs[0].choice.why, loss, solved_for, tuple(_entries(graphs, tape)))


def _entries(graphs: Sequence[PartitionedGraph], tape: Tape) -> Iterator[GraphEntry]:
    runs: dict[str, dict[str, GraphEntry]] = {}
    inputs: dict[tuple[str, str], InputsPlan] = {}
    for call, is_repeated in zip(tape.calls, tape.repeated, strict=True):
        entry = graphs[call.graph].plan
        runs.setdefault(entry.signature.digest, {})[call.layer] = entry
        inputs[entry.signature.digest, call.layer] = InputsPlan(call.offloaded, call.recomputed, is_repeated)
    for digest, entries in runs.items():
        (first, *_) = entries.values()
        if "" in entries:
            yield first
            continue
        layers: dict[LayerEntry, list[str]] = {}
        for layer, entry in entries.items():
            plan = replace(entry.layers[0], layers=()) if entry.layers else LayerEntry(())
            layers.setdefault(inputs[digest, layer].added_to(plan), []).append(layer)
        alike = tuple(replace(plan, layers=tuple(paths)) for plan, paths in layers.items())
        yield replace(first, layers=() if first.by_torch else alike)


@dataclass(frozen=True)
class ShownPlan:
    """A plan as its table, its file and its predictions.

    Attributes:
        predictor: predicts steps under the plan; None if they cannot be predicted.
    """

    table: PlanTable
    plan_file: PlanFile
    predictor: StepMemoryPredictor | None
    remarks: tuple[str, ...] = ()


def _are_layers_frozen(model: torch.nn.Module, graphs: Sequence[PartitionedGraph]) -> bool:
    """True if parameters in layers are frozen, and the graphs of a forward compute no gradient of any layer."""
    paths = [path for group in layer_groups(model) for path in group]
    in_layers = {
        name: parameter.requires_grad
        for name, parameter in model.named_parameters()
        if layer_in(name) or any(name.startswith(f"{path}.") for path in paths)
    }
    trained = with_gradient(graph.gradients for graph in graphs)
    return not all(in_layers.values()) and trained.isdisjoint(in_layers)


def show(
    model: torch.nn.Module,
    graphs: Sequence[PartitionedGraph],
    tape: Tape,
    inputs: Mapping[str, object],
    resident: int,
    producer: Producer,
    spec: TraceSpec,
    masks: KeptMasks,
    run: Run | None = None,
    runs_before: int = 0,
    pending: Pending | None = None,
) -> ShownPlan:
    """Returns the plan of a forward's graphs, ready to show.

    Args:
        graphs: graphs of the first training forward, in order, right after it.
        resident: bytes that the process held when the last graph was partitioned, after `runs_before` of the tape's
            runs.
        masks: attention masks that the forward makes for the batch.
        run: the planned run, or the training run without its optimizer, which must not be kept alive.
        pending: the model's forwards whose backward has not run yet.

    Raises:
        ConfigError: the user requests a row that none of the graphs has.
    """
    matched = matched_in(producer, [graphs[call.graph] for call in tape.calls], _are_layers_frozen(model, graphs))
    losses = [loss for graph in graphs for loss in graph.losses]
    remarks = (*matched.remarks, *check_row(losses, spec.loss, spec.strict))
    if spec.strict:
        matched.check()
    names = SymbolNames()
    with best_effort("the names of sizes"):
        names = SymbolNames.of(graphs, is_encoder_decoder(model))
    lines, predictor, footprint = [plan_line(model, spec.compiler, graphs, tape, spec.target)], None, None
    if all(graph.prediction for graph in graphs):
        with best_effort("the predicted peak"):
            made = StepMemoryPredictor(
                model, graphs, inputs, resident, names, run, tape=tape, runs_before=runs_before, pending=pending
            )
            shown, footprint = prediction_lines(made, model), made.footprint()
            lines, predictor = [*lines, *shown], made
    lines += host_lines(graphs, tape)
    lines += collective_lines(tape)
    lines += releases.what_is_less()
    table = PlanTable(engine="compile", plans=(), header=tuple(lines))
    with best_effort("the plan table"):
        table = to_table(graphs, tape, matched, names, lines)
    plan_file = plan_file_of(model, spec.compiler, graphs, tape, names.first, masks, footprint)
    return ShownPlan(table, plan_file, predictor, remarks)
