import itertools
import random
from collections import Counter

import numpy as np
import pytest

from optimum_memopt.engines.compile.graph.problem import Problem, problems_of
from optimum_memopt.engines.compile.graph.symbols import is_length
from optimum_memopt.engines.compile.solver.solver import (
    Solver,
    best_lengths,
    candidate_lengths,
    expected_extra,
    extra_by_length,
)
from optimum_memopt.training.batches import batch_lengths
from tests.captured import Captured

# No extra time up to 32 tokens, then more and more.
SHARES = {16: 0.0, 32: 0.0, 64: 0.1, 96: 0.2, 128: 0.4}


def test_candidates_are_rounded_up_and_end_in_the_longest() -> None:
    assert candidate_lengths([5, 9, 16, 17, 30], 30) == (8, 16, 24, 30)
    many = candidate_lengths(range(1, 2000), 2000)
    assert len(many) <= 34 and many[-2:] == (1992, 2000) and many == tuple(sorted(set(many)))
    assert candidate_lengths([], 0) == (0,)


def test_each_batch_pays_for_the_cheapest_plan_that_is_made_for_it() -> None:
    batches = {10: 2, 60: 1, 128: 1}
    assert expected_extra(batches, SHARES, (128,)) == pytest.approx(0.4)
    assert expected_extra(batches, SHARES, (32, 128)) == pytest.approx(0.4 * 188 / 208)
    assert expected_extra(batches, SHARES, (64, 128)) == pytest.approx((0.1 * 80 + 0.4 * 128) / 208)
    # Padded beyond the longest row.
    assert expected_extra({200: 1}, SHARES, (32, 128)) == pytest.approx(0.4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("most", [1, 2])
def test_no_other_lengths_save_more(seed: int, most: int) -> None:
    generator = random.Random(seed)
    batches = [generator.choice([10, 20, 40, 60, 90, 128]) for _ in range(20)]
    found = best_lengths(batches, SHARES, most)
    assert len(found) <= most and list(found) == sorted(found)
    own = expected_extra(Counter(batches), SHARES, (*found, 128))
    for option in itertools.chain.from_iterable(itertools.combinations(SHARES, count) for count in range(most + 1)):
        # One more length is chosen only if it is worth a compile.
        assert own - expected_extra(Counter(batches), SHARES, (*option, 128)) < 0.005 + 1e-12


def test_a_plan_that_saves_next_to_nothing_is_not_worth_compiling() -> None:
    assert best_lengths([128] * 99 + [8], SHARES, 2) == ()
    assert best_lengths([128] * 10 + [30] * 50, SHARES, 2) == (32,)
    assert best_lengths([10, 60], dict.fromkeys(SHARES, 0.0), 2) == ()


def test_the_lengths_of_batches_are_those_of_the_order() -> None:
    lengths = np.asarray([3, 9, 5, 1, 1, 2])
    assert batch_lengths(lengths, 2, "sequential") == (9, 5, 2)
    many = np.random.default_rng(1).integers(1, 200, 4096).astype(float)
    at_random, grouped = (batch_lengths(many, 16, strategy) for strategy in ("random", "group_by_length"))
    assert len(at_random) == len(grouped) == 256
    assert max(at_random) == max(grouped) == many.max()
    # Grouped, the mean length is near the middle; at random, near the maximum of 16 rows.
    assert np.mean(grouped) < 115 and np.mean(at_random) > 175
    assert at_random == batch_lengths(many, 16, "random")


def test_shorter_batches_take_less_and_each_of_them_what_a_solver_finds(roberta: Captured) -> None:
    problem_at = problems_of(roberta.graph, [1e-3] * len(roberta.joint.nodes))
    tokens = {symbol for symbol in roberta.sizes if is_length(roberta.names.get(symbol, ""))}
    assert tokens

    def shorter(length: int) -> Problem:
        return problem_at({**roberta.sizes, **dict.fromkeys(tokens, length)})

    largest = Solver(shorter(200))
    allowed = (largest.lowest.peak + largest.everything.peak) // 2
    plan = largest.solve(allowed)
    extra = extra_by_length((), 200, plan, shorter, allowed)
    assert not extra.is_known
    shares = list(extra.shares.values())
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == plan.extra_seconds / plan.seconds > 0
    for length, share in [*extra.shares.items()][1::3]:
        # The share is that of the next longer length that was solved for.
        assert Solver(shorter(length)).solve(allowed).extra_seconds / plan.seconds <= share + 1e-9
    free = max(length for length, share in extra.shares.items() if not share)
    assert Solver(shorter(free)).everything.peak <= allowed
