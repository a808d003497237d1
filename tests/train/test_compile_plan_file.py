"""A plan file has the same effect as the plan that it was made from, in another process and for any sizes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.memory.tape import Call, Tape
from optimum_memopt.engines.compile.partition.partitioned_graph import SymbolNames
from optimum_memopt.engines.compile.predict.estimate import estimate
from optimum_memopt.engines.compile.predict.table import to_table
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import MemOptError
from optimum_memopt.options import MemOptOptions
from optimum_memopt.plans.matching import Matched
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.predict.workload import Workload
from optimum_memopt.sizes import parse_budget
from optimum_memopt.step_settings import StepSpec
from tests.compiled import DROPOUT, recorded, selection
from tests.gradients import accumulate, assert_bitwise_same
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.saved_configs import save

CASES = {
    "roberta, a level": ("roberta-mlm", "level 1"),
    "roberta, counts and offload": ("roberta-mlm", "Gelu+:1:1,FusedMatMul+Add+:3:1"),
    "roberta, a count in fp8": ("roberta-mlm", "Gelu+:4:1,FusedMatMul+Add+:1:-1"),
    "roberta, a level in fp8": ("roberta-mlm", "level 1 fp8"),
    "roberta, no plan in fp8": ("roberta-mlm", " fp8"),
    "roberta, no plan": ("roberta-mlm", ""),
    "albert, layers that share weights": ("albert-mlm", "level 1"),
    "t5": ("t5", "level 2"),
    "llama": ("llama", "level 1"),
    "deberta": ("deberta-v2-mlm", "level 1"),
}


@pytest.mark.parametrize("name", nightly(CASES, but=["roberta, counts and offload"]))
def test_a_file_does_what_its_plan_did(tmp_path: Path, name: str) -> None:
    """A plan file made with fixed sizes has its plan's effect on symbolic sizes."""
    case, asked = CASES[name]
    # Counts need several layers.
    model, batch = ZOO[case].build(**({"num_hidden_layers": 1} if case == "llama" else {})), ZOO[case].batch(3, 17)
    made = CompileEngine(selection(asked), "aot_eager", dynamic=False)
    with recorded() as before:
        made.attach(model)
        torch.manual_seed(0)
        expected = accumulate(model, [batch])
    plan = made.plan_file()
    made.detach()
    plan.save(tmp_path / "plan.json")

    engine = CompileEngine(Selection(plan=PlanFile.load(tmp_path / "plan.json")), "aot_eager")
    engine.attach(model)
    torch.manual_seed(0)
    found = accumulate(model, [batch])
    assert_bitwise_same(found, expected)
    tape = Tape(tuple(map(Call, range(len(before)))))
    expected_rows = to_table([one.graph for one in before], tape, Matched(), SymbolNames(), ()).enabled
    assert {row.config: row.applied_count for row in engine.plans().enabled} == {
        row.config: row.applied_count for row in expected_rows
    }
    assert engine.plan_file().digest == plan.digest
    engine.detach()


@in_turn
@pytest.mark.parametrize("compiler", nightly(["aot_eager", "inductor"], but=["aot_eager"]))
def test_what_was_planned_for_another_device_trains_here(tmp_path: Path, compiler: str) -> None:
    """A plan for an MI300X trains here; graphs for CUDA have other attention kernels, so their plans are refused."""
    folder = save(tmp_path, "roberta-mlm", **DROPOUT, num_hidden_layers=1)
    workload = Workload(folder, "fill-mask", 8, 24)
    free = estimate(workload, Selection(), StepSpec("mi300x", compiler))
    budget = parse_budget(f"{(free.parts['activations'] * -0.2 / 2**20) + free.peak_mib:.3f}MiB")
    planned = estimate(workload, Selection(budget=budget), StepSpec("mi300x", compiler))
    assert planned.peak_mib < free.peak_mib and any(row.applied_count for row in planned.table.plans)
    assert planned.plan.solved_for["device"] == "MI300X" and planned.plan.loss == "chunked"
    assert "roofline MI300X costs" in planned.plan.why

    model, batch = workload.build()
    engine = CompileEngine(Selection(plan=planned.plan), compiler)
    engine.attach(model)
    torch.manual_seed(0)
    model(**batch).loss.backward()
    applied = {row.config: row.applied_count for row in engine.plans().plans}
    assert applied.items() >= {row.config: row.applied_count for row in planned.table.enabled}.items()
    assert "plan file (budget " in engine.plans().header[0]
    engine.detach()


def roberta() -> torch.nn.Module:
    return ZOO["roberta-mlm"].build(num_hidden_layers=1)


def larger() -> torch.nn.Module:
    model = roberta()
    model.resize_token_embeddings(model.config.vocab_size + 8)
    return model


def run_engine(model: torch.nn.Module, chosen: Selection) -> PlanFile:
    engine = CompileEngine(chosen, "aot_eager", dynamic=False)
    engine.attach(model)
    try:
        model(**ZOO["roberta-mlm"].batch(3, 17)).loss.backward()
        return engine.plan_file()
    finally:
        engine.detach()


@pytest.fixture(scope="module")
def made() -> PlanFile:
    return run_engine(roberta(), Selection(level=1))


def test_a_model_with_another_graph_is_refused_with_the_difference(made: PlanFile) -> None:
    with pytest.raises(MemOptError) as refused:
        run_engine(larger(), Selection(plan=made))
    assert "--memory_opt_plan: the file was made for a different graph: float32 parameters and buffers: " in str(
        refused.value
    )
    with pytest.raises(MemOptError, match=r"float32 parameters and buffers: .*int64 parameters and buffers: "):
        run_engine(ZOO["llama"].build(num_hidden_layers=1), Selection(plan=made))


def test_a_file_of_fewer_layers_is_refused() -> None:
    made = run_engine(ZOO["llama"].build(num_hidden_layers=4), Selection(level=1))
    run_engine(ZOO["llama"].build(num_hidden_layers=4), Selection(plan=made))
    with pytest.raises(MemOptError, match=r"it has plans for 4 layers, but none for model\.layers\.4"):
        run_engine(ZOO["llama"].build(num_hidden_layers=6), Selection(plan=made))


@in_turn
def test_without_strict_another_graph_gets_what_fits(made: PlanFile, caplog: pytest.LogCaptureFixture) -> None:
    applied = run_engine(larger(), Selection(plan=made, strict=False))
    assert applied.graphs[0].layers == made.graphs[0].layers
    assert "applying the parts that match" in caplog.text


def test_without_strict_each_layer_gets_its_own_entry() -> None:
    """All graphs differ from the file's, and layers run more often than it has entries."""
    made = run_engine(ZOO["llama"].build(num_hidden_layers=5), Selection(level=1))
    changed = [
        replace(graph, signature=replace(graph.signature, operators={**graph.signature.operators, "erf": 7}))
        for graph in made.graphs
    ]
    assert 1 < len(made.graphs) < 5
    file = replace(made, graphs=tuple(changed))
    applied = run_engine(ZOO["llama"].build(num_hidden_layers=5), Selection(plan=file, strict=False))
    assert [graph.layers for graph in applied.graphs] == [graph.layers for graph in made.graphs]


@in_turn
def test_an_operator_that_is_not_there_is_named(made: PlanFile) -> None:
    (graph,) = made.graphs
    edited = replace(graph.layers[0], recompute=(*graph.layers[0].recompute, "output/gleu"))
    wrong = replace(made, graphs=(replace(graph, layers=(edited, *graph.layers[1:])),))
    with pytest.raises(MemOptError, match=r"no output/gleu in roberta\.encoder\.layer\.\d to recompute"):
        run_engine(roberta(), Selection(plan=wrong))


@in_turn
def test_a_graph_more_than_the_file_has(made: PlanFile) -> None:
    with pytest.raises(MemOptError, match="this is graph 1 of the forward, and the file has 0"):
        run_engine(roberta(), Selection(plan=replace(made, graphs=())))


def test_a_plan_is_for_one_loss(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PlanFile("", "chunked", {}, ()).save(path)
    for loss in ("auto", "chunked"):
        MemOptOptions(memory_opt_plan=str(path), memory_opt_loss=loss).check_values()
    MemOptOptions(memory_opt_plan=str(path), memory_opt_loss="plain", memory_opt_strict=False).check_values()
    with pytest.raises(MemOptError, match="--memory_opt_loss plain with --memory_opt_plan: the file was made"):
        MemOptOptions(memory_opt_plan=str(path), memory_opt_loss="plain").check_values()


@in_turn
def test_a_loss_in_chunks_and_counts_come_from_one_file() -> None:
    """A plan file has both counts and the chunked loss; partitions ignore the row `Loss+`, which sets the loss."""
    case = ZOO["gpt2"]
    model, batch = case.build(num_hidden_layers=1), case.batch(4, 24)
    found = []
    for chosen in (selection("Loss+:1:-1,FastGelu+:1:1"), None):
        engine = CompileEngine(chosen or Selection(plan=found[0][2]), "aot_eager", dynamic=False)
        engine.attach(model)
        step = accumulate(model, [batch])
        on = {row.config: row.applied_count for row in engine.plans().enabled}
        found.append((step, on, engine.plan_file()))
        engine.detach()
    (first, rows, plan), (second, of_file, _) = found
    assert plan.loss == "chunked" and rows == of_file == {"Loss+:1:-1": 1, "FastGelu+:1:-1": 1}
    assert_bitwise_same(second, first)
