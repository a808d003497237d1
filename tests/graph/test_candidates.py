import re

import pytest
import torch

from optimum_memopt.engines.compile.graph.saved_activations import is_negligible, is_statistic, operator_name
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.stated import FromConfig
from optimum_memopt.plans.grammar import ConfigError, Strategy, parse
from optimum_memopt.plans.matching import Matched
from tests.captured import Captured, capture


def roots_of(captured: Captured, *strategies: Strategy) -> list:
    """Returns the roots of all candidates' activations under these strategies."""
    return [candidate.activation.root for candidate in captured.candidates if candidate.strategy in strategies]


def test_each_activation_is_in_one_row_of_recompute_at_most(roberta, gpt2):
    for captured in (roberta, gpt2):
        recomputed = roots_of(captured, Strategy.RECOMPUTE, Strategy.RECOMPUTE_WITH_COMPROMISE)
        assert len(recomputed) == len(set(recomputed)) > 20
        order = captured.joint.order
        for candidates in captured.rows.values():
            places = [order[candidate.activation.root] for candidate in candidates]
            assert places == sorted(places)


def test_rows_that_save_nothing_are_not_there(roberta, gpt2):
    for captured in (roberta, gpt2):
        assert all(candidate.saving.subs(captured.sizes) > 0 for candidate in captured.candidates)
        everything = set(roots_of(captured, *Strategy))
        assert not any(is_statistic(root) for root in everything)
        assert not any(operator_name(root) in ("randint", "rand") for root in everything)
        assert not any(a.root in everything for a in captured.activations if a.is_returned)
        assert not any(a.root in everything for a in captured.activations if is_negligible(a.bytes))


def test_all_other_activations_are_candidates(roberta):
    left = {activation.root for activation in roberta.activations} - set(roots_of(roberta, *Strategy))
    for activation in roberta.activations:
        if activation.root in left:
            root = activation.root
            assert is_statistic(root) or activation.is_returned or is_negligible(activation.bytes), root


def test_savings_are_bytes_of_what_is_saved(roberta):
    saving = sum(candidate.saving for candidate in roberta.rows["Gelu+:1:-1"])
    rows, columns = 4, 12
    assert saving.subs(roberta.sizes) == 2 * rows * columns * 24 * 4
    assert {roberta.names[symbol] for symbol in saving.free_symbols} == {"input_ids_dim0", "input_ids_dim1"}


def test_what_costs_as_much_as_it_saves_is_not_recomputed():
    captured = capture(lambda x: (x + torch.rand_like(x)).sin().sum(), torch.randn(8, 6, requires_grad=True))
    assert not any(candidate.chain for candidate in captured.candidates)
    assert captured.activations


def test_a_model_without_layers_has_rows_and_nothing_for_a_level():
    captured = capture(lambda x: x.exp().sin().tanh().sum(), torch.randn(8, 6, requires_grad=True))
    assert {o.cluster_id for o in captured.candidates if o.strategy is Strategy.RECOMPUTE} == {"Exp+", "Sin+Tanh+"}
    choice = captured.choose("level 2")
    assert choice.candidates == ()
    assert choice.matched.remarks == (
        "--memory_opt_level 2: no saved activation in the table lies in a layer (layers: at least two modules of a "
        "class in a ModuleList or Sequential); choose plans by name, or give a budget",
    )


def test_nothing_to_train_has_no_rows():
    captured = capture(lambda x: x.sum() * 2, torch.randn(8, 6, requires_grad=True))
    assert captured.candidates == () and captured.activations == ()


@pytest.mark.parametrize(
    "count, already, taken", [(-1, 0, 6), (-1, 6, 6), (2, 0, 2), (2, 1, 1), (2, 2, 0), (2, 9, 0), (9, 0, 6)]
)
def test_counts_run_on_through_graphs(roberta, count, already, taken):
    """A count includes the `already` candidates taken in earlier graphs."""
    name = "FusedMatMul+Add+Reshape+Transpose+:1"
    candidates = roberta.rows[f"{name}:-1"]
    earlier = [Choice((), "a graph before", (candidate,)) for candidate in (candidates + candidates)[:already]]
    assert list(roberta.choose(f"{name}:{count}", *earlier).candidates) == candidates[:taken]


def test_ids_of_other_fusions_are_taken_for_what_they_mean(roberta):
    assert {candidate.row for candidate in roberta.choose("BiasGelu+:1:-1").candidates} == {"Gelu+:1:-1"}
    assert roberta.choose("Gelu+:0:-1").candidates == ()


def test_a_level_takes_what_lies_within_a_layer(roberta):
    level1, level2 = (roberta.choose(f"level {level}") for level in (1, 2))
    assert {candidate.strategy for candidate in level1.candidates} == {Strategy.RECOMPUTE}
    assert set(level1.candidates) <= set(level2.candidates)
    taken = [candidate.activation for candidate in level1.candidates]
    assert {activation.layer for activation in taken} == {"roberta.encoder.layer.0", "roberta.encoder.layer.1"}
    assert not any(activation.leaves_layer for activation in taken)
    embeddings = "Gather+Add+Gather+Add+:1:-1"
    assert embeddings in level1.matched.requests
    assert embeddings in roberta.rows and not any(candidate.row == embeddings for candidate in level1.candidates)


def asked(captured: Captured, config: str, strict: bool = True, graphs: int = 1) -> Matched:
    matched = FromConfig(parse(config)).match(captured.candidates * graphs)
    if strict:
        matched.check()
    return matched


def test_the_same_config_as_for_onnx_runtime_applies(roberta):
    matched = asked(roberta, "Gelu+:1:-1,Dropout+:1:-1")
    assert list(matched.requests) == ["Gelu+:1:-1", "Dropout+:1:-1"]
    assert matched.remarks == ()


def test_a_fused_id_is_said_to_mean_the_activation(roberta):
    matched = asked(roberta, "BiasGelu+:1:-1")
    assert list(matched.requests) == ["Gelu+:1:-1"] and matched.note("Gelu+:1:-1") == "requested as BiasGelu+"
    assert matched.remarks == ("BiasGelu+:1:-1 is Gelu+:1:-1 on this engine: the same activation, fused differently",)


@pytest.mark.parametrize(
    "typed, near",
    [
        ("Gellu+", "Gelu+"),
        ("gelu+", "Gelu+"),
        ("LayerNorm+", "LayerNormalization+"),
        ("FusedMatMul+add+", "FusedMatMul+Add+"),
        ("MatMul+Mul+Add+Sofmax+", "MatMul+Mul+Add+Softmax+"),
    ],
)
def test_a_mistyped_id_is_refused_with_near_ones(roberta, typed, near):
    with pytest.raises(ConfigError) as caught:
        asked(roberta, f"{typed}:1:-1")
    message = str(caught.value)
    assert message.startswith(f'no plan "{typed}" in this model; did you mean ')
    assert near in re.search(r"did you mean (.*?)\?", message)[1].split(" or ")
    assert set(re.search(r"[Aa]vailable: (.*)", message)[1].split(", ")) == {
        candidate.cluster_id for candidate in roberta.candidates
    }
    assert "\n" not in message


def test_a_mistyped_id_is_a_remark_where_not_strict(roberta):
    matched = asked(roberta, "Gellu+:1:-1,Gelu+:1:-1", strict=False)
    assert list(matched.requests) == ["Gelu+:1:-1"]
    assert "Gellu+" in matched.remarks[0] and matched.remarks[0].endswith("left out")


def test_another_strategy_is_refused_with_those_there_are(roberta):
    with pytest.raises(ConfigError, match=r"^Gelu\+:2:-1: this plan supports only strategies 1, 3 and 4$"):
        asked(roberta, "Gelu+:2:-1")


@pytest.mark.parametrize("count, graphs, said", [(2, 1, False), (3, 1, True), (3, 2, False), (-1, 1, False)])
def test_more_than_there_are_are_all_of_them_with_a_remark(roberta, count, graphs, said):
    matched = asked(roberta, f"Gelu+:1:{count}", graphs=graphs)
    assert matched.remarks == ((f"Gelu+:1:{count}: there are only 2, and all of them are on",) if said else ())
