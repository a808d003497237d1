"""Steps predicted from one trace are those that `estimate` predicts separately for each batch and plan."""

import json
import re
from functools import partial

import pytest
import torch
from transformers import LlamaConfig

from optimum_memopt.engines.api.predictions import COMPUTE, COPIES, LAUNCHES, EagerSettings
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.costs import times
from optimum_memopt.engines.compile.costs.costs import bounded
from optimum_memopt.engines.compile.costs.graph_work import works
from optimum_memopt.engines.compile.options import LAYER, MODEL
from optimum_memopt.engines.compile.predict.estimate import estimate, plain_ways
from optimum_memopt.engines.compile.predict.micro_batches import of_workload
from optimum_memopt.engines.compile.predict.plain_step import plain_step
from optimum_memopt.engines.simulator.devices import DEVICES
from optimum_memopt.predict.advise import advise, fitting
from optimum_memopt.predict.workload import Workload
from optimum_memopt.sizes import MIB, Budget, parse_budget
from optimum_memopt.step_settings import StepSpec
from tests.rotation import in_turn, nightly
from tests.saved_configs import save

BIG = {"vocab_size": 3000, "n_layer": 2, "n_embd": 64, "n_positions": 64}
LENGTH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("model"), "gpt2", **BIG)


@pytest.fixture(scope="module")
def steps(folder):
    workload = Workload(folder, "text-generation", seq_len=LENGTH)
    return of_workload(workload, parse_budget("1GiB"), StepSpec("h100", "aot_eager"))


def plan(steps, name: str, chunks_loss: bool = False):
    return next(one for one in steps.plans if one.name == name and one.chunks_loss == chunks_loss)


def estimated(folder: str, rows: int, selection: Selection) -> int:
    found = estimate(Workload(folder, "text-generation", rows, LENGTH), selection, StepSpec("h100", "aot_eager"))
    return sum(found.parts[part] for part in ("parameters", "buffers", "batch", "optimizer", "constant")) + max(
        found.parts["activations"], found.parts["gradients"]
    )


def test_there_is_a_row_for_each_plan_and_loss(steps):
    names = [(one.name, one.chunks_loss) for one in steps.plans if one.is_own]
    assert names == [(name, chunks) for name in ("no plan", "level 1", "budget") for chunks in (False, True)]
    assert [one.name for one in steps.plans if not one.is_own] == [
        "plain PyTorch",
        "Trainer's checkpointing, every layer",
        "Trainer's checkpointing, every 2 layers",
    ]
    assert (steps.model, steps.device, steps.tokens) == ("GPT2LMHeadModel", "H100", LENGTH)


def test_level_1_takes_what_its_own_trace_is_predicted_to_take(steps, folder):
    found = steps.step(plan(steps, "level 1", True), 24, 1)
    # The loss is chunked, as `auto` decides for so many tokens.
    assert found.peak == pytest.approx(estimated(folder, 24, Selection(level=1)), rel=0.01)
    assert 0 < found.recomputing < 0.5 * sum(found.seconds.values())


def test_without_a_plan_no_product_is_computed_twice(steps):
    """Without a plan no matrix product is recomputed, as in torch's own partition, which saves views."""
    for graph in steps.graphs.values():
        problem, found = graph._batch(24, False, False).problem, graph._simulation("no plan", 24, False)
        assert not {problem.kinds[node] for node in found.recomputed} & {"aten.addmm.default", "aten.bmm.default"}
        assert found.peak <= graph._batch(24, False, False).step.solver.everything


def test_a_budget_is_kept_with_less_recompute_than_a_level(steps):
    level = steps.step(plan(steps, "level 1"), 24, 1)
    free = steps.step(plan(steps, "no plan"), 24, 1)
    budget = (level.peak + free.peak) // 2
    within = steps.within(budget)
    found = within.step(plan(within, "budget"), 24, 1)
    assert level.peak < found.peak <= budget < free.peak
    assert free.recomputing < found.recomputing < level.recomputing
    assert not within.fits(plan(within, "no plan"), 24, 1)
    assert advise(within, 24).recommended.step.peak <= budget
    assert steps.fits(plan(steps, "no plan"), 24, 1)


def test_checkpointing_of_fewer_layers_takes_more_memory_and_less_time(steps):
    free, every, second = (steps.step(one, 24, 1) for one in steps.plans if not one.is_own)
    assert every.peak < second.peak < free.peak
    assert every.recomputing > second.recomputing > free.recomputing


def test_what_a_step_takes_grows_with_the_rows(steps):
    free = plan(steps, "no plan")
    few, more, many = (steps.step(free, rows, 1) for rows in (1, 24, 240))
    assert few.peak < more.peak < many.peak
    assert sum(few.seconds.values()) < sum(more.seconds.values()) < sum(many.seconds.values())
    assert few.seconds[LAUNCHES] > 0.9 * sum(few.seconds.values())
    assert many.seconds.get(LAUNCHES, 0) < 0.9 * sum(many.seconds.values())
    assert COMPUTE in many.seconds
    # Gradients of other micro-batches are held in addition to this one's.
    assert steps.step(free, 24, 2).peak > more.peak
    assert steps.lowest(free, 1) == few.peak


@pytest.mark.parametrize("micro_batches", nightly([1, 2], but=[2]))
def test_a_step_of_one_graph_takes_what_it_is_planned_to_take(tmp_path, micro_batches):
    """Also with accumulation, where the graph adds each gradient to an earlier one."""
    folder = save(tmp_path, "gpt2", **{**BIG, "n_embd": 128})
    spec = StepSpec("h100", "aot_eager", gradient_accumulation_steps=micro_batches, loss="plain")
    predicted = of_workload(Workload(folder, "text-generation", seq_len=LENGTH), parse_budget("1GiB"), spec)
    planned = estimate(Workload(folder, "text-generation", 2, LENGTH), Selection(level=1), spec)
    found = predicted.step(plan(predicted, "level 1"), 2, micro_batches)
    assert found.peak == pytest.approx(planned.peak_mib * MIB, rel=2e-3)


@in_turn
@pytest.mark.parametrize("micro_batches", nightly([1, 4], but=[1]))
def test_the_advice_has_the_seconds_of_plan(steps, folder, micro_batches):
    """The advice has the seconds of `plan`, for plain PyTorch and the engine; symbolic graphs have a few more
    launches."""
    workload = Workload(folder, "text-generation", 24, LENGTH)
    spec = StepSpec("h100", "aot_eager", gradient_accumulation_steps=micro_batches, loss="plain")
    ways = (*plain_ways(workload, spec), *estimate(workload, Selection(), spec, with_ways=True).ways)
    names = ("plain PyTorch", "Trainer's checkpointing, every layer", "no plan", "level 1")
    for name, way in zip(names, ways, strict=True):
        found = steps.step(plan(steps, name), 24, micro_batches)
        assert found.total(micro_batches) == pytest.approx(way.seconds, rel=0.02), name


@pytest.mark.parametrize("copies", nightly([True, False]))
def test_the_row_of_a_budget_has_the_seconds_that_its_plan_adds(tmp_path, copies):
    """A budget's row has the seconds that its plan adds; below level 1 layer inputs are offloaded, or recomputed if
    the device's copies are unknown."""
    device = tmp_path / "device.json"
    rates = {"memory": 2**36, "bandwidth": 1e12, "flops": {"float32": 1e13}, "link": 1e10}
    device.write_text(json.dumps({"name": "own", **rates}))
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=16, num_attention_heads=4
    )
    workload = Workload(config, "text-generation", 32, 256)
    spec = StepSpec("h100" if copies else str(device), "aot_eager", loss="plain")
    level = estimate(workload, Selection(level=1), spec, with_ways=True)
    budget = int(0.8 * level.ways[1].peak)
    found = estimate(workload, Selection(budget=Budget(f"{budget} bytes", budget)), spec, with_ways=True)
    header = found.table.header[0]
    assert ("of the host for offload" in header, "recomputed twice" in header) == (copies, not copies)
    without, level_1, within = found.ways
    assert (without, level_1) == level.ways
    assert within.peak <= budget
    share = float(re.search(r"\+([0-9.]+)% time", header)[1]) / 100
    # The share does not include the optimizer's step.
    assert 0.85 * without.seconds < (within.seconds - without.seconds) / share < without.seconds


@pytest.mark.nightly
def test_foreach_takes_longer_than_fused(folder):
    workload = Workload(folder, "text-generation", seq_len=LENGTH)
    fused, foreach = (
        of_workload(workload, parse_budget("1GiB"), StepSpec("h100", "aot_eager", optim=optim)).update
        for optim in ("adamw_torch_fused", "adamw_torch")
    )
    assert foreach.optimizer == pytest.approx(2.4 * fused.optimizer)
    assert foreach.accumulating == fused.accumulating


def test_work_follows_from_that_of_two_batches(steps):
    for graph in steps.graphs.values():
        (one,) = graph._forward.graphs
        analyzed, sizes = one.analyzed, partial(one.sizes_of, tokens=LENGTH)
        found = times.estimated(analyzed, sizes, DEVICES["H100"], False)(240)
        all_work = works(analyzed.joint, sizes(240), device=DEVICES["H100"].kind)
        exact = [(0.0, "") if work is None else bounded(work, DEVICES["H100"]) for work in all_work]
        assert found.seconds == pytest.approx([seconds for seconds, _ in exact])
        assert list(found.bounds) == [bound for _, bound in exact]


def test_operators_are_measured_on_this_machine(steps):
    (graph,) = steps.graphs[False]._forward.graphs
    sizes = partial(graph.sizes_of, tokens=LENGTH)
    measured = times.measured_times(graph.analyzed, sizes, torch.device("cpu"), False, 2**30, peak=lambda rows: rows)
    one, many = measured(1), measured(64)
    assert sum(one.seconds) < sum(many.seconds)
    assert one.source == "measured"
    shares = [found.by_bound(range(len(found.seconds)))[LAUNCHES] / sum(found.seconds) for found in (one, many)]
    assert shares[0] > shares[1]


def test_operators_take_a_part_of_what_the_graph_takes(steps, monkeypatch):
    (graph,) = steps.graphs[False]._forward.graphs
    sizes = partial(graph.sizes_of, tokens=LENGTH)
    asked = []

    def whole(analyzed, batches):
        asked.extend(batches)
        return [float(number) for number in range(1, len(batches) + 1)]

    def measured(within):
        return times.measured_times(
            graph.analyzed, sizes, torch.device("cpu"), False, 2**30, lambda rows: 2**30 if rows <= within else 2**31
        )

    monkeypatch.setattr(times, "_LONG", 60.0)
    monkeypatch.setattr(times, "replayed", whole)
    found = measured(within=4)
    assert asked == [sizes(1), sizes(4)]
    assert [sum(found(rows).seconds) for rows in (1, 4)] == pytest.approx([1.0, 2.0])
    # A larger batch has the factor of the nearest measured one, and a batch between these two has one in between.
    monkeypatch.setattr(times, "replayed", lambda *given: None)
    alone = measured(within=4)
    factors = [sum(found(rows).seconds) / sum(alone(rows).seconds) for rows in (1, 2, 4, 64)]
    assert factors[3] == pytest.approx(factors[2])
    assert min(factors[0], factors[2]) < factors[1] < max(factors[0], factors[2])


def test_a_budget_below_level_1_takes_memory_of_the_host(steps):
    rows = 2000
    graph = steps.graphs[False]
    recomputed = graph._batch(rows, False, False).step.solver.solver.layers_recomputed.peak
    floor = graph._footprint("budget", rows, False, recomputed).peak
    within = steps.within(floor - 2**20)
    chosen = plan(within, "budget")
    assert within.fits(chosen, rows, 1)
    found = within.step(chosen, rows, 1)
    assert found.peak <= floor - 2**20
    assert found.host_bytes >= 2**20
    # The link copies during computation, or the step waits for it.
    assert found.seconds.get(COPIES, 0.0) < sum(found.seconds.values())
    assert not within.fits(plan(within, "level 1"), rows, 1)
    assert not steps.within(floor // 4).fits(chosen, rows, 1)


@pytest.mark.parametrize(("every", "rows"), nightly([(1, 1), (1, 9), (2, 9)], but=[(2, 9)]))
def test_checkpointing_of_any_batch_takes_what_it_takes_by_itself(steps, folder, every, rows):
    name = f"Trainer's checkpointing, every {'layer' if every == 1 else '2 layers'}"
    workload = Workload(folder, "text-generation", rows, LENGTH)
    live = plain_step(workload, StepSpec("h100", "aot_eager"), EagerSettings(every))
    assert steps.step(plan(steps, name), rows, 1).peak == live.peak


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("deep"), "gpt2", **{**BIG, "n_layer": 6})


def of_unit(folder: str, unit: str):
    workload = Workload(folder, "text-generation", seq_len=LENGTH)
    return of_workload(workload, parse_budget("1GiB"), StepSpec("h100", "aot_eager", unit=unit))


@pytest.fixture(scope="module")
def by_layer(deep_folder):
    return of_unit(deep_folder, LAYER)


@pytest.fixture(scope="module")
def by_unit(deep_folder, by_layer):
    return {LAYER: by_layer, MODEL: of_unit(deep_folder, MODEL)}


@in_turn
@pytest.mark.parametrize("accumulates", nightly([False, True], but=[True]))
@pytest.mark.parametrize("name", nightly(["no plan", "level 1"], but=["level 1"]))
def test_layers_take_what_their_plan_is_predicted_to_take(by_layer, deep_folder, name, accumulates):
    """Layers have the peak that their plan is predicted to have, for a batch with other rows than the traced one."""
    steps = by_layer
    assert len(steps.graphs[True]._forward.graphs) > 1
    spec = StepSpec("h100", "aot_eager", unit=LAYER, gradient_accumulation_steps=1 + accumulates)
    selection = Selection(level=1) if name == "level 1" else Selection()
    expected = estimate(Workload(deep_folder, "text-generation", 24, LENGTH), selection, spec)
    found = steps.step(plan(steps, name, True), 24, 1 + accumulates)
    assert found.peak == pytest.approx(expected.peak_mib * MIB, rel=0.005)


@in_turn
def test_plans_in_fp8_take_what_theirs_are_predicted_to_take(by_layer, deep_folder):
    """Plans in fp8 have the predicted peaks and times, and leave the exact plans unchanged."""
    spec = StepSpec("h100", "aot_eager", unit=LAYER)
    workload = Workload(deep_folder, "text-generation", seq_len=LENGTH)
    steps = of_workload(workload, parse_budget("1GiB"), spec, compresses=True)
    exact = [each for each in steps.plans if each.is_own and "fp8" not in each.name]
    assert exact == [each for each in by_layer.plans if each.is_own]
    assert all(steps.step(each, 24, 1) == by_layer.step(each, 24, 1) for each in exact)
    workload = Workload(deep_folder, "text-generation", 24, LENGTH)
    for name, level in (("no plan", 0), ("level 1", 1)):
        inexact = plan(steps, f"{name} in fp8", True)
        assert inexact.flags[-1] == "--memory_opt_compress fp8"
        expected = estimate(workload, Selection(level=level, compress="fp8"), spec, with_ways=True)
        found = steps.step(inexact, 24, 1)
        assert found.peak == pytest.approx(expected.peak_mib * MIB, rel=0.005)
        assert found.total(1) == pytest.approx(expected.ways[-1].seconds, rel=0.005)
        without = steps.step(plan(steps, name, True), 24, 1).total(1)
        # Recomputed layers save only their inputs, which stay exact.
        assert found.total(1) == without if level else found.total(1) > without
    budget = (steps.step(plan(steps, "level 1", True), 24, 1).peak + 2**30) // 2
    within = steps.within(budget)
    mixed, recompute = (within.step(plan(within, name, True), 24, 1) for name in ("budget with fp8", "budget"))
    assert mixed.peak <= budget and mixed.total(1) <= recompute.total(1)
    assert "gradients are not" in steps.remarks[-1]


@in_turn
def test_released_gradients_are_those_of_one_layer(by_layer, deep_folder):
    spec = StepSpec("h100", "aot_eager", unit=LAYER, release_gradients=True)
    steps = of_workload(Workload(deep_folder, "text-generation", seq_len=LENGTH), parse_budget("1GiB"), spec)
    level = plan(steps, "level 1", True)
    expected = estimate(Workload(deep_folder, "text-generation", 2, LENGTH), Selection(level=1), spec)
    found = steps.step(level, 2, 1)
    assert found.peak == pytest.approx(expected.peak_mib * MIB, rel=0.005)
    assert found.peak < by_layer.step(plan(by_layer, "level 1", True), 2, 1).peak
    plain = plan(steps, "plain PyTorch")
    assert steps.step(plain, 2, 2).peak == by_layer.step(plain, 2, 2).peak
    assert fitting(partial(steps.fits, level), 8, level.accumulates) == (8,)
    assert "--memory_opt_release_gradients" in level.flags and not plain.flags


@pytest.mark.nightly
def test_a_budget_of_layers_is_that_of_their_plan(by_unit, deep_folder):
    level, free = (by_unit[LAYER].step(plan(by_unit[LAYER], name, True), 24, 1) for name in ("level 1", "no plan"))
    budget = (level.peak + free.peak) // 2
    found = {
        unit: steps.within(budget).step(plan(steps.within(budget), "budget", True), 24, 1)
        for unit, steps in by_unit.items()
    }
    spec = StepSpec("h100", "aot_eager", unit=LAYER)
    workload = Workload(deep_folder, "text-generation", 24, LENGTH)
    expected = estimate(workload, Selection(budget=Budget(f"{budget} bytes", budget)), spec)
    assert found[LAYER].peak == pytest.approx(expected.peak_mib * MIB, rel=0.005)
    assert found[LAYER].peak <= budget
    # As good as the whole forward's plan, except that a layer's graph cannot offload during another layer's.
    whole = found[MODEL]
    assert found[LAYER].recomputing - whole.recomputing <= 0.05 * (sum(whole.seconds.values()) + whole.recomputing)


@pytest.mark.nightly
def test_layers_are_traced_once(by_unit):
    operators = {
        unit: sum(len(graph.analyzed.joint.nodes) for graph in steps.graphs[True]._forward.graphs)
        for unit, steps in by_unit.items()
    }
    assert operators[LAYER] < 0.5 * operators[MODEL]


@pytest.mark.nightly
def test_checkpointed_layers_recompute_as_much_by_themselves(by_unit):
    for name in ("every layer", "every 2 layers"):
        layer, model = (
            steps.step(plan(steps, f"Trainer's checkpointing, {name}"), 24, 1).recomputing
            for steps in by_unit.values()
        )
        # The difference: each layer casts its own mask.
        assert layer == pytest.approx(model, rel=0.2)
