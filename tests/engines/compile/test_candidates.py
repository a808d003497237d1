"""Which rows a graph has: what can be made again or moved, and nothing that saves nothing."""

import pytest
import torch

from optimum_memopt.engines.compile.analysis.candidates import select_by_config, select_by_level
from optimum_memopt.engines.compile.analysis.saved_activations import is_negligible, is_statistic, operator_name
from optimum_memopt.plans.grammar import Strategy, parse
from tests.engines.compile.captured import Captured, capture


def offered(captured: Captured, *strategies: Strategy) -> set:
    """Roots of the stashes of all rows of these strategies."""
    return {one.stash.root for o in captured.candidates if o.strategy in strategies for one in o.occurrences}


def test_each_stash_is_in_one_row_of_recompute_at_most(roberta, gpt2):
    for captured in (roberta, gpt2):
        made = [
            one.stash.root for o in captured.candidates if o.strategy is not Strategy.OFFLOAD for one in o.occurrences
        ]
        assert len(made) == len(set(made)) > 20
        order = captured.joint.order
        for candidate in captured.candidates:
            places = [order[one.stash.root] for one in candidate.occurrences]
            assert places == sorted(places)


def test_rows_that_save_nothing_are_not_there(roberta, gpt2):
    for captured in (roberta, gpt2):
        assert all(candidate.saving.subs(captured.sizes) > 0 for candidate in captured.candidates)
        everything = offered(captured, *Strategy)
        assert not any(is_statistic(root) for root in everything)
        assert not any(operator_name(root) in ("randint", "rand") for root in everything)
        assert not any(stash.root in everything for stash in captured.stashes if stash.is_returned)
        assert not any(stash.root in everything for stash in captured.stashes if is_negligible(stash.bytes))


def test_all_other_stashes_are_offered(roberta):
    left = {stash.root for stash in roberta.stashes} - offered(roberta, *Strategy)
    for stash in roberta.stashes:
        if stash.root in left:
            assert is_statistic(stash.root) or stash.is_returned or is_negligible(stash.bytes), stash.root


def test_savings_are_bytes_of_what_is_stashed(roberta):
    gelu = next(candidate for candidate in roberta.candidates if candidate.cluster_id == "Gelu+")
    rows, columns = 4, 12
    assert gelu.saving.subs(roberta.sizes) == 2 * rows * columns * 24 * 4
    assert {roberta.names[symbol] for symbol in gelu.saving.free_symbols} == {"input_ids_dim0", "input_ids_dim1"}


def test_what_is_kept_in_exchange_makes_it_a_compromise():
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + torch.rand(x.shape[0], 1)).sin().sum()

    captured = capture(function, torch.randn(8, 6, requires_grad=True))
    (candidate,) = [candidate for candidate in captured.candidates if candidate.strategy is not Strategy.OFFLOAD]
    assert candidate.strategy is Strategy.RECOMPUTE_WITH_COMPROMISE
    assert candidate.saving.subs(captured.sizes) == (8 * 6 - 8) * 4
    assert candidate.saving.subs(dict.fromkeys(captured.sizes, 10)) == (100 - 10) * 4


def test_what_costs_as_much_as_it_saves_is_offloaded_at_best():
    captured = capture(lambda x: (x + torch.rand_like(x)).sin().sum(), torch.randn(8, 6, requires_grad=True))
    assert {candidate.strategy for candidate in captured.candidates} <= {Strategy.OFFLOAD}
    assert captured.stashes


def test_a_model_without_layers_has_rows_and_nothing_for_a_level():
    captured = capture(lambda x: x.exp().sin().tanh().sum(), torch.randn(8, 6, requires_grad=True))
    assert {o.cluster_id for o in captured.candidates if o.strategy is Strategy.RECOMPUTE} == {"Exp+", "Sin+Tanh+"}
    assert not any(select_by_level(captured.candidates, 2).values())


def test_nothing_to_train_has_no_rows():
    captured = capture(lambda x: x.sum() * 2, torch.randn(8, 6, requires_grad=True))
    assert captured.candidates == () and captured.stashes == ()


@pytest.mark.parametrize(
    "count, already, taken", [(-1, 0, 6), (-1, 6, 6), (2, 0, 2), (2, 1, 1), (2, 2, 0), (2, 9, 0), (9, 0, 6)]
)
def test_counts_run_on_through_graphs(roberta, count, already, taken):
    """`already` were taken in graphs before this one."""
    name = "FusedMatMul+Add+Reshape+Transpose+:1"
    chosen = select_by_config(roberta.candidates, parse(f"{name}:{count}"), {f"{name}:-1": already})
    (occurrences,) = chosen.values()
    candidate = next(iter(chosen))
    assert occurrences == candidate.occurrences[:taken]


def test_ids_of_other_fusions_are_taken_for_what_they_mean(roberta):
    (candidate,) = select_by_config(roberta.candidates, parse("BiasGelu+:1:-1"), {})
    assert candidate.config == "Gelu+:1:-1"
    assert select_by_config(roberta.candidates, parse("Gelu+:0:-1"), {}) == {}


def test_a_level_takes_what_lies_within_a_layer(roberta):
    level1, level2 = (select_by_level(roberta.candidates, level) for level in (1, 2))
    assert {candidate.strategy for candidate in level1} == {Strategy.RECOMPUTE}
    assert set(level1) <= set(level2)
    taken = [one.stash for some in level1.values() for one in some]
    assert {stash.layer for stash in taken} == {"roberta.encoder.layer.0", "roberta.encoder.layer.1"}
    assert not any(stash.leaves_layer for stash in taken)
    embeddings = next(
        candidate for candidate in roberta.candidates if candidate.cluster_id == "Gather+Add+Gather+Add+"
    )
    assert level1[embeddings] == ()
