"""Inputs of layers that backwards read are recomputed in segments of layers, or offloaded to the host."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.memory.composition import compose
from optimum_memopt.engines.compile.memory.simulation import problem_events
from optimum_memopt.engines.compile.options import LAYER
from optimum_memopt.engines.compile.partition.producers.budget import saved_nodes
from optimum_memopt.engines.compile.partition.step_model import StepModel
from optimum_memopt.engines.compile.solver.forward_solver import ForwardSolver
from optimum_memopt.engines.compile.solver.offload import Host
from optimum_memopt.engines.compile.solver.segments import links_of, with_recomputed
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.simulator.devices import DEVICES
from optimum_memopt.errors import DoesNotFitError, MemOptError
from optimum_memopt.plans.plan_file import LayerEntry, PlanFile
from optimum_memopt.sizes import Budget
from tests.compiled import DROPOUT, below_recompute, hold_still
from tests.gradients import Batch, Gradients, accumulate, assert_bitwise_same, assert_bitwise_same_step
from tests.graph.test_tape_problem import captured
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.train.test_layers import Perceptrons
from tests.train.test_step_memory import EXACT, measured

LAYERS = 9
# Bytes of a CPU generator's state, which is saved to rerun a layer with dropout.
RANDOM_STATE = 5056


def deep(name: str, **changes: float) -> torch.nn.Module:
    if name == "own":
        return Perceptrons(LAYERS, **changes)
    return ZOO[name].build(**ZOO[name].deep(LAYERS), **changes)


def attached(model: torch.nn.Module, chosen: Selection) -> CompileEngine:
    engine = CompileEngine(chosen, "aot_eager", loss="plain", unit=LAYER)
    engine.attach(model)
    return engine


def below_all_plans(model: torch.nn.Module, batch: Batch, inputs: float = 1.5) -> Selection:
    """Returns a budget that is `inputs` layer inputs below the lowest peak of recompute inside layers."""
    engine = attached(model, Selection(budget=Budget("2 GiB", 2**31)))
    accumulate(model, [batch])
    planner = engine._planned.planner
    footprint = engine.predictor.footprint()
    lowest = StepModel.of(planner._forward, planner.step()).solver.lowest
    engine.detach()
    budget = footprint.peak - footprint.activations + lowest - int(inputs * input_bytes(model, batch))
    return Selection(budget=Budget(f"{budget} bytes", budget))


def input_bytes(model: torch.nn.Module, batch: Batch) -> int:
    """Returns the bytes of a layer's input, the hidden states."""
    return batch["x"].nbytes if "x" in batch else batch["input_ids"].numel() * model.config.hidden_size * 4


def seeded(model: torch.nn.Module, batch: Batch) -> Gradients:
    torch.manual_seed(1)
    return accumulate(model, [batch])


def recomputed(engine: CompileEngine) -> list[str]:
    return [call.layer for call in engine.predictor.tape.calls if call.recomputed]


CASES = {"own": {"dropout": 0.1}, "llama": {}, "roberta-mlm": DROPOUT, "t5": {}}


def batch_of(name: str, rows: int, length: int) -> Batch:
    return {"x": torch.randn(rows, length, 32)} if name == "own" else ZOO[name].batch(rows, length)


@in_turn
@pytest.mark.parametrize("name", nightly(list(CASES), but=["own"]))
def test_a_budget_below_level_1_runs_layers_in_segments(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hold_still(monkeypatch)
    model, batch = deep(name, **CASES[name]), batch_of(name, 8, 48)
    budget = below_all_plans(model, batch)
    engine = attached(model, Selection(level=1))
    expected = seeded(model, batch)
    engine.detach()
    engine = attached(model, budget)
    assert_bitwise_same(seeded(model, batch), expected)
    predicted, count = engine.predictor.footprint(), len(recomputed(engine))
    assert count and f"{count} layer{'s' if count > 1 else ''} recomputed twice (segments)" in engine.plans().header[0]
    saved, peak = measured(model, batch)
    states = count * RANDOM_STATE if CASES[name] else 0
    assert predicted.peak <= budget.budget.bytes
    assert engine.predictor.saved() + states == pytest.approx(saved, **EXACT)
    assert predicted.activations + states == pytest.approx(peak, **EXACT)
    # Another batch is predicted from the first one's graphs.
    other = batch_of(name, 5, 31)
    _, peak = measured(model, other)
    sizes = engine.predictor.sizes_of(other)
    assert engine.predictor.activations(sizes) + states == pytest.approx(peak, **EXACT)
    engine.plan_file().save(tmp_path / "plan.json")
    engine.detach()
    engine = attached(model, Selection(plan=PlanFile.load(tmp_path / "plan.json")))
    assert_bitwise_same(seeded(model, batch), expected)
    assert len(recomputed(engine)) == count
    assert engine.predictor.footprint().activations == predicted.activations
    engine.detach()


@pytest.fixture(scope="module")
def segments() -> PlanFile:
    with pytest.MonkeyPatch.context() as patch:
        hold_still(patch)
        model, batch = deep("llama"), ZOO["llama"].batch(8, 48)
        engine = attached(model, below_all_plans(model, batch))
        accumulate(model, [batch])
        plan = engine.plan_file()
        assert recomputed(engine)
        engine.detach()
        return plan


@pytest.mark.nightly
def test_a_graph_that_is_kept_is_recomputed_twice(segments: PlanFile) -> None:
    model, batch = deep("llama"), ZOO["llama"].batch(8, 48)
    plain = copy.deepcopy(model)
    engine = attached(model, Selection(plan=segments))
    for each in (model, plain):
        loss = each(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
    assert recomputed(engine)
    for (name, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight.grad, other.grad), name
    engine.detach()


@pytest.mark.nightly
@pytest.mark.parametrize("is_in_place", [False, True])
def test_what_a_hook_has_changed_between_layers_is_saved(segments: PlanFile, is_in_place: bool) -> None:
    def hook(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor | None:
        if is_in_place:
            output.mul_(1.5)
            return None
        return 1.5 * output

    model, batch = deep("llama"), ZOO["llama"].batch(8, 48)
    for layer in model.model.layers[::4]:
        layer.register_forward_hook(hook)
    plain = copy.deepcopy(model)
    engine = attached(model, Selection(plan=segments))
    assert_bitwise_same_step(model, plain, batch)
    hooked = {f"model.layers.{index + 1}" for index in range(0, LAYERS, 4)}
    assert recomputed(engine) and hooked.isdisjoint(recomputed(engine))
    if not is_in_place:
        _, peak = measured(model, batch)
        assert engine.predictor.activations() == pytest.approx(peak, **EXACT)
    engine.detach()


@pytest.mark.nightly
def test_a_batch_that_torch_traces_again_runs_in_the_same_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retraced batch runs in the same segments, since on sharded ranks another rank may not retrace."""
    hold_still(monkeypatch)
    monkeypatch.setattr(CompileEngine, "_is_sharded", True)
    model, batch, alone = deep("llama"), ZOO["llama"].batch(8, 48), ZOO["llama"].batch(1, 48)
    plain = copy.deepcopy(model)
    engine = attached(model, below_all_plans(model, batch))
    accumulate(model, [batch])
    layers = recomputed(engine)
    assert_bitwise_same_step(model, plain, alone)
    (first, again) = engine._planned.predictors
    assert {graph.digest for graph in first.graphs}.isdisjoint(graph.digest for graph in again.graphs)
    assert [call.layer for call in again.tape.calls if call.recomputed] == layers
    _, peak = measured(model, alone)
    assert again.activations(again.sizes_of(alone)) == pytest.approx(peak, **EXACT)
    engine.detach()


class Counting(torch.nn.Module):
    """Layers with running statistics."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.nn.functional.gelu(self.norm(self.linear(x)))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(loss=x.square().mean())


@in_turn
def test_layers_with_running_statistics_are_in_no_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_still(monkeypatch)
    engine = attached(model := Counting(), Selection(budget=Budget("2 GiB", 2**31)))
    with below_recompute(), pytest.raises(DoesNotFitError):
        model(x=torch.randn(64, 32))
    engine.detach()


@in_turn
def test_layers_with_running_statistics_run_once_whatever_a_plan_says(tmp_path: Path) -> None:
    model, x = Counting(), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    plan, place = level_1(model, {"x": x})
    with_entries(plan, recompute=("forward", f"input {place}")).save(tmp_path / "plan.json")
    model = copy.deepcopy(plain)
    engine = attached(model, Selection(plan=PlanFile.load(tmp_path / "plan.json")))
    assert_bitwise_same(accumulate(model, [{"x": x}]), accumulate(plain, [{"x": x}]))
    for (name, ours), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, expected), name
    engine.detach()


def with_entries(plan: PlanFile, **changes: tuple[str, ...]) -> PlanFile:
    """Returns the plan with further paths for all layers but the first."""

    def changed(entry: LayerEntry) -> LayerEntry:
        is_later = any(layer.endswith(tuple("12345678")) for layer in entry.layers)
        more = {kind: (*getattr(entry, kind), *paths) for kind, paths in changes.items()} if is_later else {}
        return dataclasses.replace(entry, **more)

    graphs = (dataclasses.replace(graph, layers=tuple(map(changed, graph.layers))) for graph in plan.graphs)
    return dataclasses.replace(plan, graphs=tuple(graphs))


def level_1(model: torch.nn.Module, batch: Batch) -> tuple[PlanFile, int]:
    """Returns the plan file of level 1, and the position of the hidden states among a layer's arguments."""
    engine = attached(model, Selection(level=1))
    accumulate(model, [batch])
    first, second = [call for call in engine.predictor.tape.calls if call.layer][:2]
    (place,) = [at for at, number in second.inputs.items() if number in first.outputs.values()]
    plan = engine.plan_file()
    engine.detach()
    return plan, place


@in_turn
@pytest.mark.parametrize("name", ["llama"])
def test_inputs_of_layers_wait_on_the_host(name: str) -> None:
    """Offloaded layer inputs give exact gradients and the predicted memory, on a CPU, where host is device."""
    model, batch = deep(name), ZOO[name].batch(8, 48)
    plan, place = level_1(model, batch)
    # There is one entry for all layers, so the first one's input, an output of the embeddings, is offloaded, too.
    plain = copy.deepcopy(model)
    engine = attached(model, Selection(plan=with_entries(plan, offload=(f"input {place}",))))
    assert_bitwise_same_step(model, plain, batch)
    away = [call for call in engine.predictor.tape.calls if call.offloaded]
    assert len(away) == LAYERS
    saved, _ = measured(model, batch)
    assert engine.predictor.saved() + LAYERS * input_bytes(model, batch) == pytest.approx(saved, **EXACT)
    engine.detach()


@pytest.mark.nightly
def test_an_input_that_a_layer_has_not_is_an_error() -> None:
    model, batch = deep("llama"), ZOO["llama"].batch(8, 48)
    plan, _ = level_1(model, batch)
    engine = attached(model, Selection(plan=with_entries(plan, offload=("input 99",))))
    with pytest.raises(MemOptError, match=r"layers\.0 has no input 99"):
        accumulate(model, [batch])
    engine.detach()


@pytest.fixture(scope="module")
def forward():
    forward = captured("llama", 64, 256, num_hidden_layers=12)
    return forward.graphs, forward.problem(forward.first)


@pytest.mark.nightly
def test_below_what_is_recomputed_inputs_are_offloaded(forward) -> None:
    graphs, problem = forward
    offloadable = {
        node for node, (run, local) in enumerate(problem.places) if local in graphs[problem.graphs[run]].offloadable
    }
    assert problem.passed and not problem.passed & offloadable
    host = Host(DEVICES["H100"].link, 2**40, frozenset(offloadable | problem.passed))
    alone, offloading = ForwardSolver(problem), ForwardSolver(problem, host)
    budget = int(0.97 * alone.lowest)
    segments, plan = alone.cheapest(budget), offloading.cheapest(budget)
    assert segments.segments and not segments.offloaded and max(segments.peak, plan.peak) <= budget
    assert plan.offloaded and not plan.segments and plan.extra_seconds < segments.extra_seconds
    nodes = saved_nodes(problem, plan)
    assert any(saved.inputs.offloaded for saved in nodes)
    # The graphs' own events are composed with the offloaded inputs.
    tape = problem.tape
    calls = (
        dataclasses.replace(call, offloaded=saved.inputs.offloaded)
        for call, saved in zip(tape.calls, nodes, strict=True)
    )
    events = [
        problem_events(run, frozenset(saved.saved), {}, saved.offloaded)
        for run, saved in zip(problem.runs, nodes, strict=True)
    ]
    assert compose(dataclasses.replace(tape, calls=tuple(calls)), events).peak() <= plan.peak


@pytest.mark.nightly
def test_segments_take_no_more_time_than_they_need(forward) -> None:
    """Smaller budgets recompute more layers in segments, and the plan's peak equals the composed one."""
    _, problem = forward
    solver = ForwardSolver(problem)
    plans = [solver.cheapest(int(share * solver.lowest)) for share in (0.99, 0.98, 0.97)]
    counts = [len(plan.segments) for plan in plans]
    assert 0 < counts[0] < counts[1] < counts[2]
    for plan in plans:
        events = [problem_events(run, own) for run, own in zip(problem.runs, problem.of_runs(plan.saved), strict=True)]
        assert compose(with_recomputed(problem.tape, plan.segments), events).peak() == plan.peak


@in_turn
def test_a_budget_that_some_segments_fit_is_feasible() -> None:
    """A layer that runs again may hold more than the inputs of all layers, so more segments may have a higher peak."""
    forward = captured("llama", 4, 256, ranks=8, num_hidden_layers=LAYERS)
    problem = forward.problem(forward.first)
    solver = ForwardSolver(problem)
    saved = problem.of_runs(solver.solver.lowest.saved)
    runs = [problem_events(run, nodes) for run, nodes in zip(problem.runs, saved, strict=True)]
    links = links_of(problem.tape, runs, [run.writes for run in problem.runs])

    def peaks(size: int) -> list[int]:
        """Returns the peaks of the first 0, 1, ... links inside segments of this size."""
        inner = [link for place, link in enumerate(links, 1) if place % size]
        return [compose(with_recomputed(problem.tape, inner[:count]), runs).peak() for count in range(len(inner) + 1)]

    of_sizes = [peaks(size) for size in (2, 3, 4, 6)]
    assert any(min(found) < found[-1] for found in of_sizes)
    for budget in sorted({peak for found in of_sizes for peak in found if peak < solver.lowest}):
        assert solver.cheapest(budget).peak <= budget
