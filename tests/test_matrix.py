"""Every engine, model and plan: loss and gradients are those of plain PyTorch.

A new engine is a line in `ENGINES` of the package (and one in `OPTIONS` here when it takes any), a new model a line in
`model_zoo.py`.
"""

import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import pytest
import torch
from gradients import Batch, accumulate, assert_same_step
from model_zoo import SDPA, UNTRAINABLE, ZOO, Case

from optimum_memopt.engines.base import ENGINES, Engine, Selection, create
from optimum_memopt.errors import UnsupportedModelError
from optimum_memopt.options import MemOptOptions
from optimum_memopt.plans.grammar import parse
from optimum_memopt.plans.table import Plan, PlanTable

OPTIONS = {"ort": {"ort_fallback": False}}
PLANS = ("none", "one", "level 1", "level 2", "random")
MODELS = [(name, "eager") for name in ZOO] + [(name, "sdpa") for name in SDPA]


@dataclass
class Pair:
    """A model under an engine, and its copy in plain PyTorch."""

    name: str
    case: Case
    model: torch.nn.Module
    plain: torch.nn.Module
    engine: Engine
    folder: Path
    rows: tuple[Plan, ...] = field(default=())

    def check_step(self, *batches: Batch) -> None:
        assert_same_step(self.model, self.plain, *batches)

    def check_evaluation(self, batch: Batch) -> None:
        for model in (self.model, self.plain):
            model.eval()
        with torch.no_grad():
            ours, expected = self.model(**batch), self.plain(**batch)
        for model in (self.model, self.plain):
            model.train()
        torch.testing.assert_close(ours.logits, expected.logits, rtol=0, atol=0)
        assert ("loss" in ours) == ("loss" in expected) == ("labels" in batch)


@pytest.fixture(scope="module", params=ENGINES)
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=MODELS, ids=["-".join(model) for model in MODELS])
def pair(request: pytest.FixtureRequest, engine_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    name, attention = request.param
    case = ZOO[name]
    model = case.build(attention)
    plain = copy.deepcopy(model)
    folder = tmp_path_factory.mktemp(name)
    options = dict(OPTIONS.get(engine_name, {}))
    if engine_name == "ort":
        options["ort_save_onnx"] = str(folder)
    engine = create(MemOptOptions(memory_opt_engine=engine_name, **options))
    engine.attach(model)
    assert model.config._attn_implementation == attention
    pair = Pair(f"{name}-{attention}", case, model, plain, engine, folder)
    accumulate(model, (case.batch(),))
    pair.rows = engine.plans().plans
    yield pair
    engine.detach()


def selection(pair: Pair, plan: str) -> Selection:
    if plan.startswith("level"):
        return Selection(level=int(plan[-1]))
    if plan == "none":
        return Selection()
    if plan == "one":
        return Selection(config=parse(next(row.config for row in pair.rows if row.config.endswith(":1:-1"))))
    chosen = random.Random(pair.name).sample(pair.rows, k=(len(pair.rows) + 1) // 2)
    parts = dict.fromkeys(part for row in chosen for part in row.config.split(","))
    by_id = {part.split(":")[0]: part for part in parts}
    return Selection(config=parse(",".join(by_id.values())))


def check_applied(table: PlanTable, chosen: Selection) -> None:
    """The table says that all that was chosen is applied, everywhere, and nothing else."""
    asked = set(str(chosen.config).split(",")) if chosen.config else set()
    for row in table.plans:
        strategies = {int(part.split(":")[1]) for part in row.config.split(",")}
        by_level = bool(chosen.level) and max(strategies) <= chosen.level and not row.note
        wanted = by_level or set(row.config.split(",")) <= asked
        assert row.applied_count == (row.frequency if wanted else 0), row
    assert bool(table.enabled) == bool(chosen.level or chosen.config)


def check_executed(engine_name: str, folder: Path, table: PlanTable) -> None:
    """The graph that is run recomputes what the table says, and nothing else."""
    if engine_name != "ort":
        return
    (file,) = folder.glob("*_execution_model_training.onnx")
    nodes = onnx.load(file).graph.node
    found = Counter(node.op_type for node in nodes if any("_recompute" in output for output in node.output))
    expected: set[str] = set()
    for row in table.enabled:
        for cluster_id in row.cluster_ids:
            *others, last = cluster_id.split("+")[:-1]
            expected |= {*others, last}
            # The last operator makes the stashed tensor; occurrences may share the ones before (GPT-2's Split).
            assert found[last] >= row.applied_count, (row, found)
    assert set(found) == expected


@pytest.mark.parametrize("plan", PLANS)
def test_trains_as_plain_pytorch(engine_name: str, pair: Pair, plan: str) -> None:
    case, engine = pair.case, pair.engine
    chosen = selection(pair, plan)
    engine.apply(chosen)
    pair.check_step(case.batch(4, 12))
    table = engine.plans()
    check_applied(table, chosen)
    check_executed(engine_name, pair.folder, table)

    pair.check_step(case.batch(3, 7, seed=1))
    pair.check_step(case.batch(1, 17, seed=2))
    pair.check_evaluation(case.batch(5, 9, seed=3))
    pair.check_evaluation(case.without_labels(case.batch(2, 11, seed=4)))
    pair.check_step(case.batch(4, 12, seed=5), case.batch(3, 8, seed=6))
    assert engine.plans() is table, "other shapes and evaluation need no new graph"


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_what_onnx_runtime_cannot_train_says_why(name: str) -> None:
    case, attention, changes, reason = UNTRAINABLE[name]
    model = case.build("eager", **changes)
    engine = create(MemOptOptions(memory_opt_engine="ort", ort_fallback=False))
    engine.attach(model)
    # The engine replaces attention that cannot train before it exports; this asks for it again.
    model.set_attn_implementation(attention)
    with pytest.raises((UnsupportedModelError, RuntimeError), match=reason) as caught:
        accumulate(model, [case.batch()])
    engine.detach()
    if isinstance(caught.value, UnsupportedModelError):
        assert "\n" not in str(caught.value)
        assert "--ort_fallback" in str(caught.value)


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_what_onnx_runtime_cannot_train_falls_back_or_trains_another_way(name: str) -> None:
    case, attention, changes, _ = UNTRAINABLE[name]
    model = case.build(attention, **changes)
    plain = copy.deepcopy(model)
    engine = create(MemOptOptions(memory_opt_engine="ort", memory_opt_level=1))
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
