"""Copies that overlap computation: each schedule is replayed with a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimum_memopt.engines.compile.solver.offload import Copy, Overlap, overlap

OPERATORS = 8


@st.composite
def copies(draw: st.DrawFn) -> list[Copy]:
    return sorted(
        draw(st.lists(st.builds(Copy, st.integers(0, OPERATORS - 1), st.integers(1, 50)), min_size=1, max_size=6))
    )


helds = st.lists(st.integers(0, 100), min_size=OPERATORS, max_size=OPERATORS)
times = st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=OPERATORS, max_size=OPERATORS)


def replay(seconds: list[float], asked: list[Copy], found: Overlap, bandwidth: float) -> float:
    """Returns the total seconds if the device waits as scheduled."""
    now = link_free = 0.0
    ends: dict[int, float] = {}
    for operator in range(OPERATORS + 1):
        for number, until in enumerate(found.until):
            if until == operator:
                now = max(now, ends[number])
        if operator < OPERATORS:
            now += seconds[operator]
        for number, copy in enumerate(asked):
            if copy.after == operator:
                link_free = max(link_free, now) + copy.bytes / bandwidth
                ends[number] = link_free
    return now


@given(helds, times, copies(), st.integers(0, 60), st.sampled_from([1.0, 10.0, 1e9]))
def test_a_clock_agrees(held: list[int], seconds: list[float], asked: list[Copy], room: int, bandwidth: float) -> None:
    limit = max(held) + room
    found = overlap(held, seconds, asked, limit, bandwidth)
    assert replay(seconds, asked, found, bandwidth) == pytest.approx(sum(seconds) + found.stall)
    assert all(copy.after < until <= OPERATORS for copy, until in zip(asked, found.until, strict=True))
    assert found.until == tuple(sorted(found.until))
    in_flight = [
        sum(copy.bytes for copy, until in zip(asked, found.until, strict=True) if copy.after < operator < until)
        for operator in range(OPERATORS)
    ]
    assert max(map(sum, zip(held, in_flight, strict=True))) <= limit
    # Never longer than without overlap, and never longer with more room.
    assert found.stall <= sum(copy.bytes for copy in asked) / bandwidth + 1e-9
    assert overlap(held, seconds, asked, limit + 1000, bandwidth).stall <= found.stall + 1e-9


def test_a_copy_is_waited_for_when_it_is_complete() -> None:
    held, seconds = [10] * 6, [1.0] * 6
    found = overlap(held, seconds, [Copy(0, 20), Copy(1, 10)], limit=100, bandwidth=10)
    # Started at 1, complete at 3 and at 4: before the operators that start then.
    assert found == Overlap((3, 4), 0.0)
    # On such a slow link, the rest is waited for at the end, or earlier if there is no room.
    assert overlap(held, seconds, [Copy(0, 20)], limit=100, bandwidth=2) == Overlap((6,), 5.0)
    assert overlap([10, 10, 10, 25, 10, 10], seconds, [Copy(0, 20)], limit=40, bandwidth=2) == Overlap((3,), 8.0)
