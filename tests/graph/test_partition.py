"""Forward and backward run exactly what the plan says, in its order, and no random operator twice."""

import random
from collections import Counter

import pytest
import torch
from torch import fx
from torch._functorch import partitioners

from optimum_memopt.engines.compile.graph.analyzed_graph import layer_boundaries, nodes_to_save
from optimum_memopt.engines.compile.graph.joint import is_output, is_tensor, is_view, root
from optimum_memopt.engines.compile.graph.saved_activations import (
    is_generator_state,
    is_statistic,
    layer_of,
    operator_name,
)
from optimum_memopt.engines.compile.partition import dropout
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.torch_compat import dynamo
from optimum_memopt.engines.torch_compat.fx_graph import is_random
from tests.captured import Captured, Parts, capture
from tests.compiled import selection
from tests.model_zoo import ZOO
from tests.rotation import nightly


def by_name(captured: Captured) -> dict:
    return {node.name: node for node in captured.joint.nodes}


def is_noted(node: fx.Node) -> bool:
    """True if a node is small and saved under every plan."""
    return is_statistic(node) or is_generator_state(node)


def check(captured: Captured, parts: Parts) -> None:
    """Check that the plan's activations and constants are recomputed by their own operators, all others saved once."""
    joint, nodes = captured.joint, by_name(captured)
    chosen = {candidate.activation.root.name: candidate.chain for candidate in parts.graph.choice.recomputed}
    saved = [root(node).name for node in parts.saved_for_backward if is_tensor(node)]
    constants = {node.name for node in captured.graph.constants}
    expected = {activation.root.name for activation in captured.activations} - constants - set(chosen)
    extra = set(saved) - expected
    # Generator states are saved instead.
    assert extra <= {node.name for chain in chosen.values() for node in chain.extra_saved}
    assert expected <= set(saved)
    assert len(saved) == len(set(saved)), "one storage twice"

    recomputed = parts.recomputed(joint)
    compute = [name for name in recomputed if not is_view(nodes[name]) and is_tensor(nodes[name])]
    allowed = {node.name for chain in chosen.values() for node in chain.nodes}
    allowed |= constants
    # A view of a parameter or of a saved activation is free and not part of a plan.
    assert set(compute) <= allowed
    assert set(chosen) <= set(recomputed)
    assert len(recomputed) == len(set(recomputed)), "one operator twice"
    assert not any(is_random(node) for node in parts.backward.graph.nodes)


def rows(captured: Captured) -> list[str]:
    return [row for row, (first, *_) in captured.rows.items() if first.chain is not None]


def test_each_row_alone_is_recomputed_and_nothing_else(gpt2):
    for config in rows(gpt2):
        parts = gpt2.split(config)
        assert {candidate.row for candidate in parts.graph.choice.candidates} == {config}
        assert len(parts.graph.choice.candidates) == gpt2.configs[config]
        check(gpt2, parts)


@pytest.mark.parametrize("seed", range(8))
def test_any_rows_together_are_recomputed_and_nothing_else(roberta, albert, seed):
    captured = (roberta, albert)[seed % 2]
    chosen = random.Random(seed).sample(rows(captured), k=2 + seed % 8)
    counted = [config.replace(":-1", f":{1 + index}") if index % 3 else config for index, config in enumerate(chosen)]
    parts = captured.split(",".join(counted))
    taken = Counter(candidate.row for candidate in parts.graph.choice.candidates)
    asked = {config: 1 + index if index % 3 else captured.configs[config] for index, config in enumerate(chosen)}
    assert taken == {config: min(count, captured.configs[config]) for config, count in asked.items()}
    # Several rows together reach further back: the chain of one leads through another.
    dropped = {candidate.activation.root.name for candidate in parts.graph.choice.recomputed}
    assert dropped <= set(parts.recomputed(captured.joint))
    assert not any(is_random(node) for node in parts.backward.graph.nodes)
    saved = {root(node).name for node in parts.saved_for_backward if is_tensor(node)}
    assert saved.isdisjoint(dropped)
    constants = {node.name for node in captured.graph.constants}
    assert {activation.root.name for activation in captured.activations} - dropped - constants <= saved


def test_with_every_row_on_only_what_must_be_is_saved(roberta):
    parts = roberta.split(",".join(rows(roberta)))
    nodes = by_name(roberta)
    left = {
        operator_name(node) for node in parts.saved_for_backward if is_tensor(node) and not is_noted(nodes[node.name])
    }
    roots = {candidate.activation.root for candidate in roberta.candidates}
    assert left <= {"index", "gather", "nll_loss_forward"} | {
        operator_name(activation.root)
        for activation in roberta.activations
        if activation.is_returned or activation.root not in roots
    }


@pytest.mark.parametrize("level", [1, 2])
def test_a_level_saves_only_a_layers_input_and_statistics(roberta, gpt2, albert, level):
    for captured in (roberta, gpt2, albert):
        parts = captured.split(f"level {level}")
        nodes = by_name(captured)
        inside = [node for node in parts.saved_for_backward if is_tensor(node) and layer_of(nodes[node.name])]
        boundaries = {node.name for node in layer_boundaries(captured.graph)}
        for node in inside:
            saved = nodes[node.name]
            leaves = next((s.leaves_layer for s in captured.activations if s.root is root(saved)), False)
            assert is_noted(saved) or leaves or root(saved).name in boundaries, node
        big = [node for node in inside if not is_noted(nodes[node.name])]
        assert len(big) <= 4, "an output of each layer, and an input or two"


@pytest.fixture(scope="module")
def jamba() -> Captured:
    """Returns a Mamba layer with a token loop, of which torch's partition saves little, and an attention layer."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    others = {"num_experts": 1, "mamba_d_state": 8, "use_mamba_kernels": False, "use_cache": False}
    model, ids = ZOO["jamba"].build(**sizes, **others), torch.arange(1, 65).view(4, 16)
    model.loss_type = "ForCausalLM"
    return capture(model.forward, input_ids=ids, labels=ids, dynamic=False)


def peak(parts: Parts) -> int:
    assert parts.graph.prediction is not None
    return parts.graph.prediction.peak


@pytest.mark.parametrize("level", [1, 2])
def test_no_level_has_a_higher_peak_than_no_plan(jamba, level):
    parts = jamba.split(f"level {level}")
    assert peak(parts) <= peak(jamba.split())
    choice = parts.graph.choice
    assert choice.why == f"level {level}, less what would raise the peak in model.layers.0"
    # The other layer is recomputed as by a level.
    nodes = by_name(jamba)
    recomputed = {nodes[name] for name in parts.recomputed(jamba.joint)}
    inside = {one.root for one in jamba.activations if one.layer == "model.layers.1" and not one.leaves_layer}
    assert {node for node in inside if not is_statistic(node)} <= recomputed
    names = {candidate.activation.root.name for candidate in jamba.candidates if candidate.chain is not None}
    listed = {candidate.activation.root.name for candidate in choice.candidates}
    assert listed == names & set(parts.recomputed(jamba.joint))


def test_asking_for_torchs_own_partition_leaves_the_joint_graph_as_it_is(jamba):
    before = [node.name for node in jamba.joint.module.graph.nodes]
    jamba.choose("level 1")
    assert [node.name for node in jamba.joint.module.graph.nodes] == before


def test_a_level_that_keeps_the_peak_down_is_whole(roberta, gpt2, albert):
    for captured in (roberta, gpt2, albert):
        assert captured.choose("level 1").why == "level 1"
        assert peak(captured.split("level 1")) < peak(captured.split())


def test_a_row_is_recomputed_just_before_it_is_read(roberta):
    parts = roberta.split("Gelu+:1:-1")
    for node in parts.backward.graph.nodes:
        if operator_name(node) == "gelu":
            reader = min(parts.order[user.name] for user in node.users)
            between = [n for n in parts.backward.graph.nodes if parts.order[node.name] < parts.order[n.name] < reader]
            assert all(is_view(n) or is_output(n) for n in between), between


def torchs_own(captured: Captured) -> Parts:
    """Returns torch's own partition of the untouched joint graph."""
    given = {"num_fwd_outputs": captured.num_fwd_outputs, **captured.others}
    halves = partitioners.min_cut_rematerialization_partition(captured.copied(), captured.inputs, **given)
    dropout.take_drawn_masks(halves[0])
    return Parts(captured.split().graph, *halves, captured.num_fwd_outputs)


def computing(module: fx.GraphModule) -> list[tuple[str, object]]:
    return [(n.name, n.target) for n in module.graph.nodes if n.op == "call_function" and not is_view(n)]


def test_without_a_plan_the_halves_are_torchs_own(roberta, gpt2):
    for captured in (roberta, gpt2):
        expected, parts = torchs_own(captured), captured.split()
        # Views without an effect are removed, as when inductor partitions.
        assert computing(parts.forward) == computing(expected.forward)
        assert computing(parts.backward) == computing(expected.backward)
        saved, torchs = (
            [root(n).name for n in halves.saved_for_backward if is_tensor(n)] for halves in (parts, expected)
        )
        assert saved == torchs
        choice = parts.graph.choice
        assert not choice.candidates and choice.torchs_graphs == (parts.forward, parts.backward)
        names = {node.name for node in parts.saved_for_backward if is_tensor(node)}
        assert {node.name for node in choice.nodes_to_save} == names


def test_what_torch_recomputes_by_itself_is_known(roberta, gpt2):
    counts = []
    for captured in (roberta, gpt2):
        expected = torchs_own(captured)
        saved = {root(node).name for node in expected.saved_for_backward if is_tensor(node)}
        names = {candidate.activation.root.name for candidate in captured.candidates}
        auto_recomputed = {c.activation.root.name for c in captured.split().graph.choice.auto_recomputed}
        assert auto_recomputed == names - saved
        assert auto_recomputed <= set(expected.recomputed(captured.joint))
        assert not captured.split("level 1").graph.choice.auto_recomputed
        counts.append(len(auto_recomputed))
    # Elementwise operators of an activation that consists of several operators.
    assert counts[1] >= 4


def test_logits_that_are_saved_are_saved_as_they_are():
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.dense(x).tanh()
            return logits.square().sum(), logits

    captured = capture(Head().forward, torch.randn(5, 8))
    (returned,) = [activation for activation in captured.activations if activation.is_returned]
    assert operator_name(returned.root) == "tanh"
    assert returned not in {candidate.activation for candidate in captured.candidates}
    parts = captured.split("level 1")
    (output,) = parts.forward.graph.find_nodes(op="output")
    logits, saved = output.args[0][1], [node for node in parts.saved_for_backward if is_tensor(node)]
    assert root(logits).name == "tanh" and [root(node).name for node in saved] == ["tanh"]
    assert "clone" not in {operator_name(node) for node in parts.forward.graph.nodes if node.op == "call_function"}


def test_what_must_not_run_twice_is_saved_in_exchange():
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + torch.rand(x.shape[0], 1)).sin().sum()

    captured = capture(function, torch.randn(8, 6, requires_grad=True))
    (activation,) = captured.activations
    assert [node.name for node in nodes_to_save(captured.graph, {activation.root})] == ["rand"]
    assert [node.name for node in nodes_to_save(captured.graph, ())] == [activation.root.name]
    (config,) = rows(captured)
    assert config.endswith("+:2:-1")
    parts = captured.split(config)
    check(captured, parts)
    assert [node.name for node in parts.saved_for_backward if is_tensor(node)] == ["rand"]


def ancestors(node: fx.Node) -> set[str]:
    found: set[str] = set()
    todo = [node]
    while todo:
        for read in todo.pop().all_input_nodes:
            if read.name not in found:
                found.add(read.name)
                todo.append(read)
    return found


@pytest.mark.parametrize("name", nightly(["roberta", "gpt2", "albert"], but=["roberta"]))
@pytest.mark.parametrize("asked", ["level 1", "{gelu}+:1:-1"])
def test_what_a_layer_is_recomputed_from_waits_for_the_layer_behind_it(name, asked, request):
    captured = request.getfixturevalue(name)
    parts = captured.split(asked.format(gelu="Gelu" if name == "roberta" else "FastGelu"))
    recomputed = set(parts.recomputed(captured.joint))
    nodes = {node.name: node for node in parts.backward.graph.nodes}
    copies = [nodes[name] for name in recomputed if layer_of(nodes[name]) and not is_view(nodes[name])]
    first, second = sorted({layer_of(node) for node in copies})
    gradients = {
        node.name
        for node in nodes.values()
        if node.op == "call_function"
        and node.name not in recomputed
        and layer_of(node) == second
        and not is_view(node)
    }
    saved = {node.name for node in parts.saved_for_backward}
    checked = 0
    for node in copies:
        before = ancestors(node)
        if layer_of(node) == first and before & saved:
            assert gradients <= before, node
            checked += 1
    assert checked and len(gradients) > 10


@pytest.mark.nightly
@pytest.mark.skipif(not dynamo.inductor_works("cpu"), reason="there is no C++ compiler")
def test_inductor_holds_what_the_graph_would():
    model = ZOO["deberta-v2-classification"].build(num_hidden_layers=4)
    batch = ZOO["deberta-v2-classification"].batch(8, 60, seed=1)
    held = []
    for compiler in ("aot_eager", "inductor"):
        engine = CompileEngine(selection("level 1"), compiler, dynamic=False)
        engine.attach(model)
        model(**batch).loss.backward()
        held.append(engine.predictor.activations())
        assert not engine.predictor.caveat
        engine.detach()
    graph, program = held
    assert program < graph
