"""What runs in which half under a plan: exactly what the plan says, in its order, and nothing random twice."""

import random

import pytest
import torch
from torch import fx
from torch._functorch import partitioners

from optimum_memopt.engines.compile import compat
from optimum_memopt.engines.compile.analysis.candidates import layer_boundaries
from optimum_memopt.engines.compile.analysis.joint import is_tensor, is_view, root
from optimum_memopt.engines.compile.analysis.saved_activations import is_output, is_statistic, layer_of, operator_name
from optimum_memopt.engines.compile.partitioned_graph import chosen_roots
from optimum_memopt.engines.compile.passes.partition import kept
from optimum_memopt.plans.grammar import Strategy
from tests.engines.compile.captured import Captured, Parts, capture


def by_name(captured: Captured) -> dict:
    return {node.name: node for node in captured.joint.nodes}


def check(captured: Captured, parts: Parts) -> None:
    """The plan's stashes are made again by their own operators, every other stash is handed over, once."""
    joint, nodes = captured.joint, by_name(captured)
    chosen = {one.stash.root.name: one for some in parts.graph.chosen.values() for one in some}
    handed = [root(node).name for node in parts.find_saved_for_backward if is_tensor(node)]
    kept_roots = {stash.root.name for stash in captured.stashes} - set(chosen)
    extra = set(handed) - kept_roots
    # In exchange: seeds.
    assert extra <= {kept.name for one in chosen.values() for kept in one.extra_saved}
    assert kept_roots <= set(handed)
    assert len(handed) == len(set(handed)), "one storage twice"

    again = parts.recomputed_by_torch(joint)
    compute = [name for name in again if not is_view(nodes[name]) and is_tensor(nodes[name])]
    allowed = {node.name for one in chosen.values() for node in one.nodes}
    # A view of a parameter or of a stash costs nothing and is no part of a plan.
    assert set(compute) <= allowed
    assert set(chosen) <= set(again)
    assert len(again) == len(set(again)), "one operator twice"
    assert not any(compat.is_random(node) for node in parts.backward.graph.nodes)


def rows(captured: Captured) -> list[str]:
    return [candidate.config for candidate in captured.candidates if candidate.strategy is not Strategy.OFFLOAD]


def test_each_row_alone_is_made_again_and_nothing_else(gpt2):
    for config in rows(gpt2):
        parts = gpt2.split(config)
        (occurrences,) = parts.graph.chosen.values()
        assert len(occurrences) == gpt2.configs[config]
        check(gpt2, parts)


@pytest.mark.parametrize("seed", range(8))
def test_any_rows_together_are_made_again_and_nothing_else(roberta, albert, seed):
    captured = (roberta, albert)[seed % 2]
    chosen = random.Random(seed).sample(rows(captured), k=2 + seed % 8)
    counted = [config.replace(":-1", f":{1 + index}") if index % 3 else config for index, config in enumerate(chosen)]
    parts = captured.split(",".join(counted))
    taken = {candidate.config: len(some) for candidate, some in parts.graph.chosen.items()}
    asked = {config: 1 + index if index % 3 else captured.configs[config] for index, config in enumerate(chosen)}
    assert taken == {config: min(count, captured.configs[config]) for config, count in asked.items()}
    # Several together reach further back: the one's way leads through the other.
    again = parts.recomputed_by_torch(captured.joint)
    assert {one.stash.root.name for some in parts.graph.chosen.values() for one in some} <= set(again)
    assert not any(compat.is_random(node) for node in parts.backward.graph.nodes)
    handed = {root(node) for node in parts.find_saved_for_backward if is_tensor(node)}
    dropped, _ = chosen_roots(parts.graph.chosen)
    assert {node.name for node in handed}.isdisjoint(node.name for node in dropped)
    assert {stash.root.name for stash in captured.stashes} - {n.name for n in dropped} <= {n.name for n in handed}


def test_every_row_is_on_nothing_is_kept_but_what_must_be(roberta):
    parts = roberta.split(",".join(rows(roberta)))
    nodes = by_name(roberta)
    left = {
        operator_name(node)
        for node in parts.find_saved_for_backward
        if is_tensor(node) and not is_statistic(nodes[node.name])
    }
    assert left <= {"randint", "index", "gather", "nll_loss_forward"} | {
        operator_name(stash.root)
        for stash in roberta.stashes
        if stash.is_returned or stash.root not in {one.stash.root for o in roberta.candidates for one in o.occurrences}
    }


@pytest.mark.parametrize("count, taken", [(1, 1), (2, 2), (5, 5), (99, 6)])
def test_a_count_takes_the_first_in_graph_order(roberta, count, taken):
    config = next(config for config in rows(roberta) if config.startswith("FusedMatMul+Add+Reshape+Transpose+"))
    candidate = next(candidate for candidate in roberta.candidates if candidate.config == config)
    expected = [one.stash.root.name for one in candidate.occurrences][:taken]
    assert expected == sorted(expected, key=lambda name: roberta.joint.order[by_name(roberta)[name]])
    parts = roberta.split(config.replace(":-1", f":{count}"))
    again = set(parts.recomputed_by_torch(roberta.joint))
    assert [one.stash.root.name for one in candidate.occurrences if one.stash.root.name in again] == expected


@pytest.mark.parametrize("level", [1, 2])
def test_a_level_keeps_a_layers_input_and_statistics_alone(roberta, gpt2, albert, level):
    for captured in (roberta, gpt2, albert):
        parts = captured.split(f"level {level}")
        nodes = by_name(captured)
        inside = [node for node in parts.find_saved_for_backward if is_tensor(node) and layer_of(nodes[node.name])]
        borders = {node.name for node in layer_boundaries(captured.joint)}
        for node in inside:
            made = nodes[node.name]
            leaves = next((s.leaves_layer for s in captured.stashes if s.root is root(made)), False)
            assert is_statistic(made) or compat.is_random(made) or leaves or root(made).name in borders, node
        big = [
            node for node in inside if not is_statistic(nodes[node.name]) and not compat.is_random(nodes[node.name])
        ]
        assert len(big) <= 4, "an output of each layer, and an input or two"


def test_a_level_makes_each_layer_again_when_its_backward_starts(roberta, gpt2, albert):
    for captured in (roberta, gpt2, albert):
        parts = captured.split("level 1")
        again = set(parts.recomputed_by_torch(captured.joint))
        nodes = by_name(captured)
        first, second = sorted({layer_of(nodes[name]) for name in again} - {""})
        backward = list(parts.backward.graph.nodes)
        made = [n for n in backward if n.name in again and layer_of(nodes[n.name]) == first and not is_view(n)]
        gradients = [
            n
            for n in backward
            if n.op == "call_function" and n.name not in again and layer_of(n) == second and not is_view(n)
        ]
        assert len(made) > 5 and len(gradients) > 10
        begin = min(parts.order[node.name] for node in made)
        late = [node.name for node in gradients if parts.order[node.name] > begin]
        assert late == [], (begin, late)


def test_a_row_is_made_again_just_before_it_is_read(roberta):
    parts = roberta.split("Gelu+:1:-1")
    for node in parts.backward.graph.nodes:
        if operator_name(node) == "gelu":
            reader = min(parts.order[user.name] for user in node.users)
            between = [n for n in parts.backward.graph.nodes if parts.order[node.name] < parts.order[n.name] < reader]
            assert all(is_view(n) or is_output(n) for n in between), between


def torchs_own(captured: Captured) -> Parts:
    """What torch's partitioner makes of a joint graph that nobody has touched."""
    given = {"num_fwd_outputs": captured.num_fwd_outputs, **captured.others}
    halves = partitioners.min_cut_rematerialization_partition(captured.copied(), captured.inputs, **given)
    return Parts(captured.split().graph, *halves, captured.num_fwd_outputs)


def computing(module: fx.GraphModule) -> list[tuple[str, object]]:
    return [(n.name, n.target) for n in module.graph.nodes if n.op == "call_function" and not is_view(n)]


def test_without_a_plan_the_halves_are_torchs_own(roberta, gpt2):
    for captured in (roberta, gpt2):
        expected, parts = torchs_own(captured), captured.split()
        # Views of the whole are gone, as they are where inductor partitions.
        assert computing(parts.forward) == computing(expected.forward)
        assert computing(parts.backward) == computing(expected.backward)
        handed, torchs = (
            [root(n).name for n in one.find_saved_for_backward if is_tensor(n)] for one in (parts, expected)
        )
        assert handed == torchs
        assert not any(parts.graph.chosen.values())


def test_what_torch_makes_again_by_itself_is_known(roberta, gpt2):
    frees = []
    for captured in (roberta, gpt2):
        expected = torchs_own(captured)
        handed = {root(node).name for node in expected.find_saved_for_backward if is_tensor(node)}
        offered = {one.stash.root.name for candidate in captured.candidates for one in candidate.occurrences}
        auto_recomputed = {one.stash.root.name for one in captured.split().graph.auto_recomputed}
        assert auto_recomputed == offered - handed
        assert auto_recomputed <= set(expected.recomputed_by_torch(captured.joint))
        assert not captured.split("level 1").graph.auto_recomputed
        frees.append(len(auto_recomputed))
    # Elementwise operators of an activation that is not one operator.
    assert frees[1] >= 4


def test_logits_that_are_stashed_are_handed_over_as_they_are():
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.dense(x).tanh()
            return logits.square().sum(), logits

    captured = capture(Head().forward, torch.randn(5, 8))
    (stash,) = [stash for stash in captured.stashes if stash.is_returned]
    assert operator_name(stash.root) == "tanh"
    assert stash.root not in {one.stash.root for candidate in captured.candidates for one in candidate.occurrences}
    parts = captured.split("level 1")
    (output,) = parts.forward.graph.find_nodes(op="output")
    logits, handed = output.args[0][1], [node for node in parts.find_saved_for_backward if is_tensor(node)]
    assert root(logits).name == "tanh" and [root(node).name for node in handed] == ["tanh"]
    assert "clone" not in {operator_name(node) for node in parts.forward.graph.nodes if node.op == "call_function"}


def test_what_must_not_run_twice_is_kept_though_no_stash_leads_there():
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + torch.rand(x.shape[0], 1)).sin().sum()

    captured = capture(function, torch.randn(8, 6, requires_grad=True))
    (stash,) = captured.stashes
    assert [node.name for node in kept(captured.joint, captured.stashes, {stash.root})] == ["rand"]
    assert [node.name for node in kept(captured.joint, captured.stashes, ())] == [stash.root.name]
    (config,) = rows(captured)
    assert config.endswith("+:2:-1")
    parts = captured.split(config)
    check(captured, parts)
    assert [node.name for node in parts.find_saved_for_backward if is_tensor(node)] == ["rand"]
