"""Plans with inductor on the CPU; it compiles for many seconds, so tests with transformers are nightly."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from transformers import MiniMaxConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.options import LAYER, MODEL
from optimum_memopt.engines.compile.partition.step_model import StepModel
from optimum_memopt.engines.compile.solver.forward_solver import ForwardSolver
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.shared.forward_patch import without_key_value_cache
from optimum_memopt.engines.torch_compat import dynamo, fx_graph
from optimum_memopt.engines.torch_compat.fx_graph import is_random
from optimum_memopt.plans.grammar import Strategy
from optimum_memopt.sizes import parse_budget
from tests.compiled import DROPOUT, GPT2_DROPOUT, Run, recorded, run
from tests.gradients import (
    TOLERANCE,
    Batch,
    accumulate,
    assert_bitwise_same,
    assert_same,
    assert_same_step,
    wrong_gradients,
)
from tests.model_zoo import ZOO
from tests.rotation import in_turn
from tests.train.test_layers import Perceptrons
from tests.trainer_runs import log_lines

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not dynamo.inductor_works("cpu"), reason="there is no C++ compiler"),
]

HIDDEN = 32
MODELS = {"roberta-classification": DROPOUT, "deberta-v2-mlm": DROPOUT, "gpt2": GPT2_DROPOUT}


class Layer(torch.nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.outer = torch.nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = torch.nn.Dropout(p)
        self.norm = torch.nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.dropout(self.outer(torch.nn.functional.gelu(self.inner(x)))))


class Layers(torch.nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer(p) for _ in range(1))

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(loss=(x * torch.sin(3 * x)).sum())


def check_masks(ours: Run, without_plan: Run, rounding: float = 0) -> None:
    """Check that each mask has its own seed, drawn once, so that the backward draws no random numbers.

    Args:
        ours: a run under a plan.
        without_plan: a run without a plan.
        rounding: relative tolerance of the losses, if forward operators are fused differently.
    """
    ours.split.check(ours.table)
    assert not any(is_random(node) for node in ours.split.backward.graph.nodes)
    torch.testing.assert_close(ours.step[0], without_plan.step[0], rtol=rounding, atol=0, msg="other masks")
    # Differently fused operators round differently.
    assert wrong_gradients(ours.step[1], without_plan.step[1]) == {}


def found_in_cache() -> int:
    return counters["inductor"]["fxgraph_cache_hit"]


@pytest.fixture(scope="module")
def batch() -> Batch:
    return {"x": torch.randn(256, HIDDEN, generator=torch.Generator().manual_seed(1))}


class Embedded(torch.nn.Module):
    """A model that only multiplies its embeddings, so that their gradient is plain PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(4096, HIDDEN, padding_idx=0, dtype=torch.bfloat16)

    def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> CausalLMOutput:
        return CausalLMOutput(loss=(self.words(ids) * weight).float().sum())


@in_turn
def test_a_gradient_of_words_is_pytorchs_and_held_once():
    """An embedding's gradient is PyTorch's; inductor's would accumulate in float32, at three times the size."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (4, 100), generator=generator)
    batch = {"ids": ids, "weight": torch.randn(4, 100, HIDDEN, generator=generator).bfloat16()}
    model = Embedded()
    ours = run(model, "", batch, compiler="inductor")
    # The products are added up before they are rounded.
    assert torch.equal(ours.step[1]["words.weight"], accumulate(model, [batch])[1]["words.weight"])
    words = model.words.weight.nbytes
    assert "embedding_dense_backward" in ours.split.run_in_backward
    assert words <= ours.split.graph.prediction.backward.peak < 2 * words


class Chunks(torch.nn.Module):
    """A linear attention over chunks of four tokens, of which the last one may have fewer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        self.layers = torch.nn.ModuleList([MiniMaxLightningAttention(MiniMaxConfig(block_size=4, **sizes), 0)])

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        for layer in self.layers:
            x, *_ = layer(x, None, None)
        return CausalLMOutput(loss=x.square().sum())


@in_turn
def test_a_chunk_of_one_token() -> None:
    """inductor's gradients are wrong if the last chunk's size is an expression that is 1 in the traced batch."""
    model = Chunks()
    plain = copy.deepcopy(model)
    engine = CompileEngine(Selection(level=1), "inductor")
    engine.attach(model)
    with torch._inductor.config.patch(force_disable_caches=True):
        for length in (9, 11):
            assert_same_step(model, plain, {"x": torch.randn(2, length, HIDDEN)})
    assert engine.plans().enabled


def test_a_level_is_applied(batch):
    model = Layers(0.0)
    ours = run(model, "level 1", batch, compiler="inductor")
    assert_same(ours.step, accumulate(model, [batch]))
    ours.split.check(ours.table)
    recomputed = {candidate.activation.root.name for candidate in ours.split.graph.choice.recomputed}
    assert "addmm" in recomputed and len(recomputed) >= 3
    assert not recomputed & ours.split.saved_for_backward
    assert "by inductor" in ours.table.header[0]


def compiled_graphs(model: torch.nn.Module, chosen: Selection, batch: Batch) -> tuple[int, Any]:
    """Returns the number of graphs that inductor compiles for two steps, and the steps' results."""
    engine = CompileEngine(chosen, "inductor", unit=LAYER)
    compile_inner = compile_fx.compile_fx_inner
    with mock.patch.object(compile_fx, "compile_fx_inner", side_effect=compile_inner) as compiled:
        engine.attach(model)
        try:
            found = accumulate(model, [batch, batch])
        finally:
            engine.detach()
    return compiled.call_count, found


@in_turn
@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_that_shows_its_graphs_is_not_compiled(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward that reveals its graphs is not compiled, unless it cannot run so, e.g. for lack of memory."""
    model, batch = Perceptrons(4), {"x": torch.randn(64, 32)}
    without_plan, _ = compiled_graphs(model, Selection(), batch)
    if fails:
        monkeypatch.setattr(fx_graph, "run_operators", lambda *graph: fx_graph.boxed(out_of_memory))
    with log_lines() as lines:
        compiled, found = compiled_graphs(model, Selection(budget=parse_budget("64GiB")), batch)
    assert compiled > without_plan if fails else compiled == without_plan
    assert fails != any(line.startswith("ran the forward of Perceptrons once") for line in lines)
    assert_same(found, accumulate(model, [batch, batch]))


def out_of_memory(args: list[torch.Tensor]) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


class BiasedLayer(torch.nn.Linear):
    """Attention with a bias computed from a mask, as torch does for its kernels."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        scores = hidden @ hidden.transpose(-1, -2)
        bias = torch.where(mask, torch.full(scores.shape, 0.5), -0.5)
        return x + (scores * bias).softmax(-1) @ hidden


class Biased(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(BiasedLayer(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> CausalLMOutput:
        for layer in self.layers:
            x = layer(x, mask)
        return CausalLMOutput(loss=x.sin().sum())


@in_turn
def test_a_budget_saves_no_fill_that_inductor_computes_where_it_is_read():
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 96, 96, dtype=torch.bool).tril()
    batch = {"x": torch.randn(2, 96, HIDDEN, generator=generator), "mask": mask}
    model = Biased()
    engine = CompileEngine(Selection(budget=parse_budget("100%")), "inductor", unit=MODEL)
    lowest = mock.patch.object(ForwardSolver, "cheapest", lambda solver, _: solver.solver.plan(solver.solver.lowest))
    # Independent of this process's free memory.
    not_by_torch = mock.patch.object(StepModel, "fits_by_torch", False)
    with recorded() as splits, lowest, not_by_torch:
        engine.attach(model)
        try:
            found = accumulate(model, [batch])
        finally:
            engine.detach()
    (split,) = splits
    fills = {node.name for node in split.forward.graph.nodes if node.target is torch.ops.aten.full.default}
    assert fills & split.run_in_backward and not fills & split.saved_for_backward
    assert_same(found, accumulate(model, [batch]))


@in_turn
def test_masks_are_recomputed_and_plans_are_not_mixed(batch):
    """Masks are recomputed from seeds, gelus from inputs, and norms are offloaded; plans share no cached graphs."""
    model = Layers(0.2)
    without_plan = run(model, "", batch, compiler="inductor", seed=7)
    state = torch.get_rng_state()
    rows = (("gt", Strategy.RECOMPUTE), ("mul_2", Strategy.RECOMPUTE), ("add_3", Strategy.OFFLOAD))
    plan = ",".join(without_plan.split.request(*row) for row in rows)
    ours = run(model, plan, batch, compiler="inductor", seed=7)
    check_masks(ours, without_plan)
    assert torch.equal(torch.get_rng_state(), state), "what is drawn after the step is another"
    names = ours.split.saved_for_backward
    assert {"add_3_on_host", "inductor_lookup_seed_default"} < names and not {"gt", "mul_2", "add_3"} & names

    # Again, from inductor's cache, where each plan finds its own graphs.
    before = found_in_cache()
    for asked, first in ((plan, ours), ("", without_plan)):
        again = run(model, asked, batch, compiler="inductor", seed=7)
        assert_bitwise_same(again.step, first.step)
        assert again.split.saved_for_backward == first.split.saved_for_backward
        before += 2
        assert found_in_cache() == before, "forward and backward were compiled again"
    another = run(model, plan, batch, compiler="inductor", seed=8)
    assert not torch.equal(another.step[0], ours.step[0])


@pytest.mark.nightly
@pytest.mark.parametrize("asked", ["", "Gelu+:1:-1", "level 1", "level 2", "LayerNormalization+:3:-1"])
@pytest.mark.parametrize("name", MODELS)
def test_a_transformer_without_dropout(name, asked):
    if name == "gpt2":
        asked = asked.replace("Gelu", "FastGelu")
    model = ZOO[name].build()
    batches = [without_key_value_cache(model, (), ZOO[name].batch(*shape, seed=1)) for shape in ((8, 24), (3, 17))]
    ours = run(model, asked, *batches, compiler="inductor", dynamic=True)
    assert_same(ours.step, accumulate(model, batches))
    if asked:
        ours.split.check(ours.table)
        assert ours.table.enabled


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_a_transformer_with_dropout(name):
    model = ZOO[name].build(**MODELS[name])
    batches = [ZOO[name].batch(8, 24, seed=seed) for seed in (1, 2)]
    without_plan = run(model, "", *batches, compiler="inductor", seed=7)
    state = torch.get_rng_state()
    for asked in ("Dropout+:1:-1", "Dropout+:3:-1", "level 1", "level 2"):
        ours = run(model, asked, *batches, compiler="inductor", seed=7)
        assert ours.table.enabled
        # Different masks would change GPT-2's loss by 1%.
        check_masks(ours, without_plan, rounding=TOLERANCE if name == "gpt2" else 0)
        assert torch.equal(torch.get_rng_state(), state)
