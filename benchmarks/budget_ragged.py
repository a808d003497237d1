"""What one plan for the largest batch costs where batches of real text have all lengths, for budget.py."""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from budget_graphs import Shape, estimated, trace
from shared import to_markdown

from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph
from optimum_memopt.engines.compile.budget.simulation import simulate
from optimum_memopt.engines.compile.budget.solve import Solution, Solver

ORDERS = ("random", "grouped by length")
SHARES = (0.75, 0.5, 0.25)
FULL, QUICK = Shape("roberta", 12, 768, 32, 512), Shape("roberta", 1, 64, 4, 64)
# Batches are padded to a multiple, as a collator does for a GPU.
_MULTIPLE = 8


def padded_lengths(lengths: Sequence[int], batch_size: int, order: str) -> Counter[int]:
    """How many batches of an epoch have which length; the last, smaller one is dropped.

    Args:
        lengths: tokens of each sample.
        batch_size: samples.
        order: one of `ORDERS`; both as in a Trainer.
    """
    from torch.utils.data import BatchSampler, RandomSampler
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(0)
    sampler = (
        RandomSampler(lengths, generator=generator)
        if order == "random"
        else LengthGroupedSampler(batch_size, lengths=list(lengths), generator=generator)
    )
    longest = (max(lengths[index] for index in batch) for batch in BatchSampler(sampler, batch_size, drop_last=True))
    return Counter(-(-length // _MULTIPLE) * _MULTIPLE for length in longest)


def at_each_length(graph: AnalyzedGraph, lengths: Sequence[int], of: int) -> dict[str, Any]:
    """Peaks and times of the plans for the longest batch.

    Args:
        graph: whose sizes are symbols; read, not changed.
        lengths: of the batches.
        of: the length that the graph was traced with.
    """

    def problem_at(length: int) -> Any:
        hints = {symbol: length if size == of else size for symbol, size in graph.size_hints.items()}
        return estimated(replace(graph, size_hints=hints))

    problems = {length: problem_at(length) for length in lengths}
    solver = Solver(problems[max(lengths)])
    low, high = solver.lowest.peak, solver.everything.peak
    found: dict[str, Any] = {"lowest": low, "everything": high, "plans": {}, "plain": {}}
    for length, problem in problems.items():
        plain = simulate(problem, problem.closure(problem.activations))
        ran = (*plain.forward.order, *plain.backward.order)
        found["plain"][str(length)] = (plain.peak, sum(problem.seconds[node] for node in ran))
    for share in SHARES:
        budget = low + int(share * (high - low))
        plan = solver.solve(budget)
        assert isinstance(plan, Solution)
        under = {}
        for length, problem in problems.items():
            simulated = simulate(problem, frozenset(plan.saved))
            under[str(length)] = (simulated.peak, simulated.extra_seconds(problem))
        found["plans"][str(share)] = {"budget": budget, "lengths": under}
    return found


def run(saved: dict[str, Any], keep: Callable[[], None], arguments: argparse.Namespace) -> None:
    """Add what is missing; see budget.py."""
    if "plans" in saved:
        return
    shape = QUICK if arguments.quick else FULL
    samples = [9, 30, 33, 17, 60, 12, 8, 40] if arguments.quick else _verses()
    orders = {order: padded_lengths(samples, shape.batch_size, order) for order in ORDERS}
    lengths = sorted(set().union(*orders.values()))
    # Its symbol is told from the others by its value.
    saved.update(trace(shape, lambda graph: at_each_length(graph, lengths, shape.seq_len), dynamic=True))
    saved["orders"] = {
        order: {str(length): count for length, count in sorted(counts.items())} for order, counts in orders.items()
    }
    saved["about"] = f"{shape.layers} layers of {shape.hidden}, batches of {shape.batch_size}"
    keep()


def _verses() -> list[int]:
    from sampling_balance import verse_lengths

    return [int(length) for length in verse_lengths(0)]


def rows(saved: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each budget and order."""
    plain = saved["plain"]
    for plan in saved["plans"].values():
        for order, counts in saved["orders"].items():
            total = sum(count * plain[length][1] for length, count in counts.items())
            extra = sum(count * plan["lengths"][length][1] for length, count in counts.items())
            longest = max(counts, key=int)
            fits = sum(count for length, count in counts.items() if plain[length][0] <= plan["budget"])
            yield {
                "budget": f"{plan['budget'] / 2**30:.2f} GiB",
                "order": order,
                "batches": sum(counts.values()),
                "highest peak": f"{max(plan['lengths'][length][0] for length in counts) / 2**30:.2f} GiB",
                "extra time": f"{extra / total:+.1%}",
                "of the longest batch": f"{plan['lengths'][longest][1] / plain[longest][1]:+.1%}",
                "batches that fit without a plan": f"{fits / sum(counts.values()):.1%}",
            }


def sections(saved: Mapping[str, Any]) -> dict[str, str]:
    """The table."""
    lengths = list(map(int, saved["plain"]))
    about = (
        f"{saved['about']} and {min(lengths)} to {max(lengths)} tokens; the longest batch holds "
        f"{saved['everything'] / 2**30:.2f} GiB with everything saved and at least {saved['lowest'] / 2**30:.2f}:"
    )
    return {"ragged": f"{about}\n\n{to_markdown(list(rows(saved)), {})}"}
