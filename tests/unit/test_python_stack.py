"""A function that runs with room on Python's data stack maps no memory for the functions that it calls."""

import resource
from collections.abc import Callable

import pytest

from optimum_memopt.compat.python import with_room

CALLS = 500


def short(number: int) -> int:
    return number


def many_calls() -> int:
    return sum(map(short, range(CALLS))) + sum([short(number) for number in range(CALLS)])


def faults(function: Callable[[], object]) -> int:
    """Returns the page faults of a call: a page that is mapped anew costs one when it is first written to."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at_depth(depth: int, function: Callable[[], int]) -> int:
    return function() if depth == 0 else at_depth(depth - 1, function)


def test_no_depth_of_the_stack_maps_memory_in_each_call() -> None:
    # 250 frames take more than a chunk, so that one of them is its last.
    assert max(at_depth(depth, lambda: faults(lambda: with_room(many_calls))) for depth in range(250)) < CALLS


def test_arguments_results_and_errors_pass_through() -> None:
    assert with_room(dict, ([("a", 1)],), {"b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 / 0)
