"""One rank computes for all through a store; here the ranks are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from optimum_memopt.engines.compile.costs.times import computed_once

WAIT = 60.0


def never() -> str:
    raise AssertionError("computed twice")


def test_the_first_computes_and_the_others_wait_for_it():
    store, asked, done = HashStore(), threading.Event(), threading.Event()

    def compute() -> str:
        asked.set()
        done.wait(WAIT)
        return "costs"

    with ThreadPoolExecutor() as pool:
        first = pool.submit(computed_once, store, "a graph", compute, WAIT)
        asked.wait(WAIT)
        others = [pool.submit(computed_once, store, "a graph", never, WAIT) for _ in range(2)]
        # The operators of another graph do not wait.
        assert computed_once(store, "another graph", lambda: "its costs", WAIT) == "its costs"
        assert not any(one.done() for one in (first, *others))
        done.set()
        assert [one.result() for one in (first, *others)] == ["costs"] * 3
    assert computed_once(store, "a graph", never, WAIT) == "costs"


def test_where_the_first_has_failed_each_computes_for_itself():
    store = HashStore()
    with pytest.raises(AssertionError, match="computed twice"):
        computed_once(store, "a graph", never, WAIT)
    assert computed_once(store, "a graph", lambda: "own", WAIT) == "own"


def test_where_the_first_does_not_answer_each_computes_for_itself():
    store = HashStore()

    def stuck() -> str:
        assert computed_once(store, "a graph", lambda: "own", wait=0.1) == "own"
        return "late"

    assert computed_once(store, "a graph", stuck, WAIT) == "late"


def test_a_store_that_does_not_count():
    class Fake(HashStore):
        def add(self, key: str, value: int) -> int:
            raise RuntimeError("not implemented")

    assert computed_once(Fake(), "a graph", lambda: "own", WAIT) == "own"
