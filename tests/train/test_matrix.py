"""Every engine, model and plan: loss and gradients are those of plain PyTorch, bitwise on the compile engine.

The compile engine compiles a forward as one graph, and again with equal layers compiled separately. To add a way, add
a line to `WAYS` and its models to the parameters of a test; to add a model, add a line to `model_zoo.py`.
"""

import copy
import functools
import random
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.capture.layer_groups import layer_groups
from optimum_memopt.engines.compile.capture.moved_state import COMPARED_BACKWARDS
from optimum_memopt.engines.compile.loss.decide import ROW
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.shared.forward_patch import without_key_value_cache
from optimum_memopt.engines.shared.registry import create
from optimum_memopt.engines.torch_compat.fx_graph import is_random
from optimum_memopt.errors import UnsupportedModelError
from optimum_memopt.options import MemOptOptions, resolve
from optimum_memopt.plans.grammar import parse
from optimum_memopt.plans.table import PlanRow, PlanTable
from optimum_memopt.sizes import Budget
from tests.compiled import Split, hold_still, recorded
from tests.gradients import Batch, accumulate, assert_bitwise_same_step, assert_same_step
from tests.model_zoo import COMPILE_ONLY, SDPA, UNTRAINABLE, ZOO, Case
from tests.rotation import in_turn, nightly
from tests.train.test_step_memory import EXACT, measured

_AOT_EAGER = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
WAYS: dict[str, dict[str, Any]] = {
    "ort": {"memory_opt_engine": "ort", "ort_fallback": False},
    "compile": {**_AOT_EAGER, "memory_opt_unit": "model"},
    "layers": {**_AOT_EAGER, "memory_opt_unit": "layer"},
}
PLANS = ("none", "one", "level 1", "level 2", "random")
# Comes after "level 1", and continues with its graph.
ONE_ROW = "one row"
# Activations may take a quarter more than under level 1.
BUDGET = "budget"
MODELS = [(name, "eager") for name in ZOO] + [(name, "sdpa") for name in SDPA]
# Models of every run: an encoder, one with relative positions, and a decoder. The others are nightly.
FAST = ("roberta-classification", "deberta-v2-mlm", "gpt2")
# The compile engine trains two of them as one graph, and two by layers.
LEFT_OUT = {("compile", "deberta-v2-mlm"), ("layers", "roberta-classification")}
# Trained in turn, since both engines train this model in every run anyway.
IN_TURN = {("compile", "gpt2", "eager")}
# The compile engine retraces a model for each plan, which takes nearly all of the time here. So only these models have
# every plan; the others have some plans, and one plan for their second kind of attention.
EVERY_PLAN = FAST
SOME_PLANS = ("level 1", BUDGET, "random")
# Models with level 1 only: models in several graphs, where torch's own partition applies other rows in a graph that
# has none of the plan's; and a model that is traced again for each length.
LEVEL_ONLY = ("gemma3-vision", "qwen2-vl", "jamba")
# Number of layers, of each type, when compiled by layers: T5's first layer has its own positions.
DEPTH = 3
# Models without equal layers.
NO_LAYERS = ("albert-mlm", "segformer")


@dataclass
class Pair:
    """A model with an engine, and its copy in plain PyTorch."""

    name: str
    case: Case
    model: torch.nn.Module
    plain: torch.nn.Module
    engine: Engine
    folder: Path
    way: str
    selection: Selection = field(default=Selection())
    # Training graphs made for the selection by the compile engine.
    partitions: list[Split] = field(default_factory=list)

    @functools.cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        """Returns all rows of the plan table, on or off."""
        if self.engine.plans() is None:
            # Runs both, with the same masks, since they may have running statistics (SegFormer).
            for model in (self.model, self.plain):
                torch.manual_seed(0)
                accumulate(model, (self.case.batch(),))
        return self.engine.plans().plans

    def apply(self, chosen: Selection) -> None:
        if chosen != self.selection:
            self.engine.apply(chosen)
            self.partitions.clear()
            self.selection = chosen

    def check_step(self, *batches: Batch) -> None:
        if self.engine.name == "ort":
            assert_same_step(self.model, self.plain, *batches)
            return
        # The engine does this itself. Caches change the layout of keys and values (GPT-2, T5), so that products with
        # them differ in the last bits.
        batches = tuple(without_key_value_cache(self.plain, (), batch) for batch in batches)
        if self.way == "layers" and self.case.rounds_by_layer:
            assert_same_step(self.model, self.plain, *batches, tolerance=1e-6)
        else:
            assert_bitwise_same_step(self.model, self.plain, *batches)

    def check_evaluation(self, batch: Batch) -> None:
        for model in (self.model, self.plain):
            model.eval()
        with torch.no_grad():
            ours = self.model(**batch)
            with torch.compiler.set_stance("force_eager"):
                expected = self.plain(**batch)
        for model in (self.model, self.plain):
            model.train()
        # The first output other than the loss, usually the logits.
        values = [next(outputs[name] for name in outputs if name != "loss") for outputs in (ours, expected)]
        torch.testing.assert_close(*values, rtol=0, atol=0)
        assert ("loss" in ours) == ("loss" in expected) == (self.case.labels in batch)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    way, name, attention = request.param
    case = ZOO[name]
    # ONNX Runtime draws different masks. The CPU has no fused attention with dropout.
    dropout = case.dropout if way != "ort" and attention == "eager" else {}
    if way == "layers":
        # Its rate rises from layer to layer, so that no two are equal.
        dropout.pop("drop_path_rate", None)
    model = case.build(attention, **dropout, **(case.deep(DEPTH) if way == "layers" else {}))
    plain = copy.deepcopy(model)
    if case.rounds_when_traced:
        plain.compile(backend="aot_eager")
    folder = tmp_path_factory.mktemp(name)
    options = dict(WAYS[way])
    if way == "ort":
        options["ort_save_onnx"] = str(folder)
    engine = create(resolve(MemOptOptions(**options)))
    engine.attach(model)
    assert model.config._attn_implementation == attention
    with recorded() as partitions:
        yield Pair(f"{name}-{attention}", case, model, plain, engine, folder, way, partitions=partitions)
    engine.detach()


def selection(pair: Pair, plan: str) -> Selection:
    if plan.startswith("level"):
        return Selection(level=int(plan[-1]))
    if plan == "none":
        return Selection()
    if plan == "one":
        return Selection(config=parse(next(row.config for row in pair.rows if row.config.endswith(":1:-1"))))
    # The chunked loss adds in a different order, and is tested in `test_chunked_loss.py`.
    rows = [row for row in pair.rows if row.config != ROW]
    chosen = random.Random(pair.name).sample(rows, k=(len(rows) + 1) // 2)
    parts = dict.fromkeys(part for row in chosen for part in row.config.split(","))
    by_id = {part.split(":")[0]: part for part in parts}
    return Selection(config=parse(",".join(by_id.values())))


def check_applied(table: PlanTable, chosen: Selection) -> None:
    """Check that the table has exactly the chosen rows applied, in all occurrences."""
    asked = set(str(chosen.config).split(",")) if chosen.config else set()
    for row in table.plans:
        strategies = {int(part.split(":")[1]) for part in row.config.split(",")}
        if table.engine == "compile" and (chosen.level or chosen.budget):
            # A level applies within layers, a budget where needed; `check_partition` checks each occurrence.
            assert 0 <= row.applied_count <= row.frequency, row
            continue
        by_level = bool(chosen.level) and max(strategies) <= chosen.level and not row.note
        wanted = by_level or set(row.config.split(",")) <= asked
        assert row.applied_count == (row.frequency if wanted else 0), row
    assert chosen.budget or bool(table.enabled) == bool(chosen.level or chosen.config)


def check_partition(partitions: list[Split], engine: CompileEngine) -> None:
    """Check that the backward recomputes exactly the table's rows, and draws no random numbers."""
    table, recomputed = engine.plans(), Counter()
    splits = {(split.graph.digest, split.graph.choice.key): split for split in partitions}
    # A graph may have been partitioned before the rows of all graphs were known.
    assert len(engine.predictor.graphs) <= len(partitions)
    for graph, runs in zip(engine.predictor.graphs, engine.predictor.tape.runs, strict=True):
        split = splits[graph.digest, graph.choice.key]
        assert not any(is_random(node) for node in split.backward.graph.nodes)
        found = (one for one in split.graph.candidates if one.activation.root.name in split.run_in_backward)
        for one in found:
            recomputed[one.row] += runs if one.chain is not None else 0
    assert not table.enabled or +recomputed == {row.config: row.applied_count for row in table.enabled}


def check_layers(pair: Pair, batch: Batch) -> None:
    """Check that equal layers share graphs that were compiled once, and that their memory is predicted."""
    engine, layers = pair.engine, sum(map(len, layer_groups(pair.model)))
    # As in `check_step`: a forward that makes caches is traced apart.
    batch = without_key_value_cache(pair.plain, (), batch)
    assert f" graphs for {layers} layers, equal layers share one" in engine.plans().header[0]
    if not all(parameter.requires_grad for parameter in pair.model.parameters()):
        # The first forwards copy frozen state, to compare it with the state that their backwards read.
        for model in (pair.model, pair.plain):
            torch.manual_seed(0)
            accumulate(model, [batch] * COMPARED_BACKWARDS)
    torch.manual_seed(0)
    saved, peak = measured(pair.model, batch)
    # The plain model may have running statistics, too.
    torch.manual_seed(0)
    accumulate(pair.plain, (batch,))
    if not engine.predictor.caveat:
        assert engine.predictor.saved() == pytest.approx(saved, **EXACT)
        assert engine.predictor.activations() == pytest.approx(peak, **EXACT)


def check_executed(folder: Path, table: PlanTable) -> None:
    """Check that ONNX Runtime's graph recomputes exactly the table's rows."""
    (file,) = folder.glob("*_execution_model_training.onnx")
    nodes = onnx.load(file).graph.node
    found = Counter(node.op_type for node in nodes if any("_recompute" in output for output in node.output))
    expected: set[str] = set()
    for row in table.enabled:
        for cluster_id in row.cluster_ids:
            *others, last = cluster_id.split("+")[:-1]
            expected |= {*others, last}
            # The last operator makes the stashed tensor; occurrences may share earlier ones (GPT-2's Split).
            assert found[last] >= row.applied_count, (row, found)
    assert set(found) == expected


def cells(way: str, attention: str, names: Collection[str], plans: Collection[str] = PLANS) -> list[Any]:
    """Returns a test case for each named model and plan; a model's plans are consecutive and share its `pair`."""
    models = [(way, *model) for model in MODELS if model[1] == attention and model[0] in names]
    return [
        pytest.param(model, plan, id="-".join((*model, plan)), marks=marks(*model, plan))
        for model in models
        for plan in plans
    ]


def marks(way: str, name: str, attention: str, plan: str) -> list[pytest.MarkDecorator]:
    if not is_fast(way, name, attention, plan):
        return [pytest.mark.nightly]
    return [in_turn] if (way, name, attention) in IN_TURN else []


def is_fast(way: str, name: str, attention: str, plan: str) -> bool:
    """True for the cells of `make test`: each fast model under one plan, and one model under every plan with ort,
    which is faster.

    In `make test`, `test_random_plans.py` tests random plans of the compile engine, `test_trainer_compile.py` one row.
    """
    every_plan = (way, name, attention) == ("ort", FAST[0], "eager")
    every_model = plan == "level 1" and name in FAST and (way, attention) != ("compile", "sdpa")
    return every_plan or (every_model and (way, name) not in LEFT_OUT)


@pytest.mark.parametrize(
    ("pair", "plan"),
    [
        *cells("ort", "eager", ZOO.keys() - set(COMPILE_ONLY)),
        *cells("ort", "sdpa", ZOO.keys() - set(COMPILE_ONLY)),
        *(
            cell
            for way, left_out in (("compile", ()), ("layers", NO_LAYERS))
            for cell in (
                *cells(way, "eager", EVERY_PLAN, ("none", "one", "level 1", ONE_ROW, BUDGET, "level 2", "random")),
                *cells(
                    way, "eager", ZOO.keys() - {*EVERY_PLAN, *LEVEL_ONLY, *left_out}, ("level 1", BUDGET, "random")
                ),
                *cells(way, "eager", LEVEL_ONLY, ("level 1",)),
            )
        ),
        *cells("compile", "sdpa", ZOO, ("level 1",)),
    ],
    indirect=["pair"],
)
def test_trains_as_plain_pytorch(pair: Pair, plan: str) -> None:
    if plan == ONE_ROW:
        check_one_row(pair)
    elif plan == BUDGET:
        check_budget(pair)
    else:
        check(pair, selection(pair, plan))


def check(pair: Pair, chosen: Selection) -> None:
    """Check that the plan is applied, and that steps and evaluations of several sizes are plain PyTorch's."""
    case, engine = pair.case, pair.engine
    pair.apply(chosen)
    pair.check_step(case.batch(4, 12))
    table = engine.plans()
    check_applied(table, chosen)
    if engine.name == "ort":
        check_executed(pair.folder, table)
    else:
        if pair.name.startswith("segformer"):
            # Its first forward registers hooks that collect hidden states, and is recompiled with them.
            del pair.partitions[:-1]
        check_partition(pair.partitions, engine)
        if pair.way == "layers":
            check_layers(pair, case.batch(4, 12))
        else:
            assert len(pair.partitions) == case.graphs

    pair.check_step(case.batch(3, 7, seed=1))
    if engine.name == "ort":
        pair.check_step(case.batch(1, 17, seed=2))
    pair.check_evaluation(case.batch(5, 9, seed=3))
    pair.check_evaluation(case.without_labels(case.batch(2, 11, seed=4)))
    pair.check_step(case.batch(4, 12, seed=5), case.batch(3, 8, seed=6))
    assert engine.plans() is table, "other shapes and evaluation need no new graph"


def check_one_row(pair: Pair) -> None:
    """Check that a batch of one row is compiled separately, once, under the same plans; others are not affected."""
    pair.apply(Selection(level=1))
    pair.check_step(pair.case.batch())
    before = pair.engine.plans()
    for length in (17, 5):
        pair.check_step(pair.case.batch(1, length, seed=2))
    alone, graphs = pair.engine.plans(), 2 * len(pair.engine.predictor.graphs)
    assert len(pair.partitions) == graphs
    # DeBERTa repeats its position embeddings for each row; with one row there is nothing to stash.
    assert 2 < len(alone.enabled) <= len(before.enabled)
    pair.check_step(pair.case.batch(2, 6, seed=7))
    assert len(pair.partitions) == graphs


def check_budget(pair: Pair) -> None:
    """Check that all batches stay within a budget for the largest one, which comes first."""
    with pytest.MonkeyPatch.context() as patch:
        hold_still(patch)
        pair.apply(Selection(level=1))
        pair.check_step(pair.case.batch(4, 12))
        by_level = pair.engine.predictor.footprint()
        budget = by_level.peak + by_level.activations // 4
        check(pair, Selection(budget=Budget(f"{budget} bytes", budget)))
        assert pair.engine.predictor.footprint().peak <= budget


# In every run: a model that cannot be exported, and one that is exported but cannot run.
REFUSED = nightly(UNTRAINABLE, but=["mamba", "t5-sdpa"])


@pytest.mark.parametrize("name", REFUSED)
def test_what_onnx_runtime_cannot_train_says_why(name: str) -> None:
    case, attention, changes, reason = UNTRAINABLE[name]
    model = case.build("eager", **changes)
    engine = create(resolve(MemOptOptions(memory_opt_engine="ort", ort_fallback=False)))
    engine.attach(model)
    # Before the export the engine replaces attention that cannot train; this restores it.
    model.set_attn_implementation(attention)
    with pytest.raises((UnsupportedModelError, RuntimeError), match=reason) as caught:
        accumulate(model, [case.batch()])
    engine.detach()
    if isinstance(caught.value, UnsupportedModelError):
        assert "\n" not in str(caught.value)
        assert "--ort_fallback" in str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_onnx_runtime_cannot_train_falls_back_or_trains_another_way(name: str) -> None:
    case, attention, changes, _ = UNTRAINABLE[name]
    model = case.build(attention, **changes)
    plain = copy.deepcopy(model)
    engine = create(resolve(MemOptOptions(memory_opt_engine="ort", memory_opt_level=1)))
    engine.attach(model)
    plain.set_attn_implementation(model.config._attn_implementation)
    fell_back = attention == "eager"
    if not changes:
        assert_same_step(model, plain, case.batch())
        assert_same_step(model, plain, case.batch(3, 7, seed=1))
    else:
        accumulate(model, [case.batch()])
    assert bool(engine.plans().plans) != fell_back
    assert engine.plans().header[0].startswith("NOT on ONNX Runtime") == fell_back
    engine.detach()
    assert model.config._attn_implementation == attention
