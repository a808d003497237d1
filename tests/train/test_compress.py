"""Strategy 4 and `--memory_opt_compress`: losses are exact, gradients have the precision of three mantissa bits."""

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.costs.costs import Costs, roofline
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.joint import is_tensor, root, tensor_value, value
from optimum_memopt.engines.compile.graph.saved_activations import is_statistic
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.options import LAYER, MODEL
from optimum_memopt.engines.compile.partition.strategies.compress import FP8
from optimum_memopt.engines.compile.predict import planner
from optimum_memopt.engines.compile.predict.estimate import estimate
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.shared.forward_patch import without_key_value_cache
from optimum_memopt.engines.simulator.devices import DEVICES
from optimum_memopt.engines.torch_compat import dynamo, kernels
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import Strategy
from optimum_memopt.predict.workload import Workload
from optimum_memopt.sizes import parse_budget
from optimum_memopt.step_settings import StepSpec
from tests.compiled import DROPOUT, Run, hold_still, recorded, run, selection
from tests.gradients import TOLERANCE, Batch, Gradients, accumulate, assert_bitwise_same
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.saved_configs import save
from tests.train.test_step_memory import EXACT, measured

# Relative rounding error of an element: half of the last of three mantissa bits.
ROUNDING = 2**-4
# Smallest step of a row, relative to its largest element: values below half of this are rounded to zero.
SMALLEST = 2**-9 / torch.finfo(FP8).max
inductor = pytest.mark.skipif(not dynamo.inductor_works("cpu"), reason="there is no C++ compiler")
COMPILERS = ["aot_eager", pytest.param("inductor", marks=[inductor, pytest.mark.nightly])]


class Rows(torch.nn.Module):
    """Saves a product; the gradient of the weight is twice that product."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(rows)
        self.gain = torch.nn.Parameter(torch.ones_like(rows[0]))

    def forward(self, factor: torch.Tensor) -> CausalLMOutput:
        product = self.weight * self.gain * factor
        return CausalLMOutput(loss=product.square().sum())


def rows_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns rows with all kinds of values, by name."""
    numbers = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    largest, smallest = torch.finfo(dtype).max / 4, torch.finfo(dtype).tiny * 512
    rows = dict(
        zip(("normal", "outlier", "large", "small", "zero", "infinite", "negative", "nan"), numbers, strict=True)
    )
    rows["outlier"][7] = 4096
    rows["large"] *= largest / rows["large"].abs().max()
    rows["small"] *= smallest
    rows["zero"].zero_()
    rows["infinite"][3], rows["negative"][4], rows["nan"][5] = float("inf"), -float("inf"), float("nan")
    return rows


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elements_keep_three_bits_and_rows_stay_what_they_are(dtype: torch.dtype, compiler: str) -> None:
    rows = rows_of(dtype)
    model = Rows(torch.stack(list(rows.values())))
    ours = run(model, "Mul+:4:-1", {"factor": torch.ones((), dtype=dtype)}, compiler=compiler)
    assert ours.table.enabled, ours.table
    gradient = ours.step[1]["weight"]
    assert gradient is not None
    found = dict(zip(rows, (gradient.double() / 2), strict=True))
    for name in ("infinite", "negative", "nan"):
        assert found.pop(name).isnan().all(), name
        del rows[name]
    assert not found["zero"].any()
    for name, row in rows.items():
        row, row_found = row.double(), found[name]
        allowed = (ROUNDING * row.abs()).maximum(SMALLEST / 2 * row.abs().max()) * (1 + 2**-6)
        assert ((row_found - row).abs() <= allowed).all(), name
        assert row_found.abs().max() <= row.abs().max(), name
    assert not torch.equal(found["normal"], rows["normal"].double())


@in_turn
def test_what_no_gradient_goes_through_stays_exact() -> None:
    """Floating-point masks, comparisons, float64 and rows with one element are not compressed."""

    class Kinds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> CausalLMOutput:
            hidden = torch.tanh(x * self.weight)
            bias = torch.where(mask, 0.0, torch.finfo(x.dtype).min)
            gate = (hidden > 0).to(x.dtype) + 0.5
            double = torch.sin(hidden.double())
            row = torch.tanh(hidden.sum(-1, keepdim=True))
            probabilities = torch.log_softmax(hidden + bias, -1)
            loss = (probabilities * gate).sum() + (double * double).sum().float() + (row * hidden).sum()
            return CausalLMOutput(loss=loss)

    batch = {"x": torch.randn(48, 64, generator=torch.Generator().manual_seed(1)), "mask": torch.rand(48, 64) > 0.1}
    ours = run(Kinds(), " fp8", batch)
    graph = ours.split.graph
    compressed = {one.activation.root for one in graph.candidates if one.strategy is Strategy.COMPRESS}
    kinds = {node.target.overloadpacket._qualified_op_name for node in compressed}
    assert kinds == {"aten::tanh"}, kinds
    assert all(tensor_value(node).shape[-1] == 64 for node in compressed)


def error(ours: Gradients, exact: Gradients) -> float:
    """Returns the relative error of all gradients together."""
    pairs = [(ours[name], gradient) for name, gradient in exact.items() if gradient is not None]
    difference = sum(float((found - gradient).square().sum()) for found, gradient in pairs)
    return (difference / sum(float(gradient.square().sum()) for _, gradient in pairs)) ** 0.5


MODELS = ("roberta-classification", "llama", "segformer", "vit", "mixtral", "t5")
PLANS = (" fp8", "level 1 fp8")
CELLS = [(name, asked, compiler) for name in MODELS for asked in PLANS for compiler in ("aot_eager", "inductor")]


@pytest.mark.parametrize(
    ("name", "asked", "compiler"), nightly(CELLS, but=[("roberta-classification", "level 1 fp8", "aot_eager")])
)
def test_gradients_are_as_exact_as_the_format(name: str, asked: str, compiler: str) -> None:
    if compiler == "inductor" and not dynamo.inductor_works("cpu"):
        pytest.skip("there is no C++ compiler")
    model = ZOO[name].build()
    batch = without_key_value_cache(model, (), ZOO[name].batch(8, 24, seed=1))
    exact, ours = accumulate(model, [batch]), run(model, asked, batch, compiler=compiler, dynamic=True)
    rounding = 0 if compiler == "aot_eager" else TOLERANCE
    torch.testing.assert_close(ours.step[0], exact[0], rtol=rounding, atol=0)
    # Rounding errors have a root mean square of at most ROUNDING / sqrt(3); those of two layers' activations add up.
    assert 0 < error(ours.step[1], exact[1]) < ROUNDING
    check_kinds(ours)


def check_kinds(ours: Run) -> None:
    """Check that compressed activations are in fp8, as in the table, and all others in their own dtype."""
    split = ours.split
    chosen = [one for one in split.graph.choice.candidates if one.strategy is Strategy.COMPRESS]
    rows = [row for row in ours.table.enabled if ":4:" in row.config]
    assert {row.config: row.applied_count for row in rows} == Counter(one.row for one in chosen)
    assert rows and all("inexact" in row.note for row in rows)
    assert not any(is_statistic(one.activation.root) for one in chosen)
    compressed = {one.activation.root.name for one in chosen}
    (output,) = split.forward.graph.find_nodes(op="output")
    for node in output.args[0][split.num_fwd_outputs :]:
        if is_tensor(node):
            assert (value(node).dtype == FP8) == (node.name.removesuffix("_fp8") in compressed), node


MEASURED = re.compile(r"(\d+) activations are saved in fp8, .* is ([\d.]+)% on average and ([\d.]+)% at most \((.+)\)")


PROBED = [("roberta-classification", LAYER), ("segformer", MODEL), ("mixtral", LAYER), ("mixtral", MODEL)]


@pytest.mark.parametrize(("name", "unit"), nightly(PROBED, but=["roberta-classification"]))
def test_the_error_of_the_first_batch_is_logged_once(name: str, unit: str, caplog: pytest.LogCaptureFixture) -> None:
    """The error of the first batch is logged once, also for layers that share a graph, without side effects."""
    case = ZOO[name]
    model = case.build(**(case.deep(4) if unit == LAYER else {}))
    plain = copy.deepcopy(model)
    batch = without_key_value_cache(model, (), case.batch(8, 24, seed=1))
    engine = CompileEngine(selection(" fp8"), "aot_eager", unit=unit)
    engine.attach(model)
    states = []
    for each in (model, plain):
        torch.manual_seed(0)
        step = [accumulate(each, [batch])[0] for _ in range(2)]
        states.append((step, torch.get_rng_state(), dict(each.named_buffers())))
    assert str(states[0]) == str(states[1])
    lines = [found for record in caplog.records if (found := MEASURED.match(record.getMessage()))]
    (line,) = lines
    count, average, worst = int(line[1]), float(line[2]) / 100, float(line[3]) / 100
    assert 0 < average <= worst < ROUNDING
    assert count == sum(row.applied_count for row in engine.plans().enabled if ":4:" in row.config)
    engine.detach()


OF_MODEL = re.compile(r"gradients are inexact by ([\d.]+)% in the first batch")
OF_GRAPHS = re.compile(
    r"activations in fp8 make .* (\d+) graphs inexact by ([\d.]+)% on average and ([\d.]+)% at most"
)
MEASURED_GRADIENTS = [
    (name, unit, compiler)
    for name, unit in (("roberta-classification", MODEL), ("roberta-classification", LAYER), *PROBED[1:])
    for compiler in ("aot_eager", "inductor")
]


@pytest.mark.parametrize(("name", "unit", "compiler"), nightly(MEASURED_GRADIENTS))
def test_the_error_of_gradients_is_logged_once(name: str, unit: str, compiler: str, caplog) -> None:
    """The error of gradients is logged once, without side effects; for one graph it is that against an exact run."""
    if compiler == "inductor" and not dynamo.inductor_works("cpu"):
        pytest.skip("there is no C++ compiler")
    case, is_bert = ZOO[name], name.startswith("roberta")
    # inductor draws different random numbers.
    dropout = DROPOUT if is_bert and compiler == "aot_eager" else dict.fromkeys(DROPOUT, 0.0) if is_bert else {}
    model = case.build(**(case.deep(4) if unit == LAYER else {}), **dropout)
    plain = copy.deepcopy(model)
    batch = without_key_value_cache(model, (), case.batch(8, 24, seed=1))
    engine = CompileEngine(selection(" fp8"), compiler, unit=unit)
    engine.attach(model)
    steps, states = [], []
    for each in (model, model, plain):
        steps.append(accumulate_from(each, batch))
        states.append(torch.get_rng_state())
    assert_bitwise_same(steps[0], steps[1])
    assert all(torch.equal(state, states[-1]) for state in states)
    messages = [record.getMessage() for record in caplog.records]
    of_model, of_graphs = (
        [found for each in messages if (found := kind.match(each))] for kind in (OF_MODEL, OF_GRAPHS)
    )
    if unit == MODEL:
        (line,) = of_model
        rounding = 1e-4 if compiler == "aot_eager" else 1e-2
        assert float(line[1]) / 100 == pytest.approx(error(steps[0][1], steps[-1][1]), abs=rounding)
    else:
        (line,) = of_graphs
        assert int(line[1]) > 2 and 0 < float(line[2]) <= float(line[3]) < 100 * ROUNDING
    assert len(of_model) + len(of_graphs) == 1
    engine.detach()


@in_turn
def test_queries_and_keys_of_fused_attention_stay_exact() -> None:
    """Queries and keys of fused attention stay exact: its backward combines them with their exact logsumexp."""
    model = ZOO["llama"].build("sdpa")
    batch = without_key_value_cache(model, (), ZOO["llama"].batch(8, 24, seed=1))
    split = run(model, " fp8", batch).split
    compressed = {
        one.activation.root.name for one in split.graph.choice.candidates if one.strategy is Strategy.COMPRESS
    }
    kernels_run = [
        node for node in split.backward.graph.nodes if "attention" in node.name and node.name.endswith("backward")
    ]
    assert kernels_run
    for node in kernels_run:
        _, query, key, keys_value, output, *_ = (root(read).name for read in node.all_input_nodes)
        assert not {f"{query}_from_fp8", f"{key}_from_fp8"} & {query, key} and not {query, key} & compressed
        assert keys_value.endswith("_from_fp8") and output.endswith("_from_fp8")


@in_turn
def test_decisions_are_those_of_the_forward() -> None:
    """A recomputed router chooses the same experts as in the forward."""
    model = ZOO["mixtral"].build()
    batch = without_key_value_cache(model, (), ZOO["mixtral"].batch(8, 24, seed=1))
    ours = run(model, "level 1 fp8", batch, dynamic=True)
    assert "exact, from which integers are recomputed" in ours.table.header[0]
    exact = accumulate(model, [batch])
    assert error(ours.step[1], exact[1]) < ROUNDING
    # An expert without tokens has no gradient; a different choice would give it one.
    routed = {name: g.any() for name, g in exact[1].items() if g is not None and "experts" in name}
    assert routed == {name: ours.step[1][name].any() for name in routed}


@in_turn
def test_nothing_is_compressed_that_nobody_asked_for() -> None:
    model, batch = ZOO["roberta-classification"].build(), ZOO["roberta-classification"].batch(8, 24)
    ours = run(model, "Gelu+:4:0,FusedMatMul+Add+:1:-1", batch)
    assert_bitwise_same(ours.step, accumulate(model, [batch]))
    assert not any(name.endswith("_fp8") for name in ours.split.saved_for_backward)


@in_turn
def test_a_count_and_other_strategies_go_with_it() -> None:
    """Compression combines with counts and other strategies, and saves the bytes that the table claims."""
    model, batch = ZOO["roberta-classification"].build(), ZOO["roberta-classification"].batch(8, 24)
    kept = run(model, "Gelu+:4:0", batch)
    asked = "FusedMatMul+Add+:4:-1,Gelu+:1:-1,LayerNormalization+:4:3,FusedMatMul+Add+Add+:3:1"
    ours = run(model, asked, batch)
    ours.split.check(ours.table)
    applied = {row.config: row.applied_count for row in ours.table.enabled}
    assert applied["FusedMatMul+Add+:4:-1"] == 2 and applied["LayerNormalization+:4:-1"] == 3
    claimed = sum(row.applied_saving_bytes for row in ours.table.enabled)
    saved = [each.split.graph.prediction.saved_bytes for each in (kept, ours)]
    assert saved[0] - saved[1] == claimed > 0


@pytest.fixture
def layered() -> Iterator[tuple[CompileEngine, torch.nn.Module]]:
    model = ZOO["roberta-classification"].build(**DROPOUT, num_hidden_layers=4)
    engine = CompileEngine(selection("level 1 fp8"), "aot_eager", unit=LAYER)
    engine.attach(model)
    yield engine, model
    engine.detach()


@in_turn
def test_what_passes_between_graphs_stays_exact(layered) -> None:
    """Tensors between graphs stay exact: a layer's input is an output of the graph before, which autograd holds."""
    engine, model = layered
    batches = [ZOO["roberta-classification"].batch(*size, seed=1) for size in ((8, 48), (5, 31))]
    plain = copy.deepcopy(model)
    with recorded() as splits:
        torch.manual_seed(0)
        found = accumulate(model, batches)
    torch.manual_seed(0)
    exact = accumulate(plain, batches)
    assert torch.equal(found[0], exact[0]) and error(found[1], exact[1]) < ROUNDING
    assert len(splits) > 1
    for split in splits:
        returned = {node.name for node in split.forward.graph.output_node().args[0][: split.num_fwd_outputs] if node}
        assert not any(name.endswith("_fp8") for name in returned)
    for batch in batches:
        saved, peak = measured(model, batch)
        sizes = {f"inputs_input_ids_dim{dim}": size for dim, size in enumerate(batch["input_ids"].shape)}
        assert engine.predictor.saved(sizes) == pytest.approx(saved, **EXACT)
        assert engine.predictor.activations(sizes) == pytest.approx(peak, **EXACT)


# A device with slow matrix products and fast memory.
FEW_FLOPS = replace(DEVICES["RTX 4090"], bandwidth=1e12, flops=dict.fromkeys(DEVICES["RTX 4090"].flops, 1e9))


@in_turn
@pytest.mark.parametrize("unit", nightly([LAYER, MODEL], but=[LAYER]))
def test_a_budget_compresses_where_that_takes_less_time(unit: str, monkeypatch, caplog) -> None:
    """A budget compresses, if allowed, where that is faster; the step is as predicted, and its error is logged."""
    hold_still(monkeypatch)

    def costs(graph: AnalyzedGraph, device: torch.device, fused: bool, *_: object) -> Costs:
        return roofline(graph.joint, graph.size_hints, FEW_FLOPS, fused)

    monkeypatch.setattr(planner, "costs_of", costs)
    model = ZOO["roberta-classification"].build(**DROPOUT, num_hidden_layers=4)
    batch = ZOO["roberta-classification"].batch(16, 48, seed=1)
    exact = accumulate_from(copy.deepcopy(model), batch)

    def trained(chosen: Selection) -> tuple[CompileEngine, tuple[torch.Tensor, Gradients]]:
        engine = CompileEngine(chosen, "aot_eager", unit=unit)
        engine.attach(model)
        return engine, accumulate_from(model, batch)

    def held(level: int) -> Footprint:
        engine, _ = trained(Selection(level=level))
        footprint = engine.predictor.footprint()
        engine.detach()
        return footprint

    low, high = held(1).peak, held(0).peak
    bytes = low + (high - low) // 3
    budget = parse_budget(f"{bytes / 2**20:.3f}MiB")
    engine, recomputed = trained(Selection(budget=budget))
    assert_bitwise_same(recomputed, exact)
    assert not any(":4:" in row.config for row in engine.plans().enabled)
    engine.detach()
    engine, ours = trained(Selection(budget=budget, compress="fp8"))
    table = engine.plans()
    rows = [row for row in table.enabled if ":4:" in row.config]
    assert rows and all("inexact" in row.note for row in rows)
    assert "activations in fp8, inexact" in table.header[0]
    assert torch.equal(ours[0], exact[0]) and 0 < error(ours[1], exact[1]) < ROUNDING
    (line,) = (found for record in caplog.records if (found := MEASURED.match(record.getMessage())))
    assert int(line[1]) == sum(row.applied_count for row in rows)
    assert engine.predictor.footprint().peak <= budget.bytes
    saved, peak = measured(model, batch)
    assert engine.predictor.saved() == pytest.approx(saved, **EXACT)
    assert engine.predictor.activations() == pytest.approx(peak, **EXACT)
    engine.detach()


def accumulate_from(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Gradients]:
    torch.manual_seed(0)
    return accumulate(model, [batch])


@in_turn
def test_a_plan_without_a_run_is_that_of_a_run(tmp_path, monkeypatch) -> None:
    """An estimate of an fp8 plan has the same peak in the comparison of ways, and rows that save memory."""
    hold_still(monkeypatch)
    workload = Workload(save(tmp_path, "roberta-mlm", num_hidden_layers=2), "fill-mask", 8, 48)
    spec = StepSpec(compiler="aot_eager", loss="plain")
    exact = estimate(workload, selection("level 1"), spec)
    found = estimate(workload, selection("level 1 fp8"), spec, with_ways=True)
    assert found.ways[-1].peak == found.peak
    # Conversions take time.
    assert found.ways[-1].seconds > found.ways[-2].seconds
    assert "fp8" in found.ways[-1].plan.name and "--memory_opt_compress fp8" in found.ways[-1].plan.flags
    assert sum(row.applied_saving_bytes for row in found.table.enabled if ":4:" in row.config) > 0
    assert exact.table.header[0].replace("level 1", "level 1, what is saved in fp8") == found.table.header[0]


@in_turn
@pytest.mark.parametrize(("compiler", "is_held"), [("aot_eager", True), ("inductor", False)])
def test_a_compiler_holds_no_tensor_between_an_activation_and_its_fp8(tmp_path, compiler: str, is_held: bool) -> None:
    workload = Workload(save(tmp_path, "llama", num_hidden_layers=1), "text-generation", 8, 48)
    traced = PlannedStep(workload, selection(" fp8"), StepSpec(compiler=compiler, loss="plain")).trace(dynamic=False)
    (graph,) = traced.forward.graphs
    events = graph.timeline.events
    held = {storage.name for event in (*events.forward, *events.backward) for storage in event.allocates}
    assert any(name.endswith("_fp8") for name in held) and any(name.endswith("_from_fp8") for name in held)
    between = [name for name in held if name.endswith(("_fp8_scaled", "_from_fp8_cast"))]
    assert bool(between) == is_held


@pytest.mark.parametrize(("capability", "is_able"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_fp8_is_refused_in_one_line(monkeypatch, capability: tuple[int, int], is_able: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernels.check_fp8(torch.device("cpu"))
    with contextlib.nullcontext() if is_able else pytest.raises(MemOptError, match=r"8\.0: Triton needs 8\.9; use"):
        kernels.check_fp8(torch.device("cuda"))


@pytest.mark.nightly
def test_training_ends_near_the_exact_run() -> None:
    """Sixty steps over four batches, which a model without dropout memorizes, end near the exact run's loss."""
    batches = [ZOO["roberta-classification"].batch(16, 24, seed=seed) for seed in range(4)]

    def losses(asked: str) -> list[float]:
        model = ZOO["roberta-classification"].build(hidden_size=32, intermediate_size=64)
        engine = CompileEngine(selection(asked), "aot_eager")
        engine.attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = []
        for _ in range(15):
            total = 0.0
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item() / len(batches)
            found.append(total)
        engine.detach()
        return found

    exact, ours = losses("level 1"), losses("level 1 fp8")
    assert exact[0] == pytest.approx(ours[0], rel=ROUNDING)
    learned = exact[0] - exact[-1]
    assert learned > exact[0] / 4, "nothing was learned"
    assert abs(ours[-1] - exact[-1]) < learned / 10
