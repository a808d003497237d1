"""The costs of plans within a budget for batches of real text of various lengths, for budget.py."""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from budget_graphs import Shape, estimated, trace
from shared import to_markdown

from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.simulation import simulate
from optimum_memopt.engines.compile.solver.solver import ExtraByLength, Solver, best_lengths, extra_by_length

ORDERS = ("random", "grouped by length")
SHARES = (0.75, 0.5, 0.25, 0.1)
MOST_VARIANTS = 3
FULL, QUICK = Shape("roberta", 12, 768, 32, 512), Shape("roberta", 1, 64, 4, 64)
# Batches are padded to a multiple of this length, as a collator does for a GPU.
_MULTIPLE = 8


def padded_lengths(lengths: Sequence[int], batch_size: int, order: str) -> Counter[int]:
    """Count the batches of an epoch by padded length; a smaller last batch is dropped.

    Args:
        lengths: tokens of each sample.
        batch_size: samples per batch.
        order: one of `ORDERS`, sampled as Trainer does.
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


def at_each_length(graph: AnalyzedGraph, orders: Mapping[str, Counter[int]], of: int) -> dict[str, Any]:
    """Compute peaks and times of batches of each length, without a plan and under the variants that a run would have.

    Args:
        graph: the graph, with symbolic sizes; not modified.
        orders: the number of batches of each length, by order.
        of: the length that the graph was traced with.
    """
    problems = {length: _problem_at(graph, of, length) for length in sorted(set().union(*orders.values()))}
    solver = Solver(problems[max(problems)])
    low, high = solver.lowest.peak, solver.everything.peak
    found: dict[str, Any] = {"lowest": low, "everything": high, "plain": {}, "plans": []}
    for length, problem in problems.items():
        plain = simulate(problem, problem.closure(problem.activations))
        ran = (*plain.forward.order, *plain.backward.order)
        found["plain"][str(length)] = (plain.peak, sum(problem.seconds[node] for node in ran))
    for share in SHARES:
        budget = low + int(share * (high - low))
        for order, counts in orders.items():
            times = times_by_length(problems, counts, budget)
            for most in range(1, MOST_VARIANTS + 1):
                lengths = [*best_lengths(times.batches, times.shares, most - 1), max(problems)]
                plans = [_plan(problems[length], budget) for length in lengths]
                under = {str(length): _cheapest(problem, plans, budget) for length, problem in problems.items()}
                found["plans"].append({"budget": budget, "order": order, "variants": lengths, "lengths": under})
    return found


def _problem_at(graph: AnalyzedGraph, of: int, length: int) -> Problem:
    hints = {symbol: length if size == of else size for symbol, size in graph.size_hints.items()}
    return estimated(replace(graph, size_hints=hints))


def times_by_length(problems: Mapping[int, Problem], counts: Counter[int], budget: int) -> ExtraByLength:
    """Compute the extra seconds of plans as a run does, with the operator times of the longest batch.

    Args:
        problems: the problem of each length.
        counts: the number of batches of each length in an epoch.
        budget: the graph's budget, in bytes.
    """
    longest = max(problems)
    plan = Solver(problems[longest]).solve(budget)

    def shortened(length: int) -> Problem:
        return replace(problems[length], seconds=problems[longest].seconds)

    return extra_by_length(list(counts.elements()), longest, plan, shortened, budget)


def _plan(problem: Problem, budget: int) -> frozenset[int]:
    return frozenset(Solver(problem).solve(budget).saved)


def _cheapest(problem: Problem, plans: Sequence[frozenset[int]], budget: int) -> tuple[int, float]:
    """Returns peak and extra seconds of the first plan that fits, from the cheapest to the longest batch's."""
    *cheaper, last = (simulate(problem, plan) for plan in plans)
    found = next((one for one in cheaper if one.peak <= budget), last)
    return found.peak, found.extra_seconds(problem)


def run(saved: dict[str, Any], keep: Callable[[], None], arguments: argparse.Namespace) -> None:
    """Add the results if they are missing; see budget.py."""
    if "plans" in saved:
        return
    shape = QUICK if arguments.quick else FULL
    samples = [9, 30, 33, 17, 60, 12, 8, 40] if arguments.quick else _verses()
    orders = {order: padded_lengths(samples, shape.batch_size, order) for order in ORDERS}
    # The length's symbol is identified by its value.
    saved.update(trace(shape, lambda graph: at_each_length(graph, orders, shape.seq_len), dynamic=True))
    saved["orders"] = {
        order: {str(length): count for length, count in sorted(counts.items())} for order, counts in orders.items()
    }
    saved["about"] = f"{shape.layers} layers of {shape.hidden}, batches of {shape.batch_size}"
    keep()


def _verses() -> list[int]:
    from sampling_balance import verse_lengths

    return [int(length) for length in verse_lengths(0)]


def rows(saved: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a table row for each budget, order and number of variants, without repeated numbers of variants."""
    plain = saved["plain"]
    shown: dict[tuple[int, str], int] = {}
    for plan in saved["plans"]:
        counts, variants = saved["orders"][plan["order"]], plan["variants"]
        if shown.get((plan["budget"], plan["order"])) == len(variants):
            continue
        shown[plan["budget"], plan["order"]] = len(variants)
        total = sum(count * plain[length][1] for length, count in counts.items())
        extra = sum(count * plan["lengths"][length][1] for length, count in counts.items())
        yield {
            "budget": f"{plan['budget'] / 2**30:.2f} GiB",
            "order": plan["order"],
            "plans for lengths up to": ", ".join(map(str, variants)),
            "extra time": f"{extra / total:+.1%}",
            "highest peak": f"{max(plan['lengths'][length][0] for length in counts) / 2**30:.2f} GiB",
        }


def sections(saved: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table."""
    lengths = list(map(int, saved["plain"]))
    batches = sum(next(iter(saved["orders"].values())).values())
    about = (
        f"{saved['about']} and {min(lengths)} to {max(lengths)} tokens, {batches} an epoch; the longest batch holds "
        f"{saved['everything'] / 2**30:.2f} GiB with everything saved and at least {saved['lowest'] / 2**30:.2f}:"
    )
    return {"ragged": f"{about}\n\n{to_markdown(list(rows(saved)), {})}"}
