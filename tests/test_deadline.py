"""A task that looks at the time before each of its parts."""

import pytest

from optimum_memopt.deadline import Deadline, TimeIsUpError


def test_a_part_begins_where_there_is_time_for_it():
    deadline = Deadline(60)
    deadline.check()
    deadline.check(needed=30)
    with pytest.raises(TimeIsUpError):
        deadline.check(needed=60)
    assert 0 <= deadline.elapsed < 60


def test_no_part_begins_when_the_time_is_up():
    with pytest.raises(TimeIsUpError):
        Deadline(0).check()
