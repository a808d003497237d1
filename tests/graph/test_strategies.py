import pytest

from optimum_memopt.engines.compile.graph.candidates import Candidate
from optimum_memopt.engines.compile.memory.tape import Tape
from optimum_memopt.engines.compile.partition import strategies
from optimum_memopt.engines.compile.partition.partitioned_graph import SymbolNames
from optimum_memopt.engines.compile.partition.strategies import offload, strategy_of
from optimum_memopt.engines.compile.predict.table import to_table
from optimum_memopt.plans.grammar import Strategy


class Halve(offload.Offload):
    """Saves every activation in half its bytes."""

    def __init__(self) -> None:
        self.rewritten: list[Candidate] = []

    def candidate(self, activation, chain, cluster_id, size_hints):
        return Candidate(activation, Strategy.OFFLOAD, cluster_id, activation.bytes / 2)

    def rewrite(self, modules, candidates):
        self.rewritten.extend(candidates)

    def saves_on(self, device_type):
        return True

    def note(self, device_type):
        return f"halved on {device_type}"

    def note_applied(self, candidates, prediction, sizes):
        return ""


def test_every_strategy_of_the_grammar_is_registered_once():
    numbers = [number for strategy in strategies._strategies for number in strategy.numbers]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(Strategy) - {Strategy.NONE}
    assert all(number in strategy_of(number).numbers for number in numbers)


@pytest.mark.parametrize("device_type, saves", [("cuda", True), ("xpu", True), ("cpu", False)])
def test_offload_saves_memory_of_accelerators_only(device_type, saves):
    strategy = strategy_of(Strategy.OFFLOAD)
    assert strategy.saves_on(device_type) is saves
    assert ("saves nothing" in strategy.note(device_type)) is not saves
    assert strategy.is_listed(device_type, is_recomputable=False) is saves
    assert not strategy.is_listed(device_type, is_recomputable=True)


def test_nothing_but_the_strategy_knows_how_it_saves(monkeypatch, roberta):
    """Another strategy in place of offload brings its own candidates, rewrite, bytes and note in the table."""
    halve = Halve()
    monkeypatch.setattr(strategies, "_strategies", [strategy_of(Strategy.RECOMPUTE), halve])
    graph = roberta.split("Gelu+:3:-1,Dropout+:1:-1").graph
    assert {candidate.row for candidate in halve.rewritten} == {"Gelu+:3:-1"} and len(halve.rewritten) == 2
    names = {candidate.activation.root.name for candidate in halve.rewritten}
    assert names <= {node.name for node in graph.choice.nodes_to_save}
    table = to_table(
        [graph], Tape.of_one(), graph.choice.matched, SymbolNames.of([graph], is_encoder_decoder=False), ()
    )
    (row,) = [plan for plan in table.plans if plan.config == "Gelu+:3:-1"]
    (recompute,) = [plan for plan in table.plans if plan.config == "Gelu+:1:-1"]
    assert (row.applied_count, row.note) == (2, "halved on cpu")
    assert row.saving_bytes == row.applied_saving_bytes == recompute.saving_bytes / 2
