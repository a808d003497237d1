"""A task that does not look at the clock ends in time."""

import itertools
import time

import pytest

from optimum_memopt.deadline import TimeIsUpError, finished_within


def endless(found: list[int]) -> None:
    for number in itertools.count():
        try:
            found.append(number)
        except Exception:
            pytest.fail("an interrupt is no error")


def test_what_is_found_in_time_is_there():
    found: list[int] = []
    begin = time.monotonic()
    assert not finished_within(0.2, lambda: endless(found))
    assert found and time.monotonic() - begin < 60


def test_a_task_that_ends_in_time_is_left_alone():
    found: list[int] = []
    assert finished_within(60, lambda: found.append(1))
    assert found == [1]
    with pytest.raises(KeyError):
        finished_within(60, lambda: {}[0])


def test_an_interrupt_that_gets_lost_comes_again():
    caught = []

    def swallowing() -> None:
        try:
            endless([])
        except TimeIsUpError as error:
            caught.append(error)
        endless([])

    assert not finished_within(0.1, swallowing)
    assert len(caught) == 1


def test_nothing_arrives_afterwards():
    for _ in range(200):
        finished_within(0.0005, lambda: time.sleep(0.0005))
    for _ in range(100_000):
        pass
