import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max

from optimum_memopt.engines.compile.graph.symbols import formula
from optimum_memopt.engines.compile.memory.tape import Call, Tape
from optimum_memopt.engines.compile.partition.partitioned_graph import SymbolNames
from optimum_memopt.engines.compile.predict.table import to_table
from optimum_memopt.plans.table import PlanTable
from tests.captured import Parts


def table_of(parts: Parts, graphs: int = 1) -> PlanTable:
    all_graphs = [parts.graph] * graphs
    matched = parts.graph.choice.matched
    matched.check()
    return to_table(
        all_graphs,
        Tape(tuple(map(Call, range(len(all_graphs))))),
        matched,
        SymbolNames.of(all_graphs, is_encoder_decoder=False),
        ("a header",),
    )


def row(table: PlanTable, config: str):
    return next(plan for plan in table.plans if plan.config == config)


def test_each_row_of_recompute_is_shown_largest_first(roberta):
    table = table_of(roberta.split())
    assert {plan.config for plan in table.plans} == {
        row for row, (first, *_) in roberta.rows.items() if first.chain is not None
    }
    assert {plan.config: plan.frequency for plan in table.plans}.items() <= roberta.configs.items()
    savings = [plan.saving_bytes for plan in table.plans]
    assert savings == sorted(savings, reverse=True) and savings[-1] > 0
    assert table.symbols == {"inputs_input_ids_dim0": 4, "inputs_input_ids_dim1": 12}
    assert table.engine == "compile" and table.header == ("a header",) and not table.enabled
    assert PlanTable.from_json(table.to_json()) == table


def test_symbolic_savings_are_those_of_other_batches(roberta, roberta_of_another_batch):
    there = table_of(roberta_of_another_batch.split())
    table = table_of(roberta.split())
    values = {sympy.Symbol(name): size for name, size in zip(sorted(table.symbols), (7, 29), strict=True)}
    found = {plan.config: sympy.sympify(plan.saving_symbolic).subs(values) for plan in table.plans}
    assert found == {plan.config: plan.saving_bytes for plan in there.plans}


def test_a_saving_names_no_strides_of_empty_tensors():
    rows, length = sympy.symbols("rows length", integer=True, positive=True)
    frames = FloorDiv(length - 127, 64)
    extent = 1 + (rows - 1) * 256 * Max(1, frames) + 256 * Max(1, frames) - 1
    assert formula(4 * extent) == str(1024 * rows * frames)
    assert formula(sympy.Max(7, length)) == "Max(7, length)"


def test_what_is_on_is_shown_with_what_it_saves(roberta):
    table = table_of(roberta.split("Gelu+:1:1,BiasDropout+:1:-1,FusedMatMul+Add+:1:0"))
    gelu, dropout = row(table, "Gelu+:1:-1"), row(table, "Dropout+:1:-1")
    assert (gelu.requested_count, gelu.applied_count, gelu.frequency) == (1, 1, 2)
    assert gelu.applied_saving_bytes * 2 == gelu.saving_bytes
    assert (dropout.requested_count, dropout.applied_count) == (-1, 6)
    assert dropout.note == "requested as BiasDropout+"
    assert {plan.config for plan in table.enabled} == {"Gelu+:1:-1", "Dropout+:1:-1"}
    assert table.claimed_saving_bytes == gelu.applied_saving_bytes + dropout.saving_bytes


def test_a_claimed_saving_is_no_longer_saved_for_backward(gpt2):
    """A claim is the difference in bytes saved for the backward, except for the generator states of masks."""
    nothing = gpt2.split("Dropout+:1:0").graph.prediction.saved_bytes
    for plan in table_of(gpt2.split()).plans[:10]:
        less = nothing - gpt2.split(plan.config).graph.prediction.saved_bytes
        assert 0 <= plan.saving_bytes - less <= torch.get_rng_state().nbytes * plan.frequency, plan.config


@pytest.mark.parametrize("level", [1, 2])
def test_a_levels_rows_are_on_where_they_lie_in_layers(roberta, level):
    table = table_of(roberta.split(f"level {level}"))
    gelu, embeddings = row(table, "Gelu+:1:-1"), row(table, "Gather+Add+Gather+Add+:1:-1")
    assert (gelu.requested_count, gelu.applied_count) == (-1, 2)
    assert embeddings.applied_count == embeddings.applied_saving_bytes == 0


def test_what_torch_recomputes_by_itself_is_said(gpt2):
    parts = gpt2.split()
    table = table_of(parts)
    for plan in table.plans:
        auto_recomputed = {candidate.activation.root.name for candidate in parts.graph.choice.auto_recomputed}
        count = sum(candidate.activation.root.name in auto_recomputed for candidate in gpt2.rows[plan.config])
        said = {0: "", plan.frequency: "AUTO: torch recomputes all by itself"}
        assert plan.note == said.get(count, f"AUTO: torch recomputes {count} by itself")
    assert row(table, "FastGelu+:1:-1").note == "AUTO: torch recomputes 4 by itself"
    assert not any("AUTO" in plan.note for plan in table_of(gpt2.split("level 1")).plans)


def test_offload_is_shown_where_it_is_on(roberta):
    asked = "Gelu+:3:-1"
    table = table_of(roberta.split(asked))
    plan = row(table, asked)
    assert (plan.applied_count, plan.saving_bytes) == (2, 0)
    assert plan.note == "offload; saves nothing on the CPU, whose memory is the host's"


def test_rows_of_several_graphs_are_one(roberta):
    once, twice = (table_of(roberta.split(), graphs=count) for count in (1, 2))
    assert {plan.config: 2 * plan.frequency for plan in once.plans} == {p.config: p.frequency for p in twice.plans}
    assert [2 * plan.saving_bytes for plan in once.plans] == [plan.saving_bytes for plan in twice.plans]
