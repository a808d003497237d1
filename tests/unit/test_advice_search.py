import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimum_memopt.predict.advise import count_fitting, highest, micro_batches, smallest_as_good


def test_micro_batches_of_a_global_batch_are_its_divisors():
    assert micro_batches(12) == (1, 2, 3, 4, 6, 12)
    assert micro_batches(16) == (1, 2, 4, 8, 16)
    assert micro_batches(1) == (1,)
    assert micro_batches(None)[:8] == (1, 2, 3, 4, 6, 8, 12, 16)


@pytest.mark.parametrize("limit", range(14))
def test_what_fits_is_found_and_nothing_far_too_large_is_looked_at(limit):
    looked = []

    def fits(size: int) -> bool:
        looked.append(size)
        return size <= limit

    sizes = range(1, 13)
    assert count_fitting(sizes, fits) == min(limit, 12)
    assert max(looked) <= max(1, 2 * limit)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40, unique=True), st.data())
def test_the_highest_of_values_with_one_maximum(values, data):
    rising = sorted(data.draw(st.lists(st.sampled_from(values), unique=True)))
    values = [*rising, *sorted(set(values) - set(rising), reverse=True)]
    looked = set()

    def value(index: int) -> float:
        looked.add(index)
        return values[index]

    assert values[highest(len(values), value)] == max(values)
    assert len(looked) <= 14


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.floats(0, 1))
def test_the_smallest_that_is_as_good(values, share):
    rising = sorted(values)
    least = share * rising[-1]
    found = smallest_as_good(len(rising) - 1, rising.__getitem__, least)
    assert rising[found] >= least
    assert not any(value >= least for value in rising[:found])
